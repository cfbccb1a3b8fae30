"""Counts what calls did, and publishes it in the journal: a repeated call adds nothing.

A lookup is answered in a tenth of a millisecond, and its caller does not wait for the counting: that is done once the
answer has left, and in any case before the next call changes the table (`count_answered`). The curve's simulated pools
do not depend on the table: no call waits for them but those that read the curve (`catch_up`).

The tally remembers a bounded number of requests and grants. A repeat of one that it has forgotten is counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvdock._core import SLOT_ALIGN, Lookup as Found, Reservation as Granted, Table
from kvdock.api.clock import Clocks, ServerClock
from kvdock.api.convert import grant_text
from kvdock.api.pool.registry import Hits, MemberRecord, NamespaceRecord, Recent, SessionRecord, digest16
from kvdock.api.record.beginnings import Beginnings
from kvdock.api.record.counters import TABLE_COUNTERS, Counters
from kvdock.api.record.curve import Curves
from kvdock.api.record.hits import Answered, Answers, HitRecord, Whose, divided
from kvdock.api.record.journal import Journal
from kvdock.api.record.labels import Labels
from kvdock.api.record.later import Later
from kvdock.api.record.requests import Detail, RecentRequests
from kvdock.api.record.troubles import Troubles
from kvdock.api.settings import Settings
from kvdock.protocol import events as e
from kvdock.protocol.hits import COMPUTED
from kvdock.protocol.outcomes import Outcome, OutcomeView, view_of
from kvdock.protocol.reports import Break, Parting, RequestView
from kvdock.protocol.schemas import Heartbeat, Lookup, Reserve
from kvdock.protocol.wire_types import KEY_BYTES


class Memory(NamedTuple):
    """What the table has done with chunks, as last published."""

    evicted_chunks: int
    evicted_by_operator: int
    quarantined_bytes: int


class Learned(NamedTuple):
    """What follows lookups and stores besides counters. `curves` None: that is switched off."""

    curves: Curves | None
    beginnings: Beginnings
    answers: Answers
    troubles: Troubles
    labels: Labels


class _Open(msgspec.Struct, gc=False):
    """An open lease or reservation, as far as it is known."""

    name: str
    """The id of the request or the store."""
    chunks: int
    bytes: int
    began_ns: int
    detail: Detail | None = None
    """The detail of the lookup that got the lease."""
    traceparent: str = ""
    published: int = 0
    """How many chunks were published."""
    slot_bytes: int = 0
    """For the store of a benchmark: the bytes that the table counts for it."""
    has_ended: bool = False


class _Lookup(NamedTuple):
    """A lookup that was answered and is not counted yet."""

    session: SessionRecord
    body: Lookup
    request: bytes
    keys: bytes
    found: Found
    started_ns: int
    answered_ns: int
    at: float


class Tally:
    """`counters` may be raised directly; methods record lookups, stores, and changes of members."""

    def __init__(
        self, settings: Settings, table: Table, journal: Journal, learned: Learned, clocks: Clocks,
        server_clock: ServerClock,
    ) -> None:
        keep = 4 * settings.table_grants  # requests and grants
        self.counters = Counters()
        self.recent = RecentRequests(settings.recent_requests)
        self.hits = HitRecord(clocks.wall_s, clocks.boot_s)
        self.learned = learned
        self.now_ns = clocks.perf_ns
        self._apart = Counters()
        """The counts of benchmarks."""
        self._memory = Memory(0, 0, 0)
        self._table, self._journal = table, journal
        self._wall_s, self._server_ms = clocks.wall_s, server_clock.now_ms
        self._lookups: Recent[tuple[int, bytes, int], int] = Recent(keep)
        """(session, request, epoch) → number of chunks already counted as leased."""
        self._stores: Recent[int, _Open] = Recent(keep)
        self._leases: Recent[int, _Open] = Recent(keep)
        self._later = Later(learned.curves.go_on if learned.curves is not None else lambda: False)

    def totals(self) -> Counters:
        """The counters, with those that the table keeps brought up to date."""
        self.count_answered()
        stats = self._table.stats()
        for name in TABLE_COUNTERS:
            setattr(self.counters, name, stats.get(name, 0) - getattr(self._apart, name))
        return self.counters

    def _counters_of(self, session: SessionRecord) -> Counters:
        return self._apart if session.is_bench else self.counters

    def _wants(self, session: SessionRecord, kind: type[e.Event]) -> bool:
        """Benchmarks cause no events: theirs would displace those of engines that serve."""
        return not session.is_bench and self._journal.wants(kind)

    def _publish_later(
        self, kind: type[e.Event], make: Callable[..., e.Event], session: SessionRecord, *values: Any,
        at: float | None = None,
    ) -> None:
        if not session.is_bench:
            self._journal.publish_later(kind, make, session, *values, at=at)

    def _curves_of(self, session: SessionRecord) -> Curves | None:
        return None if session.is_bench else self.learned.curves

    def lookup(
        self, session: SessionRecord, body: Lookup, request: bytes, keys: bytes, found: Found, started_ns: int
    ) -> None:
        """A lookup has its answer. It is counted a moment later."""
        self._later.count(partial(
            self._count, _Lookup(session, body, request, keys, found, started_ns, self.now_ns(), self._wall_s())
        ))

    def count_answered(self) -> None:
        """Counts the lookups that were answered. To be called before a call changes the table or reads a count."""
        self._later.count_answered()

    async def catch_up(self) -> None:
        """Counts all that waits now, in slices. To be awaited before the curves are read."""
        await self._later.catch_up()

    def _count(self, one: _Lookup) -> None:
        session, found, manifest = one.session, one.found, one.session.namespace.manifest
        key = (session.table_id, one.request, one.body.epoch)
        tokens = len(one.keys) // KEY_BYTES * manifest.chunk_tokens
        counted = self._lookups.get(key)
        before, chunks = counted or 0, found.chunk_count
        self._lookups.put(key, max(before, chunks))
        answer = None
        if not session.is_bench:
            answer = self.learned.answers.answered(
                session, one.request, one.body.epoch, one.keys, found, one.answered_ns
            )
        # If all readers share one writer's parts (MLA), each reader fetches these parts.
        leased_bytes = max(1, one.body.readers // manifest.writers) * found.bytes_from(before)
        if counted is not None:
            self._counters_of(session).lookup_renewals += 1
            detail = None if answer is None else answer.detail
            if detail is not None:
                detail.hit_tokens, detail.chunks = found.hit_tokens, max(before, chunks)
                detail.size_bytes += leased_bytes
                detail.traceparent = one.body.traceparent or ""
            self._leased(one, chunks - before, leased_bytes, detail)
            return
        self._count_first(session, one.keys, tokens, found)
        beginnings = one.body.beginnings or ""
        broke = None if answer is None else self._break_of(session.namespace, one.keys, answer, beginnings)
        took_us = (one.answered_ns - one.started_ns) // 1000
        detail = _detail(session, broke, one.body)
        if broke is not None and broke.others and broke.at_tokens:
            at = broke.at_tokens // manifest.chunk_tokens * KEY_BYTES
            detail.parted = one.keys[at - KEY_BYTES : at], one.keys[at : at + KEY_BYTES]
        if answer is not None:
            answer.detail, detail.hit_tokens = detail, found.hit_tokens
            detail.chunks, detail.size_bytes = chunks, leased_bytes
            self.recent.add(session.tenant, RequestView(
                at=one.at, kind="lookup", session=session.id, label=session.label, request=one.body.request,
                tokens=tokens, hit_tokens=found.hit_tokens, chunks=chunks, bytes=leased_bytes, took_us=took_us,
            ), detail)
        self._publish_later(
            e.LookedUp, _looked_up, session, one.body.request, one.body.traceparent or "", tokens, found.hit_tokens,
            "" if broke is None else broke.why, took_us, at=one.at,
        )
        self._leased(one, chunks, leased_bytes, detail)

    def _count_first(self, session: SessionRecord, keys: bytes, tokens: int, found: Found) -> None:
        """The first lookup of a request in its epoch."""
        counters = self._counters_of(session)
        counters.lookups += 1
        counters.lookup_tokens += tokens
        counters.limited_lookups += found.limited == "held_bytes"
        counters.unpinned_lookups += found.unpinned_tokens > 0
        counters.unpinned_tokens += found.unpinned_tokens
        counters.unpinned_chunks += -(-found.unpinned_tokens // session.namespace.manifest.chunk_tokens)
        for sums in session.all_sums:
            sums.lookups, sums.lookup_tokens = sums.lookups + 1, sums.lookup_tokens + tokens
        if (curves := self._curves_of(session)) is not None:
            self._later.simulate(partial(curves.looked_up, session.namespace, keys, found.hit_tokens))

    def _break_of(self, space: NamespaceRecord, keys: bytes, answer: Answered, beginnings: str) -> Break | None:
        """Where the prefix that a lookup found ends, and why; None: it found all that it asked for."""
        if not answer.missing:
            return None
        first, now_ms = answer.missing[0], self._server_ms()
        made = Break(
            at_tokens=answer.hit * answer.chunk_tokens, tokens=(first.end - answer.hit) * answer.chunk_tokens,
            why=first.why, in_words=COMPUTED[first.why],
        )
        if first.why == "never_stored" and answer.hit:
            last = keys[(answer.hit - 1) * KEY_BYTES : answer.hit * KEY_BYTES]
            made.others = self._table.children(space.table_id, last)
            if made.others:
                made.parts = Parting(after_tokens=made.at_tokens, before_tokens=made.at_tokens + answer.chunk_tokens)
        elif first.why == "never_stored":
            alike = self.learned.beginnings.alike(beginnings, space)
            made.same_tokens = alike.tokens
            if 0 < alike.tokens < answer.chunk_tokens:
                before = min(alike.before or answer.chunk_tokens, answer.chunk_tokens)
                made.others, made.parts = alike.ways, Parting(after_tokens=alike.tokens, before_tokens=before)
        if first.at_ms:
            made.gone_s = max(0, now_ms - first.at_ms) / 1000
            made.unused_s = max(0, first.at_ms - first.used_ms) / 1000 if first.used_ms else None
        return made

    def _leased(self, one: _Lookup, chunks: int, bytes_added: int, detail: Detail | None = None) -> None:
        """`chunks`: those that are new."""
        lease, body = one.found.lease, one.body
        if not lease or chunks <= 0:
            return
        known = self._leases.get(lease)
        if known is None:
            self._leases.put(lease, _Open(
                body.request, chunks, bytes_added, one.answered_ns, detail, body.traceparent or "",
            ))
        else:
            known.chunks, known.bytes = known.chunks + chunks, known.bytes + bytes_added
        self._publish_later(
            e.Leased, _leased, one.session, body.request, body.traceparent or "", lease, chunks, bytes_added,
            at=one.at,
        )

    def loaded(self, session: SessionRecord, lease: int) -> None:
        """All readers have released the lease."""
        self.count_answered()
        known = self._leases.get(lease)
        if known is None or known.has_ended:
            return
        known.has_ended = True
        took_us = self._took_us(known)
        counters = self._counters_of(session)
        counters.loaded_chunks += known.chunks
        counters.loaded_bytes += known.bytes
        for sums in session.all_sums:
            sums.loaded_bytes += known.bytes
        if known.detail is not None:
            known.detail.loaded_us = took_us
        self._publish_later(
            e.Loaded, _loaded, session, known.name, known.traceparent, lease, known.chunks, known.bytes, took_us
        )

    def cancelled(self, session: SessionRecord, grant: int) -> None:
        """The member that had asked for a lease or reservation has given it back."""
        self.count_answered()
        lease = self._leases.get(grant)
        known = lease or self._stores.get(grant)
        if known is None or known.has_ended:
            return
        known.has_ended = True
        if self._wants(session, e.Cancelled):
            self._journal.publish(e.Cancelled(
                **session.who, name=known.name, traceparent=known.traceparent, grant=grant_text(grant),
                is_store=lease is None, took_us=self._took_us(known),
            ))

    def reservation(
        self, session: SessionRecord, body: Reserve, keys: bytes, granted: Granted, started_ns: int
    ) -> None:
        self.count_answered()
        if granted.grant in self._stores:
            return
        counters = self._counters_of(session)
        counters.reservations += 1
        counters.short_reservations += granted.limited in ("held_bytes", "no_space")
        counters.unpinned_reservations += granted.limited == "pinning"
        counters.quota_reservations += granted.limited == "quota"
        now_ns = self.now_ns()
        if granted.grant:
            self._stores.put(granted.grant, _Open(
                body.store, granted.chunk_count, granted.part_bytes, now_ns, traceparent=body.traceparent or "",
                slot_bytes=_slot_bytes(granted) if session.is_bench else 0,
            ))
        if body.beginnings and not session.is_bench:
            self.learned.beginnings.stored(body.beginnings, session.namespace, keys, body.chunks_before)
        if (curves := self._curves_of(session)) is not None and not body.temporary:
            self._later.simulate(partial(curves.stored, session.namespace, keys))
        chunk_tokens = session.namespace.manifest.chunk_tokens
        tokens, present_tokens = len(keys) // KEY_BYTES * chunk_tokens, len(granted.present) * chunk_tokens
        row = RequestView(
            at=self._wall_s(), kind="store", session=session.id, label=session.label, request=body.store,
            tokens=tokens, hit_tokens=present_tokens, chunks=granted.chunk_count, bytes=granted.part_bytes,
            took_us=(now_ns - started_ns) // 1000,
        )
        if not session.is_bench:
            self.recent.add(session.tenant, row, _detail(session))
        if self._wants(session, e.Reserved):
            self._journal.publish(e.Reserved(
                **session.who, store=body.store, traceparent=body.traceparent or "",
                reservation=grant_text(granted.grant) if granted.grant else None, tokens=tokens,
                present_tokens=present_tokens, chunks=granted.chunk_count, bytes=granted.part_bytes,
                limited_by=granted.limited or None,
            ))

    def committed(self, session: SessionRecord, reservation: int, published: int, *, is_whole: bool) -> None:
        """`published`: how many of its chunks are published by now. `is_whole`: no rank has still to commit."""
        known = self._stores.get(reservation)
        if known is None or known.has_ended:
            return
        grown, known.published, known.has_ended = published - known.published, published, is_whole
        stored_bytes = known.bytes * grown // known.chunks if known.chunks else 0
        for sums in session.all_sums:
            sums.stored_bytes += stored_bytes
        if session.is_bench:
            self._apart.stored_chunks += grown
            self._apart.stored_bytes += known.slot_bytes * grown // max(1, known.chunks)
        if grown > 0 and self._wants(session, e.Stored):
            self._journal.publish(e.Stored(
                **session.who, store=known.name, traceparent=known.traceparent,
                reservation=grant_text(reservation), chunks=grown, took_us=self._took_us(known),
            ))
        if is_whole and self._wants(session, e.Committed):
            self._journal.publish(e.Committed(
                **session.who, store=known.name, traceparent=known.traceparent,
                reservation=grant_text(reservation), chunks=published, bytes=known.bytes, took_us=self._took_us(known),
            ))

    def aborted(self, session: SessionRecord, reservation: int, ranks: Sequence[int], *, is_over: bool) -> None:
        """`is_over`: no rank has still to commit."""
        known = self._stores.get(reservation)
        if known is not None and not known.has_ended:
            known.has_ended = is_over
            if self._wants(session, e.Aborted):
                self._journal.publish(e.Aborted(
                    **session.who, store=known.name, traceparent=known.traceparent,
                    reservation=grant_text(reservation), ranks=list(ranks), chunks=known.published, is_over=is_over,
                    took_us=self._took_us(known),
                ))

    def _took_us(self, since: _Open) -> int:
        return (self.now_ns() - since.began_ns) // 1000

    # ---------------------------------------------------------------- members and memory

    def attached(self, session: SessionRecord, member: MemberRecord, *, is_new: bool) -> None:
        """`is_new`: not a repeat of the call."""
        self.counters.attached_members += not session.is_bench
        if is_new:
            namespace = session.namespace
            self._journal.publish(e.Attached(
                **session.who, member=member.id, instance=session.instance, namespace=namespace.digest.hex(),
                ranks=list(member.ranks),
            ))

    def left(self, session: SessionRecord, member: MemberRecord) -> None:
        self._journal.publish(e.Left(**session.who, member=member.id))

    def suspected(self, session: SessionRecord, member: MemberRecord, silent_ms: int) -> None:
        self._journal.publish(e.Suspect(**session.who, member=member.id, silent_s=silent_ms / 1000))

    def recovered(self, session: SessionRecord, member: MemberRecord) -> None:
        self._journal.publish(e.Recovered(**session.who, member=member.id))

    def died(self, session: SessionRecord | None, member_id: str = "") -> None:
        """`session`: None for a member of an adopted pool that never came back."""
        if session is None or not session.is_mover:
            self.counters.dead_members += 1
        tenant, who = ("", "") if session is None else (session.tenant, session.label or session.id)
        if session is None or not (session.is_bench or session.is_mover):
            self.learned.troubles.add("died", tenant, who)
        if session is not None:
            self._journal.publish(e.Dead(**session.who, member=member_id))

    def memory(self) -> None:
        """Publishes what the table has done with chunks since the last call."""
        stats = self._table.stats()
        now, before = Memory(
            stats["evicted_chunks"], stats["evicted_by_operator"], stats["quarantined_bytes"]
        ), self._memory
        self._memory = now
        if now.evicted_chunks > before.evicted_chunks:
            self._journal.publish(e.Evicted(
                chunks=now.evicted_chunks - before.evicted_chunks,
                by_operator=now.evicted_by_operator - before.evicted_by_operator, total=now.evicted_chunks,
            ))
        if now.quarantined_bytes != before.quarantined_bytes:
            kind = e.Quarantined if now.quarantined_bytes > before.quarantined_bytes else e.Freed
            self._journal.publish(kind(bytes=now.quarantined_bytes))

    # ---------------------------------------------------------------- the end of requests

    def labelled(self, session: SessionRecord, keys: bytes, label: str) -> None:
        """A client gave that label to a request with these chunks."""
        if not session.is_bench:
            self.learned.labels.used(session.namespace, keys, label)

    def mismatched(self, session: SessionRecord, lease: str, chunks: int) -> None:
        """Chunks of a lease did not have the bytes that were stored; the table has taken them out of use."""
        if chunks and not session.is_bench:
            self.learned.troubles.add("damaged", session.tenant, session.label or session.id)
        self._journal.publish(e.Mismatched(**session.who, lease=lease, chunks=chunks))

    def refuted(self, session: SessionRecord, lease: str, chunks: int, *, is_refused: bool) -> None:
        """Chunks were reported as damaged whose bytes are right. `is_refused`: the session has used up such reports."""
        if not session.is_bench:
            self.counters.refuted_mismatches += chunks
            self.learned.troubles.add_once("misread", session.tenant, session.label or session.id)
        self._journal.publish(e.MismatchRefuted(**session.who, lease=lease, chunks=chunks, is_refused=is_refused))

    def outcomes(self, session: SessionRecord, member: MemberRecord, body: Heartbeat) -> None:
        """An engine has reported requests that have ended."""
        self.count_answered()
        counters = self._counters_of(session)
        counters.dropped_outcomes += body.outcomes_dropped
        for outcome in body.outcomes:
            if outcome.number and outcome.number <= member.last_outcome:
                continue  # the answer to an earlier report was lost
            member.last_outcome = outcome.number or member.last_outcome
            self._ended(session, counters, outcome)

    def _ended(self, session: SessionRecord, counters: Counters, outcome: Outcome) -> None:
        space = session.namespace
        answer = self.learned.answers.take(session, digest16(outcome.request), outcome.epoch)
        view = view_of(outcome, divided(outcome, space.manifest.chunk_tokens, answer))
        counters.outcomes += 1
        counters.reloaded_tokens += view.reloaded_tokens
        counters.prompt_tokens += view.prompt_tokens
        for run in view.runs:
            field = f"{run.origin}_tokens"
            setattr(counters, field, getattr(counters, field) + run.tokens)
        for sums in session.all_sums:
            sums.hits.ended(view)
        if session.is_bench:
            return
        self.hits.ended(Whose(session.tenant, session.model, session.label or session.id), view)
        traceparent = "" if answer is None or answer.detail is None else answer.detail.traceparent
        self._publish_later(e.RequestEnded, _request_ended, session, traceparent, outcome.request, view)
        self.recent.ended(session.tenant, RequestView(
            at=self._wall_s(), kind="ended", session=session.id, label=session.label, request=outcome.request,
            tokens=outcome.prompt_tokens, hit_tokens=outcome.found_tokens, chunks=0, bytes=0, took_us=0, outcome=view,
        ), _detail(session))


def _detail(session: SessionRecord, broke: Break | None = None, call: Lookup | None = None) -> Detail:
    detail = Detail(session.namespace.digest, broke, weights=session.namespace.use.weights)
    if call is not None:
        detail.traceparent, detail.beginnings = call.traceparent or "", call.beginnings or ""
    return detail


def _slot_bytes(granted: Granted) -> int:
    """The size of a reservation's slots."""
    return sum(-(-part[4] // SLOT_ALIGN) * SLOT_ALIGN for _, parts in granted.chunks for part in parts)


def _looked_up(
    session: SessionRecord, request: str, traceparent: str, tokens: int, hit_tokens: int, why: str, took_us: int
) -> e.LookedUp:
    return e.LookedUp(
        **session.who, request=request, traceparent=traceparent, tokens=tokens, hit_tokens=hit_tokens, why=why,
        took_us=took_us,
    )


def _request_ended(session: SessionRecord, traceparent: str, request: str, view: OutcomeView) -> e.RequestEnded:
    hits = Hits()
    hits.ended(view)
    return e.RequestEnded(
        **session.who, traceparent=traceparent, request=request, prompt_tokens=view.prompt_tokens,
        local_tokens=hits.local_tokens, loaded=dict(hits.loaded), computed=dict(hits.computed),
        reloaded_tokens=view.reloaded_tokens, saved_s=view.saved_s,
    )


def _leased(
    session: SessionRecord, request: str, traceparent: str, lease: int, chunks: int, added_bytes: int
) -> e.Leased:
    return e.Leased(
        **session.who, request=request, traceparent=traceparent, lease=grant_text(lease), chunks=chunks,
        bytes=added_bytes,
    )


def _loaded(
    session: SessionRecord, request: str, traceparent: str, lease: int, chunks: int, loaded_bytes: int, took_us: int
) -> e.Loaded:
    return e.Loaded(
        **session.who, request=request, traceparent=traceparent, lease=grant_text(lease), chunks=chunks,
        bytes=loaded_bytes, took_us=took_us,
    )
