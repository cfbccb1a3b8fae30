"""The short way of engine calls: from the Unix socket to the endpoint, without the router and its middlewares.

It takes only the calls that engines make often, only by POST, and only over the Unix socket, which browsers cannot
reach, so of the guard's checks it makes one: what the caller may do. Everything else, and the same calls over TCP, go
through the app, one in each turn of the event loop (kvdock/api/http/turns.py). Both ways use the same endpoints and
answer with the same problems.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvdock._core import TableError
from kvdock.api.access import audit
from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import Peer
from kvdock.api.http import endpoints
from kvdock.api.http.connection import Connection
from kvdock.api.http.endpoints import Endpoint, Incoming
from kvdock.api.http.limits import BodyRoom
from kvdock.api.http.turns import Turns
from kvdock.api.http.wire import PROBLEM, PROBLEM_HEADERS, refusal
from kvdock.api.record.timings import Meter
from kvdock.api.service import CacheService
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
_VERSION_NAME, _VERSION = VERSION_HEADER.lower().encode(), str(API_VERSION).encode()
_FIXED_HEADERS = [(b"cache-control", b"no-store"), (_VERSION_NAME, _VERSION)]


class HotPath:
    """ASGI: answers hot calls itself and passes all others to `app`."""

    def __init__(
        self, app: ASGIApp, access: AccessFile, service: CacheService, meter: Meter, body_limit_bytes: int
    ) -> None:
        self._app, self._access, self._service = app, access, service
        self._meter, self._body_limit_bytes = meter, body_limit_bytes
        self._room = BodyRoom.for_bodies_of(body_limit_bytes)
        """Its own: what arrives over TCP never fills it."""
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, id_in_path = hot_endpoint(scope)
        if endpoint is None:
            if scope["type"] == "http":
                await self._turns.next()
            await self._app(scope, receive, send)
            return
        peer: Peer = scope["state"]["peer"]
        authorization = None
        content_type = accept = content_length = ""
        for name, value in scope["headers"]:
            if name == b"content-type":
                content_type = value.decode("latin-1")
            elif name == b"content-length":
                content_length = value.decode("latin-1")
            elif name == b"accept":
                accept = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value
            elif name == _VERSION_NAME and value != _VERSION:
                await self._app(scope, receive, send)  # which answers for other versions
                return
        started_ns = self._meter.now_ns()
        status = 200
        try:
            if authorization is not None:
                peer = self._access.peer_of(authorization, peer)
            peer.require(endpoint.call.scope)
            incoming = Incoming(peer, content_type, accept, content_length, receive)
            content, media_type = await endpoint.answer(
                self._service, incoming, self._body_limit_bytes, self._room, id_in_path
            )
        except (ApiError, TableError) as error:
            if isinstance(error, ApiError):
                audit.refused(peer, "POST", endpoint.route, error)
            problem = refusal(error, scope["path"])
            self._meter.refuse(problem.code, problem.detail, f"POST {endpoint.route}")
            status, media_type, content = problem.status, PROBLEM, JSON.encode(problem)
        except ClientDisconnect:
            return
        except Exception:  # the client gets its 500 first; then the traceback goes to the log
            problem = problem_of("internal", "unexpected failure; see the server's log", path=scope["path"])
            self._meter.refuse(problem.code, problem.detail, f"POST {endpoint.route}")
            await _send(send, problem.status, PROBLEM, JSON.encode(problem))
            raise
        connection: Connection | None = scope["state"]["connection"]()
        if status != 200 or connection is None or not connection.answer(scope, _head(media_type, content) + content):
            await _send(send, status, media_type, content)
        self._meter.timings.add("POST", endpoint.route, self._meter.now_ns() - started_ns)


def hot_endpoint(scope: Scope) -> tuple[Endpoint[Any] | None, str]:
    """The endpoint of a hot call and the id in its path; (None, '') for everything else."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"]:
        return None, ""
    if not scope["state"]["peer"].is_unix:
        return None, ""
    path: str = scope["path"]
    endpoint = _BY_PATH.get(path)
    if endpoint is not None:
        return endpoint, ""
    match path.split("/"):
        case ["", "v1", kind, id_in_path, verb] if id_in_path:
            return _BY_VERB.get((kind, verb)), id_in_path
    return None, ""


def _headers(media_type: str, content: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", media_type.encode()), (b"content-length", str(len(content)).encode()), *_FIXED_HEADERS
    ]


def _head(media_type: str, content: bytes) -> bytes:
    """The first lines of an answer with status 200, and the empty one."""
    lines = [b"%b: %b\r\n" % header for header in _headers(media_type, content)]
    return b"".join((STATUS_LINE[200], *lines, b"\r\n"))


async def _send(send: Send, status: int, media_type: str, content: bytes) -> None:
    headers = _headers(media_type, content)
    if status in PROBLEM_HEADERS:
        headers += [(name.encode(), value.encode()) for name, value in PROBLEM_HEADERS[status].items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
