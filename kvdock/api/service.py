"""The cache service: each call of an engine, in the table's terms. It decides; it moves no KV byte.

Each method's first argument is the caller: sessions and namespaces of other tenants do not exist for it. Used from one
event loop; only the growth of the pool runs outside of it. Time comes from the clock passed in. A refusal is an
ApiError or the table's own TableError, and leaves nothing half done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from kvdock._core import CONVERSATION_ENDED, Reservation as Granted, TableError
from kvdock.api.access.peer import Peer
from kvdock.api.convert import (
    committed_parts,
    grant_id,
    grant_text,
    group_indices,
    ignore_unknown_grant,
    key_bytes,
)
from kvdock.api.feeds.kv import KvLog, Source
from kvdock.api.pool.damage import DamageReports
from kvdock.api.pool.registry import MemberRecord, SessionRecord, digest16
from kvdock.api.pool.sessions import Sessions, work_off
from kvdock.api.record.tally import Tally
from kvdock.api.tiers.clears import Clears
from kvdock.api.tiers.mover_client import MoverClient
from kvdock.api.tiers.peers import PEERS
from kvdock.api.tiers.tickets import LookupCall
from kvdock.api.tokens import keys_of
from kvdock.api.turns import SLICE_WORK, next_slice
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import Form, HoldReply, LookupReply, ReserveReply
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.peer_schemas import PeerNotes, PeerNotesAnswer, PeerRead, PeerReadAnswer
from kvdock.protocol.schemas import BeingStored, Hint, HintAnswer
from kvdock.protocol.wire_types import (
    KEY_BYTES,
    MAX_ENTRIES,
    MAX_LABEL,
    MAX_STORE_KEYS,
    OWN_TENANT,
    Carrier,
    RefusedRelease,
    is_label,
)

SLICE_ANSWERS = 64
"""How many answers of a heartbeat are handled at once."""
SLICE_ASKED = 4096
"""What a heartbeat asks: a question counts eight, and one more for each of its ranks, so there are 512 at most."""
SLICE_RELEASES = 16
SLICE_NAMES = 128
SLICE_EVICTED = 128
"""How many chunks a store evicts in its first slice."""
SLICE_HINT_BYTES = 512 * KEY_BYTES
NOTHING = msgspec.Raw(b"[]"), msgspec.Raw(b"\x90")
"""No chunks: as JSON and as MessagePack."""
log = logging.getLogger("kvdock.api")


class CacheService:
    """One method for each call that engines make."""

    def __init__(
        self, sessions: Sessions, tally: Tally, mover_client: MoverClient, clears: Clears, kv_log: KvLog | None,
        heartbeat_s: float, damage: DamageReports,
    ) -> None:
        """`heartbeat_s`: how often members are asked to send a heartbeat. `kv_log`: None if routers get no KV events.
        """
        self._sessions, self._tally = sessions, tally
        self._mover_client, self._clears, self._kv_log = mover_client, clears, kv_log
        self._heartbeat_s, self._damage = heartbeat_s, damage
        self._pool, self._table = sessions.pool, sessions.pool.table
        self._registry, self._names, self._clock = sessions.registry, sessions.names, sessions.clock

    # ---------------------------------------------------------------- sessions

    async def attach(self, peer: Peer, body: s.AttachSession) -> s.SessionAttached:
        return await self._sessions.with_namespace(lambda: self._attach(peer, body))

    def _attach(self, peer: Peer, body: s.AttachSession) -> s.SessionAttached:
        tenant = _tenant_of(peer)
        before = self._registry.of_instance(tenant, body.instance)
        was_member = before is not None and body.member.id in before.members
        session = self._sessions.attach(body, tenant, peer.identity)
        self._filed(session)
        member = session.member(body.member.id)
        member.follows = member.follows or session.namespace
        manifest = session.namespace.manifest
        self._tally.attached(session, member, is_new=not (was_member and session is before))
        return s.SessionAttached(
            session=session.capability,
            member=body.member.id,
            namespace=session.namespace.base.hex(),
            filed_in=session.namespace.digest.hex(),
            pool_id=grant_text(self._pool.pool_id),
            incarnation=self._pool.incarnation,
            segments=self._pool.segments(),
            part_bytes=[group.part_bytes for group in manifest.groups],
            chunk_tokens=manifest.chunk_tokens,
            heartbeat_s=self._heartbeat_s,
            changes_next=self._changes(session.namespace.table_id, 0).next,
            wants_blocks=self._kv_log is not None,
        )

    async def weights(self, peer: Peer, body: s.RunWeights) -> s.WeightsAnswer:
        def move() -> s.WeightsAnswer:
            self._tally.count_answered()
            session = self._registry.session(body.session, peer.tenant, peer.identity)
            if not session.member(body.member).scheduler:
                raise ApiError(
                    "not_the_scheduler", "the scheduler knows which weights its engine runs", found=body.member,
                    wanted="the member that attached with scheduler=true",
                )
            before = session.namespace
            self._sessions.run_weights(session, body.weights)
            if session.namespace is not before:
                log.info("session %s runs weights %r now, namespace %s", session.id, body.weights,
                         session.namespace.digest.hex()[:12])
                self._mover_client.moved(session, before)
                self._filed(session)
            return s.WeightsAnswer(filed_in=session.namespace.digest.hex())

        return await self._sessions.with_namespace(move)

    def _filed(self, session: SessionRecord) -> None:
        """The session has just come into its namespace."""
        self._mover_client.attached(session)
        space = session.namespace
        if self._kv_log is not None and not session.is_bench:
            self._kv_log.met(space.table_id, Source(
                space.digest, session.tenant, space.model, space.manifest.chunk_tokens
            ))

    async def heartbeat(self, peer: Peer, session_id: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
        """Handles long lists in slices: their entries do not depend on each other, and repeating the call is
        harmless."""
        session = self._registry.session(session_id, peer.tenant, peer.identity)
        refused = await self._release_carried(session, body)
        member = session.member(body.member)
        self._tally.outcomes(session, member, body)
        if body.copied is not None:
            member.copies.add(body.copied)
        if body.pinned_through is not None:
            self._table.report_pinned(member.table_id, body.pinned_through)
        for start in range(0, max(len(body.done), len(body.keep)), SLICE_ANSWERS):
            if start:
                await next_slice()
                session.member(body.member)  # the member may have left meanwhile
            for done in body.done[start : start + SLICE_ANSWERS]:
                with ignore_unknown_grant():
                    self._table.done(member.table_id, grant_id(done.grant), done.ranks)
            for kept in body.keep[start : start + SLICE_ANSWERS]:
                with ignore_unknown_grant():
                    self._table.keep(member.table_id, grant_id(kept), self._clock.now_ms())
        now_ms = member.heard_ms = self._clock.now_ms()
        if member.suspect:
            member.suspect = False
            self._tally.recovered(session, member)
        questions = self._table.heartbeat(member.table_id, now_ms, SLICE_ASKED)  # the others next time
        return s.HeartbeatAnswer(
            refused_releases=refused,
            heartbeat_s=self._heartbeat_s,
            questions=[s.GrantRanks(grant=grant_text(grant), ranks=ranks) for grant, ranks in questions],
            segments=self._pool.segment_count,
            retired=self._pool.removed.since(member.retired_before),
            changes=None if body.changes_since is None else self._followed(session, member, body.changes_since),
        )

    async def leave(self, peer: Peer, session_id: str, member_id: str | None) -> None:
        """Releases what the member holds, in slices. Nobody may call in its name any more from the first one on."""
        session = self._registry.session(session_id, peer.tenant, peer.identity)
        if member_id is None:
            if len(session.members) != 1:
                raise ApiError(
                    "ambiguous_member", "name the member that leaves", found=sorted(session.members), wanted="member="
                )
            member_id = next(iter(session.members))
        member = session.member(member_id)
        self._tally.left(session, member)
        self._registry.drop_member(session, member)
        if not session.members:
            self._registry.drop_session(session)
        await work_off(lambda: self._table.leave(member.table_id, SLICE_WORK))

    # ---------------------------------------------------------------- reading

    async def lookup(self, peer: Peer, body: s.Lookup, form: Form) -> s.LookupHead:
        if body.session is None:
            return await self._peek(peer, body)
        if body.namespace is not None:
            raise ApiError("invalid_body", "a session has its namespace", found="$.namespace", wanted="session only")
        started_ns = self._tally.now_ns()
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        refused = await self._release_carried(session, body)
        member = session.member(body.member)
        keys = await keys_of(session.namespace, body.keys, body.tokens)
        request = self._names.digest(body.request)
        if not self._sessions.may_grant(session, request):
            self._tally.learned.answers.drained(session, request, body.epoch, keys, self._tally.now_ns())
            return LookupReply(
                refused_releases=refused, hit_tokens=0, lease=None, first_chunk=0, limited_by="draining",
                chunks=NOTHING[form.packed],
            )
        found = self._table.lookup(
            session.table_id, member.table_id, request, body.epoch, keys,
            readers=body.readers, skip_tokens=body.skip_prefix_tokens, now_ms=self._clock.now_ms(),
            computes=body.computes, is_apart=session.is_bench,
        )
        session.grants += found.lease != 0
        self._tally.lookup(session, body, request, keys, found, started_ns)
        pending = None
        if self._mover_client.has_mover:
            call = LookupCall(
                session, member.table_id, request, body.epoch, keys, body.readers, body.skip_prefix_tokens
            )
            pending = self._mover_client.looked_up(call, found, body.wait_s, body.tokens_per_s)
        return LookupReply(
            refused_releases=refused,
            hit_tokens=found.hit_tokens,
            lease=grant_text(found.lease) if found.lease else None,
            first_chunk=found.first_chunk,
            limited_by=found.limited or None,
            being_stored=BeingStored(found.being_stored, found.committed) if found.being_stored else None,
            pending=pending,
            chunks=msgspec.Raw(found.chunks_msgpack if form.packed else found.chunks_json),
        )

    def release(self, peer: Peer, lease: str, body: s.ReleaseLease) -> s.ReleaseAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        return s.ReleaseAnswer(remaining=self._release(session, lease, body.ranks))

    async def release_many(self, peer: Peer, body: s.ReleaseMany) -> s.ReleaseManyAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        for request in map(digest16, body.withdraws):
            self._table.withdraw(session.table_id, request)
            self._mover_client.tickets.withdrawn(session, request)
        return s.ReleaseManyAnswer(refused_releases=await self._release_carried(session, body))

    async def hold(self, peer: Peer, body: s.Hold, form: Form) -> s.HoldHead:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        refused = await self._release_carried(session, body)
        request = self._names.digest(body.request)
        # The mover writes what waits while the server drains.
        if not self._mover_client.is_mover(session) and not self._sessions.may_grant(session, request):
            nothing = msgspec.Raw(form.encode([[] for _ in body.keys]))
            return HoldReply(refused_releases=refused, lease=None, is_limited=True, chunks=nothing)
        held = self._table.hold(
            session.table_id, session.member(body.member).table_id, request, key_bytes(body.keys), self._clock.now_ms()
        )
        session.grants += held.lease != 0
        return HoldReply(
            refused_releases=refused,
            lease=grant_text(held.lease) if held.lease else None,
            is_limited=bool(held.limited),
            chunks=msgspec.Raw(held.chunks_msgpack if form.packed else held.chunks_json),
        )

    def prefetch(self, peer: Peer, body: s.Prefetch) -> s.PrefetchAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        session.member(body.member)
        keys = key_bytes(body.keys)
        return self._mover_client.prefetches.start(session.namespace, keys, body.after_s, body.deadline_s)

    def peer_notes(self, peer: Peer, body: PeerNotes) -> PeerNotesAnswer:
        _require_own_tenant(peer)
        return self._mover_client.peers.notes(body)

    async def peer_read(self, peer: Peer, body: PeerRead) -> PeerReadAnswer:
        _require_own_tenant(peer)
        return await self._mover_client.peers.read(body)

    def cancel(self, peer: Peer, lease: str, session: str, member: str) -> None:
        asker = self._registry.session(session, peer.tenant, peer.identity)
        self._cancel(asker, asker.member(member), lease)

    async def mismatch(self, peer: Peer, body: s.ReportMismatch) -> s.MismatchAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        self._tally.count_answered()
        found = await self._damage.judge(session, peer.name, grant_id(body.lease), body.chunks)
        if found.damaged or not found.whole:
            self._tally.mismatched(session, body.lease, found.damaged)
        if found.whole:
            self._tally.refuted(session, body.lease, found.whole, is_refused=self._damage.is_refused(session))
        return s.MismatchAnswer(quarantined=found.damaged, whole=found.whole)

    async def hint(self, peer: Peer, body: Hint) -> HintAnswer:
        """Handles the keys in slices: from the first key on, or, where the end matters, from the last one back."""
        _require_one_hint(body)
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        session.member(body.member)
        space, keys = session.namespace.table_id, key_bytes(body.keys)
        if body.label:
            self._tally.labelled(session, keys, body.label)
            return HintAnswer(chunks=0)
        until_ms = 0
        if body.duration_s is not None:
            until_ms = self._clock.now_ms() + max(1, round(body.duration_s * 1000))
        starts = range(0, len(keys), SLICE_HINT_BYTES)
        chunks = refused = 0
        if body.priority > 0:
            for start in starts:
                some = keys[start : start + SLICE_HINT_BYTES]
                retained, too_many = self._table.retain(space, some, body.priority, until_ms)
                chunks, refused = chunks + retained, refused + too_many
                if retained + too_many < len(some) // KEY_BYTES:
                    break  # a key is missing there, and nothing behind a gap is retained
                await next_slice()
                session.member(body.member)  # the member may have left meanwhile
            return HintAnswer(chunks=chunks, refused=refused)
        priority = CONVERSATION_ENDED if body.conversation_ended else body.priority
        for start in reversed(starts):
            end = start + SLICE_HINT_BYTES
            following = keys[end : end + KEY_BYTES]
            lowered, is_shared = self._table.lower(space, keys[start:end], priority, until_ms, following)
            chunks += lowered
            if is_shared:
                break
            await next_slice()
            session.member(body.member)
        return HintAnswer(chunks=chunks)

    # ---------------------------------------------------------------- writing

    async def reserve(self, peer: Peer, body: s.Reserve, form: Form) -> s.ReserveHead:
        started_ns = self._tally.now_ns()
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        refused = await self._release_carried(session, body)
        member = session.member(body.member)
        groups = group_indices(session.namespace.manifest, body.groups)
        parent = b"" if body.parent is None else key_bytes([body.parent])
        if parent and body.tokens is not None:
            raise ApiError("invalid_body", "tokens start at the sequence's first", found="$.parent", wanted="keys")
        keys = await keys_of(session.namespace, body.keys, body.tokens, MAX_STORE_KEYS)
        if body.blocks:
            await self._name_blocks(session, keys, body.blocks)
        is_mover = self._mover_client.is_mover(session)
        temporary = body.temporary and not (is_mover and self._pool.limits.tier_keep == "always")
        await self._pool.grow_for(session.namespace.table_id, keys, session.namespace.bytes_of_groups(groups))
        store = self._names.digest(body.store)

        def ask(slice_: int) -> Granted | None:
            self._tally.count_answered()
            # Checked again after a wait, because other calls may have been granted something meanwhile.
            if not self._sessions.may_grant(session, store):
                return None
            self._check_edition(session, body.edition)
            return self._table.reserve(
                session.table_id, member.table_id, store, parent, keys,
                groups=sum(1 << group for group in groups), temporary=temporary,
                deadline_ms=round(body.deadline_s * 1000), now_ms=self._clock.now_ms(),
                most_evicted=SLICE_EVICTED << slice_, goes_on=slice_ > 0,
            )

        granted = await _in_slices(ask)
        # Free memory may be in slots of another size; a call that was granted nothing has changed nothing.
        while granted and not granted.grant and granted.limited == "no_space" and await self._pool.grow_once():
            granted = await _in_slices(ask)
        if granted is None:
            return ReserveReply(
                refused_releases=refused, reservation=None, deadline_s=body.deadline_s, present=[], busy=[],
                limited_by="draining", chunks=NOTHING[form.packed],
            )
        session.grants += granted.grant != 0
        if is_mover and temporary and granted.grant:
            self._mover_client.tickets.reserved(session, granted.grant, keys)
        if is_mover and granted.grant and body.tier:
            reserved = _granted_keys(granted, keys)
            self._tally.learned.answers.tier_reserved(session.namespace, granted.grant, reserved, body.tier)
            if body.tier == PEERS:
                self._mover_client.peers.come(session.namespace.digest, reserved)
        self._tally.reservation(session, body, keys, granted, started_ns)
        if granted.chunk_count > SLICE_NAMES:
            await next_slice()  # to write a long answer takes as long as a call
        return ReserveReply(
            refused_releases=refused,
            reservation=grant_text(granted.grant) if granted.grant else None,
            deadline_s=body.deadline_s,
            present=granted.present,
            busy=granted.busy,
            limited_by=granted.limited or None,
            chunks=msgspec.Raw(granted.chunks_msgpack if form.packed else granted.chunks_json),
        )

    async def commit(self, peer: Peer, reservation: str, body: s.Commit) -> s.CommitAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        refused = await self._release_carried(session, body)
        grant = grant_id(reservation)
        parts = committed_parts(body.parts)
        self._tally.count_answered()
        ready, remaining = self._table.commit(session.table_id, grant, body.rank, parts, self._clock.now_ms())
        self._tally.committed(session, grant, ready, is_whole=not remaining)
        if self._mover_client.is_mover(session):
            self._tally.learned.answers.tier_committed(grant, self._tally.now_ns(), is_whole=not remaining)
            self._mover_client.tickets.extend(session.namespace)
            if not remaining:
                self._mover_client.tickets.reservation_ended(grant)
        return s.CommitAnswer(refused_releases=refused, ready=ready, remaining=remaining)

    async def make_raw(self, peer: Peer, reservation: str, body: s.MakeRaw) -> s.RawAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        grant, left = grant_id(reservation), [(part.index, part.group) for part in body.parts]
        slots: list[s.RawSlot] = []
        while True:
            self._tally.count_answered()
            found, limited = self._table.make_raw(session.table_id, grant, body.rank, left, self._clock.now_ms())
            slots += [s.RawSlot(*slot) for slot in found]
            left = left[len(found) :]
            if limited != "no_space" or not await self._pool.grow_once():
                return s.RawAnswer(parts=slots, limited_by=limited or None)

    def abort(self, peer: Peer, reservation: str, body: s.Abort) -> s.ReleaseAnswer:
        session = self._registry.session(body.session, peer.tenant, peer.identity)
        if body.ranks is None:
            self._cancel(session, session.member(body.member), reservation)
            return s.ReleaseAnswer(remaining=[])
        self._tally.count_answered()
        remaining = self._table.abort(session.table_id, grant_id(reservation), body.ranks)
        self._tally.aborted(session, grant_id(reservation), body.ranks, is_over=not remaining)
        if self._mover_client.is_mover(session):
            self._mover_client.tickets.reservation_ended(grant_id(reservation))
        return s.ReleaseAnswer(remaining=remaining)

    # ---------------------------------------------------------------- helpers

    async def _name_blocks(self, session: SessionRecord, keys: bytes, names: Sequence[BlockNames]) -> None:
        """In slices. Raises ApiError(invalid_body) for names that do not fit the keys."""
        wanted, chunk_tokens = len(keys) // KEY_BYTES, session.namespace.manifest.chunk_tokens
        if len(names) != wanted:
            raise ApiError("invalid_body", "one for each key", found=f"$.blocks: {len(names)}", wanted=wanted)
        for at, name in enumerate(names):
            if at % SLICE_NAMES == SLICE_NAMES - 1:
                await next_slice()
            if fault := name.fault(chunk_tokens):
                raise ApiError(
                    "invalid_body", "the names of a chunk cover all its tokens",
                    found=f"$.blocks[{at}]: {fault}", wanted=f"{chunk_tokens} tokens, in hashes of equally many",
                )
        if (log := self._kv_log) is None:
            return
        space = session.namespace.table_id
        for at in range(0, len(names), SLICE_NAMES):
            end = at + SLICE_NAMES
            log.named(space, keys[KEY_BYTES * at : KEY_BYTES * end], names[at:end])
            await next_slice()

    def _followed(self, session: SessionRecord, member: MemberRecord, since: int) -> s.Changes:
        """The changes that the member asks for; all of them if it followed another namespace before."""
        space = session.namespace.table_id
        if member.follows is not session.namespace:
            member.follows = session.namespace
            return s.Changes(changes=[], next=self._changes(space, 0).next, complete=False)
        return self._changes(space, since)

    def _changes(self, space: int, since: int) -> s.Changes:
        seen, following, complete = self._table.changes(space, since, MAX_ENTRIES)
        return s.Changes(
            changes=[s.Change(key.hex(), is_there) for key, is_there in seen], next=following, complete=complete
        )

    async def _peek(self, peer: Peer, body: s.Lookup) -> s.LookupAnswer:
        """A lookup without a session: the answer is only a length, and nothing is leased."""
        if body.releases:
            raise ApiError("invalid_body", "without a session there is no lease", found="$.releases", wanted="session")
        if body.computes:
            detail = "a request without a session computes nothing"
            raise ApiError("invalid_body", detail, found="$.computes", wanted="session")
        if body.namespace is None:
            raise ApiError("invalid_body", "without a session, name the namespace", found="$", wanted="namespace")
        namespace = self._registry.namespace(key_bytes([body.namespace]), peer.sees)
        keys = await keys_of(namespace, body.keys, body.tokens)
        self._tally.counters.peeks += 1
        hit_tokens = self._table.peek(namespace.table_id, keys)
        return s.LookupAnswer(hit_tokens=hit_tokens, lease=None, first_chunk=0, chunks=[])

    async def _release_carried(self, session: SessionRecord, body: Carrier) -> list[RefusedRelease]:
        """Handles the releases that a call carries, in slices. Returns those that are refused."""
        refused: list[RefusedRelease] = []
        for number, release in enumerate(body.releases, 1):
            if number % SLICE_RELEASES == 0:
                await next_slice()
            try:
                self._release(session, release.lease, release.ranks)
            except (ApiError, TableError) as error:
                refused.append(RefusedRelease(release.lease, error.code))
        return refused

    def _cancel(self, session: SessionRecord, member: MemberRecord, grant: str) -> None:
        self._table.cancel(session.table_id, member.table_id, grant_id(grant))
        self._tally.cancelled(session, grant_id(grant))

    def _release(self, session: SessionRecord, lease: str, ranks: Sequence[int]) -> list[int]:
        grant = grant_id(lease)
        self._tally.count_answered()  # a temporary chunk leaves the pool with its last reader
        remaining = self._table.release(session.table_id, grant, ranks)
        if not remaining:
            self._tally.loaded(session, grant)
        return remaining

    def _check_edition(self, session: SessionRecord, edition: int | None) -> None:
        """Raises ApiError(cleared_meanwhile) if the mover found its chunks before the last clear or deletion."""
        if edition is not None and edition != (now := self._clears.edition(session.namespace)):
            raise ApiError(
                "cleared_meanwhile", "chunks of the namespace were cleared or deleted since", found=edition, wanted=now
            )


def _require_one_hint(body: Hint) -> None:
    """Raises ApiError(invalid_body) for a hint whose fields do not go together."""
    if body.label and (body.conversation_ended or body.priority or body.duration_s is not None):
        raise ApiError("invalid_body", "a label is no hint", found="$.label", wanted="it alone")
    if body.label and not is_label(body.label):
        raise ApiError(
            "invalid_body", "a label names a prefix for people", found=body.label[:MAX_LABEL],
            wanted="characters that can be seen, without spaces at the ends",
        )
    if body.conversation_ended and (body.priority or body.duration_s is not None):
        raise ApiError(
            "invalid_body", "chunks of a conversation that has ended have no other priority",
            found="$.conversation_ended", wanted="it alone, or $.priority and $.duration_s",
        )
    if body.priority > 0 and body.duration_s is None:
        raise ApiError("invalid_body", "chunks are retained for some time", found="$.priority", wanted="$.duration_s")


async def _in_slices(ask: Callable[[int], Granted | None]) -> Granted | None:
    """What `ask` is granted, given the number of each slice, once the chunks that are in its way are evicted. Each
    slice evicts twice as many as the one before it, so the last one comes even if others take what becomes free."""
    slice_ = 0
    while (granted := ask(slice_)) is not None and granted.has_more:
        await next_slice()
        slice_ += 1
    return granted


def _granted_keys(granted: Granted, keys: bytes) -> list[bytes]:
    return [keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at, _ in granted.chunks]


def _tenant_of(peer: Peer) -> str:
    """Raises ApiError(unauthenticated) for a caller without a tenant; the checks of calls have refused it before."""
    if peer.tenant is None:
        raise ApiError("unauthenticated", "a session belongs to a tenant", found=peer.name, wanted="an access token")
    return peer.tenant


def _require_own_tenant(peer: Peer) -> None:
    """Raises ApiError(forbidden): other nodes read what the server's own user has, as lower tiers do."""
    if peer.tenant != OWN_TENANT:
        raise ApiError(
            "forbidden", "the access token of other nodes belongs to no tenant", found=peer.tenant, wanted=OWN_TENANT
        )
