"""The routes for people, probes and scrapers: health, lists, status, history, metrics, the status page and /docs."""

from __future__ import annotations

import asyncio
import os
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles

from kvdock.api.http.docs_page import docs_page, docs_style
from kvdock.api.http.handlers import handlers_of
from kvdock.api.http.openapi import doc, openapi_schema
from kvdock.api.http.wire import DEFAULT_LIMIT, Cursor, Limit, answer
from kvdock.api.views.metrics import CONTENT_TYPE
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import SessionDetail
from kvdock.protocol.errors import CODES
from kvdock.protocol.reports import Health, Leases, LeaseView, Requests, Stats, Status

_WELL_OR_NOT = (200, CODES["not_ready"].status)
PAGE_SUFFIXES = frozenset({".css", ".html", ".js", ".svg"})

router = APIRouter()


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


@router.get("/livez", tags=["health"], **doc("The event loop turns", answer=Health, statuses=_WELL_OR_NOT))
async def livez(request: Request) -> Response:
    return _health(handlers_of(request).probes.live())


@router.get("/startupz", tags=["health"], **doc("The server has started", answer=Health, statuses=_WELL_OR_NOT))
async def startupz(request: Request) -> Response:
    return _health(handlers_of(request).probes.started())


@router.get("/readyz", tags=["health"], **doc("Slots can be given out", answer=Health, statuses=_WELL_OR_NOT))
@router.get("/healthz", tags=["health"], **doc("The same as /readyz", answer=Health, statuses=_WELL_OR_NOT))
async def readyz(request: Request) -> Response:
    return _health(handlers_of(request).probes.ready())


def _health(health: Health) -> Response:
    response = answer(health)
    response.status_code = 200 if health.status == "ok" else CODES["not_ready"].status
    return response


# ------------------------------------------------------------------ lists, and the pool at a glance


@router.get("/v1/sessions", tags=["sessions"], **doc("Who is attached", answer=s.Sessions, errors=("bad_argument",)))
async def list_sessions(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(handlers_of(request).reports.sessions(limit, cursor))


@router.get("/v1/sessions/{session}", tags=["sessions"], **doc(
    "One session: members, grants, bytes held", answer=SessionDetail, errors=("unknown_session", "bad_argument")
))
async def show_session(
    request: Request, session: str, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0
) -> Response:
    return answer(handlers_of(request).reports.session(session, limit, cursor))


@router.get("/v1/leases", tags=["reading"], **doc(
    "Open leases and reservations, oldest first", answer=Leases, errors=("bad_argument",)
))
async def list_leases(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(handlers_of(request).reports.leases(limit, cursor))


@router.get("/v1/leases/{lease}", tags=["reading"], **doc(
    "One lease or reservation: what it holds, and for which ranks it waits", answer=LeaseView, errors=("unknown_grant",)
))
async def show_lease(request: Request, lease: str) -> Response:
    return answer(handlers_of(request).reports.lease(lease))


@router.get("/v1/segments", tags=["pool"], **doc(
    "The pool's shared memory, and its lock file", answer=s.Segments, errors=("bad_argument",)
))
async def segments(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(handlers_of(request).reports.segments(limit, cursor))


@router.get("/v1/status", tags=["pool"], **doc("The server at a glance", answer=Status))
async def status(request: Request) -> Response:
    return answer(handlers_of(request).reports.status())


@router.get("/v1/stats", tags=["pool"], **doc("The last minutes, as time series", answer=Stats))
async def stats(request: Request) -> Response:
    return answer(handlers_of(request).reports.stats())


@router.get("/v1/requests", tags=["pool"], **doc(
    "The last lookups and stores, newest first", answer=Requests, errors=("bad_argument",)
))
async def requests(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(handlers_of(request).reports.requests(limit, cursor))


@router.get("/metrics", tags=["health"], **doc("Prometheus text", text="text/plain"))
async def metrics(request: Request) -> Response:
    return Response(handlers_of(request).metrics.text(), headers={
        "content-type": CONTENT_TYPE, "cache-control": "no-store"
    })


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
    return Response(docs_style(), media_type="text/css")
