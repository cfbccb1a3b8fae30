"""The routes for people, probes and scrapers: health, lists, status, history, metrics, the status page, /docs and the
manual."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Path as PathParameter, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from kvdock.api.access.peer import Peer, log_done, log_refusal
from kvdock.api.admin import Admin
from kvdock.api.feeds.sse import Stream
from kvdock.api.http.engine_calls import ENGINE_CALLS
from kvdock.api.http.handlers import handlers_of, is_admitted_of, peer_of_call
from kvdock.api.http.openapi import EVENT_STREAM, IDEMPOTENT, OPEN_METRICS_TEXT, PAGED, openapi_schema, route
from kvdock.api.http.pages import STYLE, docs_page, manual_page, page_names
from kvdock.api.http.wire import (
    DEFAULT_LIMIT,
    NO_STORE,
    PROBLEM_HEADERS,
    Cursor,
    EventResponse,
    Limit,
    answer,
    read_body,
)
from kvdock.api.reports.lists import Lists
from kvdock.api.reports.metrics import CLASSIC, OPEN_METRICS
from kvdock.api.reports.status import Probes
from kvdock.api.turns import next_slice, not_collected
from kvdock.protocol import admin_schemas as a, calls as c
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import CODES, ApiError
from kvdock.protocol.events import KINDS
from kvdock.protocol.forms import MAX_COST, Codec
from kvdock.protocol.reports import Health, Over
from kvdock.protocol.wire_types import Answer, Body

_WELL_OR_NOT = (200, CODES["not_ready"].status)
PAGE_FOLDER = files("kvdock.web")
PAGE_SUFFIXES = frozenset({".css", ".html", ".js", ".svg"})

router = APIRouter(generate_unique_id_function=lambda route: route.name)
_route = partial(route, router)


def _probe(path: str, summary: str, note: str, ask: Callable[[Probes], Health]) -> None:
    async def probe(request: Request) -> Response:
        health = ask(handlers_of(request).probes)
        response = answer(health)
        if health.status != "ok":
            response.status_code = CODES["not_ready"].status
            response.headers.update(PROBLEM_HEADERS[response.status_code])
        return response

    name = path.removeprefix("/")
    _route(Call("GET", path, Health, "health"), "health", summary, note, statuses=_WELL_OR_NOT, name=name)(probe)


View = Callable[[Lists, Peer, int, int], Awaitable[Answer]]
"""(lists, caller, limit, cursor)."""


def _list(call: Call[Any], tag: str, name: str, summary: str, view: View) -> None:
    async def page(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
        return answer(await view(handlers_of(request).lists, peer_of_call(request), limit, cursor))

    _route(call, tag, summary, PAGED, errors=("bad_argument",), name=name)(page)


def add_static(app: FastAPI) -> None:
    app.mount("/static", PageFiles(directory=str(PAGE_FOLDER)), name="static")


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    index = str(PAGE_FOLDER / "index.html")
    return FileResponse(index, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})


class PageFiles(StaticFiles):
    """Files of the page, chosen by suffix: the folder is also a Python package."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if PurePosixPath(path).suffix not in PAGE_SUFFIXES:
            return "", None
        return super().lookup_path(path)


# ------------------------------------------------------------------ probes


_NO_SLOT = "503 with reasons when no slot can be given out now."
_probe("/livez", "The event loop turns", "503 with reasons when the server is stuck: restart it.", Probes.live)
_probe("/startupz", "The server has started", "503 until the first segment is allocated.", Probes.started)
_probe("/healthz", "The same as /readyz", _NO_SLOT, Probes.ready)
_probe("/readyz", "Slots can be given out", _NO_SLOT, Probes.ready)


# ------------------------------------------------------------------ lists, and the pool at a glance


_list(c.SESSIONS, "sessions", "list_sessions", "Attached sessions and their members", Lists.sessions)


@_route(
    c.SESSION, "sessions", "One session: members, grants, bytes held",
    "Up to 128 members that have not left, the bytes that the session holds, and a page of its open leases and "
    "reservations, chosen by `limit` and `cursor`.",
    errors=("unknown_session", "bad_argument"),
)
async def show_session(request: Request, session: str, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(await handlers_of(request).lists.session(peer_of_call(request), session, limit, cursor))


_list(c.LEASES, "reading", "list_leases", "Open leases and reservations, oldest first", Lists.leases)


@_route(
    c.LEASE, "reading", "One lease or reservation: what it holds, and for which ranks it waits",
    "A lease has no deadline, so nothing renews it; this call changes nothing.", errors=("unknown_grant",),
)
async def show_lease(request: Request, lease: str) -> Response:
    return answer(handlers_of(request).lists.lease(peer_of_call(request), lease))


_list(c.SEGMENTS, "pool", "list_segments", "The pool's shared memory, and its lock file", Lists.segments)


@_route(c.STATUS, "pool", "The server at a glance")
async def status(request: Request) -> Response:
    return answer(handlers_of(request).overview.status(peer_of_call(request)))


@_route(
    c.WHOAMI, "health", "What the caller may do",
    "The scopes and the tenant of the access token, or of the connection without one. The status page asks this first, "
    "and makes no call that would be refused.",
)
async def whoami(request: Request) -> Response:
    return answer(peer_of_call(request).view())


OverQuery = Annotated[Over, Query(alias="over", description="How far back, and how finely")]


@_route(
    c.STATS, "pool", "The last minutes, hours or days, as time series",
    "`hours`: half a day by the minute; `days`: two weeks by the half-hour. The next server of the pool goes on with "
    "both.",
    errors=("bad_argument",),
)
async def stats(request: Request, over: OverQuery = "minutes") -> Response:
    return answer(handlers_of(request).overview.stats(over))


@_route(
    c.VERDICT, "pool", "Whether the server helps, and what to do about what goes wrong",
    "Findings name engines and tenants only to callers that may know of them.",
)
async def verdict(request: Request) -> Response:
    return answer(await handlers_of(request).judge.verdict(peer_of_call(request)))


@_route(
    c.HITS, "pool", "Where prompts' tokens came from, by day",
    "Of requests that have ended, by day, tenant and model: tokens that the engine's own cache had, that were loaded, "
    "by source, and that were computed, by reason. The next server of the pool goes on with them.",
)
async def hits(request: Request) -> Response:
    return answer(await handlers_of(request).lists.hit_days(peer_of_call(request)))


@_route(
    c.CURVE, "pool", "What if the pool were larger or smaller",
    "The share of tokens that lookups would find in pools of 1/4 to 8 times the size, and in one without bound, as "
    "simulated pools under the same eviction policy show. docs/operate/sizing.md says how accurate they are.",
    errors=("not_found",),
)
async def curve(request: Request) -> Response:
    return answer(await handlers_of(request).overview.curve(peer_of_call(request)))


@_route(
    c.NAMESPACES, "pool", "Manifests that engines have attached with, what is cached of each, and what it was used for",
    f"{PAGED} The pool's chunks are counted when a call asks for them, at most once in some seconds.",
    errors=("bad_argument",), name="list_namespaces",
)
async def list_namespaces(request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0) -> Response:
    return answer(await handlers_of(request).lists.namespaces(peer_of_call(request), limit, cursor))


Search = Annotated[str, Query(
    max_length=256,
    description="Part of a label, model or tenant, or the first 4 or more hex digits of the key of one of its chunks",
)]
Of = Annotated[str, Query(max_length=64, description="The namespace of `below`")]
Below = Annotated[str, Query(max_length=64, description="The key of the chunk whose branches are asked for")]


@_route(
    c.PREFIXES, "pool", "What is cached, by prefix: the most used first",
    f"{PAGED} A prefix is a first chunk with all chunks that continue it; all of it shares the part up to the chunk "
    "where the tree of chunks forks. With `namespace` and `below` (a row's `fork_key`), what goes on from that chunk: "
    "its branches, each a prefix of its own. The pool's chunks are counted when a call asks for them, at most once in "
    "some seconds, and after an operator took some out of use or keeps some. At most 256 prefixes are listed in one "
    "page, of each namespace the 256 most used, of one fork the 2,048 most used.",
    errors=("bad_argument", "unknown_namespace", "too_busy"), name="list_prefixes",
)
async def list_prefixes(
    request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0, search: Search = "", namespace: Of = "",
    below: Below = "",
) -> Response:
    return answer(await handlers_of(request).contents.prefixes(
        peer_of_call(request), limit, cursor, search=search, namespace=namespace, below=below
    ))


RequestId = Annotated[str, PathParameter(alias="request", max_length=256, description="As the engine names it")]
OfSession = Annotated[str, Query(max_length=256, description="As lists show it; empty: the latest request's")]
Begins = Annotated[str, Query(alias="request", max_length=256, description="How the ids of requests begin")]


@_route(
    c.REQUESTS, "pool", "The last lookups and stores, newest first, and what became of their requests",
    f"{PAGED} `outcome` is what the engine's heartbeat reported when the request had ended. A request that looked up "
    "nothing here is a row of its own, of the kind `ended`. Stores have ids of their own.",
    errors=("bad_argument",),
)
async def list_requests(
    request: Request, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = 0, begins: Begins = ""
) -> Response:
    return answer(await handlers_of(request).lists.requests(peer_of_call(request), limit, cursor, begins))


Kinds = Annotated[str, Query(max_length=1024, description="Kinds of events, separated by commas; empty: all")]
Follow = Annotated[bool, Query(description="Go on with what comes, until the server drains")]


def _streamed(stream: Stream, tenant: str, pieces: AsyncIterator[bytes]) -> Response:
    """Raises ApiError: too_busy."""
    stream.make_room(tenant)
    return EventResponse(pieces, media_type=EVENT_STREAM, headers=NO_STORE)


@_route(
    c.EVENTS, "pool", "What happens, as it happens",
    "Server-sent events, each with one JSON object: docs/operate/events.md lists them. Without `follow`, those that "
    "are kept, oldest first. With the header `Last-Event-ID`, only what came after that event.",
    errors=("bad_argument", "not_found", "too_busy"), name="list_events",
    media_types=(EVENT_STREAM,),
)
async def events(request: Request, kinds: Kinds = "", follow: Follow = False) -> Response:
    stream = handlers_of(request).events
    if stream is None:
        raise ApiError("not_found", "the event stream is switched off", found="observe", wanted="stream among them")
    names = [name.strip() for name in kinds.split(",") if name.strip()] or list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        raise ApiError("bad_argument", "no such kinds of events", found=unknown, wanted=list(KINDS))
    await stream.catch_up()
    peer = peer_of_call(request)
    tenant = peer.tenant or ""
    pieces = stream.read(
        request.headers.get("last-event-id", ""), {KINDS[name] for name in names}, tenant, peer.sees,
        is_admitted_of(request), follows=follow,
    )
    return _streamed(stream, tenant, pieces)


@_route(
    c.KV_EVENTS, "pool", "Which chunks lookups find, for routers",
    "Server-sent events, each with a batch of KV cache events of the caller's tenant: first a snapshot of what is "
    "there, then, with `follow`, what changes. With the header `Last-Event-ID`, only what came after that batch, if "
    "that is kept. docs/operate/routers.md explains them.",
    errors=("not_found", "too_busy"), name="list_kv_events", media_types=(EVENT_STREAM,),
)
async def kv_events(request: Request, follow: Follow = False) -> Response:
    stream = handlers_of(request).kv_stream
    if stream is None:
        raise ApiError("not_found", "KV events are switched off", found="observe", wanted="kv_events among them")
    tenant = peer_of_call(request).tenant or ""
    pieces = stream.read(
        tenant, request.headers.get("last-event-id", ""), is_admitted_of(request), follows=follow
    )
    return _streamed(stream, tenant, pieces)


@_route(
    c.EXPLAIN, "pool", "Why a request found what it found",
    "The latest request of that id: what its lookups found, where the prefix ends and why, how long loading took, "
    "and what its engine reported, as long as `GET /v1/requests` has it. Engines choose ids: where several use the "
    "same one, `session` chooses between them.",
    errors=("unknown_request", "bad_argument"), name="explain",
)
async def explain(request: Request, request_id: RequestId, session: OfSession = "") -> Response:
    return answer(await handlers_of(request).explainer.explain(peer_of_call(request), request_id, session))


_FORMATS = {"text/plain": CLASSIC, f"{OPEN_METRICS_TEXT};version=1.0.0": OPEN_METRICS}


@_route(
    Call("GET", "/metrics", str, "health"), "health", "Metrics for Prometheus",
    "In Prometheus' text format, or in OpenMetrics 1.0 if the request's `Accept` prefers that. Only OpenMetrics has "
    "exemplars: of each bucket of `kvdock_call_seconds` (for calls of engines), `kvdock_load_seconds` and "
    "`kvdock_store_seconds` the last one whose trace is recorded. Base units; counters end in `_total`.",
    media_types=("text/plain", OPEN_METRICS_TEXT),
)
async def metrics(request: Request) -> Response:
    accept = ",".join(request.headers.getlist("accept"))
    form = _FORMATS[preferred(accept, tuple(_FORMATS))]
    text = await handlers_of(request).metrics.text(peer_of_call(request), form)
    return Response(text, headers={"content-type": form.media_type, "vary": "accept", **NO_STORE})


class Documents(NamedTuple):
    openapi: bytes
    page: bytes


async def _documents(app: FastAPI) -> Documents:
    """Made once, in a thread: it takes about 100 ms. Calls that ask meanwhile wait for the same result; each of them is
    answered in a turn of its own."""
    making: asyncio.Task[Documents] | None = getattr(app.state, "documents", None)
    if making is None:
        making = app.state.documents = asyncio.create_task(asyncio.to_thread(_make_documents, app))
    made = await asyncio.shield(making)
    await next_slice()
    return made


def _make_documents(app: FastAPI) -> Documents:
    with not_collected():
        schema = openapi_schema(app, ENGINE_CALLS)
        return Documents(msgspec.json.encode(schema), docs_page(schema).encode())


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request) -> Response:
    return Response((await _documents(request.app)).openapi, media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse((await _documents(request.app)).page)


@router.get("/manual/{name:path}", include_in_schema=False)
async def manual(name: str) -> Response:
    name = name or "index.md"
    text = await asyncio.to_thread(_manual, name)
    return HTMLResponse(text) if name.endswith(".md") else PlainTextResponse(text)


@cache
def _manual(name: str) -> str:
    served = page_names()
    if name not in served:
        raise ApiError("not_found", "the manual has no such page", found=name, wanted=sorted(served))
    return manual_page(name, served) if name.endswith(".md") else served[name].read_text(encoding="utf-8")


@router.get("/docs.css", include_in_schema=False)
async def docs_css() -> Response:
    return Response(STYLE, media_type="text/css")


# --------------------------------------------------------------------------- the Accept header

# Which of several media types a request accepts best, by its `Accept` header (RFC 9110).



class _Range(NamedTuple):
    kind: str
    subtype: str
    parameters: dict[str, str]
    weight: float


def preferred(accept: str, offered: Sequence[str]) -> str:
    """One of `offered`: the one of the highest weight; among equals the one that is named more exactly, then the first.
    The first also if none is accepted. A range does not match a type that has one of its parameters with another
    value; one that is malformed matches none."""
    ranges = list(_ranges(accept))
    return max(offered, key=lambda media_type: _rank(media_type, ranges))


def _rank(media_type: str, ranges: Sequence[_Range]) -> tuple[float, int]:
    """(the weight of the most exact range that matches, how exact it is); (0, 0): it is not accepted."""
    offered = _range(media_type)
    assert offered is not None
    found = [(_exactness(one, offered), one.weight) for one in ranges]
    exactness, weight = max(found, default=(0, 0.0))
    return (weight, exactness) if weight else (0.0, 0)


def _exactness(one: _Range, offered: _Range) -> int:
    """0: it does not match."""
    if any(offered.parameters.get(name, value) != value for name, value in one.parameters.items()):
        return 0
    match one.kind, one.subtype:
        case "*", "*":
            return 1
        case offered.kind, "*":
            return 2
        case offered.kind, offered.subtype:
            return 3 + len(one.parameters)
    return 0


def _ranges(accept: str) -> Iterator[_Range]:
    for item in accept.split(","):
        if (found := _range(item)) is not None:
            yield found


def _range(text: str) -> _Range | None:
    named, *parameters = (part.strip() for part in text.lower().split(";"))
    kind, slash, subtype = named.partition("/")
    values = {name.strip(): value.strip().strip('"') for name, _, value in (one.partition("=") for one in parameters)}
    try:
        weight = float(values.pop("q", "1"))
    except ValueError:
        return None
    if not (slash and kind and subtype and 0 <= weight <= 1):
        return None
    return _Range(kind, subtype, values, weight)


# --------------------------------------------------------------------------- routes for operators

QUOTAS_COST = 16 * a.MAX_QUOTAS
"""The most that decoding this body may cost. A quota with all its fields costs 10, and takes seven times as long as 10
numbers in a list."""

# The routes that operators call: clear, delete, evict, pin, drain, limits. Each may be repeated.

B = TypeVar("B", bound=Body)

_admin_route = partial(route, router, tag="administration")


def _add(
    call: Call[Any], body: type[B], run: Callable[[Admin, B], Awaitable[Answer]], name: str, summary: str, note: str,
    *, allow: Callable[[Admin, Peer, B], None] | None = None, most_cost: int = MAX_COST, **more: Any,
) -> None:
    """`allow` refuses what the caller's scope alone would let it do. `most_cost`: of decoding the body."""
    codec = Codec(body, most_cost=most_cost)

    async def respond(request: Request) -> Response:
        asked = await read_body(request, codec)
        admin, peer = handlers_of(request).admin, peer_of_call(request)
        if allow is not None:
            try:
                allow(admin, peer, asked)
            except ApiError as error:
                log_refusal(peer, call.method, call.path, error)
                raise
        done = await run(admin, asked)
        log_done(peer, call, asked, done)
        return answer(done)

    _admin_route(call, summary=summary, note=note, body=body, name=name, **more)(respond)


_add(
    c.CLEAR, a.ClearCache, Admin.clear, "clear",
    "Take all stored chunks out of use, or those of a namespace or a tenant",
    "Raises the namespace's generation, in the pool and in every lower tier. Lookups stop finding the chunks at once, "
    "and what was being stored or loaded is not published; memory that engines read is freed when they are done. "
    "Other servers that share a tier follow. The answer names tiers that have not carried it out within 2 s: they "
    "are not used for the namespace until they have. A token of a tenant clears what is its tenant's: others are "
    "`forbidden` to it.",
    retry=IDEMPOTENT, errors=("unknown_namespace",), allow=Admin.allow_clear,
)
_add(
    c.DELETE, a.DeleteChunks, Admin.delete, "delete_chunks", "Take some stored chunks out of use",
    "Like clear, for some keys, in the pool and in every lower tier. More keys than a tier can name clear the "
    "namespace.",
    retry=IDEMPOTENT, errors=("unknown_namespace",),
)
_add(
    c.EVICT, a.EvictChunks, Admin.evict, "evict", "Evict the chunks that are worth least, until enough is free",
    "In the order in which the pool itself would evict. Memory by which the pool may still grow counts as free. Chunks "
    "that engines hold or write stay, and so do pinned chunks and those before them in their prefix; then the answer's "
    "`free_bytes` is less than was asked for. Chunks that no lower tier has are lost.",
    retry=IDEMPOTENT, errors=("bad_argument",),
)
_add(
    c.PIN, a.PinChunks, Admin.pin, "pin_chunks", "Keep chunks from being evicted for a while",
    "Clear, delete and mismatches take pinned chunks out of use like all others; a tenant whose quota is full loses "
    "its own pinned chunks once it has no others to evict. Pins can fill the pool: then reservations answer "
    "`no_space`, and `/readyz` says so. With `name`, `GET /v1/prefixes` labels the prefix so; at most 256 prefixes "
    "have names.",
    retry="idempotent: the duration counts from the last call.", errors=("unknown_namespace", "bad_argument"),
)
_add(
    c.DRAIN, a.DrainServer, Admin.drain, "drain", "Give out nothing new, or do so again",
    "While the server is drained, lookups find nothing and reservations get nothing (`limited_by` says `draining`), so "
    "engines compute; `/readyz` fails with the reason `draining`. What engines have leased and reserved stays theirs, "
    "and engines may attach. `GET /v1/status` shows when no lease and no reservation is left. The next server of the "
    "pool is not drained.",
    retry=IDEMPOTENT,
)
_add(
    c.CONFIGURE, a.PatchConfig, Admin.configure, "configure", "Change limits while the server runs",
    "Changes of limits last until the server ends; quotas are kept with the pool, for the next servers of it, too. A "
    "smaller `pool_bytes` drains whole segments: nothing new is stored in them, "
    "chunks that no engine holds are evicted, and a segment is removed once no engine holds any of it. Each quota in "
    "`tenants` replaces that tenant's quota; chunks beyond it are evicted, except those that its engines hold.",
    retry="idempotent: values are absolute.", errors=("bad_argument", "no_memory"), most_cost=QUOTAS_COST,
)


_add(
    c.ACKNOWLEDGE, a.Acknowledge, Admin.acknowledge, "acknowledge", "End findings about dead engines and damaged data",
    "What has happened so far is no finding of `GET /v1/verdict` any more. Counters and metrics keep it.",
    retry=IDEMPOTENT,
)


_add(
    c.EMPTY_TIER, a.EmptyTier, Admin.empty_tier, "empty_tier",
    "Remove all that one lower tier has of some namespaces",
    "For space: the namespaces' generations stay, so what the pool and other tiers have is found as before, and chunks "
    "that prompts go on asking for are written again. To take chunks out of use everywhere, clear the namespace. The "
    "call removes parts for up to 15 s; repeat it until `left_objects` is 0.",
    retry=IDEMPOTENT, errors=("bad_argument",), allow=Admin.allow_tiers,
)


@_admin_route(
    c.TIERS, summary="What lower tiers have of each namespace",
    note="Every tier lists what it has, which takes a while in a large store; `error` of a tier says why its list is "
    "missing. Object stores, folders and a disk can list.",
)
async def show_tiers(request: Request) -> Response:
    admin = handlers_of(request).admin
    admin.allow_tiers(peer_of_call(request))
    return answer(await admin.tiers())


@_admin_route(c.CONFIG, summary="Limits and settings in effect")
async def show_config(request: Request) -> Response:
    return answer(await handlers_of(request).admin.config())
