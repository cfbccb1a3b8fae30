"""The OpenAPI document, made from the message structs and from what each route states about itself.

`route` adds one route; `openapi_schema` adds the components that routes refer to, and examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.types import DecoratedCallable

from kvdock.api.http import examples
from kvdock.protocol import admin_schemas, reports, schemas, wire_types
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import CODES, problem_of
from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.reports import Problem
from kvdock.protocol.version import SUPPORTED_VERSIONS, VERSION_HEADER
from kvdock.protocol.wire_types import Answer, Body, Carried, Carrier, Identity

READS = "reads only, so it may be repeated."
IDEMPOTENT = "idempotent: a repeat finds less or nothing to do, and leaves the same state."
PAGED = "A page of at most `limit`; `next` is the `cursor` of the following one, null after the last."

_REF = "#/components/schemas/{name}"
_BODY_ERRORS = ("malformed_json", "too_large", "unsupported_media_type", "invalid_body")
_ANY_ERRORS = ("unsupported_version", "unknown_parameter", "wrong_host")
_VERSION_PARAMETER = {
    "name": VERSION_HEADER, "in": "header", "required": False,
    "description": "The version of the API that the request was written for; every answer names the server's version.",
    "schema": {"type": "string", "enum": [str(version) for version in SUPPORTED_VERSIONS]},
}


def route(
    router: APIRouter, call: Call[Any], tag: str, summary: str, note: str = "", *, retry: str = READS,
    body: type[Body] | None = None, errors: Iterable[str] = (), statuses: Iterable[int] = (200,),
    parameters: Iterable[dict[str, Any]] = (), name: str | None = None,
) -> Callable[[DecoratedCallable], DecoratedCallable]:
    """Decorates the function that answers `call`.

    `note`: how the call behaves; `retry`: what repeating it does. If the call is `packed`, its body and answer may be
    MessagePack too, of the same shape; bytes are a bin there, not base64. `statuses`: those that the answer comes with.
    `parameters`: those that the function does not name; `name`: instead of the function's.
    """
    packed, has_answer = call.packed and body is not None, call.answer is not NoneType
    codes = [*errors, *(_BODY_ERRORS if body else ()), *(("malformed_msgpack",) if packed else ()), *_ANY_ERRORS]
    responses: dict[int | str, dict[str, Any]] = {}
    if call.answer is str:
        responses[200] = {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    elif has_answer:
        for status in statuses:
            responses[status] = {"description": call.answer.__name__, "content": _content(call.answer, packed)}
    for status in sorted({CODES[code].status for code in codes}):
        titles = [f"`{code}`: {CODES[code].title}." for code in codes if CODES[code].status == status]
        responses[status] = {"description": " ".join(titles), "content": _problem()}
    responses["default"] = {"description": "Any error", "content": _problem()}
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _content(body, packed)}
    return router.api_route(
        call.path, methods=[call.method], tags=[tag], summary=summary, name=name,
        description=f"{note}\n\nRetry: {retry}".lstrip(), responses=responses, response_model=None,
        status_code=200 if has_answer else 204, openapi_extra=extra,
    )


def _content(struct: type[msgspec.Struct], packed: bool) -> dict[str, Any]:
    schema = {"schema": {"$ref": _REF.format(name=struct.__name__)}}
    return {form.media_type: schema for form in ((JSON, PACKED) if packed else (JSON,))}


def _problem() -> dict[str, Any]:
    return {"application/problem+json": {"schema": {"$ref": _REF.format(name=Problem.__name__)}}}


def wire_structs() -> list[type[msgspec.Struct]]:
    """Every body and answer."""
    bases = (Body, Identity, Answer, Carrier, Carried)
    named = {**vars(wire_types), **vars(reports), **vars(schemas), **vars(admin_schemas)}
    return [
        item
        for item in named.values()
        if isinstance(item, type) and issubclass(item, bases) and item not in bases
    ]


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """The app's OpenAPI document, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, components = msgspec.json.schema_components(wire_structs(), ref_template=_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        shown = examples.by_name(kind for kind in wire_structs() if kind is not Problem)
        for path, methods in schema["paths"].items():
            for method, call in methods.items():
                _annotate(call, method.upper(), path, shown)
        app.openapi_schema = schema
    return app.openapi_schema


def _annotate(call: dict[str, Any], method: str, path: str, shown: dict[str, Any]) -> None:
    """Adds the version header, examples and a line for curl to one call."""
    call.setdefault("parameters", []).append(_VERSION_PARAMETER)
    body = None
    for content in call.get("requestBody", {}).get("content", {}).values():
        body = content["example"] = shown[_struct_name(content)]
    for status, reply in call["responses"].items():
        for content in reply.get("content", {}).values():
            name = _struct_name(content)
            if name == Problem.__name__ and status != "default":
                code = reply["description"].split("`")[1]
                content["example"] = msgspec.to_builtins(problem_of(code, CODES[code].title, path=path))
            elif name in shown:
                content["example"] = shown[name]
    call["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": examples.curl(method, path, body)}]


def _struct_name(content: dict[str, Any]) -> str:
    """The struct that a media type refers to; '' for text."""
    return str(content["schema"].get("$ref", "")).rpartition("/")[2]
