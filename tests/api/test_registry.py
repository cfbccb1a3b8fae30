"""What the server knows of sessions beside the table, without a server."""

from __future__ import annotations

import asyncio

from api_helpers import MIB, manifest
from table_helpers import new_table

from kvdock.api.pool.registry import Registry, SessionRecord


def test_a_session_that_comes_back_while_ended_ones_are_dropped_is_kept() -> None:
    """The list of those to look at was made before."""
    table, registry = new_table(MIB), Registry(1, b"s" * 32)
    space = table.add_namespace(bytes(32), chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, 4096)])
    namespace = registry.add_namespace(space, bytes(32), manifest())

    def attached() -> SessionRecord:
        session = table.open_session(b"n" * 16, space, 0)
        record = registry.add_session(session, "instance", "", namespace)
        table.add_member(session, b"m" * 16, [0], True, 0)
        return record

    first = attached()
    for view in table.members():
        table.leave(view.member)
    listed = registry.sessions()
    registry.drop_ended(table, listed)
    assert registry.of_instance("", "instance") is None
    second = attached()
    assert second.table_id != first.table_id
    registry.drop_ended(table, listed)
    assert registry.of_instance("", "instance") is registry.of_table_id(second.table_id) is second
    asyncio.run(registry.prune(table))
    assert registry.sessions() == [second] and registry.namespaces() == [namespace]
