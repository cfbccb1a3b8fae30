"""No call keeps the event loop: the largest body of each call that is taken, the smallest that is too large, and bodies
that are nothing but values, while an engine goes on looking up.

The calls and the schemas of their bodies come from the server's own OpenAPI document, so that a new call is tested as
well. tests/api/test_long_calls.py has calls that are large and do what they say.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator

import pytest
from admin_helpers import DOCUMENT
from app_rig import CHAIN, Rig, ask, opened
from turns import Turns, quickest, turns_of

from bench.floods.bodies import Body, Described, bodies_of, calls_of, is_refused_undecoded

pytestmark = pytest.mark.security

TURN_MS = 5.0
"""With a lookup of the engine in the same turn."""
NUMBERS = itertools.count()
CALLS = list(calls_of(DOCUMENT))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with opened() as made:
        yield made


def test_the_calls_are_those_that_the_server_describes(rig: Rig) -> None:
    status, content = asyncio.run(ask(rig.app, "GET", "/openapi.json"))
    assert status == 200 and list(calls_of(json.loads(content))) == CALLS and len(CALLS) > 40


def is_decoded(rig: Rig, call: Described, path: str, body: bytes) -> bool:
    status, content = asyncio.run(ask(rig.app, call.method, path, body))
    assert status < 500 or b'"internal"' not in content, content
    return not is_refused_undecoded(status, content)


def longest_turn(rig: Rig, call: Described, path: str, body: Body | None) -> Turns:
    """While an engine looks up 16 chunks that are there."""
    def measured() -> Turns:
        async def honest() -> None:
            sent = {"session": rig.session, "member": "m", "request": f"honest {next(NUMBERS)}", "keys": CHAIN[:16]}
            status, content = await ask(rig.app, "POST", "/v1/lookups", sent)
            assert status == 200, content

        async def work() -> None:
            content, media_type = body or Body(b"")
            asked = asyncio.create_task(ask(rig.app, call.method, path, content, media_type=media_type))
            await asyncio.gather(asked, honest())

        return turns_of(work)

    return quickest(measured, TURN_MS)


@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_no_body_of_any_call_keeps_the_event_loop(call: Described, rig: Rig) -> None:
    there = "another" if call.method == "DELETE" else rig.session
    path = call.target({"session": there, "lease": "0" * 16, "reservation": "0" * 16})
    bodies: list[Body | None] = [None]
    if call.forms:
        known = {"session": rig.session, "member": "m"}
        legal, refused = bodies_of(DOCUMENT, call, known, lambda body: is_decoded(rig, call, path, body))
        assert len(legal.content) > 1
        bodies = [legal, *refused]
    for body in bodies:
        turns = longest_turn(rig, call, path, body)
        assert turns.longest_ms < TURN_MS, body and f"{len(body.content)} bytes of {body.media_type}: {body[0][:60]!r}"
