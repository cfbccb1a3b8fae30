"""What engines call: sessions, lookups, leases, reservations. Parse, call the service, shape the answer."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from kvdock.api import schemas as s
from kvdock.api import views
from kvdock.api.errors import ApiError
from kvdock.api.openapi import doc
from kvdock.api.service import CacheService
from kvdock.api.wire import answer, invalid_body, no_content, read_body

B = TypeVar("B", bound=s.Body)

# One decoder per body, compiled when the module is loaded.
_ATTACH = msgspec.json.Decoder(s.AttachSession)
_HEARTBEAT = msgspec.json.Decoder(s.Heartbeat)
_LOOKUP = msgspec.json.Decoder(s.Lookup)
_RELEASE = msgspec.json.Decoder(s.ReleaseLease)
_RENEW = msgspec.json.Decoder(s.RenewLease)
_CANCEL = msgspec.json.Decoder(s.CancelLease)
_RESERVE = msgspec.json.Decoder(s.Reserve)
_COMMIT = msgspec.json.Decoder(s.Commit)
_ABORT = msgspec.json.Decoder(s.Abort)
_MISMATCH = msgspec.json.Decoder(s.ReportMismatch)

_ASKER = ("unknown_session", "unknown_member", "member_suspect", "member_dead")
_GRANT = ("unknown_session", "unknown_grant", "grant_closed", "foreign_grant")

router = APIRouter(prefix="/v1")


def service_of(request: Request) -> CacheService:
    service: CacheService = request.app.state.service
    return service


# ------------------------------------------------------------------ sessions


@router.post("/sessions", tags=["sessions"], **doc(
    "Attach one process of an engine instance", body=s.AttachSession, answer=s.SessionAttached,
    errors=("bad_argument", "pool_too_small", "layout_mismatch", "id_reused", "rank_taken", "lock_not_visible",
            "member_dead", "table_full", "not_ready"),
))
async def attach(request: Request) -> Response:
    body = await read_body(request, _ATTACH)
    service = service_of(request)
    if not service.pool.ready:
        raise ApiError("not_ready", "the first segment is being allocated: attach again in a moment")
    return answer(service.attach(body))


@router.get("/sessions", tags=["sessions"], **doc("Who is attached", answer=s.Sessions))
async def list_sessions(request: Request) -> Response:
    return answer(views.sessions(service_of(request)))


@router.get("/sessions/{session}", tags=["sessions"], **doc(
    "One session", answer=s.SessionView, errors=("unknown_session",)
))
async def show_session(request: Request, session: str) -> Response:
    return answer(views.session(service_of(request), session))


@router.delete("/sessions/{session}", tags=["sessions"], **doc(
    "Leave: the member's word on everything it holds",
    errors=("unknown_session", "unknown_member", "ambiguous_member"),
))
async def leave(request: Request, session: str, member: str | None = None) -> Response:
    service_of(request).leave(session, member)
    return no_content()


@router.post("/sessions/{session}/heartbeat", tags=["sessions"], **doc(
    "Say that a member lives; hear and answer questions about old grants", body=s.Heartbeat,
    answer=s.HeartbeatAnswer,
    errors=("unknown_session", "unknown_member", "member_dead", "foreign_grant", "not_the_asker", "not_a_holder"),
))
async def heartbeat(request: Request, session: str) -> Response:
    body = await read_body(request, _HEARTBEAT)
    return answer(service_of(request).heartbeat(session, body))


# ------------------------------------------------------------------ reading


@router.post("/lookups", tags=["reading"], **doc(
    "The longest stored prefix, and a lease on it", body=s.Lookup, answer=s.LookupAnswer,
    errors=(*_ASKER, "unknown_namespace", "stale_epoch", "id_reused", "skip_misaligned", "skip_exceeds_hit",
            "bad_argument", "table_full"),
))
async def lookup(request: Request) -> Response:
    body = await read_body(request, _LOOKUP)
    return answer(await service_of(request).lookup(body))


@router.get("/leases", tags=["reading"], **doc("All grants, leases and reservations", answer=s.Leases))
async def list_leases(request: Request) -> Response:
    return answer(views.leases(service_of(request)))


@router.post("/leases/{lease}/release", tags=["reading"], **doc(
    "Reader ranks say done", body=s.ReleaseLease, answer=s.ReleaseAnswer, errors=(*_GRANT, "not_a_holder")
))
async def release(request: Request, lease: str) -> Response:
    body = await read_body(request, _RELEASE)
    return answer(service_of(request).release(lease, body))


@router.post("/leases/{lease}/renew", tags=["reading"], **doc(
    "What a lease still holds; heartbeats renew it", body=s.RenewLease, answer=s.LeaseView,
    errors=("unknown_session", "unknown_grant", "foreign_grant"),
))
async def renew(request: Request, lease: str) -> Response:
    body = await read_body(request, _RENEW)
    return answer(views.lease(service_of(request), lease, body.session))


@router.delete("/leases/{lease}", tags=["reading"], **doc(
    "Cancel a lease whose plan was handed to nobody", body=s.CancelLease,
    errors=(*_GRANT, "unknown_member", "not_the_asker", "handed_out"),
))
async def cancel(request: Request, lease: str, session: str = "", member: str = "") -> Response:
    """The asker, in the body or, as some clients send no body with DELETE, in the query."""
    if session or member:
        body = _from_query(s.CancelLease, {"session": session, "member": member})
    else:
        body = await read_body(request, _CANCEL)
    service_of(request).cancel(lease, body)
    return no_content()


@router.post("/mismatches", tags=["reading"], **doc(
    "Report chunks that did not hash to what the lease promised", body=s.ReportMismatch, answer=s.MismatchAnswer,
    errors=(*_GRANT, "bad_argument"),
))
async def mismatch(request: Request) -> Response:
    body = await read_body(request, _MISMATCH)
    return answer(service_of(request).mismatch(body))


# ------------------------------------------------------------------ writing


@router.post("/reservations", tags=["writing"], **doc(
    "Slots for the chunks that are missing", body=s.Reserve, answer=s.ReserveAnswer,
    errors=(*_ASKER, "id_reused", "grant_closed", "chain_mismatch", "bad_argument", "table_full"),
))
async def reserve(request: Request) -> Response:
    body = await read_body(request, _RESERVE)
    return answer(await service_of(request).reserve(body))


@router.post("/reservations/{reservation}/commit", tags=["writing"], **doc(
    "A rank's parts are complete", body=s.Commit, answer=s.CommitAnswer,
    errors=(*_GRANT, "not_a_holder", "not_reserved", "already_committed"),
))
async def commit(request: Request, reservation: str) -> Response:
    body = await read_body(request, _COMMIT)
    return answer(service_of(request).commit(reservation, body))


@router.post("/reservations/{reservation}/abort", tags=["writing"], **doc(
    "Ranks say done without committing; the reservation closes", body=s.Abort, answer=s.ReleaseAnswer,
    errors=(*_GRANT, "unknown_member", "not_the_asker", "handed_out", "not_a_holder"),
))
async def abort(request: Request, reservation: str) -> Response:
    body = await read_body(request, _ABORT)
    return answer(service_of(request).abort(reservation, body))


def _from_query(kind: type[B], values: dict[str, Any]) -> B:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from error
