"""Calls of operators in tests: any method with a JSON body, as a program without our client would make them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
from api_helpers import Engine, raw

from kvdock.api.build import api_document
from kvdock.protocol.wire_types import Scope


class Route(NamedTuple):
    """A call of the API. `body`: the name of its struct; "": it has none."""

    method: str
    path: str
    scope: Scope
    body: str


def _routes() -> list[Route]:
    found = list[Route]()
    for path, methods in DOCUMENT["paths"].items():
        for method, described in methods.items():
            media = described.get("requestBody", {}).get("content", {}).get("application/json")
            body = media["schema"]["$ref"].rpartition("/")[2] if media else ""
            found.append(Route(method.upper(), path, described["x-scope"], body))
    return found


DOCUMENT = api_document()
ROUTES = _routes()
"""Every call of the API, from its document, so that none can be forgotten."""
CALLS = [(route.method, route.path) for route in ROUTES]
"""(method, path) of every call of the API."""


def call(address: str, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """(status, decoded JSON); {} for no content."""
    sent = None if body is None else msgspec.json.encode(body)
    headers = {} if sent is None else {"Content-Type": "application/json"}
    status, _, content = raw(address, method, path, sent, headers)
    return status, json.loads(content) if content else {}


def hit_tokens(engine: Engine, chain: list[str]) -> int:
    """What a lookup that holds nothing finds."""
    body = {"namespace": engine.attached.namespace, "keys": chain}
    return int(ok(engine.client.address, "POST", "/v1/lookups", body)["hit_tokens"])


def ok(address: str, method: str, path: str, body: object = None) -> dict[str, Any]:
    """The answer of a call that must succeed."""
    status, answer = call(address, method, path, body)
    assert status < 300, (method, path, status, answer)
    return answer


def refused(address: str, method: str, path: str, body: object = None) -> dict[str, Any]:
    """The problem of a call that must be refused."""
    status, answer = call(address, method, path, body)
    assert status == answer["status"] >= 400, (method, path, status, answer)
    return answer
