"""The ASGI application, built from arguments: nothing exists before `create_app` is called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvdock._core import TableError
from kvdock.api.build import Parts
from kvdock.api.http import routes_admin, routes_people, wire
from kvdock.api.http.dispatch import Dispatch
from kvdock.api.http.engine_calls import methods_at
from kvdock.api.http.guard import Checks, Guard
from kvdock.api.http.openapi import TAGS
from kvdock.api.reports.status import VERSION
from kvdock.api.settings import Settings
from kvdock.protocol.errors import ApiError

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

DESCRIPTION = (
    "The KV-cache server that every LLM inference engine on a machine shares. HTTP carries decisions; "
    "shared memory carries bytes. A HEAD is answered like its GET, without the body. In JSON, integers are written "
    "without fraction and exponent: `88`, not `88.0`."
)


def create_app(settings: Settings, parts: Parts, lifespan: Lifespan | None = None) -> Dispatch:
    """`lifespan` runs the background work (kvdock/api/server.py); tests of routes alone leave it out."""
    app = FastAPI(
        title="kvdock",
        version=VERSION,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        servers=[{"url": "/", "description": "The server that this document comes from"}],
        generate_unique_id_function=lambda route: route.name,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        exception_handlers={
            ApiError: wire.on_refusal,
            TableError: wire.on_refusal,
            HTTPException: wire.on_http_exception,
            RequestValidationError: wire.on_bad_parameters,
            ClientDisconnect: wire.on_disconnect,
            Exception: wire.on_failure,
        },
    )
    app.state.handlers = parts.handlers
    app.include_router(routes_people.router)
    app.include_router(routes_admin.router)
    routes_people.add_static(app)
    routes, checks = (*routes_people.router.routes, *routes_admin.router.routes), Checks(settings, parts.access)
    app.add_middleware(Guard, checks=checks, meter=parts.meter, routes=routes, methods_at=methods_at)
    return Dispatch(app, checks, parts.handlers, parts.meter)
