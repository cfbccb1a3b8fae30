"""The largest legal call of each route keeps the event loop for some ms at most, and its answer is whole.

The real application in this process, without sockets: what is measured is processor time of one turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from api_helpers import keys
from app_rig import CHAIN, OWN, Rig, ask, commit, opened, store
from turns import Turns, quickest, turns_of

from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import MAX_QUOTAS
from kvdock.protocol.forms import JSON
from kvdock.protocol.outcomes import MAX_OUTCOMES
from kvdock.protocol.wire_types import MAX_ANSWERS, MAX_ENTRIES, MAX_KEYS, MAX_RELEASES, MAX_STORE_KEYS

pytestmark = pytest.mark.security

MAX_PROMISED = 8192
"""Chunks, of one session."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with opened() as made:
        yield made


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
            packed = msgspec.msgpack.encode(body)
            assert (await ask(rig.app, "POST", "/v1/lookups", packed, media_type="application/msgpack"))[0] == 200

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
        leases, cursor = list[str](), "0"
        while len(leases) < 64:
            _, content = await ask(rig.app, "GET", f"/v1/leases?limit=32&cursor={cursor}")
            page = msgspec.json.decode(content)
            leases += [lease["grant"] for lease in page["leases"]]
            cursor = page["next"]
        body = {"session": rig.session, "releases": [[lease, list(range(128))] for lease in leases] + [["0" * 16, []]]}
        status, answer = await ask(rig.app, "POST", "/v1/releases", body)
        gone = [(await ask(rig.app, "GET", f"/v1/leases/{lease}"))[0] for lease in leases]
        assert gone == [404] * len(leases) and len(leases) == 64
        return status, msgspec.json.decode(answer)

    assert asyncio.run(work()) == (200, {"refused_releases": [["0" * 16, "unknown_grant"]]})
