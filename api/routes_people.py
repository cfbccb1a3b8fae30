"""What people, probes and scrapers read: health, status, history, metrics, the status page and /docs."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles

from kvdock.api import schemas as s
from kvdock.api import views
from kvdock.api.docs_page import docs_page, docs_style
from kvdock.api.metrics import CONTENT_TYPE, metrics_text
from kvdock.api.openapi import doc, openapi_schema
from kvdock.api.routes_engine import service_of
from kvdock.api.wire import answer

router = APIRouter()


def add_page(app: FastAPI) -> None:
    """`/` and `/static` from the installed folder kvdock.web."""
    index = str(files("kvdock.web") / "index.html")

    async def page() -> FileResponse:
        return FileResponse(index, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})

    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.mount("/static", StaticFiles(directory=index.removesuffix("/index.html")), name="static")


@router.get("/livez", tags=["health"], **doc("The process answers", answer=s.Health))
async def livez() -> Response:
    return answer(s.Health(status="ok"))


@router.get("/startupz", tags=["health"], **doc("The server has started", answer=s.Health, errors=("not_ready",)))
@router.get("/readyz", tags=["health"], **doc("There is memory to give out", answer=s.Health, errors=("not_ready",)))
@router.get("/healthz", tags=["health"], **doc("The same as /readyz", answer=s.Health, errors=("not_ready",)))
async def readyz(request: Request) -> Response:
    health = views.health(service_of(request))
    response = answer(health)
    response.status_code = 200 if health.status == "ok" else 503
    return response


@router.get("/v1/segments", tags=["pool"], **doc("The pool's shared memory, and its lock file", answer=s.Segments))
async def segments(request: Request) -> Response:
    return answer(views.segments(service_of(request)))


@router.get("/v1/status", tags=["pool"], **doc("The server at a glance", answer=s.Status))
async def status(request: Request) -> Response:
    return answer(views.status(service_of(request)))


@router.get("/v1/stats", tags=["pool"], **doc("The last minutes, as series", answer=s.Stats))
async def stats(request: Request) -> Response:
    return answer(views.stats(service_of(request)))


@router.get("/v1/requests", tags=["pool"], **doc(
    "The last lookups and stores, newest first", answer=s.Requests, errors=("bad_argument",)
))
async def requests(request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Response:
    return answer(views.requests(service_of(request), limit))


@router.get("/metrics", tags=["health"], **doc("Prometheus text", text="text/plain"))
async def metrics(request: Request) -> Response:
    return Response(metrics_text(service_of(request)), headers={
        "content-type": CONTENT_TYPE, "cache-control": "no-store"
    })


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    app = request.app
    assert isinstance(app, FastAPI)
    return HTMLResponse(docs_page(openapi_schema(app)))


@router.get("/docs.css", include_in_schema=False)
async def docs_css() -> Response:
    return Response(docs_style(), media_type="text/css")
