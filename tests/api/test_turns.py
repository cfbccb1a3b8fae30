"""No call keeps the event loop: the largest body of each call that is taken, the smallest that is too large, and bodies
that are nothing but values, while an engine goes on looking up.

The calls and the schemas of their bodies come from the server's own OpenAPI document, so that a new call is tested as
well. tests/api/test_long_calls.py has calls that are large and do what they say.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from admin_helpers import CALLS
from app_rig import CHAIN, Rig, ask, opened
from turns import Turns, quickest, turns_of

pytestmark = pytest.mark.security

TURN_MS = 5.0
"""With a lookup of the engine in the same turn."""
PACKED_TYPE = "application/msgpack"
SHARES = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Parts of the greatest length that the document gives to each list."""
UNBOUNDED = 1000
NUMBERS = itertools.count()
_HOLLOW = b"\x81\xa1x\xdd" + (7_000_000).to_bytes(4, "big")
BOMBS = {
    "JSON of hollow lists": (b'{"x":[' + b"[]," * 330_000 + b"[]]}", "application/json"),
    "JSON of many megabytes": (b'{"x":[' + b"0," * 3_500_000 + b"0]}", "application/json"),
    "JSON of names of tokens": (b'{"tokens" :' * 600_000, "application/json"),
    "packed nils": (_HOLLOW + b"\xc0" * 7_000_000, PACKED_TYPE),
    "packed tokens": (msgspec.msgpack.encode({"tokens": [150_000] * (1 << 20)}), PACKED_TYPE),
    "packed blocks": (msgspec.msgpack.encode({"blocks": [[None, [1 << 63] * 768, b""]] * 1024}), PACKED_TYPE),
    "packed hollow lists": (_HOLLOW + b"\x90" * 7_000_000, PACKED_TYPE),
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with opened() as made:
        yield made


class Largest:
    """Makes values that a schema of the document allows, with `share` of the longest lists."""

    def __init__(self, document: dict[str, Any], share: float, known: dict[str, str]) -> None:
        """`known`: values of fields that name what is there."""
        self._schemas, self._share, self._known = document["components"]["schemas"], share, known

    def of(self, schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].rpartition("/")[2]])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return max(map(self.of, choices), key=lambda value: len(msgspec.json.encode(value)))
        if "enum" in schema or "const" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        make: Callable[[dict[str, Any]], Any] = getattr(self, f"_{schema.get('type', 'null')}")
        return make(schema)

    def _object(self, schema: dict[str, Any]) -> Any:
        made = {
            name: self._known[name] if name in self._known else self.of(one)
            for name, one in schema.get("properties", {}).items()
        }
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            made |= {f"name-{number}": self.of(more) for number in range(max(1, int(UNBOUNDED * self._share)))}
        return made

    def _array(self, schema: dict[str, Any]) -> Any:
        if "prefixItems" in schema:
            return [self.of(one) for one in schema["prefixItems"]]
        count = max(1, schema.get("minItems", 0), int(schema.get("maxItems", UNBOUNDED) * self._share))
        item = self.of(schema["items"]) if isinstance(schema.get("items"), dict) else None
        return [item] * count

    def _string(self, schema: dict[str, Any]) -> str:
        length: int = schema.get("maxLength", 64)
        return "A" * (length // 4 * 4) if "contentEncoding" in schema else "0" * length

    def _integer(self, schema: dict[str, Any]) -> int:
        return int(schema.get("maximum", schema.get("exclusiveMaximum", 1 << 31) - 1))

    def _number(self, schema: dict[str, Any]) -> float:
        return float(schema.get("maximum", 1.0))

    def _boolean(self, _: dict[str, Any]) -> bool:
        return False

    def _null(self, _: dict[str, Any]) -> None:
        return None


def document_of(rig: Rig) -> dict[str, Any]:
    status, content = asyncio.run(ask(rig.app, "GET", "/openapi.json"))
    assert status == 200
    document: dict[str, Any] = json.loads(content)
    return document


def status_of(rig: Rig, method: str, path: str, body: bytes | None) -> int:
    status, content = asyncio.run(ask(rig.app, method, path, body))
    assert status < 500 or b'"internal"' not in content, content
    return status


def longest_turn(rig: Rig, method: str, path: str, body: bytes | None, media_type: str) -> Turns:
    """While an engine looks up 16 chunks that are there."""
    def measured() -> Turns:
        async def honest() -> None:
            sent = {"session": rig.session, "member": "m", "request": f"honest {next(NUMBERS)}", "keys": CHAIN[:16]}
            status, content = await ask(rig.app, "POST", "/v1/lookups", sent)
            assert status == 200, content

        async def work() -> None:
            call = asyncio.create_task(ask(rig.app, method, path, body, media_type=media_type))
            await asyncio.gather(call, honest())

        return turns_of(work)

    return quickest(measured, TURN_MS)


def bodies_of(rig: Rig, document: dict[str, Any], method: str, path: str, there: str) -> list[tuple[bytes, str]]:
    """The largest body that is decoded, the next one, which is not, and the bombs."""
    content = document["paths"][path][method.lower()]["requestBody"]["content"]
    made: list[tuple[bytes, str]] = []
    for share in SHARES:
        known = {"session": rig.session, "member": "m"}
        body = msgspec.json.encode(Largest(document, share, known).of(content["application/json"]["schema"]))
        if len(body) > 16 << 20:
            break
        if status_of(rig, method, there, body) == 413:
            made.append((body, "application/json"))
            break
        made = [(body, "application/json")]
    assert len(made[0][0]) > 1
    return made + [bomb for bomb in BOMBS.values() if bomb[1] in content]


@pytest.mark.parametrize(("method", "path"), CALLS, ids=map(" ".join, CALLS))
def test_no_body_of_any_call_keeps_the_event_loop(method: str, path: str, rig: Rig) -> None:
    document = document_of(rig)
    if method == "HEAD":
        assert "get" in document["paths"][path]
        return
    call = document["paths"][path][method.lower()]
    there = path.replace("{session}", "another" if method == "DELETE" else rig.session)
    for name in ("lease", "reservation"):
        there = there.replace(f"{{{name}}}", "0" * 16)
    query = {item["name"] for item in call["parameters"] if item["in"] == "query"}
    there += "?limit=1000" if "limit" in query else ""
    bodies = bodies_of(rig, document, method, path, there) if "requestBody" in call else [(None, "application/json")]
    for body, media_type in bodies:
        turns = longest_turn(rig, method, there, body, media_type)
        assert turns.longest_ms < TURN_MS, f"{len(body or b'')} bytes of {media_type}: {(body or b'')[:60]!r}"
