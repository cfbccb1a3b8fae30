"""The routes that operators call: clear, delete, pin, limits. Each may be repeated."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from kvdock.api.http.handlers import handlers_of
from kvdock.api.http.openapi import doc
from kvdock.api.http.wire import DEFAULT_LIMIT, Cursor, Limit, answer, read_body
from kvdock.protocol import admin_schemas as a

_CLEAR = msgspec.json.Decoder(a.ClearCache)
_DELETE = msgspec.json.Decoder(a.DeleteChunks)
_PIN = msgspec.json.Decoder(a.PinChunks)
_PATCH = msgspec.json.Decoder(a.PatchConfig)

router = APIRouter(prefix="/v1", tags=["administration"])


@router.post("/cache/clear", **doc(
    "Take all stored chunks of one or all namespaces out of use", body=a.ClearCache, answer=a.Cleared,
    errors=("unknown_namespace",),
))
async def clear(request: Request) -> Response:
    return answer(await handlers_of(request).admin.clear(await read_body(request, _CLEAR)))


@router.delete("/chunks", **doc(
    "Take some stored chunks out of use", body=a.DeleteChunks, answer=a.Deleted, errors=("unknown_namespace",)
))
async def delete(request: Request) -> Response:
    return answer(await handlers_of(request).admin.delete(await read_body(request, _DELETE)))


@router.post("/pins", **doc(
    "Keep chunks from being evicted for a while", body=a.PinChunks, answer=a.Pinned, errors=("unknown_namespace",)
))
async def pin(request: Request) -> Response:
    return answer(await handlers_of(request).admin.pin(await read_body(request, _PIN)))


@router.get("/config", **doc("Limits and settings in effect", answer=a.Config))
async def show_config(request: Request) -> Response:
    return answer(handlers_of(request).admin.config())


@router.patch("/config", **doc(
    "Change limits while the server runs", body=a.PatchConfig, answer=a.Config, errors=("bad_argument", "no_memory")
))
async def configure(request: Request) -> Response:
    return answer(await handlers_of(request).admin.configure(await read_body(request, _PATCH)))


@router.get("/namespaces", **doc("Manifests that engines have attached with", answer=a.Namespaces,
                                 errors=("bad_argument",)))
async def list_namespaces(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(handlers_of(request).reports.namespaces(limit, cursor))
