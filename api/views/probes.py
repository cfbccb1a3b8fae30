"""Answers to probes: is the process alive, has it started, can slots be given out; and if not, why not.

Reads only. Every reason is a sentence that docs/runbook.md explains.
"""

from __future__ import annotations

from kvdock._core import SLOT_ALIGN
from kvdock.api.service import CacheService
from kvdock.protocol.reports import Health

STUCK_ROUNDS = 20
"""A keeper that has missed so many rounds does not come back."""
STUCK_LEAST_S = 10.0

STARTING = "the first segment is being allocated"
DRAINING = "draining"
ALL_HELD = "every byte of the pool is held by engines or waits for engines' word"
ALL_KEPT = "pins keep what engines do not hold of the pool: nothing may be evicted"
CAP_REACHED = "engines hold as much of the pool as total_cap lets them"
TABLE_HELD = "every record of the chunk table is held: serve with more table_records"


def live(service: CacheService) -> Health:
    """Whoever reads the answer knows that the loop turns; the keeper must make its rounds as well."""
    since_s = service.pulse.since_round_s
    if service.pool.ready and since_s > max(STUCK_LEAST_S, STUCK_ROUNDS * service.settings.watch_s):
        return _health([f"the keeper has made no round for {since_s:.0f} s: restart the server"])
    return _health([])


def started(service: CacheService) -> Health:
    """Once true it stays so."""
    return _health([] if service.pool.ready else [STARTING])


def ready(service: CacheService) -> Health:
    """A slot could be given out now: something is free, can be had, or can be evicted.

    What is free may be the ends of segments, too short for any slot: less than a slot a segment is nothing.
    """
    if not service.pool.ready:
        return _health([STARTING])
    stats, pool, limits = service.table.stats(), service.pool, service.limits
    leased_bytes = max(0, stats["held_bytes"] - stats["reserved_bytes"])
    evictable_bytes = stats["ready_bytes"] - leased_bytes
    # A kept chunk keeps those before it as well, so that sums do not tell: ask for a chunk that could go.
    kept = evictable_bytes > 0 and stats["kept_bytes"] > 0 and not service.table.can_evict()
    stuck = kept or evictable_bytes <= 0
    records = stats["reserved_chunks"] + stats["ready_chunks"] + stats["quarantined_chunks"]
    slot_bytes = min(
        (group.part_bytes for space in service.registry.namespaces() for group in space.manifest.groups),
        default=SLOT_ALIGN,
    )
    too_little_bytes = pool.segment_count * slot_bytes
    reasons = [DRAINING] if service.draining else []
    if gone := pool.missing():
        reasons.append(f"no engine can attach any more, somebody removed from shared memory: {', '.join(gone)}")
    if service.table.free_bytes() < too_little_bytes and stuck and not pool.can_grow():
        reasons.append(ALL_KEPT if kept else ALL_HELD)
    if stats["held_bytes"] >= limits.total_cap * stats["limit_bytes"]:
        reasons.append(CAP_REACHED)
    if records >= service.settings.table_records and stuck:
        reasons.append(TABLE_HELD)
    if not {ALL_HELD, CAP_REACHED, TABLE_HELD}.isdisjoint(reasons):
        reasons += most_held_by(service)
    return _health(reasons)


def most_held_by(service: CacheService) -> list[str]:
    """A sentence that names the session that holds most; none when nobody holds anything."""
    views = [view for view in service.table.sessions() if view.held_bytes]
    if not views:
        return []
    most = max(views, key=lambda view: view.held_bytes)
    record = service.registry.of_table_id(most.session)
    who = "(not back yet)" if record is None else " ".join((record.id, record.label or record.instance))
    held, leases, reservations = most.held_bytes, most.leases, most.reservations
    return [f"most is held by session {who}: {held} bytes, {leases} leases, {reservations} reservations"]


def _health(reasons: list[str]) -> Health:
    return Health(status="not ready" if reasons else "ok", reasons=reasons)
