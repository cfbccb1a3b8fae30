"""What people read of the service: status, sessions, grants, health. Reads only."""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from kvdock._core import GrantView, MemberView
from kvdock.api import schemas as s
from kvdock.api.convert import grant_text
from kvdock.api.errors import ApiError
from kvdock.api.registry import SessionRecord
from kvdock.api.service import CacheService

VERSION = version("kvdock")


def health(service: CacheService) -> s.Health:
    if service.pool.ready:
        return s.Health(status="ok")
    return s.Health(status="not ready", reasons=["the first segment is being allocated"])


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
    now = health(service)
    growth = [f"the pool stopped growing: {service.pool.growth_error}"] if service.pool.growth_error else []
    sessions = service.table.sessions()
    return s.Status(
        status=now.status,
        reasons=[*now.reasons, *growth],
        version=VERSION,
        pool_id=grant_text(service.pool.pool_id),
        incarnation=service.pool.incarnation,
        uptime_s=service.clock.now_ms() / 1000,
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


def sessions(service: CacheService) -> s.Sessions:
    return s.Sessions(sessions=[session(service, record.id) for record in service.registry.sessions()])


def session(service: CacheService, session_id: str) -> s.SessionView:
    record = service.registry.session(session_id)
    view = next((view for view in service.table.sessions() if view.session == record.table_id), None)
    if view is None:
        raise ApiError("unknown_session", "the session has just ended", found=session_id)
    now_ms = service.clock.now_ms()
    return s.SessionView(
        session=record.id,
        instance=record.instance,
        label=record.label,
        model=record.namespace.manifest.model,
        namespace=record.namespace.digest.hex(),
        members=_members(record, service.table.members(), now_ms),
        leases=view.leases,
        reservations=view.reservations,
        held_bytes=view.held_bytes,
        age_s=(now_ms - view.opened_ms) / 1000,
    )


def _members(record: SessionRecord, views: list[MemberView], now_ms: int) -> list[s.MemberView]:
    names = {member.table_id: member.id for member in record.members.values()}
    return [
        s.MemberView(
            id=names.get(view.member, view.nonce.hex()),
            ranks=view.ranks,
            scheduler=view.scheduler,
            state=_state(view.state),
            heartbeat_age_s=(now_ms - view.heartbeat_ms) / 1000,
        )
        for view in views
        if view.session == record.table_id
    ]


def leases(service: CacheService) -> s.Leases:
    return s.Leases(leases=[_lease(service, view) for view in service.table.grants()])


def lease(service: CacheService, lease_id: str, session_id: str) -> s.LeaseView:
    """One grant of one session. Raises ApiError: unknown_session, unknown_grant, foreign_grant."""
    record = service.registry.session(session_id)
    found = next((view for view in service.table.grants() if grant_text(view.grant) == lease_id), None)
    if found is None:
        raise ApiError("unknown_grant", "it was never given, or everyone has said done", found=lease_id)
    if found.session != record.table_id:
        raise ApiError("foreign_grant", "the grant belongs to another session", found=session_id)
    return _lease(service, found)


def _lease(service: CacheService, view: GrantView) -> s.LeaseView:
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
        age_s=(service.clock.now_ms() - view.opened_ms) / 1000,
        closed=view.closed,
    )


def _state(text: str) -> s.MemberState:
    match text:
        case "live" | "suspect" | "dead" | "gone":
            return text
    raise ValueError(f"member state found {text!r}, wanted live, suspect, dead or gone")


def segments(service: CacheService) -> s.Segments:
    return s.Segments(
        pool_id=grant_text(service.pool.pool_id), lock_file=service.pool.lock_path, segments=service.pool.segments()
    )


def requests(service: CacheService, limit: int) -> s.Requests:
    return s.Requests(requests=service.recent.view(limit))


def stats(service: CacheService) -> s.Stats:
    return service.history.view(service.clock.now_ms() / 1000)
