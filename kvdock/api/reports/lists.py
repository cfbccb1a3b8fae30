"""The lists that people read: sessions, namespaces, leases and reservations, recent requests, segments. Reads only.

A list comes in pages: at most `limit` items, and a cursor from which the next page goes on. A cursor is the id of the
first item of the next page; for grants it is their position in the list of all grants. Both rise and are never reused
(a position only within its millisecond), so items that come or go between two pages shift nothing: no item is shown
twice, and none that was there all the time is missed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec

from kvdock._core import GrantView, MemberView, SessionView
from kvdock.api.access.peer import Peer
from kvdock.api.clock import since_s
from kvdock.api.convert import grant_id, grant_text
from kvdock.api.pool.registry import MemberRecord, NamespaceRecord, SessionRecord, Sums, mean_of, rates_of
from kvdock.api.pool.sessions import Sessions
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.recorded import HitRecord, Recent
from kvdock.api.turns import Slices, next_slice, sliced
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import MemberDetail, Namespaces, NamespaceView, SessionDetail
from kvdock.protocol.errors import ApiError
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.reports import CopyRates, DayOfHits, HitDays, Leases, LeaseView, Requests, UseTotals

SESSIONS_OF_PAGE = 64
"""A page is as long as can be made in one turn of the event loop, even if more are asked for."""
MOST_MEMBERS = 128
"""How many members of a session are shown."""
GRANTS_OF_PAGE = 32
REQUESTS_OF_PAGE = 256
NAMESPACES_OF_PAGE = 128
MOST_OF_DAYS = 1024
"""Pairs of tenant and model on all days together: as many as are encoded in one turn."""
MOST_SESSIONS = 32
"""Sessions that metrics name."""
ALL_SESSIONS = 0
"""The session id by which the table means all sessions."""
T = TypeVar("T")


class Lists:
    """One method for each list. `limit` and `cursor` choose a page of it. A list has the items that the caller may see:
    those of its own tenant, or all."""

    def __init__(
        self, sessions: Sessions, recent: Recent, hits: HitRecord, contents: Contents,
        is_mover: Callable[[SessionRecord], bool],
    ) -> None:
        """`is_mover`: whether a session is one of the mover's."""
        self._pool, self._table = sessions.pool, sessions.pool.table
        self._registry, self._names, self._clock = sessions.registry, sessions.names, sessions.clock
        self._recent, self._hits, self._contents, self._is_mover = recent, hits, contents, is_mover

    async def _engines(self) -> AsyncIterator[SessionRecord]:
        """All sessions but the mover's, in slices."""
        async for session in sliced(self._registry.sessions()):
            if not self._is_mover(session):
                yield session

    async def segments(self, _: Peer, limit: int, cursor: int) -> s.Segments:
        shown, following = page_of(self._pool.segment_infos, lambda info: info.id, limit, cursor)
        return s.Segments(
            pool_id=grant_text(self._pool.pool_id),
            lock_file=self._pool.lock_path,
            segments=self._pool.segments(shown),
            next=following,
        )

    async def requests(self, peer: Peer, limit: int, cursor: int, request: str) -> Requests:
        """The recent requests whose ids begin with `request`."""
        limit = min(limit, REQUESTS_OF_PAGE)
        shown, following = await self._recent.view(limit, cursor, peer.sees, request)
        return Requests(requests=shown, next=following)

    # ---------------------------------------------------------------- sessions

    async def sessions(self, peer: Peer, limit: int, cursor: int) -> s.Sessions:
        limit = min(limit, SESSIONS_OF_PAGE)
        shown, following = page_of(
            self._registry.sessions(), lambda record: record.number, limit, cursor, lambda one: peer.sees(one.tenant)
        )
        ids = [record.table_id for record in shown]
        views = {view.session: view for view in self._table.sessions(ids)}
        await next_slice()
        now_ms, sessions = self._clock.now_ms(), list[s.SessionView]()
        async for record in sliced(shown):
            if record.table_id in views:
                sessions.append(s.SessionView(**_session_fields(record, views[record.table_id], now_ms), members=[
                    s.MemberView(**_member_fields(member, view, now_ms)) for member, view in self._members(record)
                ]))
        return s.Sessions(sessions=sessions, next=following)

    async def copy_rates(self) -> CopyRates:
        """The mean rates of all engines, without benchmarks."""
        rates = list[CopyRates]()
        async for record in self._engines():
            of_session = rates_of([member.copies for member in record.members.values()])
            if not record.is_bench and of_session != CopyRates():
                rates.append(of_session)
        return mean_of(rates)

    async def hit_days(self, peer: Peer) -> HitDays:
        """The last days, as many as are MOST_OF_DAYS rows together, in slices."""
        by_day, rows, slices = list[list[DayOfHits]](), 0, Slices()
        for date in self._hits.dates():
            of_day = self._hits.on(date, peer.sees)
            rows += len(of_day)
            if rows > MOST_OF_DAYS:
                break
            by_day.append(of_day)
            await slices.give_turn()
        return HitDays(days=list(chain.from_iterable(reversed(by_day))))

    def hits_by_model(self, peer: Peer) -> dict[tuple[str, str], HitTotals]:
        """By tenant and model, of the tenants that the caller sees."""
        return {names: hits.view() for names, hits in self._hits.by_model.items() if peer.sees(names[0])}

    async def most_used_sessions(self, peer: Peer) -> dict[str, UseTotals]:
        """By label, or by id where there is none: the MOST_SESSIONS that looked up most tokens, of those seen.
        Those that have one label are summed."""
        most = list[tuple[int, int, SessionRecord]]()  # a heap: the one that looked up least is first
        async for record in self._engines():
            if not record.is_bench and peer.sees(record.tenant):
                heapq.heappush(most, (record.sums.lookup_tokens, -record.number, record))
                if len(most) > MOST_SESSIONS:
                    heapq.heappop(most)
        named: dict[str, Sums] = {}
        for _, _, record in sorted(most, reverse=True):
            named.setdefault(record.label or record.id, Sums()).add(record.sums)
        return {name: sums.view() for name, sums in named.items()}

    def _members(self, record: SessionRecord) -> list[tuple[MemberRecord, MemberView]]:
        """Those that have not left, MOST_MEMBERS at most: the dead come last."""
        most = heapq.nsmallest(MOST_MEMBERS, record.members.values(), key=lambda member: member.dead)
        views = {view.member: view for view in self._table.members_named([member.table_id for member in most])}
        return [(member, views[member.table_id]) for member in most if member.table_id in views]

    async def session(self, peer: Peer, session_id: str, limit: int, cursor: int) -> SessionDetail:
        """One session with its members and a page of its grants, in slices. Raises ApiError(unknown_session)."""
        record = self._registry.listed(session_id, peer.sees)
        views = self._table.sessions([record.table_id])
        if not views:
            raise ApiError("unknown_session", "the session has just ended", found=session_id)
        shown, following = self._grants_of(record.table_id, limit, cursor)
        now_ms = self._clock.now_ms()
        fields, grants = _session_fields(record, views[0], now_ms), [self._grant_view(one, now_ms) for one in shown]
        await next_slice()
        left, members = [(one.grant, frozenset(one.remaining)) for one in grants], list[MemberDetail]()
        async for member, view in sliced(self._members(record)):
            its = [grant for grant, remaining in left if not remaining.isdisjoint(view.ranks)]
            members.append(MemberDetail(**_member_fields(member, view, now_ms), grants=its))
        return SessionDetail(**fields, members=members, grants=grants, next=following)

    async def namespaces(self, peer: Peer, limit: int, cursor: int) -> Namespaces:
        await self._contents.refresh()
        limit = min(limit, NAMESPACES_OF_PAGE)
        shown, following = page_of(
            self._registry.namespaces(), lambda record: record.table_id, limit, cursor,
            lambda one: peer.sees(one.tenant),
        )
        attached = Counter[int]()
        async for session in self._engines():
            attached[session.namespace.table_id] += 1
        await next_slice()
        left = {view.namespace: view.left_ms for view in self._table.namespaces()}
        await next_slice()
        views = list[NamespaceView]()
        async for record in sliced(shown):
            views.append(self._namespace_view(record, attached[record.table_id], left.get(record.table_id)))
        return Namespaces(namespaces=views, next=following)

    def _namespace_view(self, record: NamespaceRecord, sessions: int, left_ms: int | None) -> NamespaceView:
        count, now_ms = self._contents.of(record.table_id), self._clock.now_ms()
        return NamespaceView(
            namespace=record.digest.hex(),
            tenant=record.tenant,
            model=record.model,
            manifest=shown_manifest(record.manifest),
            weights=record.use.weights,
            base=record.base.hex(),
            left_s=None if left_ms is None else since_s(left_ms, now_ms),
            chunk_bytes=record.chunk_bytes,
            sessions=sessions,
            is_bench=record.use.is_bench,
            chunks=count.chunks,
            bytes=count.bytes,
            oldest_s=since_s(count.oldest_ms, now_ms),
            unused_s=since_s(count.newest_ms, now_ms),
            totals=record.use.sums.view(),
        )

    # ---------------------------------------------------------------- leases and reservations

    async def leases(self, peer: Peer, limit: int, cursor: int) -> Leases:
        """Oldest first, with all ages taken at one moment."""
        shown, following = await self._grants(peer, limit, cursor)
        now_ms = self._clock.now_ms()
        return Leases(leases=[self._grant_view(view, now_ms) for view in shown], next=following)

    def lease(self, peer: Peer, lease_id: str) -> LeaseView:
        """One lease or reservation. Raises ApiError(unknown_grant)."""
        found = self._table.grant(grant_id(lease_id))
        if found is None or not self._sees_session(peer, found.session):
            raise ApiError("unknown_grant", "it was never given out, or all its ranks are done", found=lease_id)
        return self._grant_view(found, self._clock.now_ms())

    async def _grants(self, peer: Peer, limit: int, cursor: int) -> tuple[Sequence[GrantView], str | None]:
        """A page of the grants that the caller may see, and the cursor of the next."""
        if "admin" in peer.scopes:
            return self._grants_of(ALL_SESSIONS, limit, cursor)
        limit, seen = min(limit, GRANTS_OF_PAGE), list[GrantView]()
        place: str | None = str(cursor)
        while place is not None and len(seen) <= limit:
            found, place = self._grants_of(ALL_SESSIONS, GRANTS_OF_PAGE, int(place))
            seen += [view for view in found if self._sees_session(peer, view.session)]
            await next_slice()
        return page_of(seen, lambda view: view.place, limit, cursor)

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
        "model": record.model,
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


def _member_fields(member: MemberRecord, view: MemberView, now_ms: int) -> dict[str, Any]:
    return {
        "id": member.id,
        "ranks": view.ranks,
        "scheduler": view.scheduler,
        "state": view.state,
        "heartbeat_age_s": (now_ms - view.heartbeat_ms) / 1000,
        "pinned_through": view.pinned_through,
    }


def shown_manifest(manifest: s.Manifest) -> s.Manifest:
    """The manifest without its secrets: a caller that knows a salt could look up chunks that are stored under it."""
    return msgspec.structs.replace(
        manifest, **{name: "hidden" for name in s.SECRET_FIELDS if getattr(manifest, name)}
    )


def page_of(
    items: Sequence[T], id_of: Callable[[T], int], limit: int, cursor: int, sees: Callable[[T], bool] | None = None
) -> tuple[Sequence[T], str | None]:
    """Those of `items`, in rising order of their ids, that the caller sees, from `cursor` on; and the next cursor, None
    after the last."""
    following = islice(items, bisect_left(items, cursor, key=id_of), None)
    found = list(islice(following if sees is None else filter(sees, following), limit + 1))
    return found[:limit], str(id_of(found[limit])) if len(found) > limit else None
