"""The OpenAPI document, made from the message structs and from what each route states about itself.

`doc` returns the keyword arguments for a FastAPI route decorator; `openapi_schema` adds the components
that those arguments refer to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvdock.api.http import examples
from kvdock.api.http.notes import NOTES
from kvdock.protocol import admin_schemas, reports, schemas, wire_types
from kvdock.protocol.errors import CODES, problem_of
from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.reports import Problem
from kvdock.protocol.version import SUPPORTED_VERSIONS, VERSION_HEADER
from kvdock.protocol.wire_types import Answer, Body, Carried, Carrier, Identity

_REF = "#/components/schemas/{name}"
_BODY_ERRORS = ("malformed_json", "too_large", "unsupported_media_type", "invalid_body")
_ANY_ERRORS = ("unsupported_version", "unknown_parameter", "wrong_host")
_VERSION_PARAMETER = {
    "name": VERSION_HEADER, "in": "header", "required": False,
    "description": "The version of the API that the request was written for; every answer names the server's version.",
    "schema": {"type": "string", "enum": [str(version) for version in SUPPORTED_VERSIONS]},
}


def doc(
    summary: str,
    *,
    answer: type[Answer] | None = None,
    body: type[Body] | None = None,
    errors: Iterable[str] = (),
    text: str | None = None,
    packed: bool = False,
    statuses: Iterable[int] = (200,),
) -> dict[str, Any]:
    """Arguments of `@router.post(path, **doc(…))`.

    `text`: media type of an answer that is no struct. `packed`: body and answer may be MessagePack too, of the
    same shape; bytes are a bin there, not base64. `statuses`: those that `answer` comes with.
    """
    codes = [*errors, *(_BODY_ERRORS if body else ()), *(("malformed_msgpack",) if packed else ()), *_ANY_ERRORS]
    responses: dict[int | str, dict[str, Any]] = {}
    if answer is not None:
        for status in statuses:
            responses[status] = {"description": answer.__name__, "content": _content(answer, packed)}
    elif text is not None:
        responses[200] = {"description": "OK", "content": {text: {"schema": {"type": "string"}}}}
    for status in sorted({CODES[code].status for code in codes}):
        titles = [f"`{code}`: {CODES[code].title}." for code in codes if CODES[code].status == status]
        responses[status] = {"description": " ".join(titles), "content": _problem()}
    responses["default"] = {"description": "Any error", "content": _problem()}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _content(body, packed)}
    return {
        "summary": summary,
        "responses": responses,
        "openapi_extra": extra,
        "response_model": None,
        "status_code": 200 if answer is not None or text is not None else 204,
    }


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
        shown = examples.by_name()
        for path, methods in schema["paths"].items():
            for method, call in methods.items():
                _annotate(call, method.upper(), path, shown)
        app.openapi_schema = schema
    return app.openapi_schema


def _annotate(call: dict[str, Any], method: str, path: str, shown: dict[str, Any]) -> None:
    """Adds the note, the version header, examples and a line for curl to one call."""
    note = NOTES[method, path]
    call["description"] = f"{note.text}\n\nRetry: {note.retry}".lstrip()
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
