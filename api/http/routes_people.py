"""The routes for people, probes and scrapers: health, lists, status, history, metrics, the status page and /docs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvdock.api.http.docs_page import STYLE, docs_page
from kvdock.api.http.handlers import handlers_of
from kvdock.api.http.openapi import PAGED, openapi_schema, route
from kvdock.api.http.wire import DEFAULT_LIMIT, NO_STORE, Cursor, Limit, answer
from kvdock.api.views.probes import Probes
from kvdock.api.views.reports import Reports
from kvdock.protocol import calls as c
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import CODES
from kvdock.protocol.reports import Health
from kvdock.protocol.wire_types import Answer

_WELL_OR_NOT = (200, CODES["not_ready"].status)
PAGE_SUFFIXES = frozenset({".css", ".html", ".js", ".svg"})

router = APIRouter()
_route = partial(route, router)


def _probe(path: str, name: str, summary: str, note: str, ask: Callable[[Probes], Health]) -> None:
    async def probe(request: Request) -> Response:
        health = ask(handlers_of(request).probes)
        response = answer(health)
        response.status_code = 200 if health.status == "ok" else CODES["not_ready"].status
        return response

    _route(Call("GET", path, Health), "health", summary, note, statuses=_WELL_OR_NOT, name=name)(probe)


def _list(call: Call[Any], tag: str, name: str, summary: str, view: Callable[[Reports, int, int], Answer]) -> None:
    async def page(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
        return answer(view(handlers_of(request).reports, limit, cursor))

    _route(call, tag, summary, PAGED, errors=("bad_argument",), name=name)(page)


def add_page(app: FastAPI) -> None:
    """`/` and `/static` from the installed folder kvdock.web."""
    index = str(files("kvdock.web") / "index.html")

    async def page() -> FileResponse:
        return FileResponse(index, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})

    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.mount("/static", PageFiles(directory=index.removesuffix("/index.html")), name="static")


class PageFiles(StaticFiles):
    """Files of the page, chosen by suffix: the folder is also a Python package."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if PurePosixPath(path).suffix not in PAGE_SUFFIXES:
            return "", None
        return super().lookup_path(path)


# ------------------------------------------------------------------ probes


_NO_SLOT = "503 with reasons when no slot can be given out now."
_probe("/livez", "livez", "The event loop turns", "503 with reasons when the server is stuck: restart it.", Probes.live)
_probe("/startupz", "startupz", "The server has started", "503 until the first segment is allocated.", Probes.started)
_probe("/healthz", "readyz", "The same as /readyz", _NO_SLOT, Probes.ready)
_probe("/readyz", "readyz", "Slots can be given out", _NO_SLOT, Probes.ready)


# ------------------------------------------------------------------ lists, and the pool at a glance


_list(c.SESSIONS, "sessions", "list_sessions", "Who is attached", Reports.sessions)


@_route(
    c.SESSION, "sessions", "One session: members, grants, bytes held",
    "All members, the bytes that the session holds, and a page of its open leases and reservations, chosen by "
    "`limit` and `cursor`.",
    errors=("unknown_session", "bad_argument"),
)
async def show_session(request: Request, session: str, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(handlers_of(request).reports.session(session, limit, cursor))


_list(c.LEASES, "reading", "list_leases", "Open leases and reservations, oldest first", Reports.leases)


@_route(
    c.LEASE, "reading", "One lease or reservation: what it holds, and for which ranks it waits",
    "A heartbeat renews the leases of its session; this call changes nothing.", errors=("unknown_grant",),
)
async def show_lease(request: Request, lease: str) -> Response:
    return answer(handlers_of(request).reports.lease(lease))


_list(c.SEGMENTS, "pool", "segments", "The pool's shared memory, and its lock file", Reports.segments)


@_route(c.STATUS, "pool", "The server at a glance")
async def status(request: Request) -> Response:
    return answer(handlers_of(request).reports.status())


@_route(c.STATS, "pool", "The last minutes, as time series")
async def stats(request: Request) -> Response:
    return answer(handlers_of(request).reports.stats())


_list(c.REQUESTS, "pool", "requests", "The last lookups and stores, newest first", Reports.requests)


@_route(Call("GET", "/metrics", str), "health", "Prometheus text", "Base units; counters end in `_total`.")
async def metrics(request: Request) -> Response:
    return Response(handlers_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST, **NO_STORE})


async def _document(request: Request) -> dict[str, Any]:
    """Made once, in a thread: it takes about 50 ms."""
    app = request.app
    assert isinstance(app, FastAPI)
    return await asyncio.to_thread(openapi_schema, app)


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request) -> Response:
    return Response(msgspec.json.encode(await _document(request)), media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(await asyncio.to_thread(docs_page, await _document(request)))


@router.get("/docs.css", include_in_schema=False)
async def docs_css() -> Response:
    return Response(STYLE, media_type="text/css")
