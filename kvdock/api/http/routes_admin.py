"""The routes that operators call: clear, delete, evict, pin, drain, limits. Each may be repeated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from kvdock.api.access.peer import Peer, log_done, log_refusal
from kvdock.api.admin import Admin
from kvdock.api.http.handlers import handlers_of, peer_of_call
from kvdock.api.http.openapi import IDEMPOTENT, route
from kvdock.api.http.wire import answer, read_body
from kvdock.protocol import admin_schemas as a, calls as c
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import Codec
from kvdock.protocol.wire_types import Answer, Body

B = TypeVar("B", bound=Body)

router = APIRouter(generate_unique_id_function=lambda route: route.name)
_route = partial(route, router, tag="administration")


def _add(
    call: Call[Any], body: type[B], run: Callable[[Admin, B], Awaitable[Answer]], name: str, summary: str, note: str,
    *, allow: Callable[[Admin, Peer, B], None] | None = None, **more: Any,
) -> None:
    """`allow` refuses what the caller's scope alone would let it do."""
    codec = Codec(body)

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

    _route(call, summary=summary, note=note, body=body, name=name, **more)(respond)


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
    retry="idempotent: values are absolute.", errors=("bad_argument", "no_memory"),
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


@_route(
    c.TIERS, summary="What lower tiers have of each namespace",
    note="Every tier lists what it has, which takes a while in a large store; `error` of a tier says why its list is "
    "missing. Object stores, folders and a disk can list.",
)
async def show_tiers(request: Request) -> Response:
    admin = handlers_of(request).admin
    admin.allow_tiers(peer_of_call(request))
    return answer(await admin.tiers())


@_route(c.CONFIG, summary="Limits and settings in effect")
async def show_config(request: Request) -> Response:
    return answer(await handlers_of(request).admin.config())
