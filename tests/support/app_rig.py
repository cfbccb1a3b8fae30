"""The server's application in this process, without sockets, with a full pool: what is measured is processor time."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from api_helpers import MIB, attach_body, keys, manifest, small_pool

from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import of_user
from kvdock.api.build import Parts, build, create_app
from kvdock.api.clock import Clocks
from kvdock.api.http.dispatch import Dispatch
from kvdock.api.pool.pool import Pool, open_pool
from kvdock.api.pool.registry import MemberRecord
from kvdock.api.settings import Settings
from kvdock.protocol import schemas as s
from kvdock.protocol.forms import JSON
from kvdock.protocol.wire_types import MAX_ENTRIES, MAX_KEYS, MAX_STORE_KEYS

SESSIONS = 300
CHAIN = keys(MAX_KEYS, "long")


class Rig(NamedTuple):
    """`session`: the id of one with CHAIN and leases."""

    app: Dispatch
    pool: Pool
    parts: Parts
    session: str


OWN = of_user(os.geteuid())


async def ask(
    app: Dispatch, method: str, path: str, body: object = None, *, tcp: bool = False,
    media_type: str = "application/json",
) -> tuple[int, bytes]:
    """(status, content). What arrives is in one piece. `body`: what JSON is made of, or bytes as they are sent."""
    sent = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    path, _, query = path.partition("?")
    got: list[Any] = []
    messages = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message)

    await app({
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", media_type.encode())],
        "client": None, "server": None, "state": {"peer": OWN._replace(is_unix=not tcp), "connection": lambda: None},
    }, receive, send)
    return got[0]["status"], b"".join(message.get("body", b"") for message in got[1:])


@contextmanager
def opened() -> Iterator[Rig]:
    settings = Settings.load(small_pool(
        pool_bytes=64 * MIB, segment_bytes=64 * MIB, table_records=1 << 15, recent_requests=1000, history_values=1000,
    ))
    pool = open_pool(settings, secrets.randbits)
    parts = build(settings, pool, AccessFile(""), Clocks())
    app = create_app(settings, parts)
    try:
        asyncio.run(pool.grow_first())
        yield Rig(app, pool, parts, asyncio.run(fill(parts)))
    finally:
        pool.close()


async def store(parts: Parts, session: str, name: str, keys_now: list[str], parent: str | None = None) -> str:
    """Reserves all that one store may have; the reservation."""
    body = s.Reserve(session=session, member="m", store=name, keys=keys_now, parent=parent)
    granted = await parts.handlers.service.reserve(OWN, body, JSON)
    assert granted.reservation is not None and len(keys_now) == MAX_STORE_KEYS
    return granted.reservation


async def commit(parts: Parts, session: str, reservation: str) -> None:
    body = s.Commit(session=session, rank=0, parts=[s.PartDone(index, 0, 7) for index in range(MAX_ENTRIES)])
    assert (await parts.handlers.service.commit(OWN, reservation, body)).ready == MAX_STORE_KEYS


async def fill(parts: Parts) -> str:
    """Sessions, a chain as long as one call may name, and leases; the id of the session that has them."""
    service, registry = parts.handlers.service, parts.handlers.lists._registry
    table = parts.handlers.lists._table
    described = manifest(groups=(s.Group(part_bytes=4096),))
    space = table.add_namespace(bytes(32), chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, 4096)])
    namespace = registry.add_namespace(space, bytes(32), described)
    first = ""
    for number in range(SESSIONS):
        session = table.open_session(number.to_bytes(16, "big"), space, 0)
        record = registry.add_session(session, attach_body(f"instance-{number}"), namespace)
        member = table.add_member(session, (1000 + number).to_bytes(16, "big"), [0], True, 0)
        registry.add_member(record, MemberRecord("m", member, (0,), True, number + 1))
        first = first or record.capability
    for start in range(0, MAX_KEYS, MAX_STORE_KEYS):
        parent = CHAIN[start - 1] if start else None
        granted = await store(parts, first, f"s{start}", CHAIN[start : start + MAX_STORE_KEYS], parent)
        await commit(parts, first, granted)
    for number in range(1000):
        await service.lookup(
            OWN, s.Lookup(session=first, member="m", request=f"r{number}", keys=CHAIN[:1], readers=128), JSON
        )
    return first
