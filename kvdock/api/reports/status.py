"""The server at a glance, and the answers to probes: is the process alive, has it started, can it give out slots.

Reads only. kvdock/api/reports/degraded.py has the reasons why it cannot.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from kvdock import __version__
from kvdock._core import MAX_MEMBERS, MAX_NAMESPACES, MAX_SESSIONS, SLOT_ALIGN
from kvdock.api.access.peer import Peer
from kvdock.api.clock import since_s
from kvdock.api.convert import grant_text
from kvdock.api.pool.sessions import Sessions
from kvdock.api.reports.degraded import (
    ALL_HELD,
    ALL_KEPT,
    CANNOT_GROW,
    CAP_REACHED,
    DRAINING,
    GRANTS_HELD,
    MEMBERS_HELD,
    NAMES_GONE,
    NAMESPACES_HELD,
    NOT_KEPT,
    SESSIONS_HELD,
    STARTING,
    TABLE_HELD,
    Lack,
    Most,
    Rounds,
    tenant_with_most,
)
from kvdock.api.reports.recorded import Curves, Loop, Series, Totals
from kvdock.api.settings import Settings
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import ChunkCounts, Curve, Health, MoverView, Over, Stats, Status, TierView

FULL_SHARE = 0.02
"""A pool with a smaller share of free memory counts as full."""
STUCK_ROUNDS = 20
"""A keeper that has missed this many rounds is stuck."""
STUCK_LEAST_S = 10.0


class Probes:
    """The three probes of a server."""

    def __init__(
        self, settings: Settings, sessions: Sessions, loop: Loop, series: Series, wall_s: Callable[[], float]
    ) -> None:
        """`wall_s`: Unix seconds."""
        self._pool, self._registry, self._drain = sessions.pool, sessions.registry, sessions.drain
        self._quotas, self._loop, self._series = sessions.quotas, loop, series
        self._stuck_s = max(STUCK_LEAST_S, STUCK_ROUNDS * settings.watch_s)
        self._table_records, self._table_grants = settings.table_records, settings.table_grants
        self.full_connections: Callable[[], list[Lack]] = list
        self.rounds = Rounds(self.lacks, wall_s)

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
        """A slot could be given out now: memory is free, can be allocated, or can be evicted."""
        return _health([lack.text for lack in self._stops()])

    def lacks(self) -> list[Lack]:
        """All that the server cannot give or do now; what keeps slots from being given out comes first."""
        return [*self._stops(), *self._full_namespaces(), *self.full_connections(), *self._notes()]

    def _stops(self) -> Iterator[Lack]:
        """Free memory may be the ends of segments, too short for any slot: less than one slot per segment counts as
        none."""
        if not self._pool.ready:
            yield Lack(STARTING, stops=True, is_logged=False)
            return
        pool, table = self._pool, self._pool.table
        stats = table.stats()
        leased_bytes = max(0, stats["held_bytes"] - stats["reserved_bytes"])
        evictable_bytes = stats["ready_bytes"] - leased_bytes
        # A kept chunk keeps those before it as well, so the sums do not decide: ask for a chunk that could go.
        kept = evictable_bytes > 0 and stats["kept_bytes"] > 0 and not table.can_evict()
        stuck = kept or evictable_bytes <= 0
        records = stats["reserved_chunks"] + stats["ready_chunks"] + stats["quarantined_chunks"]
        if self._drain.refuses_new:
            yield Lack(DRAINING, stops=True, is_logged=False)
        if gone := pool.missing():
            yield Lack(NAMES_GONE, ", ".join(gone), stops=True)
        by_bytes = partial(self._session_with_most, by_grants=False)
        if stuck and not pool.can_grow() and table.free_bytes() < pool.segment_count * self._least_part_bytes():
            yield Lack(ALL_KEPT, stops=True) if kept else Lack(ALL_HELD, find_most=by_bytes, stops=True)
        if stats["held_bytes"] >= pool.limits.total_cap * stats["limit_bytes"]:
            yield Lack(CAP_REACHED, find_most=by_bytes, stops=True)
        if records >= self._table_records and stuck:
            yield Lack(TABLE_HELD, find_most=by_bytes, stops=True)
        if stats["leases"] + stats["reservations"] >= self._table_grants:
            yield Lack(GRANTS_HELD, find_most=partial(self._session_with_most, by_grants=True), stops=True)
        if stats["members"] >= MAX_MEMBERS:
            yield Lack(MEMBERS_HELD, find_most=partial(self._tenant_with_most, "members"), stops=True)
        if stats["sessions"] >= MAX_SESSIONS:
            yield Lack(SESSIONS_HELD, find_most=partial(self._tenant_with_most, "sessions"), stops=True)

    def _full_namespaces(self) -> Iterator[Lack]:
        if len(self._registry.namespaces()) < MAX_NAMESPACES:
            return
        if self._pool.table.namespaces_in_use(None) == MAX_NAMESPACES:  # those that sessions have left give way
            yield Lack(NAMESPACES_HELD, find_most=self._tenant_with_most_namespaces)

    def _notes(self) -> Iterator[Lack]:
        """What is logged where it is found."""
        if why := self._pool.growth_error:
            yield Lack(CANNOT_GROW, why, is_logged=False)
        if why := self._series.unkept:
            yield Lack(NOT_KEPT, why, is_logged=False)

    async def watch(self, every_s: float) -> None:
        """Until cancelled."""
        while True:
            await self.rounds.look()
            await asyncio.sleep(every_s)

    def _least_part_bytes(self) -> int:
        return min((space.least_part_bytes for space in self._registry.namespaces()), default=SLOT_ALIGN)

    async def _session_with_most(self, *, by_grants: bool) -> Most | None:
        most = self._pool.table.most_holding(by_grants=by_grants)
        if most is None:
            return None
        record = self._registry.of_table_id(most.session)
        who = "(not back yet)" if record is None else " ".join((record.id, record.label or record.instance))
        held, leases, reservations = most.held_bytes, most.leases, most.reservations
        text = f"most is held by session {who}: {held} bytes, {leases} leases, {reservations} reservations"
        return Most(text, None if record is None else record.tenant)

    async def _tenant_with_most_namespaces(self) -> Most | None:
        """The registry also knows the names of tenants that have not come back to an adopted pool."""
        return tenant_with_most("namespaces", Counter(one.tenant for one in self._registry.namespaces()))

    async def _tenant_with_most(self, what: str) -> Most | None:
        """In slices. `what`: a field of Amounts."""
        views = await self._quotas.views()
        return tenant_with_most(what, {name: getattr(view.used, what) or 0 for name, view in views.items()})


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
        lacks = self._probes.lacks()
        return Status(
            status="not ready" if any(one.stops for one in lacks) else "degraded" if lacks else "ok",
            degraded=self._probes.rounds.told(lacks, peer),
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
