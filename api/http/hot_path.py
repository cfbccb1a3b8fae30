"""The short way of engine calls: from the Unix socket to the endpoint, without the router and its middlewares.

It takes only the calls that engines make often, only by POST, and only over the Unix socket, which browsers cannot
reach, so the guard's checks are not needed. Everything else, and the same calls over TCP, go through the app. Both
ways use the same endpoints and answer with the same problems.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from kvdock._core import TableError
from kvdock.api.http import endpoints
from kvdock.api.http.endpoints import Endpoint, Incoming
from kvdock.api.http.wire import refusal
from kvdock.api.service import CacheService
from kvdock.api.views.timing import Meter
from kvdock.protocol.errors import ApiError, problem_of
from kvdock.protocol.forms import JSON
from kvdock.protocol.version import API_VERSION, VERSION_HEADER

_BY_PATH: dict[str, Endpoint[Any]] = {
    "/v1/lookups": endpoints.LOOKUP,
    "/v1/reservations": endpoints.RESERVE,
    "/v1/releases": endpoints.RELEASE_MANY,
}
_BY_VERB: dict[tuple[str, str], Endpoint[Any]] = {
    ("leases", "release"): endpoints.RELEASE,
    ("reservations", "commit"): endpoints.COMMIT,
    ("sessions", "heartbeat"): endpoints.HEARTBEAT,
}
_PROBLEM = "application/problem+json"
_VERSION_NAME, _VERSION = VERSION_HEADER.lower().encode(), str(API_VERSION).encode()
_FIXED_HEADERS = [(b"cache-control", b"no-store"), (_VERSION_NAME, _VERSION)]


class HotPath:
    """ASGI: answers hot calls itself and passes all others to `app`."""

    def __init__(self, app: ASGIApp, service: CacheService, meter: Meter, body_limit_bytes: int) -> None:
        self._app, self._service, self._meter, self._body_limit_bytes = app, service, meter, body_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, id_in_path = hot_endpoint(scope)
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        content_type = accept = content_length = ""
        for name, value in scope["headers"]:
            if name == b"content-type":
                content_type = value.decode("latin-1")
            elif name == b"content-length":
                content_length = value.decode("latin-1")
            elif name == b"accept":
                accept = value.decode("latin-1")
            elif name == _VERSION_NAME and value != _VERSION:
                await self._app(scope, receive, send)  # which answers for other versions
                return
        started_ns = self._meter.now_ns()
        incoming = Incoming(content_type, accept, content_length, receive)
        status = 200
        try:
            content, media_type = await endpoint.answer(self._service, incoming, self._body_limit_bytes, id_in_path)
        except (ApiError, TableError) as error:
            self._meter.counters.refusals += 1
            problem = refusal(error, scope["path"])
            status, media_type, content = problem.status, _PROBLEM, JSON.encode(problem)
        except ClientDisconnect:
            return
        except Exception:  # the client gets its 500 first; then the traceback goes to the log
            problem = problem_of("internal", "unexpected failure; see the server's log", path=scope["path"])
            await _send(send, problem.status, _PROBLEM, JSON.encode(problem))
            raise
        await _send(send, status, media_type, content)
        self._meter.timings.add("POST", endpoint.route, self._meter.now_ns() - started_ns)


def hot_endpoint(scope: Scope) -> tuple[Endpoint[Any] | None, str]:
    """The endpoint of a hot call and the id in its path; (None, '') for everything else."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope.get("client") or scope["query_string"]:
        return None, ""
    path: str = scope["path"]
    endpoint = _BY_PATH.get(path)
    if endpoint is not None:
        return endpoint, ""
    match path.split("/"):
        case ["", "v1", kind, id_in_path, verb] if id_in_path:
            return _BY_VERB.get((kind, verb)), id_in_path
    return None, ""


async def _send(send: Send, status: int, media_type: str, content: bytes) -> None:
    length = str(len(content)).encode()
    headers = [(b"content-type", media_type.encode()), (b"content-length", length), *_FIXED_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
