"""Between HTTP and structs: reads bodies, makes answers and problems. Decides nothing.

Invariants: of a body, at most `body_limit_bytes` are held, and of all long bodies together at most what BodyCapacity
allows (kvdock/api/http/limits.py); every error leaves as problem details; a body is JSON or MessagePack by its content
type, which a web page's cross-site form cannot send."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Mapping
from typing import Annotated, TypeVar

from fastapi import Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvdock._core import TableError
from kvdock.api.access.peer import Peer
from kvdock.api.http.limits import BodyCapacity, BodyShare
from kvdock.api.log import shown
from kvdock.api.turns import SHORT_READ_BYTES, next_call, next_slice
from kvdock.protocol.errors import CODES, ApiError, problem_of
from kvdock.protocol.forms import JSON, Codec, RawBody, form_of_body
from kvdock.protocol.refused import wanted_of
from kvdock.protocol.reports import Problem
from kvdock.protocol.wire_types import API_VERSION, VERSION_HEADER, Answer, Body

B = TypeVar("B", bound=Body)

log = logging.getLogger("kvdock.api")

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Items of one page")]
Cursor = Annotated[
    int, Query(ge=0, lt=1 << 64, description="`next` of the page before; without it the first page", examples=[0])
]

PROBLEM = "application/problem+json"
NO_STORE = {"cache-control": "no-store"}
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""On every answer. Pages of this server load nothing from elsewhere, and no page may embed them in a frame."""
COMMON_HEADERS = {**SECURITY_HEADERS, VERSION_HEADER.lower(): str(API_VERSION)}
PLAIN_BODY_BYTES = 1 << 20
"""Longest body of operators' calls: thousands of keys in JSON."""


async def read_body(request: Request, codec: Codec[B]) -> B:
    """The decoded body. Raises ApiError: unsupported_media_type, too_large, malformed_json, invalid_body."""
    media_type = request.headers.get("content-type", "")
    if form_of_body(media_type) is not JSON:
        raise ApiError("unsupported_media_type", "send JSON", found=media_type, wanted=JSON.media_type)
    body = await read_limited(request)
    if len(body) <= SHORT_READ_BYTES:
        return codec.decode(body, JSON)
    await next_call()  # bodies that end in one turn of the event loop are decoded in several
    try:
        return codec.decode(body, JSON)
    finally:
        await next_slice()  # what follows has a turn of its own, be it a refusal


async def read_limited(request: Request) -> RawBody:
    """The whole body. Raises ApiError: too_large, too_busy."""
    limit: int = request.app.state.handlers.body_limit_bytes
    capacity: BodyCapacity = request.app.state.handlers.body_capacity
    peer: Peer = request.scope["state"]["peer"]
    share, declared = BodyShare(capacity, peer.tenant), request.headers.get("content-length", "")
    try:
        return await read_all(request.receive, declared, min(limit, PLAIN_BODY_BYTES), share)
    finally:
        share.give_back()


async def read_all(receive: Receive, declared: str, limit: int, share: BodyShare) -> RawBody:
    """The whole body, refused as soon as it is known to be longer than the limit. Raises ApiError: too_large, too_busy.

    Pieces are written one behind the other as they arrive, into memory that never moves: to join megabytes at the end,
    or to move them because a buffer grows, would block the loop for several ms.
    """
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(int(declared[:18]), limit)
    body: mmap.mmap | None = None
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            if body is not None:
                await next_slice()  # to give megabytes back takes up to a ms: those of one turn are one body's
            raise ClientDisconnect
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(size, limit)
        more = message.get("more_body", False)
        if not more and body is None:
            return piece
        share.hold(size)
        if body is None:
            body = mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        body.write(piece)
        if not more:
            if not size:
                return b""
            body.resize(size)
            return body


def _too_large(found: int, limit: int) -> ApiError:
    return ApiError("too_large", "the body is longer than this call takes", found=found, wanted=limit)


def answer(body: Answer) -> Response:
    return Response(JSON.encode(body), media_type="application/json", headers=NO_STORE)


def no_content() -> Response:
    return Response(status_code=204, headers=NO_STORE)


class EventResponse(StreamingResponse):
    """Server-sent events, until there are no more or the client has gone. Starlette's own response leaves some 80
    objects of each stream in a circle, which collections of garbage have to find."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.create_task(self.stream_response(send)), asyncio.create_task(self.listen_for_disconnect(receive))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


PROBLEM_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": 'Bearer realm="kvdock"'},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}
"""The headers of a problem by its status; times are whole seconds."""


REFUSAL = "refusal"
"""A key in the scope's state: under it is the problem with which the call was refused, if it was."""


class ProblemResponse(Response):
    def __init__(self, problem: Problem, headers: Mapping[str, str]) -> None:
        super().__init__(JSON.encode(problem), problem.status, headers, PROBLEM)
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][REFUSAL] = self._problem
        await super().__call__(scope, receive, send)


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return ProblemResponse(problem, {**NO_STORE, **PROBLEM_HEADERS.get(problem.status, {}), **(headers or {})})


# --------------------------------------------------------------------------- exception → problem


def refusal(error: ApiError | TableError, path: str) -> Problem:
    """The answer of a call that was refused."""
    if isinstance(error, ApiError):
        return problem_of(error.code, error.detail, found=error.found, wanted=error.wanted, path=path)
    code = error.code if error.code in CODES else "internal"
    if CODES[code].status >= 500:
        log.error("%s: the table answered %s: %s", shown(path), error.code, error)
    return problem_of(code, str(error), found=error.found, wanted=error.wanted, path=path)


async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | TableError)
    return problem_response(refusal(error, request.url.path))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Refusals of the router itself: unknown paths, and methods of the page's files."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_argument")
    wanted = (error.headers or {}).get("Allow")
    problem = problem_of(code, str(error.detail), found=request.method, wanted=wanted, path=request.url.path)
    return problem_response(problem, error.headers)


async def on_bad_parameters(request: Request, error: Exception) -> Response:
    """Refusals of FastAPI, which checks path and query parameters."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"])
    wanted = wanted_of(first)
    said = f"wanted {wanted}, found {str(first['input'])[:80]!r}" if wanted else first["msg"]
    problem = problem_of(
        "bad_argument", f"{where}: {said}", found=where, wanted=wanted or said, path=request.url.path
    )
    return problem_response(problem)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client went away before its body had ended: nobody reads the answer, and nothing needs to be logged."""
    return no_content()


async def on_failure(request: Request, error: Exception) -> Response:
    """Failures of the server itself. uvicorn writes the traceback to the log; the client never gets it."""
    problem = problem_of("internal", "unexpected failure; see the server's log", path=request.url.path)
    return problem_response(problem, COMMON_HEADERS)  # made outside of Guard, which adds them to all other answers
