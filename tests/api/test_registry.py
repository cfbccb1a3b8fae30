"""What the server knows of sessions beside the table, without a server."""

from __future__ import annotations

import asyncio

import pytest
from api_helpers import MIB, attach_body, manifest
from table_helpers import new_table

from kvdock._core import Table
from kvdock.api.pool.registry import KEYS_OF_PART, Recent, Registry, SessionRecord, digest16


@pytest.fixture
def table() -> Table:
    return new_table(MIB)


@pytest.fixture
def registry(table: Table) -> Registry:
    registry = Registry(1, b"s" * 32)
    space = table.add_namespace(bytes(32), chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, 4096)])
    registry.add_namespace(space, bytes(32), manifest())
    return registry


def attached(table: Table, registry: Registry) -> SessionRecord:
    [namespace] = registry.namespaces()
    session = table.open_session(b"n" * 16, namespace.table_id, 0)
    record = registry.add_session(session, attach_body(), namespace)
    table.add_member(session, b"m" * 16, [0], True, 0)
    return record


def test_a_session_that_comes_back_before_its_ended_one_is_dropped_is_kept(table: Table, registry: Registry) -> None:
    first = attached(table, registry)
    table.leave(table.members()[0].member)
    second = attached(table, registry)
    registry.drop_ended(table, [first])
    assert registry.of_instance("", "instance") is second
    registry.drop_session(second)
    assert registry.of_instance("", "instance") is None and registry.sessions() == []


def test_a_session_that_comes_back_while_ended_ones_are_dropped_is_kept(table: Table, registry: Registry) -> None:
    """The list of those to look at was made before."""
    namespaces = registry.namespaces()
    first = attached(table, registry)
    for view in table.members():
        table.leave(view.member)
    listed = registry.sessions()
    registry.drop_ended(table, listed)
    assert registry.of_instance("", "instance") is None
    second = attached(table, registry)
    assert second.table_id != first.table_id
    registry.drop_ended(table, listed)
    assert registry.of_instance("", "instance") is registry.of_table_id(second.table_id) is second
    asyncio.run(registry.prune(table))
    assert registry.sessions() == [second] and registry.namespaces() == namespaces


def test_what_is_kept_of_the_last_keys_is_divided_into_small_dicts() -> None:
    """A large dict is made anew as a whole when it is full, in one turn of the event loop."""
    keep = 8 * KEYS_OF_PART
    recent: Recent[bytes, int] = Recent(keep)
    for number in range(3 * keep):
        recent.put(digest16(str(number)), number)
    sizes = [len(part) for part in recent._parts]
    assert 0.9 * keep < sum(sizes) <= keep and max(sizes) <= KEYS_OF_PART
    lately = range(3 * keep - keep // 2, 3 * keep)
    assert [recent.get(digest16(str(number))) for number in lately] == list(lately)
    assert digest16("0") not in recent
