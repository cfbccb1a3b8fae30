"""The cache service: each call of the API, in the table's terms. It decides; it never touches a KV byte.

Ownership: pool (table, segments, lock file) and registry (names) belong to one service and are used
from one event loop; only growing the pool leaves it. Time comes from the clock passed in.
Refusals are ApiError or the table's own TableError; after one nothing is half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvdock._core import Reservation as Granted, TableError
from kvdock.api.clock import ServerClock
from kvdock.api.convert import (
    committed_parts,
    grant_id,
    grant_text,
    group_indices,
    ignore_unknown_grant,
    key_bytes,
    lookup_limit,
    store_limit,
)
from kvdock.api.pool.attach import attach
from kvdock.api.pool.limits import check_grants, limits_of
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import Names, NamespaceRecord, Registry, SessionRecord
from kvdock.api.settings import Settings
from kvdock.api.tokens import hash_tokens
from kvdock.api.views.history import TABLE_COUNTERS, Counters, History, RecentRequests
from kvdock.api.views.pulse import Pulse
from kvdock.api.views.tally import Tally
from kvdock.api.views.timing import Timings
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import Form, LookupReply, ReserveReply
from kvdock.protocol.keys import HASH_FUNCTION


class CacheService:
    """What the routes call. `perf_ns` times calls for people, `wall_s` dates them."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        clock: ServerClock,
        *,
        perf_ns: Callable[[], int],
        wall_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.table = pool.table
        self.clock = clock
        self.started_ms = clock.now_ms()
        self.wall_s = wall_s
        self.registry = Registry(pool.table.first_incarnation)
        self.names = Names(keep=4 * settings.table_grants)
        self.limits = limits_of(settings)
        self.configuring = asyncio.Lock()
        """Held while limits change: a change is checked against the limits it replaces."""
        self.draining = False
        """Set by SIGTERM: no new sessions, leases or reservations; whoever has some may finish."""
        self.counters = Counters()
        self.history = History(settings.history_values, settings.history_interval_s)
        self.recent = RecentRequests(settings.recent_requests)
        self._tally = Tally(self.counters, self.recent, keep=4 * settings.table_grants)
        self.perf_ns = self._perf_ns = perf_ns
        self.pulse = Pulse(perf_ns)
        self.timings = Timings()

    def totals(self) -> Counters:
        """The counters, with those that the table keeps."""
        stats = self.table.stats()
        for name in TABLE_COUNTERS:
            setattr(self.counters, name, stats.get(name, 0))
        return self.counters

    # ---------------------------------------------------------------- sessions

    def forget_closed(self) -> None:
        """Drops the names of sessions that the table has closed, and counts the grants of the others."""
        if self.registry.sessions():
            self.registry.prune({view.session: view.leases + view.reservations for view in self.table.sessions()})

    def attach(self, body: s.AttachSession) -> s.SessionAttached:
        self.forget_closed()
        if self.draining and self.registry.of_instance(body.instance) is None:
            raise ApiError("not_ready", "the server is draining: attach to the next one")
        session = attach(body, pool=self.pool, registry=self.registry, now_ms=self.clock.now_ms())
        self.counters.attached_members += 1
        manifest = session.namespace.manifest
        return s.SessionAttached(
            session=session.id,
            member=body.member.id,
            namespace=session.namespace.digest.hex(),
            pool_id=grant_text(self.pool.pool_id),
            incarnation=self.pool.incarnation,
            segments=self.pool.segments(),
            part_bytes=[group.part_bytes for group in manifest.groups],
            chunk_tokens=manifest.chunk_tokens,
            heartbeat_s=self.settings.heartbeat_s,
            changes_next=self._changes(session, 0).next,
        )

    def heartbeat(self, session_id: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
        session = self.registry.session(session_id)
        refused = self._carried(session, body)
        member = session.member(body.member)
        now_ms = self.clock.now_ms()
        if body.pinned_through is not None:
            self.table.report_pinned(member.table_id, body.pinned_through)
        for said in body.done:
            with ignore_unknown_grant():
                self.table.done(member.table_id, grant_id(said.grant), said.ranks, now_ms)
        for kept in body.keep:
            with ignore_unknown_grant():
                self.table.keep(member.table_id, grant_id(kept), now_ms)
        questions = self.table.heartbeat(member.table_id, now_ms)
        return s.HeartbeatAnswer(
            refused_releases=refused,
            heartbeat_s=self.settings.heartbeat_s,
            questions=[s.GrantRanks(grant=grant_text(grant), ranks=ranks) for grant, ranks in questions],
            segments=self.pool.segment_count,
            retired=self.pool.retired[member.retired_before :],
            changes=None if body.changes_since is None else self._changes(session, body.changes_since),
        )

    def leave(self, session_id: str, member_id: str | None) -> None:
        session = self.registry.session(session_id)
        if member_id is None:
            if len(session.members) != 1:
                raise ApiError(
                    "ambiguous_member", "name the member that leaves", found=sorted(session.members), wanted="member="
                )
            member_id = next(iter(session.members))
        member = session.member(member_id)
        self.table.leave(member.table_id, self.clock.now_ms())
        del session.members[member_id]
        if not session.members:
            self.registry.drop_session(session)

    # ---------------------------------------------------------------- reading

    async def lookup(self, body: s.Lookup, form: Form) -> s.LookupHead:
        if body.session is None:
            return await self._peek(body)
        if body.namespace is not None:
            raise ApiError("invalid_body", "a session has its namespace", found="$.namespace", wanted="session only")
        started_ns = self._perf_ns()
        session = self.registry.session(body.session)
        refused = self._carried(session, body)
        member = session.member(body.member)
        keys = await self._keys(session.namespace, body.keys, body.tokens, parent=b"")
        request = self.names.digest(body.request)
        check_grants(self.table, session, request, self.limits.session_grants, draining=self.draining)
        found = self.table.lookup(
            session.table_id, member.table_id, request, body.epoch, keys,
            readers=body.readers, skip_tokens=body.skip_prefix_tokens, now_ms=self.clock.now_ms(),
        )
        session.grants += found.lease != 0
        took_us = (self._perf_ns() - started_ns) // 1000
        self._tally.lookup(session, body, request, keys, found, at=self.wall_s(), took_us=took_us)
        return LookupReply(
            refused_releases=refused,
            hit_tokens=found.hit_tokens,
            lease=grant_text(found.lease) if found.lease else None,
            first_chunk=found.first_chunk,
            limited_by=lookup_limit(found.limited),
            chunks=msgspec.Raw(found.chunks_msgpack if form.packed else found.chunks_json),
        )

    def release(self, lease: str, body: s.ReleaseLease) -> s.ReleaseAnswer:
        session = self.registry.session(body.session)
        remaining = self.table.release(session.table_id, grant_id(lease), body.ranks, self.clock.now_ms())
        return s.ReleaseAnswer(remaining=remaining)

    def release_many(self, body: s.ReleaseMany) -> s.ReleaseManyAnswer:
        return s.ReleaseManyAnswer(refused_releases=self._carried(self.registry.session(body.session), body))

    def cancel(self, lease: str, body: s.CancelLease) -> None:
        session = self.registry.session(body.session)
        member = session.member(body.member)
        self.table.cancel(session.table_id, member.table_id, grant_id(lease), self.clock.now_ms())

    def mismatch(self, body: s.ReportMismatch) -> s.MismatchAnswer:
        session = self.registry.session(body.session)
        quarantined = self.table.mismatch(
            session.table_id, grant_id(body.lease), body.chunks, self.clock.now_ms()
        )
        return s.MismatchAnswer(quarantined=quarantined)

    # ---------------------------------------------------------------- writing

    async def reserve(self, body: s.Reserve, form: Form) -> s.ReserveHead:
        started_ns = self._perf_ns()
        session = self.registry.session(body.session)
        refused = self._carried(session, body)
        member = session.member(body.member)
        groups = group_indices(session.namespace.manifest, body.groups)
        parent = b"" if body.parent is None else key_bytes([body.parent])
        keys = await self._keys(session.namespace, body.keys, body.tokens, parent=parent)
        await self.pool.make_room(session.namespace.table_id, keys, session.namespace.bytes_of_groups(groups))
        store = self.names.digest(body.store)
        check_grants(self.table, session, store, self.limits.session_grants, draining=self.draining)

        def ask() -> Granted:
            return self.table.reserve(
                session.table_id, member.table_id, store, parent, keys,
                groups=sum(1 << group for group in groups), temporary=body.temporary,
                deadline_ms=round(body.deadline_s * 1000), now_ms=self.clock.now_ms(),
            )

        granted = ask()
        # What is free may lie in slots of another size; a call that was granted nothing left no trace.
        while not granted.grant and granted.limited == "no_space" and await self.pool.grow_once():
            granted = ask()
        session.grants += granted.grant != 0
        took_us = (self._perf_ns() - started_ns) // 1000
        self._tally.reservation(session, body, keys, granted, at=self.wall_s(), took_us=took_us)
        return ReserveReply(
            refused_releases=refused,
            reservation=grant_text(granted.grant) if granted.grant else None,
            deadline_s=body.deadline_s,
            present=granted.present,
            busy=granted.busy,
            limited_by=store_limit(granted.limited),
            chunks=msgspec.Raw(granted.chunks_msgpack if form.packed else granted.chunks_json),
        )

    def commit(self, reservation: str, body: s.Commit) -> s.CommitAnswer:
        session = self.registry.session(body.session)
        refused = self._carried(session, body)
        grant = grant_id(reservation)
        parts = committed_parts(body.parts)
        ready, remaining = self.table.commit(session.table_id, grant, body.rank, parts, self.clock.now_ms())
        return s.CommitAnswer(refused_releases=refused, ready=ready, remaining=remaining)

    def abort(self, reservation: str, body: s.Abort) -> s.ReleaseAnswer:
        session = self.registry.session(body.session)
        now_ms = self.clock.now_ms()
        if body.ranks is None:
            member = session.member(body.member)
            self.table.cancel(session.table_id, member.table_id, grant_id(reservation), now_ms)
            return s.ReleaseAnswer(remaining=[])
        return s.ReleaseAnswer(
            remaining=self.table.abort(session.table_id, grant_id(reservation), body.ranks, now_ms)
        )

    # ---------------------------------------------------------------- helpers

    def _changes(self, session: SessionRecord, since: int) -> s.Changes:
        told, following, complete = self.table.changes(session.namespace.table_id, since, s.MAX_KEYS)
        return s.Changes(
            changes=[s.Change(key.hex(), is_there) for key, is_there in told], next=following, complete=complete
        )

    async def _peek(self, body: s.Lookup) -> s.LookupAnswer:
        """Without a session: a length, and nothing is held."""
        if body.releases:
            raise ApiError("invalid_body", "without a session there is no lease", found="$.releases", wanted="session")
        if body.namespace is None:
            raise ApiError("invalid_body", "without a session say which namespace", found="$", wanted="namespace")
        namespace = self.registry.namespace(key_bytes([body.namespace]))
        keys = await self._keys(namespace, body.keys, body.tokens, parent=b"")
        self.counters.peeks += 1
        hit_tokens = self.table.peek(namespace.table_id, keys)
        return s.LookupAnswer(hit_tokens=hit_tokens, lease=None, first_chunk=0, chunks=[])

    def _carried(self, session: SessionRecord, body: s.Carrier) -> list[s.ReleaseRefused]:
        """Handles the releases that a call carries; the refused ones are for its answer."""
        refused: list[s.ReleaseRefused] = []
        for said in body.releases:
            try:
                self.table.release(session.table_id, grant_id(said.lease), said.ranks, self.clock.now_ms())
            except (ApiError, TableError) as error:
                refused.append(s.ReleaseRefused(said.lease, error.code))
        return refused

    async def _keys(
        self, namespace: NamespaceRecord, keys: list[str] | bytes | None, tokens: list[int] | None, *, parent: bytes
    ) -> bytes:
        if (keys is None) == (tokens is None):
            found = "neither" if keys is None else "both"
            raise ApiError("invalid_body", "give keys or tokens", found=found, wanted="one of $.keys, $.tokens")
        if tokens is None:
            assert keys is not None
            return key_bytes(keys)
        if (function := namespace.manifest.hash_function) != HASH_FUNCTION:
            raise ApiError(
                "bad_argument", "engines of this namespace hash tokens in their own way: give keys",
                found=function, wanted=HASH_FUNCTION,
            )
        if parent:
            raise ApiError("invalid_body", "tokens start at the sequence's first", found="$.parent", wanted="keys")
        count = len(tokens) // namespace.manifest.chunk_tokens
        if count > s.MAX_KEYS:
            raise ApiError("bad_argument", "too many chunks of tokens in one call", found=count, wanted=s.MAX_KEYS)
        return await hash_tokens(namespace.digest, tokens, namespace.manifest.chunk_tokens)

