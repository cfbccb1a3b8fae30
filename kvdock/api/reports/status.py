"""The answers to probes: is the process alive, has it started, can slots be given out; and if not, why.

Reads only. Every reason is a sentence that docs/runbook.md explains.
"""

from __future__ import annotations

from kvdock._core import SLOT_ALIGN
from kvdock.api.access.peer import Peer
from kvdock.api.pool.drain import Drain
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import Registry
from kvdock.api.record.pulse import Pulse
from kvdock.api.settings import Settings
from kvdock.protocol.reports import Health

STUCK_ROUNDS = 20
"""A keeper that has missed this many rounds does not come back."""
STUCK_LEAST_S = 10.0

STARTING = "the first segment is being allocated"
DRAINING = "draining"
ALL_HELD = "every byte of the pool is held by engines or waits for their release"
ALL_KEPT = "pins keep all that engines do not hold: nothing may be evicted"
CAP_REACHED = "engines hold as much of the pool as total_cap lets them"
TABLE_HELD = "every record of the chunk table is held: serve with more table_records"


class Probes:
    """The three probes of a server."""

    def __init__(self, settings: Settings, *, pool: Pool, registry: Registry, drain: Drain, pulse: Pulse) -> None:
        self._pool, self._registry, self._drain, self._pulse = pool, registry, drain, pulse
        self._stuck_s = max(STUCK_LEAST_S, STUCK_ROUNDS * settings.watch_s)
        self._table_records = settings.table_records

    def live(self) -> Health:
        """An answer at all proves that the event loop turns; the keeper must make its rounds as well."""
        since_s = self._pulse.since_round_s
        if self._pool.ready and since_s > self._stuck_s:
            return _health([f"the keeper has made no round for {since_s:.0f} s: restart the server"])
        return _health([])

    def started(self) -> Health:
        """Once true it stays so."""
        return _health([] if self._pool.ready else [STARTING])

    def ready(self) -> Health:
        """A slot could be given out now: memory is free, can be allocated, or can be evicted.

        Free memory may be the ends of segments, too short for any slot: less than one slot per segment counts as none.
        """
        if not self._pool.ready:
            return _health([STARTING])
        pool, table = self._pool, self._pool.table
        stats = table.stats()
        leased_bytes = max(0, stats["held_bytes"] - stats["reserved_bytes"])
        evictable_bytes = stats["ready_bytes"] - leased_bytes
        # A kept chunk keeps those before it as well, so the sums do not decide: ask for a chunk that could go.
        kept = evictable_bytes > 0 and stats["kept_bytes"] > 0 and not table.can_evict()
        stuck = kept or evictable_bytes <= 0
        records = stats["reserved_chunks"] + stats["ready_chunks"] + stats["quarantined_chunks"]
        slot_bytes = min(
            (group.part_bytes for space in self._registry.namespaces() for group in space.manifest.groups),
            default=SLOT_ALIGN,
        )
        reasons = [DRAINING] if self._drain.begun else []
        if gone := pool.missing():
            reasons.append(f"no engine can attach any more, somebody removed from shared memory: {', '.join(gone)}")
        if table.free_bytes() < pool.segment_count * slot_bytes and stuck and not pool.can_grow():
            reasons.append(ALL_KEPT if kept else ALL_HELD)
        if stats["held_bytes"] >= pool.limits.total_cap * stats["limit_bytes"]:
            reasons.append(CAP_REACHED)
        if records >= self._table_records and stuck:
            reasons.append(TABLE_HELD)
        return _health(reasons)

    def blamed(self, health: Health, peer: Peer) -> list[str]:
        """A sentence that names the session that holds most, if that is why no slot can be given out, somebody holds
        anything, and the caller may know."""
        if {ALL_HELD, CAP_REACHED, TABLE_HELD}.isdisjoint(health.reasons):
            return []
        views = [view for view in self._pool.table.sessions() if view.held_bytes]
        if not views:
            return []
        most = max(views, key=lambda view: view.held_bytes)
        record = self._registry.of_table_id(most.session)
        if not (peer.may("admin") if record is None else peer.may("read") and peer.sees(record.tenant)):
            return []
        who = "(not back yet)" if record is None else " ".join((record.id, record.label or record.instance))
        held, leases, reservations = most.held_bytes, most.leases, most.reservations
        return [f"most is held by session {who}: {held} bytes, {leases} leases, {reservations} reservations"]


def _health(reasons: list[str]) -> Health:
    return Health(status="not ready" if reasons else "ok", reasons=reasons)
