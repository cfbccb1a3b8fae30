"""The routes that engines call: sessions, lookups, leases, reservations. Bodies are JSON or MessagePack."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from kvdock.api.http import endpoints
from kvdock.api.http.endpoints import Endpoint, Incoming
from kvdock.api.http.handlers import handlers_of
from kvdock.api.http.openapi import doc
from kvdock.api.http.wire import NO_STORE, no_content, read_limited
from kvdock.protocol import schemas as s
from kvdock.protocol.forms import Codec, form_of_body, invalid_body
from kvdock.protocol.wire_types import Body

B = TypeVar("B", bound=Body)

_CANCEL = Codec(s.CancelLease)

_ASKER = ("unknown_session", "unknown_member", "member_suspect", "member_dead")
_GRANT = ("unknown_session", "unknown_grant", "grant_closed", "foreign_grant")

router = APIRouter(prefix="/v1")
both = partial(doc, packed=True)
"""For routes whose bodies may also be MessagePack."""


async def respond(request: Request, endpoint: Endpoint[Any], id_in_path: str = "") -> Response:
    """The endpoint's answer, in the form that the caller sent or, if it says so, accepts."""
    handlers, header = handlers_of(request), request.headers.get
    incoming = Incoming(
        header("content-type", ""), header("accept", ""), header("content-length", ""), request.receive
    )
    content, media_type = await endpoint.answer(handlers.service, incoming, handlers.body_limit_bytes, id_in_path)
    return Response(content, media_type=media_type, headers=NO_STORE)


# ------------------------------------------------------------------ sessions


@router.post("/sessions", tags=["sessions"], **both(
    "Attach one process of an engine instance", body=s.AttachSession, answer=s.SessionAttached,
    errors=("bad_argument", "pool_too_small", "layout_mismatch", "id_reused", "rank_taken", "lock_not_visible",
            "member_dead", "table_full", "not_ready"),
))
async def attach(request: Request) -> Response:
    return await respond(request, endpoints.ATTACH)


@router.delete("/sessions/{session}", tags=["sessions"], **doc(
    "Detach a member; everything it holds is released",
    errors=("unknown_session", "unknown_member", "ambiguous_member"),
))
async def leave(request: Request, session: str, member: str | None = None) -> Response:
    handlers_of(request).service.leave(session, member)
    return no_content()


@router.post("/sessions/{session}/heartbeat", tags=["sessions"], **both(
    "Show that a member lives; get and answer questions about old grants", body=s.Heartbeat,
    answer=s.HeartbeatAnswer,
    errors=("unknown_session", "unknown_member", "member_dead", "foreign_grant", "not_the_asker", "not_a_holder"),
))
async def heartbeat(request: Request, session: str) -> Response:
    return await respond(request, endpoints.HEARTBEAT, session)


# ------------------------------------------------------------------ reading


@router.post("/lookups", tags=["reading"], **both(
    "The longest stored prefix, and a lease on it", body=s.Lookup, answer=s.LookupAnswer,
    errors=(*_ASKER, "unknown_namespace", "stale_epoch", "id_reused", "skip_misaligned", "skip_exceeds_hit",
            "bad_argument", "table_full", "too_many_grants"),
))
async def lookup(request: Request) -> Response:
    return await respond(request, endpoints.LOOKUP)


@router.post("/leases/{lease}/release", tags=["reading"], **both(
    "Reader ranks are done with a lease", body=s.ReleaseLease, answer=s.ReleaseAnswer, errors=(*_GRANT, "not_a_holder")
))
async def release(request: Request, lease: str) -> Response:
    return await respond(request, endpoints.RELEASE, lease)


@router.post("/releases", tags=["reading"], **both(
    "Releases of many leases of one session; lookups, reservations, commits and heartbeats carry them too",
    body=s.ReleaseMany, answer=s.ReleaseManyAnswer, errors=("unknown_session",),
))
async def release_many(request: Request) -> Response:
    return await respond(request, endpoints.RELEASE_MANY)


@router.delete("/leases/{lease}", tags=["reading"], **both(
    "Cancel a lease whose plan was not handed to any rank", body=s.CancelLease,
    errors=(*_GRANT, "unknown_member", "not_the_asker", "handed_out"),
))
async def cancel(request: Request, lease: str, session: str = "", member: str = "") -> Response:
    """The session and member are in the body or, because some clients cannot send one with DELETE, in the query."""
    if session or member:
        body = _from_query(s.CancelLease, {"session": session, "member": member})
    else:
        sent = form_of_body(request.headers.get("content-type", ""))
        body = _CANCEL.decode(await read_limited(request), sent)
    handlers_of(request).service.cancel(lease, body)
    return no_content()


@router.post("/mismatches", tags=["reading"], **both(
    "Report chunks whose checksum is not the one in the lease", body=s.ReportMismatch, answer=s.MismatchAnswer,
    errors=(*_GRANT, "bad_argument"),
))
async def mismatch(request: Request) -> Response:
    return await respond(request, endpoints.MISMATCH)


# ------------------------------------------------------------------ writing


@router.post("/reservations", tags=["writing"], **both(
    "Get slots for the chunks that are missing", body=s.Reserve, answer=s.ReserveAnswer,
    errors=(*_ASKER, "id_reused", "grant_closed", "chain_mismatch", "bad_argument", "table_full", "too_many_grants"),
))
async def reserve(request: Request) -> Response:
    return await respond(request, endpoints.RESERVE)


@router.post("/reservations/{reservation}/commit", tags=["writing"], **both(
    "Publish the parts that a rank has written", body=s.Commit, answer=s.CommitAnswer,
    errors=(*_GRANT, "not_a_holder", "not_reserved", "already_committed"),
))
async def commit(request: Request, reservation: str) -> Response:
    return await respond(request, endpoints.COMMIT, reservation)


@router.post("/reservations/{reservation}/abort", tags=["writing"], **both(
    "Ranks end without committing; the reservation closes", body=s.Abort, answer=s.ReleaseAnswer,
    errors=(*_GRANT, "unknown_member", "not_the_asker", "handed_out", "not_a_holder"),
))
async def abort(request: Request, reservation: str) -> Response:
    return await respond(request, endpoints.ABORT, reservation)


def _from_query(kind: type[B], values: dict[str, Any]) -> B:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from error
