"""No number that a caller sends, in any field of any call, makes an answer fail or a figure infinite. The calls and
their numbers come from the OpenAPI document, so that a new field is tested as well."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from admin_helpers import DOCUMENT, ROUTES, Route
from api_helpers import Engine, ServerProcess, attach, keys, raw

from kvdock.client.client import Client

pytestmark = pytest.mark.security

SCHEMAS = DOCUMENT["components"]["schemas"]
NEVER_TAKEN = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1" + b"0" * 4400, b"18446744073709551616", b"true")
TAKEN_OR_NOT = (b"-0.0", b"-0", b"5e-324", b"1e308", b"9223372036854775808", b"-9223372036854775809", b"1.0", b'"1"')
PACKED = (math.nan, math.inf, -math.inf, 5e-324, 1.7e308, -0.0, (1 << 64) - 1, -(1 << 63))
WITH_BODY = [route for route in ROUTES if route.body]
READS = ("status", "stats", "sessions", "namespaces", "config", "requests", "verdict", "hits", "prefixes", "curve")
At = tuple[str | int, ...]


def numbers_of(schema: dict[str, Any], at: At = ()) -> Iterator[At]:
    """Where a body of the schema may have a number; 0: in the first item of a list, "k": under any name."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from numbers_of(one, at)
    if schema.get("type") in ("number", "integer"):
        yield at
    for name, inner in schema.get("properties", {}).items():
        yield from numbers_of(inner, (*at, name))
    for name in ("additionalProperties", "items"):
        if isinstance(inner := schema.get(name), dict):
            yield from numbers_of(inner, (*at, "k" if name == "additionalProperties" else 0))


def with_value(body: Any, at: At, value: object) -> Any:
    """The body with the value there, and with the objects and lists around it."""
    if not at:
        return value
    name, *rest = at
    if name == 0:
        return [with_value(body[0] if isinstance(body, list) and body else None, tuple(rest), value)]
    known = body if isinstance(body, dict) else {}
    return {**known, name: with_value(known.get(name), tuple(rest), value)}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(observe="log,stream,metrics,curve,kv_events") as running:
        yield running
        assert "Traceback" not in running.log_text()


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    attached = attach(client)
    if (granted := attached.reserve(keys(2, "numbers"))).reservation:
        attached.commit(granted)
    yield attached
    attached.close()


def legal_body(route: Route, engine: Engine) -> dict[str, Any]:
    """One that is taken but for the number, as far as one body can be."""
    if route.body == "AttachSession":
        return dict(msgspec.to_builtins(engine.body))
    known: dict[str, Any] = {
        "session": engine.session, "member": engine.member, "request": "r", "store": "s", "rank": 0,
        "keys": keys(2, "numbers"), "namespace": engine.attached.namespace, "outcomes": [{"request": "r"}],
    }
    schema = SCHEMAS[route.body]
    wanted = {*schema.get("required", ()), *({"keys", "session", "member"} & set(schema["properties"]))}
    return {name: value for name, value in known.items() if name in wanted}


@pytest.mark.parametrize("route", WITH_BODY, ids=[f"{route.method} {route.path}" for route in WITH_BODY])
def test_no_number_in_a_body_breaks_a_call(route: Route, server: ServerProcess, engine: Engine) -> None:
    path = route.path.format(session=engine.session, lease="0" * 15 + "1", reservation="0" * 15 + "1")
    body, media = legal_body(route, engine), {"Content-Type": "application/json"}
    if route.body == "Heartbeat":
        body["outcomes"] = [{"request": "r", "prompt_tokens": 9, "loaded_tokens": 4, "load_us": 1}]
    for at in numbers_of({"$ref": f"/{route.body}"}):
        marked = msgspec.json.encode(with_value(body, at, "here"))
        for number in (*NEVER_TAKEN, *TAKEN_OR_NOT):
            status, _, content = raw(server.unix, route.method, path, marked.replace(b'"here"', number), media)
            assert status < 500, (at, number, content)
            assert status >= 400 or number not in NEVER_TAKEN, (at, number[:20], content)
        for value in PACKED:
            sent = with_value(body, at, value)
            if isinstance(sent.get("keys"), list):
                sent["keys"] = bytes.fromhex("".join(sent["keys"]))
            packed = msgspec.msgpack.encode(sent)
            status, _, content = raw(server.unix, route.method, path, packed, {"Content-Type": "application/msgpack"})
            assert status < 500, (at, value, content)
            assert status >= 400 or math.isfinite(value), (at, value, content)
    raw(server.unix, "POST", "/v1/drain", b'{"drain": false}', media)


def test_afterwards_all_figures_are_finite(server: ServerProcess, engine: Engine) -> None:
    """Metrics may say that the pool is full in +Inf seconds, and the last bucket of a histogram ends there."""
    def refuse(text: str) -> None:
        raise AssertionError(text)

    for name in READS:
        status, _, content = raw(server.unix, "GET", f"/v1/{name}")
        assert status == 200 and json.loads(content, parse_constant=refuse), name
    lines = raw(server.unix, "GET", "/metrics")[2].decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    assert [name for name, value in values.items() if not math.isfinite(value)] in ([], ["kvdock_pool_full_in_seconds"])
    assert engine.lookup(keys(2, "numbers")).hit_tokens in (0, 32), "the server goes on"
