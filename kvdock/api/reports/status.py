"""The server at a glance, and the answers to probes: is the process alive, has it started, can it give out slots.

Reads only. Every reason why it cannot is a sentence that docs/operate/not_ready.md explains.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvdock import __version__
from kvdock._core import MAX_MEMBERS, MAX_NAMESPACES, MAX_SESSIONS, SLOT_ALIGN
from kvdock.api.access.peer import Peer, of_user
from kvdock.api.clock import since_s
from kvdock.api.convert import grant_text
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import Registry
from kvdock.api.pool.sessions import Drain, Sessions
from kvdock.api.reports.recorded import Curves, Loop, Series, Totals
from kvdock.api.settings import Settings
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import ChunkCounts, Curve, Health, MoverView, Over, Stats, Status, TierView

FULL_SHARE = 0.02
"""A pool with a smaller share of free memory counts as full."""
STUCK_ROUNDS = 20
"""A keeper that has missed this many rounds is stuck."""
STUCK_LEAST_S = 10.0

log = logging.getLogger("kvdock.api")

STARTING = "the first segment is being allocated"
DRAINING = "draining"
ALL_HELD = "every byte of the pool is held by engines or waits for their release"
ALL_KEPT = "pins keep all that engines do not hold: nothing may be evicted"
CAP_REACHED = "engines hold as much of the pool as total_cap lets them"
GRANTS_HELD = "all leases and reservations that there may be are open: no lookup and no store gets another one"
MEMBERS_HELD = "every place for processes of engines is taken: no engine can attach any more"
SESSIONS_HELD = "every session that there may be is open: no other engine can attach"
NAMESPACES_HELD = "every namespace is in use: no engine with another manifest, or other weights, can attach"
CONNECTIONS_HELD = "all connections that a socket may have are open: new ones are refused until one ends"
TABLE_HELD = "every record of the chunk table is held: serve with more table_records"


class Full(NamedTuple):
    """Something that is full, which keeps out whoever has none of it yet. `of`: how many of it each tenant has."""

    reason: str
    what: str
    of: Counter[str]

    def told(self, peer: Peer) -> list[str]:
        """The reason, and who has most, if the caller may know of it."""
        return [self.reason, *_most_of(peer, self.what, self.of)]


class Probes:
    """The three probes of a server."""

    def __init__(self, settings: Settings, pool: Pool, registry: Registry, drain: Drain, loop: Loop) -> None:
        self._pool, self._registry, self._drain, self._loop = pool, registry, drain, loop
        self._stuck_s = max(STUCK_LEAST_S, STUCK_ROUNDS * settings.watch_s)
        self._table_records, self._table_grants = settings.table_records, settings.table_grants
        self.full_connections: Callable[[], list[Full]] = list

    @property
    def worst_lag_s(self) -> float:
        """How long a call may have waited for the event loop, within the last ten to twenty seconds."""
        return self._loop.worst_lag_s

    @property
    def is_drained(self) -> bool:
        """An operator has drained the server."""
        return self._drain.is_asked_for

    def live(self) -> Health:
        """An answer at all proves that the event loop turns; the keeper must make its rounds as well."""
        since_s = self._loop.since_round_s
        if self._pool.ready and since_s > self._stuck_s:
            return _health([f"the keeper has made no round for {since_s:.0f} s: restart the server"])
        return _health([])

    def started(self) -> Health:
        """Stays true once it was."""
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
        reasons = [DRAINING] if self._drain.refuses_new else []
        if gone := pool.missing():
            reasons.append(f"no engine can attach any more, somebody removed from shared memory: {', '.join(gone)}")
        if stuck and not pool.can_grow() and table.free_bytes() < pool.segment_count * self._least_part_bytes():
            reasons.append(ALL_KEPT if kept else ALL_HELD)
        if stats["held_bytes"] >= pool.limits.total_cap * stats["limit_bytes"]:
            reasons.append(CAP_REACHED)
        if records >= self._table_records and stuck:
            reasons.append(TABLE_HELD)
        if stats["leases"] + stats["reservations"] >= self._table_grants:
            reasons.append(GRANTS_HELD)
        if stats["members"] >= MAX_MEMBERS:
            reasons.append(MEMBERS_HELD)
        if stats["sessions"] >= MAX_SESSIONS:
            reasons.append(SESSIONS_HELD)
        return _health(reasons)

    def full(self) -> list[Full]:
        """What keeps out those that are not here yet, and nobody else."""
        return [*self._full_namespaces(), *self.full_connections()]

    def _full_namespaces(self) -> list[Full]:
        if len(self._registry.namespaces()) < MAX_NAMESPACES:
            return []
        if self._pool.table.namespaces_in_use(None) < MAX_NAMESPACES:
            return []  # those that sessions have left give way
        return [Full(NAMESPACES_HELD, "namespaces", Counter(one.tenant for one in self._registry.namespaces()))]

    async def watch(self, every_s: float) -> None:
        """Until cancelled. Logs what is full, and who holds most of it, when that begins and when it ends."""
        logged = set[str]()
        while True:
            health, server = self.ready(), of_user(os.geteuid())
            blamed = self.blamed(health, server)
            now = {reason: [reason, *blamed] for reason in health.reasons if reason not in (STARTING, DRAINING)}
            now |= {one.reason: one.told(server) for one in self.full()}
            for reason in sorted(now.keys() - logged):
                log.warning("%s", "; ".join(now[reason]))
            for reason in sorted(logged - now.keys()):
                log.info("this is over: %s", reason)
            logged = set(now)
            await asyncio.sleep(every_s)

    def _least_part_bytes(self) -> int:
        sizes = (group.slot_bytes for space in self._registry.namespaces() for group in space.manifest.groups)
        return min(sizes, default=SLOT_ALIGN)

    def blamed(self, health: Health, peer: Peer) -> list[str]:
        """A sentence that names the session that holds most, if that is the reason why no slot can be given out, and if
        the caller may know of it."""
        if MEMBERS_HELD in health.reasons:
            return self._most_members(peer)
        if SESSIONS_HELD in health.reasons:
            return _most_of(peer, "sessions", Counter(one.tenant for one in self._registry.sessions()))
        if {ALL_HELD, CAP_REACHED, TABLE_HELD, GRANTS_HELD}.isdisjoint(health.reasons):
            return []
        most = self._pool.table.most_holding(by_grants=GRANTS_HELD in health.reasons)
        if most is None:
            return []
        record = self._registry.of_table_id(most.session)
        if not (peer.may("admin") if record is None else peer.may("read") and peer.sees(record.tenant)):
            return []
        who = "(not back yet)" if record is None else " ".join((record.id, record.label or record.instance))
        held, leases, reservations = most.held_bytes, most.leases, most.reservations
        return [f"most is held by session {who}: {held} bytes, {leases} leases, {reservations} reservations"]

    def _most_members(self, peer: Peer) -> list[str]:
        record = max(self._registry.sessions(), key=lambda one: len(one.members), default=None)
        if record is None or not (peer.may("read") and peer.sees(record.tenant)):
            return []
        who = " ".join((record.id, record.label or record.instance))
        return [f"most are of session {who}: {len(record.members)} members"]


def _most_of(peer: Peer, what: str, tenants: Counter[str]) -> list[str]:
    """A sentence that names the tenant that has most, if the caller may know of it."""
    most = tenants.most_common(1)
    if not most or not (peer.may("read") and peer.sees(most[0][0])):
        return []
    tenant, count = most[0]
    who = "tenant " + tenant if tenant else "the own user"
    return [f"most are of {who}: {count} {what}"]


def _health(reasons: list[str]) -> Health:
    return Health(status="not ready" if reasons else "ok", reasons=reasons)


class LowerTiers(NamedTuple):
    """What the mover has last reported. Reading it does not wait for the mover."""

    tiers: Callable[[], list[TierView]]
    mover: Callable[[], MoverView | None]
    mover_sessions: Callable[[], int]
    """How many of the table's sessions are the mover's."""


class Overview:
    """The server at a glance: its status, its time series, and the curve of other pool sizes."""

    def __init__(
        self, probes: Probes, sessions: Sessions, totals: Totals, series: Series, curves: Curves | None,
        lower: LowerTiers, wall_s: Callable[[], float],
    ) -> None:
        """`curves`: None if the curve is switched off. `wall_s` dates the status."""
        self._probes, self._totals, self._series, self._curves, self._lower = probes, totals, series, curves, lower
        self._pool, self._clock, self._wall_s = sessions.pool, sessions.clock, wall_s
        self._started_ms = sessions.clock.now_ms()

    def status(self, peer: Peer) -> Status:
        stats, pool, now_ms = self._pool.table.stats(), self._pool, self._clock.now_ms()
        now = self._probes.ready()
        notes = [f"the pool cannot grow now: {pool.growth_error}"] if pool.growth_error else []
        if why := self._series.unkept:
            notes.append(f"quotas that calls have put and the history are not kept for the next server: {why}")
        return Status(
            status=now.status,
            reasons=[
                *now.reasons, *self._probes.blamed(now, peer),
                *(text for one in self._probes.full() for text in one.told(peer)), *notes,
            ],
            version=__version__,
            pool_id=grant_text(pool.pool_id),
            incarnation=pool.incarnation,
            uptime_s=(now_ms - self._started_ms) / 1000,
            now=self._wall_s(),
            pool=pool.view(),
            chunks=ChunkCounts(
                reserved=stats["reserved_chunks"], ready=stats["ready_chunks"], quarantined=stats["quarantined_chunks"]
            ),
            sessions=stats["sessions"] - self._lower.mover_sessions(),
            leases=stats["leases"],
            reservations=stats["reservations"],
            counters=msgspec.structs.asdict(self._totals.totals()),
            tiers=[
                tier if peer.may("read") else msgspec.structs.replace(tier, error="", pending_why="")
                for tier in self._lower.tiers()
            ],
            mover=self._lower.mover(),
            hits=self._totals.hits.total.view(),
            oldest_s=since_s(stats["oldest_used_ms"], now_ms),
            full_in_s=self._full_in_s(),
            host=socket.gethostname() if peer.may("read") else "",
        )

    def _full_in_s(self) -> float | None:
        rate, free_bytes = self._series.filling_bytes_per_s(), self._pool.free_bytes
        is_full = free_bytes < FULL_SHARE * self._pool.limit_bytes
        return free_bytes / rate if rate is not None and rate > 0 and not is_full else None

    def stats(self, over: Over) -> Stats:
        return self._series.view(over, self._clock.now_ms() / 1000)

    async def curve(self, peer: Peer) -> Curve:
        """Raises ApiError(not_found) if the curve is switched off."""
        if self._curves is None:
            raise ApiError("not_found", "the curve is switched off", found="observe", wanted="curve among them")
        await self._totals.catch_up()
        return await self._curves.view(peer)
