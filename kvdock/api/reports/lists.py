"""What people read of the server: status, sessions, grants, namespaces, segments. Reads only."""

from __future__ import annotations

import heapq
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from kvdock._core import GrantView, MemberView, SessionView
from kvdock.api.access.peer import Peer
from kvdock.api.clock import ServerClock
from kvdock.api.convert import grant_id, grant_text
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import Names, NamespaceRecord, Registry, SessionRecord
from kvdock.api.pool.sums import mean_of, rates_of
from kvdock.api.record.curve import Curves
from kvdock.api.record.history import History
from kvdock.api.record.tally import Tally
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.paging import page_of
from kvdock.api.reports.status import Probes
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import MemberDetail, Namespaces, NamespaceView, SessionDetail
from kvdock.protocol.curve import Curve
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import (
    ChunkCounts,
    Leases,
    LeaseView,
    MoverView,
    Over,
    PoolView,
    Requests,
    Stats,
    Status,
    TierView,
)
from kvdock.protocol.usage import CopyRates, UseTotals

VERSION = version("kvdock")
SESSIONS_OF_PAGE = 64
"""A page is as long as can be made in one turn of the event loop, even if more are asked for."""
GRANTS_OF_PAGE = 64
FULL_SHARE = 0.02
"""A pool with a smaller share of room counts as full."""
MOST_SESSIONS = 32
"""Sessions that metrics name."""
ALL_SESSIONS = 0
"""For the table."""


class Reports:
    """One method for each page of information. `limit` and `cursor` choose a page of a list. A list has what the caller
    may see: its own tenant's, or all."""

    def __init__(
        self, *, pool: Pool, registry: Registry, names: Names, clock: ServerClock, probes: Probes, tally: Tally,
        history: History, curves: Curves | None, tiers: Callable[[], list[TierView]],
        mover: Callable[[], MoverView | None], contents: Contents, wall_s: Callable[[], float],
    ) -> None:
        """`tiers`: as the mover has told of them. Neither this nor `mover` waits for it. `wall_s` dates the status."""
        self._pool, self._table = pool, pool.table
        self._registry, self._names = registry, names
        self._clock, self._wall_s = clock, wall_s
        self._started_ms = clock.now_ms()
        self._probes, self._tally, self._history, self._tiers = probes, tally, history, tiers
        self._mover, self._curves, self._contents = mover, curves, contents

    # ---------------------------------------------------------------- the server at a glance

    def pool(self) -> PoolView:
        stats, pool = self._table.stats(), self._pool
        return PoolView(
            limit_bytes=pool.limit_bytes,
            allocated_bytes=pool.allocated_bytes,
            prefaulted_bytes=pool.prefaulted_bytes,
            free_bytes=self._table.free_bytes(),
            reserved_bytes=stats["reserved_bytes"],
            ready_bytes=stats["ready_bytes"],
            quarantined_bytes=stats["quarantined_bytes"],
            held_bytes=stats["held_bytes"],
            retained_bytes=stats["retained_bytes"],
            segments=pool.segment_count,
        )

    def status(self, peer: Peer) -> Status:
        stats, pool = self._table.stats(), self._pool
        now = self._probes.ready()
        growth = [f"the pool cannot grow now: {pool.growth_error}"] if pool.growth_error else []
        return Status(
            status=now.status,
            reasons=[*now.reasons, *self._probes.blamed(now, peer), *growth],
            version=VERSION,
            pool_id=grant_text(pool.pool_id),
            incarnation=pool.incarnation,
            uptime_s=(self._clock.now_ms() - self._started_ms) / 1000,
            now=self._wall_s(),
            pool=self.pool(),
            chunks=ChunkCounts(
                reserved=stats["reserved_chunks"], ready=stats["ready_chunks"], quarantined=stats["quarantined_chunks"]
            ),
            sessions=stats["sessions"],
            leases=stats["leases"],
            reservations=stats["reservations"],
            counters=msgspec.structs.asdict(self._tally.totals()),
            tiers=[
                tier if peer.may("read") else msgspec.structs.replace(tier, error="") for tier in self._tiers()
            ],
            mover=self._mover(),
            saved=self._tally.saved.saved(),
            oldest_s=self._contents.since_s(stats["oldest_used_ms"]),
            full_in_s=self._full_in_s(),
            host=socket.gethostname() if peer.may("read") else "",
        )

    def _full_in_s(self) -> float | None:
        rate, free_bytes = self._history.filling_bytes_per_s(), self._pool.free_bytes
        is_full = free_bytes < FULL_SHARE * self._pool.limit_bytes
        return free_bytes / rate if rate is not None and rate > 0 and not is_full else None

    def segments(self, _: Peer, limit: int, cursor: int) -> s.Segments:
        shown, following = page_of(self._pool.segment_infos, lambda info: info.id, limit, cursor)
        return s.Segments(
            pool_id=grant_text(self._pool.pool_id),
            lock_file=self._pool.lock_path,
            segments=self._pool.segments(shown),
            next=following,
        )

    def requests(self, peer: Peer, limit: int, cursor: int, request: str) -> Requests:
        """Those whose ids begin with `request`."""
        shown, following = self._tally.recent.view(limit, cursor, peer.sees, request)
        return Requests(requests=shown, next=following)

    def stats(self, over: Over) -> Stats:
        return self._history.view(over, self._clock.now_ms() / 1000)

    def keep_history(self) -> None:
        """For the next server of the pool."""
        self._history.keep(self._clock.now_ms() / 1000)

    def curve(self, peer: Peer) -> Curve:
        if self._curves is None:
            raise ApiError("not_found", "the curve is switched off", found="observe", wanted="curve among them")
        return self._curves.view(peer)

    def sample(self) -> None:
        """Takes one more value of each series. The keeper calls it once per interval."""
        self._history.sample(self._tally.totals(), self.pool(), self._tiers(), self._clock.now_ms() / 1000)

    # ---------------------------------------------------------------- sessions

    def sessions(self, peer: Peer, limit: int, cursor: int) -> s.Sessions:
        limit = min(limit, SESSIONS_OF_PAGE)
        seen = [record for record in self._registry.sessions() if peer.sees(record.tenant)]
        shown, following = page_of(seen, lambda record: record.number, limit, cursor)
        ids = [record.table_id for record in shown]
        views = {view.session: view for view in self._table.sessions(ids)}
        members = defaultdict(list)
        for member in self._table.members(ids):
            members[member.session].append(member)
        now_ms = self._clock.now_ms()
        return s.Sessions(
            sessions=[
                s.SessionView(**_session_fields(record, views[record.table_id], now_ms), members=[
                    s.MemberView(**_member_fields(record, member, now_ms)) for member in members[record.table_id]
                ])
                for record in shown if record.table_id in views
            ],
            next=following,
        )

    def copy_rates(self) -> CopyRates:
        """The engines' mean, but for benchmarks."""
        return mean_of([
            rates_of([member.copies for member in record.members.values()])
            for record in self._registry.sessions() if not record.is_bench
        ])

    def most_used_sessions(self, peer: Peer) -> dict[str, UseTotals]:
        """By label, or by id where there is none: the MOST_SESSIONS that looked up most tokens, of those seen.
        If several have one label, it is the one that looked up most."""
        seen = [one for one in self._registry.sessions() if peer.sees(one.tenant) and not one.is_bench]
        most = heapq.nlargest(MOST_SESSIONS, seen, key=lambda record: record.sums.lookup_tokens)
        return {record.label or record.id: record.sums.view() for record in reversed(most)}

    def session(self, peer: Peer, session_id: str, limit: int, cursor: int) -> SessionDetail:
        """One session with all its members and a page of its grants. Raises ApiError(unknown_session)."""
        record = self._registry.listed(session_id, peer.sees)
        views = self._table.sessions([record.table_id])
        if not views:
            raise ApiError("unknown_session", "the session has just ended", found=session_id)
        shown, following = self._grants_of(record.table_id, limit, cursor)
        now_ms = self._clock.now_ms()
        return SessionDetail(
            **_session_fields(record, views[0], now_ms),
            members=[
                MemberDetail(**_member_fields(record, member, now_ms), grants=[
                    grant_text(grant.grant) for grant in shown if not set(member.ranks).isdisjoint(grant.remaining)
                ])
                for member in self._table.members([record.table_id])
            ],
            grants=[self._grant_view(grant, now_ms) for grant in shown],
            next=following,
        )

    async def namespaces(self, peer: Peer, limit: int, cursor: int) -> Namespaces:
        await self._contents.refresh()
        left = {view.namespace: view.left_ms for view in self._table.namespaces()}
        seen = [record for record in self._registry.namespaces() if peer.sees(record.tenant)]
        shown, following = page_of(seen, lambda record: record.table_id, limit, cursor)
        attached = Counter(session.namespace.table_id for session in self._registry.sessions())
        return Namespaces(
            namespaces=[
                self._namespace_view(record, attached[record.table_id], left.get(record.table_id)) for record in shown
            ],
            next=following,
        )

    def _namespace_view(self, record: NamespaceRecord, sessions: int, left_ms: int | None) -> NamespaceView:
        count = self._contents.of(record.table_id)
        return NamespaceView(
            namespace=record.digest.hex(),
            tenant=record.tenant,
            manifest=shown_manifest(record.manifest),
            weights=record.use.weights,
            base=record.base.hex(),
            left_s=None if left_ms is None else self._contents.since_s(left_ms),
            chunk_bytes=record.chunk_bytes,
            sessions=sessions,
            is_bench=record.use.is_bench,
            chunks=count.chunks,
            bytes=count.bytes,
            oldest_s=self._contents.since_s(count.oldest_ms),
            unused_s=self._contents.since_s(count.newest_ms),
            totals=record.use.sums.view(),
        )

    # ---------------------------------------------------------------- leases and reservations

    def leases(self, peer: Peer, limit: int, cursor: int) -> Leases:
        """Oldest first, with all ages taken at one moment."""
        shown, following = self._grants(peer, limit, cursor)
        now_ms = self._clock.now_ms()
        return Leases(leases=[self._grant_view(view, now_ms) for view in shown], next=following)

    def lease(self, peer: Peer, lease_id: str) -> LeaseView:
        """One lease or reservation. Raises ApiError(unknown_grant)."""
        found = self._table.grant(grant_id(lease_id))
        if found is None or not self._sees_session(peer, found.session):
            raise ApiError("unknown_grant", "it was never given out, or all its ranks are done", found=lease_id)
        return self._grant_view(found, self._clock.now_ms())

    def _grants(self, peer: Peer, limit: int, cursor: int) -> tuple[Sequence[GrantView], str | None]:
        """A page of the grants that the caller may see, and the cursor of the next."""
        if "admin" in peer.scopes:
            return self._grants_of(ALL_SESSIONS, limit, cursor)
        limit = min(limit, GRANTS_OF_PAGE)
        own = [record.table_id for record in self._registry.sessions() if peer.sees(record.tenant)]
        first = (view for session in own for view in self._table.grants(session, from_place=cursor, limit=limit + 1))
        return page_of(sorted(first, key=lambda view: view.place), lambda view: view.place, limit, cursor)

    def _grants_of(self, session: int, limit: int, cursor: int) -> tuple[Sequence[GrantView], str | None]:
        """A page; the table describes only the grants of the page."""
        limit = min(limit, GRANTS_OF_PAGE)
        found = self._table.grants(session, from_place=cursor, limit=limit + 1)
        return page_of(found, lambda view: view.place, limit, cursor)

    def _sees_session(self, peer: Peer, session: int) -> bool:
        record = self._registry.of_table_id(session)
        return "admin" in peer.scopes if record is None else peer.sees(record.tenant)

    def _grant_view(self, view: GrantView, now_ms: int) -> LeaseView:
        record = self._registry.of_table_id(view.session)
        return LeaseView(
            grant=grant_text(view.grant),
            kind=view.kind,
            session=record.id if record else "",
            request=self._names.name(view.request),
            epoch=view.epoch,
            readers=view.readers,
            remaining=view.remaining,
            chunks=view.chunks,
            bytes=view.bytes,
            age_s=(now_ms - view.opened_ms) / 1000,
            closed=view.closed,
        )


def _session_fields(record: SessionRecord, view: SessionView, now_ms: int) -> dict[str, Any]:
    return {
        "session": record.id,
        "tenant": record.tenant,
        "instance": record.instance,
        "label": record.label,
        "model": record.namespace.manifest.model,
        "namespace": record.namespace.digest.hex(),
        "weights": record.namespace.use.weights,
        "leases": view.leases,
        "reservations": view.reservations,
        "held_bytes": view.held_bytes,
        "age_s": (now_ms - view.opened_ms) / 1000,
        "is_bench": record.is_bench,
        "totals": record.sums.view(),
        "copy": rates_of([member.copies for member in record.members.values()]),
    }


def _member_fields(record: SessionRecord, view: MemberView, now_ms: int) -> dict[str, Any]:
    name = next((member.id for member in record.members.values() if member.table_id == view.member), view.nonce.hex())
    return {
        "id": name,
        "ranks": view.ranks,
        "scheduler": view.scheduler,
        "state": view.state,
        "heartbeat_age_s": (now_ms - view.heartbeat_ms) / 1000,
        "pinned_through": view.pinned_through,
    }


def shown_manifest(manifest: s.Manifest) -> s.Manifest:
    """Without its secrets: whoever knows a salt could ask what is stored under it."""
    return msgspec.structs.replace(
        manifest, **{name: "hidden" for name in s.SECRET_FIELDS if getattr(manifest, name)}
    )
