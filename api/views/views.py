"""What people read of the service: status, sessions, grants, health. Reads only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from kvdock._core import GrantView, MemberView, SessionView
from kvdock.api.convert import grant_id, grant_text
from kvdock.api.paging import page_of
from kvdock.api.pool.registry import SessionRecord
from kvdock.api.service import CacheService
from kvdock.api.views import probes
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import MemberDetail, SessionDetail
from kvdock.protocol.errors import ApiError

VERSION = version("kvdock")


def pool_view(service: CacheService) -> s.PoolView:
    stats, pool = service.table.stats(), service.pool
    return s.PoolView(
        limit_bytes=pool.limit_bytes,
        allocated_bytes=pool.allocated_bytes,
        prefaulted_bytes=pool.prefaulted_bytes,
        free_bytes=service.table.free_bytes(),
        reserved_bytes=stats["reserved_bytes"],
        ready_bytes=stats["ready_bytes"],
        quarantined_bytes=stats["quarantined_bytes"],
        held_bytes=stats["held_bytes"],
        segments=pool.segment_count,
    )


def status(service: CacheService) -> s.Status:
    stats = service.table.stats()
    now = probes.ready(service)
    growth = [f"the pool cannot grow now: {service.pool.growth_error}"] if service.pool.growth_error else []
    sessions = service.table.sessions()
    return s.Status(
        status=now.status,
        reasons=[*now.reasons, *growth],
        version=VERSION,
        pool_id=grant_text(service.pool.pool_id),
        incarnation=service.pool.incarnation,
        uptime_s=(service.clock.now_ms() - service.started_ms) / 1000,
        now=service.wall_s(),
        pool=pool_view(service),
        chunks=s.ChunkCounts(
            reserved=stats["reserved_chunks"], ready=stats["ready_chunks"], quarantined=stats["quarantined_chunks"]
        ),
        sessions=len(sessions),
        leases=sum(view.leases for view in sessions),
        reservations=sum(view.reservations for view in sessions),
        counters=msgspec.structs.asdict(service.totals()),
    )


def sessions(service: CacheService, limit: int, cursor: int) -> s.Sessions:
    shown, following = page_of(service.registry.sessions(), lambda record: record.number, limit, cursor)
    views = {view.session: view for view in service.table.sessions()}
    members = _members_by_session(service)
    now_ms = service.clock.now_ms()
    return s.Sessions(
        sessions=[
            s.SessionView(**_session_fields(record, views[record.table_id], now_ms), members=[
                s.MemberView(**_member_fields(record, member, now_ms)) for member in members[record.table_id]
            ])
            for record in shown if record.table_id in views
        ],
        next=following,
    )


def session(service: CacheService, session_id: str, limit: int, cursor: int) -> SessionDetail:
    """One session with all its members and a page of its grants. Raises ApiError(unknown_session)."""
    record = service.registry.session(session_id)
    view = next((view for view in service.table.sessions() if view.session == record.table_id), None)
    if view is None:
        raise ApiError("unknown_session", "the session has just ended", found=session_id)
    shown, following = _grants(service, limit, cursor, record.table_id)
    now_ms = service.clock.now_ms()
    return SessionDetail(
        **_session_fields(record, view, now_ms),
        members=[
            MemberDetail(**_member_fields(record, member, now_ms), grants=[
                grant_text(grant.grant) for grant in shown if not set(member.ranks).isdisjoint(grant.remaining)
            ])
            for member in _members_by_session(service)[record.table_id]
        ],
        grants=[_lease(service, grant, now_ms) for grant in shown],
        next=following,
    )


def _session_fields(record: SessionRecord, view: SessionView, now_ms: int) -> dict[str, Any]:
    return {
        "session": record.id,
        "instance": record.instance,
        "label": record.label,
        "model": record.namespace.manifest.model,
        "namespace": record.namespace.digest.hex(),
        "leases": view.leases,
        "reservations": view.reservations,
        "held_bytes": view.held_bytes,
        "age_s": (now_ms - view.opened_ms) / 1000,
    }


def _members_by_session(service: CacheService) -> dict[int, list[MemberView]]:
    members: dict[int, list[MemberView]] = defaultdict(list)
    for view in service.table.members():
        members[view.session].append(view)
    return members


def _member_fields(record: SessionRecord, view: MemberView, now_ms: int) -> dict[str, Any]:
    name = next((member.id for member in record.members.values() if member.table_id == view.member), view.nonce.hex())
    return {
        "id": name,
        "ranks": view.ranks,
        "scheduler": view.scheduler,
        "state": _state(view.state),
        "heartbeat_age_s": (now_ms - view.heartbeat_ms) / 1000,
        "pinned_through": view.pinned_through,
    }


def leases(service: CacheService, limit: int, cursor: int) -> s.Leases:
    """Oldest first, with ages of one moment."""
    shown, following = _grants(service, limit, cursor)
    now_ms = service.clock.now_ms()
    return s.Leases(leases=[_lease(service, view, now_ms) for view in shown], next=following)


def _grants(
    service: CacheService, limit: int, cursor: int, session: int = 0
) -> tuple[Sequence[GrantView], str | None]:
    """A page, and the cursor of the next; the table looks closely at the page's grants only."""
    found = service.table.grants(session, from_place=cursor, limit=limit + 1)
    return page_of(found, lambda view: view.place, limit, cursor)


def lease(service: CacheService, lease_id: str, session_id: str) -> s.LeaseView:
    """One grant of one session. Raises ApiError: unknown_session, unknown_grant, foreign_grant."""
    record = service.registry.session(session_id)
    found = service.table.grant(grant_id(lease_id))
    if found is None:
        raise ApiError("unknown_grant", "it was never given, or everyone has said done", found=lease_id)
    if found.session != record.table_id:
        raise ApiError("foreign_grant", "the grant belongs to another session", found=session_id)
    return _lease(service, found, service.clock.now_ms())


def _lease(service: CacheService, view: GrantView, now_ms: int) -> s.LeaseView:
    record = service.registry.of_table_id(view.session)
    return s.LeaseView(
        grant=grant_text(view.grant),
        kind="lease" if view.kind == "lease" else "reservation",
        session=record.id if record else "",
        request=service.names.name(view.request),
        epoch=view.epoch,
        readers=view.readers,
        remaining=view.remaining,
        chunks=view.chunks,
        bytes=view.bytes,
        age_s=(now_ms - view.opened_ms) / 1000,
        closed=view.closed,
    )


def _state(text: str) -> s.MemberState:
    match text:
        case "live" | "suspect" | "dead" | "gone":
            return text
    raise ValueError(f"member state found {text!r}, wanted live, suspect, dead or gone")


def segments(service: CacheService, limit: int, cursor: int) -> s.Segments:
    shown, following = page_of(service.pool.segment_infos, lambda info: info.id, limit, cursor)
    return s.Segments(
        pool_id=grant_text(service.pool.pool_id),
        lock_file=service.pool.lock_path,
        segments=service.pool.segments(shown),
        next=following,
    )


def requests(service: CacheService, limit: int, cursor: int) -> s.Requests:
    shown, following = service.recent.view(limit, cursor)
    return s.Requests(requests=shown, next=following)


def stats(service: CacheService) -> s.Stats:
    return service.history.view(service.clock.now_ms() / 1000)
