"""OpenAPI from the message structs: what a route takes, answers and refuses, stated beside the route.

`doc` returns the keyword arguments for a FastAPI route decorator; `openapi_schema` adds the components
that those arguments refer to. Nothing describes a body twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvdock.api import schemas
from kvdock.api.errors import CODES

_REF = "#/components/schemas/{name}"
_BODY_ERRORS = ("malformed_json", "too_large", "unsupported_media_type", "invalid_body")


def doc(
    summary: str,
    *,
    answer: type[schemas.Answer] | None = None,
    body: type[schemas.Body] | None = None,
    errors: Iterable[str] = (),
    text: str | None = None,
) -> dict[str, Any]:
    """Arguments of `@router.post(path, **doc(…))`. `text`: media type of an answer that is no struct."""
    codes = [*errors, *(_BODY_ERRORS if body else ())]
    responses: dict[int | str, dict[str, Any]] = {}
    if answer is not None:
        responses[200] = {"description": answer.__name__, "content": _json(answer)}
    elif text is not None:
        responses[200] = {"description": "OK", "content": {text: {"schema": {"type": "string"}}}}
    for status in sorted({CODES[code].status for code in codes}):
        titles = [f"`{code}`: {CODES[code].title}." for code in codes if CODES[code].status == status]
        responses[status] = {"description": " ".join(titles), "content": _problem()}
    responses["default"] = {"description": "Any error", "content": _problem()}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _json(body)}
    return {
        "summary": summary,
        "responses": responses,
        "openapi_extra": extra,
        "response_model": None,
        "status_code": 200 if answer is not None or text is not None else 204,
    }


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=struct.__name__)}}}


def _problem() -> dict[str, Any]:
    return {"application/problem+json": {"schema": {"$ref": _REF.format(name=schemas.Problem.__name__)}}}


def wire_structs() -> list[type[msgspec.Struct]]:
    """Every body and answer of schemas.py."""
    bases = (schemas.Body, schemas.Identity, schemas.Answer)
    return [
        item
        for item in vars(schemas).values()
        if isinstance(item, type) and issubclass(item, bases) and item not in bases
    ]


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """The app's OpenAPI document, made once and kept on the app."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, components = msgspec.json.schema_components(wire_structs(), ref_template=_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        app.openapi_schema = schema
    return app.openapi_schema
