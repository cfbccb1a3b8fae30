"""The OpenAPI document, made from the message structs and from the descriptions of calls.

`route` adds one route of FastAPI's; `openapi_schema` adds the calls of engines, the components that calls refer to,
and examples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, NamedTuple, Protocol

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.types import DecoratedCallable
from msgspec import inspect

from kvdock.protocol import (
    admin_schemas,
    admin_schemas as a,
    hits,
    outcomes,
    peer_schemas,
    peer_schemas as p,
    reports,
    schemas,
    schemas as s,
    wire_types,
)
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import CODES, problem_of
from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.outcomes import Reporting
from kvdock.protocol.reports import Problem
from kvdock.protocol.schemas import Hint
from kvdock.protocol.wire_types import (
    SUPPORTED_VERSIONS,
    VERSION_HEADER,
    Answer,
    Body,
    Carried,
    Carrier,
    Identity,
    Scope,
)

READS = "reads only, so it may be repeated."
IDEMPOTENT = "idempotent: a repeat finds less or nothing to do, and leaves the same state."
PAGED = "A page of at most `limit`, maybe of fewer; `next` is the `cursor` of the following one, null after the last."

ID_CHARACTERS = 256
"""The longest id in a query."""
_REF = "#/components/schemas/{name}"
_BODY_ERRORS = ("malformed_json", "too_large", "unsupported_media_type", "invalid_body")
_ANY_ERRORS = (
    "malformed_request", "unauthenticated", "cross_site", "wrong_host", "unsupported_version", "unknown_parameter",
    "too_busy",
)
TAGS = [
    {"name": "sessions", "description": "Members of engine instances: attaching, heartbeats, leaving."},
    {"name": "reading", "description": "Stored prefixes, and leases on them."},
    {"name": "writing", "description": "Reservations of slots, and their commits."},
    {"name": "peers", "description": "What other nodes' movers do."},
    {"name": "pool", "description": "Shared memory, namespaces, and what the server is doing."},
    {"name": "health", "description": "Probes and metrics."},
    {"name": "administration", "description": "What operators do."},
]
_HEADERS: dict[int, tuple[str, str, str]] = {
    401: ("WWW-Authenticate", "string", "How to send an access token"),
    429: ("Retry-After", "integer", "Seconds after which to try again"),
    503: ("Retry-After", "integer", "Seconds after which to try again"),
}
"""(name, type, description) of the header that answers of a status have: those of wire.PROBLEM_HEADERS."""
EVENT_STREAM = "text/event-stream"
OPEN_METRICS_TEXT = "application/openmetrics-text"
_TEXTS: dict[str, dict[str, Any]] = {
    "text/plain": {"type": "string"},
    OPEN_METRICS_TEXT: {"type": "string"},
    EVENT_STREAM: {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}},
}
"""The schemas of answers that are no JSON; that of a stream is one event's."""
_SCOPE = "x-scope"
_TOKENS = (
    "An access token of the server's access file. Over the Unix socket the server's own user and root need none. "
    "Without one, calls whose scope is `health` are answered, and no others."
)
_VERSION_PARAMETER = {
    "name": VERSION_HEADER, "in": "header", "required": False,
    "description": "The version of the API that the request was written for; every answer names the server's version.",
    "schema": {"type": "string", "enum": [str(version) for version in SUPPORTED_VERSIONS]},
}


class About(NamedTuple):
    """A call's description in the document. `note`: how it behaves; `retry`: what repeating it does; `errors`: codes of
    its own."""

    tag: str
    summary: str
    note: str = ""
    retry: str = READS
    errors: Sequence[str] = ()


class Described(Protocol):
    """A call of an engine, which has no route of FastAPI's."""

    @property
    def name(self) -> str: ...
    @property
    def call(self) -> Call[Any]: ...
    @property
    def body(self) -> type[Body] | None: ...
    @property
    def about(self) -> About: ...
    @property
    def parameters(self) -> Sequence[Parameter]: ...


class Parameter(NamedTuple):
    """A parameter of a call's query. Required ones are ids, of at most ID_CHARACTERS."""

    name: str
    is_required: bool


def route(
    router: APIRouter, call: Call[Any], tag: str, summary: str, note: str = "", *, retry: str = READS,
    body: type[Body] | None = None, errors: Sequence[str] = (), statuses: Iterable[int] = (200,),
    name: str | None = None, media_types: Sequence[str] = ("text/plain",),
) -> Callable[[DecoratedCallable], DecoratedCallable]:
    """Decorates the function that answers `call`. `note`, `retry`, `errors`: as in About. `statuses`: those that the
    answer comes with. `name`: instead of the function's. `media_types`: those of an answer that is text."""
    about = About(tag, summary, note, retry, errors)
    path = call.path.replace("{request}", "{request:path}")  # engines choose these ids: they may have slashes
    has_answer = call.answer is not NoneType
    return router.api_route(
        path, methods=[call.method], tags=[tag], summary=summary, name=name, description=_description(about),
        responses=_responses(call, body, errors, statuses, media_types), response_model=None,
        response_class=PlainTextResponse if call.answer is str else JSONResponse,
        status_code=200 if has_answer else 204, openapi_extra=_extra(call, body),
    )


def _description(about: About) -> str:
    return f"{about.note}\n\nRetry: {about.retry}".lstrip()


def _is_packed(call: Call[Any], body: type[Body] | None) -> bool:
    """Whether body and answer may be MessagePack too, of the same shape; bytes are a bin there, not base64."""
    return call.packed and body is not None


def _responses(
    call: Call[Any], body: type[Body] | None, errors: Iterable[str], statuses: Iterable[int], media_types: Iterable[str]
) -> dict[int | str, dict[str, Any]]:
    packed = _is_packed(call, body)
    forms = (*_BODY_ERRORS, *(("malformed_msgpack",) if packed else ())) if body else ()
    codes = [*errors, *(() if call.scope == "health" else ("forbidden",)), *forms, *_ANY_ERRORS]
    responses: dict[int | str, dict[str, Any]] = {}
    if call.answer is str:
        responses[200] = {"description": "OK", "content": {one: {"schema": _TEXTS[one]} for one in media_types}}
    elif call.answer is not NoneType:
        for status in statuses:
            responses[status] = {"description": call.answer.__name__, "content": _content(call.answer, packed)}
    for status in sorted({CODES[code].status for code in codes}):
        titles = [f"`{code}`: {CODES[code].title}." for code in codes if CODES[code].status == status]
        answer = responses.setdefault(status, {"description": "", "content": {}})
        answer["description"] = f"{answer['description']}. {' '.join(titles)}".removeprefix(". ")
        answer["content"] |= _problem()
        if status in _HEADERS:
            header, kind, text = _HEADERS[status]
            answer["headers"] = {header: {"description": text, "required": True, "schema": {"type": kind}}}
    responses["default"] = {"description": "Any error", "content": _problem()}
    return responses


def _extra(call: Call[Any], body: type[Body] | None) -> dict[str, Any]:
    extra: dict[str, Any] = {_SCOPE: call.scope}
    extra["security"] = [*([{}] if call.scope == "health" else []), {"token": [call.scope]}]
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _content(body, _is_packed(call, body))}
    return extra


def _operation(one: Described) -> dict[str, Any]:
    """An engine's call as the document has it."""
    responses = _responses(one.call, one.body, one.about.errors, (200,), ())
    if one.call.answer is NoneType:
        responses = {204: {"description": "No content"}, **responses}
    ids = [_parameter(id_, "path", {"type": "string"}, True) for id_ in re.findall(r"{(\w+)}", one.call.path)]
    id_schema = {"type": "string", "minLength": 1, "maxLength": ID_CHARACTERS}
    query = [
        _parameter(found.name, "query", id_schema if found.is_required else {"type": "string"}, found.is_required)
        for found in one.parameters
    ]
    return {
        "tags": [one.about.tag], "summary": one.about.summary, "description": _description(one.about),
        "operationId": one.name, "parameters": [*ids, *query],
        "responses": {str(status): answer for status, answer in responses.items()}, **_extra(one.call, one.body),
    }


def _parameter(name: str, where: str, schema: dict[str, Any], is_required: bool) -> dict[str, Any]:
    return {"name": name, "in": where, "required": is_required, "schema": {**schema, "title": name.title()}}


def scope_of(route: APIRoute) -> Scope:
    """The scope that a caller needs for the route. Every route of the API was made by `route`."""
    scope: Scope = (route.openapi_extra or {})[_SCOPE]
    return scope


def _content(struct: type[msgspec.Struct], packed: bool) -> dict[str, Any]:
    schema = {"schema": {"$ref": _REF.format(name=struct.__name__)}}
    return {form.media_type: dict(schema) for form in ((JSON, PACKED) if packed else (JSON,))}


def _problem() -> dict[str, Any]:
    return {"application/problem+json": {"schema": {"$ref": _REF.format(name=Problem.__name__)}}}


def wire_structs() -> list[type[msgspec.Struct]]:
    """Every body and answer."""
    bases = (Body, Identity, Answer, Carrier, Carried, Reporting)
    rooms = (wire_types, hits, outcomes, reports, schemas, admin_schemas, peer_schemas)
    named = {name: found for room in rooms for name, found in vars(room).items()}
    return [
        item
        for item in named.values()
        if isinstance(item, type) and issubclass(item, bases) and item not in bases
    ]


def openapi_schema(app: FastAPI, engine_calls: Iterable[Described]) -> dict[str, Any]:
    """The OpenAPI document of the app's routes and of `engine_calls`, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes,
            tags=app.openapi_tags, servers=app.servers,
        )
        paths: dict[str, dict[str, Any]] = {}
        for one in engine_calls:
            paths.setdefault(one.call.path, {})[one.call.method.lower()] = _operation(one)
        for path, methods in schema["paths"].items():
            paths.setdefault(path, {}).update(methods)
        schema["paths"] = paths
        _, components = msgspec.json.schema_components(wire_structs(), ref_template=_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        bearer = {"type": "http", "scheme": "bearer", "description": _TOKENS}
        schema["components"]["securitySchemes"] = {"token": bearer}
        shown = by_name(kind for kind in wire_structs() if kind is not Problem)
        for path, methods in schema["paths"].items():
            for method, call in methods.items():
                _annotate(call, method.upper(), path, shown)
        app.openapi_schema = schema
    return app.openapi_schema


def _annotate(call: dict[str, Any], method: str, path: str, shown: dict[str, Any]) -> None:
    """Adds the version header, examples and a line for curl to one call."""
    call.setdefault("parameters", []).append(_VERSION_PARAMETER)
    body = None
    if "requestBody" in call:
        content = call["requestBody"]["content"][JSON.media_type]
        body = content["example"] = shown[_struct_name(content)]
    for status, reply in call["responses"].items():
        for media_type, content in reply.get("content", {}).items():
            name = "" if media_type == PACKED.media_type else _struct_name(content)  # a JSON value is no MessagePack
            if name == Problem.__name__ and status != "default":
                code = reply["description"].split("`")[1]
                content["example"] = msgspec.to_builtins(problem_of(code, CODES[code].title, path=path))
            elif name in shown:
                content["example"] = shown[name]
    query = [item["name"] for item in call["parameters"] if item["in"] == "query" and item["required"]]
    line = curl(method, path, query, body, call[_SCOPE])
    call["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": line}]


def _struct_name(content: dict[str, Any]) -> str:
    """The struct that a media type refers to; '' for text."""
    return str(content["schema"].get("$ref", "")).rpartition("/")[2]


# --------------------------------------------------------------------------- examples

# One example of every body and answer for the OpenAPI document, and curl lines made from them.
#
# A curl line has shell variables in place of the ids below, and works once they are set. Bodies leave out fields with a
# default; answers have all fields.

SESSION = "0a1b2c-1-" + "5d" * 16
LISTED_SESSION = SESSION.rpartition("-")[0]
MEMBER = "scheduler-0"
INSTANCE = "engine-7"
LEASE = "0a1b2c0000000001"
RESERVATION = "0a1b2c0000000002"
POOL_ID = "3fa90c51d27be604"
LOCK_OFFSET = 4242424242424242
NAMESPACE = "5e" * 32
KEYS = ["1f" * 32, "2f" * 32]
CHECKSUM = "043ed4a6d9c7888f"
BASE_URL = "localhost:7410"
OVER_THE_SOCKET = '--unix-socket "$SOCKET"'
"""In calls that need more than the scope `health`: the server's own user needs no access token there."""

VARIABLES = {
    SESSION: "SESSION", MEMBER: "MEMBER", INSTANCE: "INSTANCE", LEASE: "LEASE", RESERVATION: "RESERVATION",
    str(LOCK_OFFSET): "LOCK_OFFSET", NAMESPACE: "NAMESPACE",
}
"""Text of an example → the shell variable that replaces it in curl lines."""

_MANIFEST: dict[str, Any] = {
    "model": "example-model", "kv_dtype": "bfloat16", "layers": 2, "kv_heads": 2, "head_size": 64,
    "chunk_tokens": 16, "block_tokens": 4, "groups": [{"part_bytes": 16384}],
}
_CHANGES = 662316 << 32
_ASKER = {"session": SESSION, "member": MEMBER}

BODIES: dict[type[Body], dict[str, Any]] = {
    s.AttachSession: {
        "instance": INSTANCE, "manifest": _MANIFEST,
        "member": {"id": MEMBER, "ranks": [0], "scheduler": True, "lock_offset": LOCK_OFFSET},
    },
    s.Heartbeat: {
        "member": MEMBER, "pinned_through": 1, "changes_since": _CHANGES, "outcomes": [
            {"request": "r-1", "prompt_tokens": 40, "local_tokens": 0, "found_tokens": 16, "loaded_tokens": 16},
        ],
    },
    s.Lookup: {**_ASKER, "request": "r-1", "keys": KEYS},
    a.Acknowledge: {},
    s.RunWeights: {**_ASKER, "weights": "step-42"},
    s.ReleaseLease: {"session": SESSION, "ranks": [0]},
    s.ReleaseMany: {"session": SESSION, "releases": [[LEASE, [0]]]},
    s.ReportMismatch: {"session": SESSION, "lease": LEASE, "chunks": [0]},
    Hint: {**_ASKER, "keys": KEYS, "priority": 10, "duration_s": 60},
    s.Hold: {**_ASKER, "request": "h-1", "keys": KEYS},
    s.Prefetch: {**_ASKER, "keys": KEYS, "after_s": 20},
    p.PeerNotes: {"notes": [[NAMESPACE, 1, []]]},
    p.PeerRead: {"namespace": NAMESPACE, "generation": 1, "keys": KEYS, "address": "10.0.0.11"},
    s.Reserve: {**_ASKER, "store": "s-1", "keys": KEYS},
    s.MakeRaw: {"session": SESSION, "rank": 0, "parts": [[0, 0]]},
    s.Commit: {"session": SESSION, "rank": 0, "parts": [[0, 0, CHECKSUM]]},
    s.Abort: {"session": SESSION, "ranks": [0]},
    a.ClearCache: {"namespace": NAMESPACE},
    a.DeleteChunks: {"namespace": NAMESPACE, "keys": KEYS},
    a.EvictChunks: {"free_bytes": 1 << 20},
    a.EmptyTier: {"tier": "objects", "namespaces": [NAMESPACE]},
    a.PinChunks: {"namespace": NAMESPACE, "keys": KEYS, "duration_s": 60, "name": "support-bot"},
    a.DrainServer: {"is_drained": False},
    a.PatchConfig: {"session_cap": 0.5, "session_grants": 4096},
}

_VALUES: dict[str, Any] = {
    **_MANIFEST, "session": LISTED_SESSION, "SessionAttached.session": SESSION, "tenant": "",
    "member": MEMBER, "instance": INSTANCE, "MemberView.id": MEMBER,
    "MemberDetail.id": MEMBER, "namespace": NAMESPACE, "filed_in": NAMESPACE, "base": NAMESPACE, "weights": "",
    "lease": LEASE, "grant": LEASE, "grants": LEASE,
    "reservation": RESERVATION, "request": "r-1", "key": KEYS[0], "last_key": KEYS[1], "checksum": CHECKSUM,
    "pool_id": POOL_ID, "last_tokens": 32,
    "fork_key": KEYS[1], "shared_tokens": 32, "shared_bytes": 16384, "branches": 0, "branch_bytes": 0,
    "labels": "support-bot",
    "incarnation": 662316, "changes_next": _CHANGES, "next": _CHANGES + 1, "is_there": True, "complete": True,
    "lock_file": f"/dev/shm/kvdock-{POOL_ID}.lock", "Segment.name": f"/kvdock-{POOL_ID}-0000-5c1d0b7e9a3f2468",
    "Segment.id": 0,
    "Segment.bytes": 1 << 30, "data_offset": 4096, "offset": 4096, "length": 16384, "bytes": 16384, "part_bytes": 16384,
    "chunk_bytes": 16384, "used_bytes": 16384, "ready_bytes": 16384, "kv_bytes": 16384, "raw_parts": 0,
    "held_bytes": 16384, "allocated_bytes": 1 << 30,
    "prefaulted_bytes": 1 << 30, "free_bytes": 1073721344, "limit_bytes": 4 << 30, "pool_bytes": 4 << 30,
    "reserved_bytes": 0, "quarantined_bytes": 0, "reserved": 0, "quarantined": 0, "reservations": 0, "epoch": 0,
    "ranks": 0, "remaining": 0, "busy": [], "retiring": [], "ReleaseAnswer.remaining": [],
    "CommitAnswer.remaining": [], "MismatchAnswer.quarantined": 1, "index": 0, "group": 0, "writer": 0, "segment": 0,
    "first_chunk": 0, "tokens": 32, "hit_tokens": 16, "prompt_tokens": 40, "local_tokens": 0, "found_tokens": 16,
    "loaded_tokens": 16, "took_us": 41, "uptime_s": 61.5, "now": 1700000000.0,
    "at": 1700000000.0, "heartbeat_s": 2.0, "deadline_s": 30.0, "scheduler": True, "state": "live", "status": "ok",
    "kind": "lookup", "unit": "ratio", "Series.name": "loaded_share", "title": "Loaded from kvdock",
    "chart": "Prompt tokens",
    "session_cap": 0.5, "total_cap": 0.75, "grow_water": 0.05, "low_water": 0.005, "high_water": 0.01,
    "session_grants": 4096,
    "eviction": "adaptive",
    "version": "0.1.0", "settings": {"pool_bytes": 4 << 30, "port": 7410},
    "counters": {"lookups": 1, "loaded_tokens": 16}, "date": "2026-11-25",
}
"""Values of answers by the names of their fields, of one struct or of all; the others follow from their types."""
_PLAIN: dict[type[inspect.Type], Any] = {
    inspect.IntType: 1, inspect.FloatType: 0.5, inspect.BoolType: False, inspect.StrType: "", inspect.DictType: {},
    inspect.AnyType: None, inspect.NoneType: None,
}


def _example(kind: inspect.Type, value: Any = None) -> Any:
    """A JSON value of that type: `value`, if it is one."""
    if isinstance(kind, inspect.Metadata):
        return _example(kind.type, value)
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: _field(kind.cls.__name__, field) for field in kind.fields}
        shown = {name: value for name, value in fields.items() if value is not msgspec.NODEFAULT}
        return list(shown.values()) if kind.array_like else shown
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return value if value == [] else [_example(kind.item_type, value)]
    if isinstance(kind, inspect.LiteralType):
        return value if value in kind.values else kind.values[0]
    if isinstance(kind, inspect.UnionType):
        found = [_example(one, value) for one in kind.types if not isinstance(one, inspect.NoneType)]
        return value if value in found else found[0]
    plain = _PLAIN[type(kind)]
    return value if type(value) is type(plain) else plain


def _field(struct: str, field: inspect.Field) -> Any:
    """An example of a field: its default, unless it has none or few would guess its form. NODEFAULT: absent."""
    if field.required or field.name in ("changes", "outcome"):
        return _example(field.type, _VALUES.get(f"{struct}.{field.name}", _VALUES.get(field.name)))
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def by_name(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Any]:
    """Examples as JSON values, by the name of their struct."""
    answers = {kind.__name__: _example(inspect.type_info(kind)) for kind in kinds if issubclass(kind, Answer)}
    return answers | {body.__name__: example for body, example in BODIES.items()}


def curl(method: str, path: str, query: Iterable[str], body: Any, scope: Scope) -> str:
    """One line for a shell in which SOCKET and the VARIABLES are set. `query`: names of the
    parameters that are required; `body`: a JSON value, or None."""
    url = (BASE_URL if scope == "health" else "localhost") + path
    for name in ("session", "lease", "reservation", "request"):
        url = url.replace(f"{{{name}}}", f"${name.upper()}")
    if parameters := "&".join(f"{name}=${name.upper()}" for name in query):
        url += f"?{parameters}"
    over = [] if scope == "health" else [OVER_THE_SOCKET]
    words = ["curl -sS", *over, *([f"-X {method}"] if method not in ("GET", "POST") else []), f'"{url}"']
    if body is not None:
        text = json.dumps(body, separators=(",", ":"))
        for example, variable in VARIABLES.items():
            text = text.replace(example, f"'\"${variable}\"'")
        words += ["-H 'content-type: application/json'", f"-d '{text}'"]
    return " ".join(words)
