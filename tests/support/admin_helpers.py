"""Calls of operators in tests: any method with a JSON body, as a program without our client would make them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from api_helpers import raw
from fastapi.routing import APIRoute

from kvdock.api.http import routes_admin, routes_engine, routes_people

CALLS = [
    (method, route.path_format)
    for module in (routes_engine, routes_people, routes_admin) for route in module.router.routes
    if isinstance(route, APIRoute) and route.include_in_schema for method in sorted(route.methods or ())
]
"""(method, path) of every call of the API."""


def call(address: str, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """(status, decoded JSON); {} for no content."""
    sent = None if body is None else msgspec.json.encode(body)
    headers = {} if sent is None else {"Content-Type": "application/json"}
    status, _, content = raw(address, method, path, sent, headers)
    return status, json.loads(content) if content else {}


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
