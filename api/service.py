"""The cache service: each call of an engine, in the table's terms. It decides; it never touches a KV byte.

Used from one event loop; only growing the pool leaves it. Time comes from the clock passed in.
Refusals are ApiError or the table's own TableError; after one nothing is half done.
"""

from __future__ import annotations

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
)
from kvdock.api.pool.attach import attach
from kvdock.api.pool.drain import Drain
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import Names, Registry, SessionRecord
from kvdock.api.tokens import keys_of
from kvdock.api.views.tally import Tally
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import Form, LookupReply, ReserveReply
from kvdock.protocol.wire_types import MAX_ANSWERS, MAX_KEYS, Carrier, RefusedRelease


class CacheService:
    """One method for each call that engines make."""

    def __init__(
        self, *, pool: Pool, registry: Registry, names: Names, clock: ServerClock, drain: Drain, tally: Tally,
        heartbeat_s: float,
    ) -> None:
        """`heartbeat_s`: how often members are asked to send a heartbeat."""
        self._pool, self._table = pool, pool.table
        self._registry, self._names = registry, names
        self._clock = clock
        self._drain = drain
        self._tally = tally
        self._heartbeat_s = heartbeat_s

    # ---------------------------------------------------------------- sessions

    def attach(self, body: s.AttachSession) -> s.SessionAttached:
        if not self._pool.ready:
            raise ApiError("not_ready", "the first segment is being allocated: attach again in a moment")
        self._registry.prune(self._table)
        if self._drain.begun and self._registry.of_instance(body.instance) is None:
            raise ApiError("not_ready", "the server is draining: attach to the next one")
        session = attach(body, pool=self._pool, registry=self._registry, now_ms=self._clock.now_ms())
        self._tally.counters.attached_members += 1
        manifest = session.namespace.manifest
        return s.SessionAttached(
            session=session.id,
            member=body.member.id,
            namespace=session.namespace.digest.hex(),
            pool_id=grant_text(self._pool.pool_id),
            incarnation=self._pool.incarnation,
            segments=self._pool.segments(),
            part_bytes=[group.part_bytes for group in manifest.groups],
            chunk_tokens=manifest.chunk_tokens,
            heartbeat_s=self._heartbeat_s,
            changes_next=self._changes(session, 0).next,
        )

    def heartbeat(self, session_id: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
        session = self._registry.session(session_id)
        refused = self._release_carried(session, body)
        member = session.member(body.member)
        now_ms = self._clock.now_ms()
        if body.pinned_through is not None:
            self._table.report_pinned(member.table_id, body.pinned_through)
        for done in body.done:
            with ignore_unknown_grant():
                self._table.done(member.table_id, grant_id(done.grant), done.ranks)
        for kept in body.keep:
            with ignore_unknown_grant():
                self._table.keep(member.table_id, grant_id(kept), now_ms)
        questions = self._table.heartbeat(member.table_id, now_ms)[:MAX_ANSWERS]  # the others next time
        return s.HeartbeatAnswer(
            refused_releases=refused,
            heartbeat_s=self._heartbeat_s,
            questions=[s.GrantRanks(grant=grant_text(grant), ranks=ranks) for grant, ranks in questions],
            segments=self._pool.segment_count,
            retired=self._pool.retired[member.retired_before :],
            changes=None if body.changes_since is None else self._changes(session, body.changes_since),
        )

    def leave(self, session_id: str, member_id: str | None) -> None:
        session = self._registry.session(session_id)
        if member_id is None:
            if len(session.members) != 1:
                raise ApiError(
                    "ambiguous_member", "name the member that leaves", found=sorted(session.members), wanted="member="
                )
            member_id = next(iter(session.members))
        member = session.member(member_id)
        self._table.leave(member.table_id)
        self._registry.drop_member(session, member)
        if not session.members:
            self._registry.drop_session(session)

    # ---------------------------------------------------------------- reading

    async def lookup(self, body: s.Lookup, form: Form) -> s.LookupHead:
        if body.session is None:
            return await self._peek(body)
        if body.namespace is not None:
            raise ApiError("invalid_body", "a session has its namespace", found="$.namespace", wanted="session only")
        started_ns = self._tally.now_ns()
        session = self._registry.session(body.session)
        refused = self._release_carried(session, body)
        member = session.member(body.member)
        keys = await keys_of(session.namespace, body.keys, body.tokens)
        request = self._names.digest(body.request)
        self._check_grants(session, request)
        found = self._table.lookup(
            session.table_id, member.table_id, request, body.epoch, keys,
            readers=body.readers, skip_tokens=body.skip_prefix_tokens, now_ms=self._clock.now_ms(),
        )
        session.grants += found.lease != 0
        self._tally.lookup(session, body, request, keys, found, started_ns)
        return LookupReply(
            refused_releases=refused,
            hit_tokens=found.hit_tokens,
            lease=grant_text(found.lease) if found.lease else None,
            first_chunk=found.first_chunk,
            limited_by=found.limited or None,
            chunks=msgspec.Raw(found.chunks_msgpack if form.packed else found.chunks_json),
        )

    def release(self, lease: str, body: s.ReleaseLease) -> s.ReleaseAnswer:
        session = self._registry.session(body.session)
        remaining = self._table.release(session.table_id, grant_id(lease), body.ranks)
        return s.ReleaseAnswer(remaining=remaining)

    def release_many(self, body: s.ReleaseMany) -> s.ReleaseManyAnswer:
        return s.ReleaseManyAnswer(refused_releases=self._release_carried(self._registry.session(body.session), body))

    def cancel(self, lease: str, body: s.CancelLease) -> None:
        session = self._registry.session(body.session)
        member = session.member(body.member)
        self._table.cancel(session.table_id, member.table_id, grant_id(lease))

    def mismatch(self, body: s.ReportMismatch) -> s.MismatchAnswer:
        session = self._registry.session(body.session)
        quarantined = self._table.mismatch(session.table_id, grant_id(body.lease), body.chunks)
        return s.MismatchAnswer(quarantined=quarantined)

    # ---------------------------------------------------------------- writing

    async def reserve(self, body: s.Reserve, form: Form) -> s.ReserveHead:
        started_ns = self._tally.now_ns()
        session = self._registry.session(body.session)
        refused = self._release_carried(session, body)
        member = session.member(body.member)
        groups = group_indices(session.namespace.manifest, body.groups)
        parent = b"" if body.parent is None else key_bytes([body.parent])
        if parent and body.tokens is not None:
            raise ApiError("invalid_body", "tokens start at the sequence's first", found="$.parent", wanted="keys")
        keys = await keys_of(session.namespace, body.keys, body.tokens)
        await self._pool.make_room(session.namespace.table_id, keys, session.namespace.bytes_of_groups(groups))
        store = self._names.digest(body.store)
        self._check_grants(session, store)

        def ask() -> Granted:
            return self._table.reserve(
                session.table_id, member.table_id, store, parent, keys,
                groups=sum(1 << group for group in groups), temporary=body.temporary,
                deadline_ms=round(body.deadline_s * 1000), now_ms=self._clock.now_ms(),
            )

        granted = ask()
        # What is free may lie in slots of another size; a call that was granted nothing left no trace.
        while not granted.grant and granted.limited == "no_space" and await self._pool.grow_once():
            granted = ask()
        session.grants += granted.grant != 0
        self._tally.reservation(session, body, keys, granted, started_ns)
        return ReserveReply(
            refused_releases=refused,
            reservation=grant_text(granted.grant) if granted.grant else None,
            deadline_s=body.deadline_s,
            present=granted.present,
            busy=granted.busy,
            limited_by=granted.limited or None,
            chunks=msgspec.Raw(granted.chunks_msgpack if form.packed else granted.chunks_json),
        )

    def commit(self, reservation: str, body: s.Commit) -> s.CommitAnswer:
        session = self._registry.session(body.session)
        refused = self._release_carried(session, body)
        grant = grant_id(reservation)
        parts = committed_parts(body.parts)
        ready, remaining = self._table.commit(session.table_id, grant, body.rank, parts, self._clock.now_ms())
        return s.CommitAnswer(refused_releases=refused, ready=ready, remaining=remaining)

    def abort(self, reservation: str, body: s.Abort) -> s.ReleaseAnswer:
        session = self._registry.session(body.session)
        if body.ranks is None:
            member = session.member(body.member)
            self._table.cancel(session.table_id, member.table_id, grant_id(reservation))
            return s.ReleaseAnswer(remaining=[])
        return s.ReleaseAnswer(remaining=self._table.abort(session.table_id, grant_id(reservation), body.ranks))

    # ---------------------------------------------------------------- helpers

    def _changes(self, session: SessionRecord, since: int) -> s.Changes:
        seen, following, complete = self._table.changes(session.namespace.table_id, since, MAX_KEYS)
        return s.Changes(
            changes=[s.Change(key.hex(), is_there) for key, is_there in seen], next=following, complete=complete
        )

    async def _peek(self, body: s.Lookup) -> s.LookupAnswer:
        """Without a session: a length, and nothing is held."""
        if body.releases:
            raise ApiError("invalid_body", "without a session there is no lease", found="$.releases", wanted="session")
        if body.namespace is None:
            raise ApiError("invalid_body", "without a session, name the namespace", found="$", wanted="namespace")
        namespace = self._registry.namespace(key_bytes([body.namespace]))
        keys = await keys_of(namespace, body.keys, body.tokens)
        self._tally.counters.peeks += 1
        hit_tokens = self._table.peek(namespace.table_id, keys)
        return s.LookupAnswer(hit_tokens=hit_tokens, lease=None, first_chunk=0, chunks=[])

    def _release_carried(self, session: SessionRecord, body: Carrier) -> list[RefusedRelease]:
        """Handles the releases that a call carries; the refused ones are for its answer."""
        refused: list[RefusedRelease] = []
        for release in body.releases:
            try:
                self._table.release(session.table_id, grant_id(release.lease), release.ranks)
            except (ApiError, TableError) as error:
                refused.append(RefusedRelease(release.lease, error.code))
        return refused

    def _check_grants(self, session: SessionRecord, request: bytes) -> None:
        """Refuses a new grant to a session that has as many as it may: ApiError(too_many_grants), and to everyone while
        the server drains: ApiError(not_ready). Retrying a call that already holds its grant does not count.

        `session.grants` is never below the true number, so the table is asked only near the limit.
        """
        limit, draining = self._pool.limits.session_grants, self._drain.begun
        if session.grants < limit and not draining:
            return
        session.grants, known = self._table.open_grants(session.table_id, request)
        if known:
            return
        if draining:
            raise ApiError("not_ready", "the server is draining: it gives out nothing new and ends soon")
        if session.grants >= limit:
            raise ApiError(
                "too_many_grants", "release leases and finish reservations first", found=session.grants,
                wanted=f"< {limit}",
            )
