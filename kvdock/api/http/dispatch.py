"""Answers all calls of engines, on both sockets, without FastAPI's router and its middlewares. A call takes one lookup
in the table of engine calls (kvdock/api/http/engine_calls.py), the checks that the guard makes for all other calls, and
one call of the service.

All other calls go to the app, one in each turn of the event loop (kvdock/api/turns.py). Engine calls
over TCP may come from strangers: they wait in the same queue, have their own limit for long bodies, and their answers
have the headers that browsers heed.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvdock._core import TableError
from kvdock.api.access.peer import log_refusal
from kvdock.api.http.connection import Connection
from kvdock.api.http.engine_calls import Encoded, EngineCall, Incoming, find
from kvdock.api.http.guard import Checks
from kvdock.api.http.handlers import Handlers
from kvdock.api.http.limits import BodyCapacity
from kvdock.api.http.wire import COMMON_HEADERS, NO_STORE, PROBLEM, PROBLEM_HEADERS, REFUSAL, refusal
from kvdock.api.record.timings import Meter
from kvdock.api.turns import next_call
from kvdock.protocol.errors import ApiError, problem_of
from kvdock.protocol.forms import JSON
from kvdock.protocol.reports import Problem
from kvdock.protocol.wire_types import API_VERSION, VERSION_HEADER

Headers = list[tuple[bytes, bytes]]

_UNIX_HEADERS: Headers = [(b"cache-control", b"no-store"), (VERSION_HEADER.lower().encode(), str(API_VERSION).encode())]
"""Without the headers that browsers heed: no browser reaches the Unix socket."""
_TCP_HEADERS: Headers = [(name.encode(), value.encode()) for name, value in {**NO_STORE, **COMMON_HEADERS}.items()]


class Dispatch:
    """ASGI: answers engine calls itself and passes all others to `app`."""

    def __init__(self, app: ASGIApp, checks: Checks, handlers: Handlers, meter: Meter) -> None:
        self.app = app
        self._checks, self._service, self._meter = checks, handlers.service, meter
        self._body_limit_bytes, self._tcp_capacity = handlers.body_limit_bytes, handlers.body_capacity
        self._unix_capacity = BodyCapacity.for_bodies_of(handlers.body_limit_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if found is None:
            if scope["type"] == "http":
                await next_call()
                await self.app(scope, receive, partial(self._send_in_turn, send))
            else:
                await self.app(scope, receive, send)
            return
        engine_call, id_in_path = found
        is_unix: bool = scope["state"]["peer"].is_unix
        if not is_unix:
            await next_call()
        started_ns, traceparent = self._meter.now_ns(), ""
        try:
            answer = await engine_call.answer(self._service, self._incoming(scope, receive, engine_call), id_in_path)
        except (ApiError, TableError) as error:
            if isinstance(error, ApiError):
                log_refusal(scope["state"]["peer"], scope["method"], engine_call.call.path, error)
            await self._refuse(scope, refusal(error, scope["path"]), engine_call, send)
        except ClientDisconnect:
            return
        except Exception:  # the client gets its 500 first; then the traceback goes to the log
            problem = problem_of("internal", "unexpected failure; see the server's log", path=scope["path"])
            await self._refuse(scope, problem, engine_call, send)
            raise
        else:
            traceparent = answer.traceparent
            connection: Connection | None = scope["state"]["connection"]() if is_unix else None
            if connection is None or not answer.media_type or not connection.answer(scope, _whole(answer)):
                await _send(send, 200 if answer.media_type else 204, answer, is_unix)
        took_ns = self._meter.now_ns() - started_ns
        self._meter.timings.add(scope["method"], engine_call.call.path, took_ns, traceparent)

    async def _send_in_turn(self, send: Send, message: Message) -> None:
        """Calls that waited for the same result are answered one in each turn."""
        if message["type"] == "http.response.start":
            await next_call()
        await send(message)

    def _incoming(self, scope: Scope, receive: Receive, engine_call: EngineCall) -> Incoming:
        """Raises ApiError, as Checks does."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        peer = self._checks.admit(scope, headers, engine_call.call.scope)
        get = headers.get
        return Incoming(
            peer, get(b"content-type", b"").decode("latin-1"), get(b"accept", b"").decode("latin-1"),
            get(b"content-length", b"").decode("latin-1"), scope["query_string"].decode("latin-1"), receive,
            self._unix_capacity if peer.is_unix else self._tcp_capacity, self._body_limit_bytes,
        )

    async def _refuse(self, scope: Scope, problem: Problem, engine_call: EngineCall, send: Send) -> None:
        scope["state"][REFUSAL] = problem
        self._meter.refuse(problem.code, problem.detail, f"{engine_call.call.method} {engine_call.call.path}")
        await _send(send, problem.status, Encoded(JSON.encode(problem), PROBLEM), scope["state"]["peer"].is_unix)


def _whole(answer: Encoded) -> bytes:
    """An answer with status 200 over the Unix socket, from its first line to its last byte."""
    lines = [b"%b: %b\r\n" % header for header in (*_headers_of(answer), *_UNIX_HEADERS)]
    return b"".join((STATUS_LINE[200], *lines, b"\r\n", answer.content))


def _headers_of(answer: Encoded) -> Headers:
    if not answer.media_type:
        return []
    return [
        (b"content-type", answer.media_type.encode()), (b"content-length", str(len(answer.content)).encode())
    ]


async def _send(send: Send, status: int, answer: Encoded, is_unix: bool) -> None:
    headers = _headers_of(answer) + (_UNIX_HEADERS if is_unix else _TCP_HEADERS)
    if status in PROBLEM_HEADERS:
        headers += [(name.encode(), value.encode()) for name, value in PROBLEM_HEADERS[status].items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.content})
