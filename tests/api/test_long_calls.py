"""The largest legal call of each route keeps the event loop for some ms at most, and its answer is whole.

The real application in this process, without sockets: what is measured is processor time of one turn.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from api_helpers import MIB, keys, manifest, small_pool
from turns import Turns, quickest, turns_of

from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import of_user
from kvdock.api.build import Parts, build, create_app
from kvdock.api.clock import Clocks
from kvdock.api.http.dispatch import Dispatch
from kvdock.api.pool.pool import Pool, open_pool
from kvdock.api.pool.registry import MemberRecord
from kvdock.api.settings import Settings
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import MAX_QUOTAS
from kvdock.protocol.forms import JSON
from kvdock.protocol.outcomes import MAX_OUTCOMES
from kvdock.protocol.wire_types import MAX_ANSWERS, MAX_ENTRIES, MAX_KEYS, MAX_RELEASES, MAX_STORE_KEYS

pytestmark = pytest.mark.security

SESSIONS = 300
MAX_PROMISED = 8192
"""Chunks, of one session."""
CHAIN = keys(MAX_KEYS, "long")


class Rig(NamedTuple):
    app: Dispatch
    pool: Pool
    parts: Parts
    session: str

OWN = of_user(os.geteuid())


async def ask(app: Dispatch, method: str, path: str, body: object = None, *, tcp: bool = False) -> tuple[int, bytes]:
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
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None, "server": None, "state": {"peer": OWN._replace(is_unix=not tcp), "connection": lambda: None},
    }, receive, send)
    return got[0]["status"], b"".join(message.get("body", b"") for message in got[1:])


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
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
        record = registry.add_session(session, f"instance-{number}", "", namespace)
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


CALLS: dict[str, tuple[str, str, Any]] = {
    "lookup": ("POST", "/v1/lookups", {"session": "{s}", "member": "m", "request": "{n}", "keys": CHAIN}),
    "computes": ("POST", "/v1/lookups", {
        "session": "{s}", "member": "m", "request": "{n}", "keys": keys(MAX_KEYS, "computed"), "computes": True,
    }),
    "withdraws": ("POST", "/v1/releases", {"session": "{s}", "withdraws": "{w}"}),
    "reserve": ("POST", "/v1/reservations", {
        "session": "{s}", "member": "m", "store": "{n}", "keys": keys(MAX_STORE_KEYS, "t"),
    }),
    "commit": ("POST", "/v1/reservations/{r}/commit", {
        "session": "{s}", "rank": 0, "parts": [[index, 0, "0" * 16] for index in range(MAX_ENTRIES)],
    }),
    "mismatch": ("POST", "/v1/mismatches", {
        "session": "{s}", "lease": "{l}", "chunks": list(range(MAX_ENTRIES)),
    }),
    "retain": ("POST", "/v1/hints", {
        "session": "{s}", "member": "m", "keys": CHAIN, "priority": 1, "duration_s": 600,
    }),
    "lower": ("POST", "/v1/hints", {"session": "{s}", "member": "m", "keys": CHAIN, "conversation_ended": True}),
    "heartbeat": ("POST", "/v1/sessions/{s}/heartbeat", {
        "member": "m", "done": [{"grant": f"{n:016x}"} for n in range(MAX_ANSWERS)],
        "keep": [f"{n:016x}" for n in range(MAX_ANSWERS)], "changes_since": 0,
        "outcomes": [{"request": f"{n}", "prompt_tokens": 1} for n in range(MAX_OUTCOMES)],
    }),
    "configure": ("PATCH", "/v1/config", {"tenants": {f"t{n}": {"chunks": 1} for n in range(MAX_QUOTAS)}}),
    "releases": ("POST", "/v1/releases", {"session": "{s}", "releases": [["0" * 16, [0] * 64]] * 256}),
    "sessions": ("GET", "/v1/sessions?limit=1000", None),
    "session": ("GET", "/v1/sessions/{s}?limit=1000", None),
    "leases": ("GET", "/v1/leases?limit=1000", None),
    "requests": ("GET", "/v1/requests?limit=1000", None),
    "stats": ("GET", "/v1/stats", None),
    "status": ("GET", "/v1/status", None),
    "curve": ("GET", "/v1/curve", None),
    "metrics": ("GET", "/metrics", None),
}


TURN_MS = 6.0
"""A quiet machine needs 0.5 to 4 ms. Before there were slices and shorter pages, some calls took 7 to 16 ms."""


async def promised(rig: Rig, unique: str) -> list[str]:
    """As many requests as a call may name, which promise all that one session may."""
    requests = [f"{unique}-{number}" for number in range(MAX_RELEASES)]
    each = MAX_PROMISED // MAX_RELEASES
    for request in requests:
        body = s.Lookup(session=rig.session, member="m", request=request, keys=keys(each, request), computes=True)
        await rig.parts.handlers.service.lookup(OWN, body, JSON)
    return requests


async def prepared(rig: Rig, name: str, unique: str) -> dict[str, Any]:
    """{r}: a reservation for `commit`; {l}: a lease for `mismatch`; {w}: requests that `withdraws` names."""
    if name == "withdraws":
        return {"{w}": await promised(rig, unique)}
    if name not in ("commit", "mismatch"):
        return {}
    keys_now = keys(MAX_STORE_KEYS, unique)
    reservation = await store(rig.parts, rig.session, unique, keys_now)
    if name == "commit":
        return {"{r}": reservation}
    await commit(rig.parts, rig.session, reservation)
    body = s.Lookup(session=rig.session, member="m", request=unique, keys=keys_now)
    found = await rig.parts.handlers.service.lookup(OWN, body, JSON)
    return {"{l}": str(found.lease)}


@pytest.mark.parametrize("name", CALLS)
def test_the_largest_call_leaves_turns_to_others(name: str, rig: Rig) -> None:
    method, path, body = CALLS[name]
    numbers = itertools.count()

    def measured() -> Turns:
        unique = f"{name}-{next(numbers)}"
        words = {"{s}": rig.session, "{n}": unique} | asyncio.run(prepared(rig, name, unique))
        sent = body and msgspec.json.encode({key: words.get(str(value), value) for key, value in body.items()})
        there = path.replace("{s}", rig.session).replace("{r}", words.get("{r}", ""))
        answers: list[tuple[int, bytes]] = []

        async def work() -> None:
            answers.append(await ask(rig.app, method, there, sent))

        turns = turns_of(work)
        ((status, content),) = answers
        assert status == 200, content[:200]
        assert len(content) < 256 << 10, "no answer grows without bounds"
        return turns

    assert quickest(measured, TURN_MS).longest_ms < TURN_MS


def test_many_keys_are_decoded_in_one_turn_and_looked_up_in_another(rig: Rig) -> None:
    def turns(count: int) -> int:
        body = {"session": rig.session, "member": "m", "request": f"of {count}", "keys": CHAIN[:count]}

        async def work() -> None:
            assert (await ask(rig.app, "POST", "/v1/lookups", body))[0] == 200

        return turns_of(work).number

    assert turns(MAX_KEYS) == turns(2048) + 1


def test_pages_of_leases_are_short_and_lose_none(rig: Rig) -> None:
    async def work() -> list[str]:
        found: list[str] = []
        cursor: str | None = "0"
        while cursor is not None:
            _, content = await ask(rig.app, "GET", f"/v1/leases?limit=1000&cursor={cursor}")
            page = msgspec.json.decode(content)
            found += [lease["grant"] for lease in page["leases"]]
            cursor = page["next"]
        return found

    found = asyncio.run(work())
    open_leases = rig.parts.handlers.overview.status(OWN).leases
    assert len(found) == len(set(found)) >= open_leases >= 1000


def test_all_releases_of_a_long_call_are_done(rig: Rig) -> None:
    async def work() -> tuple[int, dict[str, Any]]:
        _, content = await ask(rig.app, "GET", "/v1/leases?limit=64")
        leases = [lease["grant"] for lease in msgspec.json.decode(content)["leases"]]
        body = {"session": rig.session, "releases": [[lease, list(range(128))] for lease in leases] + [["0" * 16, []]]}
        status, answer = await ask(rig.app, "POST", "/v1/releases", body)
        gone = [(await ask(rig.app, "GET", f"/v1/leases/{lease}"))[0] for lease in leases]
        assert gone == [404] * len(leases) and len(leases) == 64
        return status, msgspec.json.decode(answer)

    assert asyncio.run(work()) == (200, {"refused_releases": [["0" * 16, "unknown_grant"]]})
