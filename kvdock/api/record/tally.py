"""Counts what calls did, and publishes it in the journal: a repeated call adds nothing.

The tally remembers a bounded number of requests and grants. A repeat of one that it has forgotten is counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvdock._core import SLOT_ALIGN, Lookup as Found, Reservation as Granted, Table
from kvdock.api.clock import Clocks, ServerClock
from kvdock.api.convert import grant_text
from kvdock.api.pool.registry import MemberRecord, Recent, SessionRecord
from kvdock.api.pool.sums import Sums
from kvdock.api.record.counters import TABLE_COUNTERS, Counters
from kvdock.api.record.curve import Curves
from kvdock.api.record.journal import Journal
from kvdock.api.record.requests import Detail, RecentRequests
from kvdock.api.settings import Settings
from kvdock.protocol import events as e
from kvdock.protocol.outcomes import view_of
from kvdock.protocol.reports import BREAKS, Break, RequestView
from kvdock.protocol.schemas import Heartbeat, Lookup, Reserve
from kvdock.protocol.wire_types import KEY_BYTES


class Memory(NamedTuple):
    """What the table has done with chunks, as last published."""

    evicted_chunks: int
    quarantined_bytes: int


@dataclass(slots=True)
class _Open:
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


class Tally:
    """`counters` may be raised directly; methods record lookups, stores, and changes of members."""

    def __init__(
        self, settings: Settings, table: Table, journal: Journal, curves: Curves | None, clocks: Clocks,
        server_clock: ServerClock,
    ) -> None:
        keep = 4 * settings.table_grants  # requests and grants
        self.counters = Counters()
        self.recent = RecentRequests(settings.recent_requests)
        self.saved = Sums()
        """How much all engines have loaded and saved, without benchmarks."""
        self.missed: Counter[str] = Counter()
        """Tokens that lookups asked for and did not get, by the reason."""
        self.now_ns = clocks.perf_ns
        self._apart = Counters()
        """The counts of benchmarks."""
        self._memory = Memory(0, 0)
        self._table, self._journal, self._curves = table, journal, curves
        self._wall_s, self._server_ms = clocks.wall_s, server_clock.now_ms
        self._lookups: Recent[tuple[int, bytes, int], int] = Recent(keep)
        """(session, request, epoch) → number of chunks already counted as loaded."""
        self._stores: Recent[int, _Open] = Recent(keep)
        self._leases: Recent[int, _Open] = Recent(keep)

    def totals(self) -> Counters:
        """The counters, with those that the table keeps brought up to date."""
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
        self, kind: type[e.Event], make: Callable[..., e.Event], session: SessionRecord, *values: Any
    ) -> None:
        if not session.is_bench:
            self._journal.publish_later(kind, make, session, *values)

    def _curves_of(self, session: SessionRecord) -> Curves | None:
        return None if session.is_bench else self._curves

    def lookup(
        self, session: SessionRecord, body: Lookup, request: bytes, keys: bytes, found: Found, started_ns: int
    ) -> None:
        counters, manifest = self._counters_of(session), session.namespace.manifest
        key = (session.table_id, request, body.epoch)
        tokens = len(keys) // KEY_BYTES * manifest.chunk_tokens
        counted = self._lookups.get(key)
        if counted is None:
            counters.lookups += 1
            counters.lookup_tokens += tokens
            counters.hit_tokens += found.hit_tokens
            counters.limited_lookups += found.limited == "held_bytes"
            counters.unpinned_lookups += found.unpinned_tokens > 0
            counters.unpinned_tokens += found.unpinned_tokens
            counters.unpinned_chunks += -(-found.unpinned_tokens // manifest.chunk_tokens)
            for sums in session.all_sums:
                sums.lookups, sums.lookup_tokens = sums.lookups + 1, sums.lookup_tokens + tokens
                sums.hit_tokens += found.hit_tokens
            if (curves := self._curves_of(session)) is not None:
                curves.looked_up(session.namespace, keys, found.hit_tokens)
        else:
            counters.lookup_renewals += 1
        chunks, before = found.chunk_count, counted or 0
        # If all readers share one writer's parts (MLA), each reader fetches these parts.
        fetches = max(1, body.readers // manifest.writers)
        loaded_bytes = fetches * found.bytes_from(before)
        counters.loaded_chunks += max(0, chunks - before)
        counters.loaded_bytes += loaded_bytes
        for sums in session.all_sums:
            sums.loaded_bytes += loaded_bytes
        self._lookups.put(key, max(before, chunks))
        now_ns = self.now_ns()
        if counted is not None:
            self._leased(session, body, found.lease, chunks - before, loaded_bytes, now_ns)
            return
        took_us = (now_ns - started_ns) // 1000
        row = RequestView(
            at=self._wall_s(), kind="lookup", session=session.id, label=session.label, request=body.request,
            tokens=tokens, hit_tokens=found.hit_tokens, chunks=chunks, bytes=loaded_bytes, took_us=took_us,
        )
        broke = _break_of(self._table, session, keys, found, self._server_ms())
        detail = _detail(session, broke)
        if not session.is_bench:
            if broke is not None:
                self.missed[broke.why] += tokens - found.hit_tokens
            self.recent.add(session.tenant, row, detail)
        self._publish_later(
            e.LookedUp, _looked_up, session, body.request, body.traceparent or "", tokens, found.hit_tokens,
            "" if broke is None else broke.why, took_us,
        )
        self._leased(session, body, found.lease, chunks, loaded_bytes, now_ns, detail)

    def _leased(
        self, session: SessionRecord, body: Lookup, lease: int, chunks: int, bytes_added: int, now_ns: int,
        detail: Detail | None = None,
    ) -> None:
        """`chunks`: those that are new."""
        if not lease or chunks <= 0:
            return
        known = self._leases.get(lease)
        if known is None:
            self._leases.put(lease, _Open(
                body.request, chunks, bytes_added, now_ns, detail, body.traceparent or "",
            ))
        else:
            known.chunks, known.bytes = known.chunks + chunks, known.bytes + bytes_added
        self._publish_later(
            e.Leased, _leased, session, body.request, body.traceparent or "", lease, chunks, bytes_added
        )

    def loaded(self, session: SessionRecord, lease: int) -> None:
        """All readers have released the lease."""
        known = self._leases.get(lease)
        if known is None or known.has_ended:
            return
        known.has_ended = True
        took_us = self._took_us(known)
        if known.detail is not None:
            known.detail.loaded_us = took_us
        self._publish_later(
            e.Loaded, _loaded, session, known.name, known.traceparent, lease, known.chunks, known.bytes, took_us
        )

    def cancelled(self, session: SessionRecord, grant: int) -> None:
        """The member that had asked for a lease or reservation has given it back."""
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
        if (curves := self._curves_of(session)) is not None and not body.temporary:
            curves.stored(session.namespace, keys)
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
                model=namespace.manifest.model, ranks=list(member.ranks),
            ))

    def left(self, session: SessionRecord, member: MemberRecord) -> None:
        self._journal.publish(e.Left(**session.who, member=member.id))

    def suspected(self, session: SessionRecord, member: MemberRecord, silent_ms: int) -> None:
        self._journal.publish(e.Suspect(**session.who, member=member.id, silent_s=silent_ms / 1000))

    def recovered(self, session: SessionRecord, member: MemberRecord) -> None:
        self._journal.publish(e.Recovered(**session.who, member=member.id))

    def died(self, session: SessionRecord | None, member_id: str = "") -> None:
        """`session`: None for a member of an adopted pool that never came back."""
        self.counters.dead_members += 1
        if session is not None:
            self._journal.publish(e.Dead(**session.who, member=member_id))

    def memory(self) -> None:
        """Publishes what the table has done with chunks since the last call."""
        stats = self._table.stats()
        now, before = Memory(stats["evicted_chunks"], stats["quarantined_bytes"]), self._memory
        self._memory = now
        if now.evicted_chunks > before.evicted_chunks:
            self._journal.publish(
                e.Evicted(chunks=now.evicted_chunks - before.evicted_chunks, total=now.evicted_chunks)
            )
        if now.quarantined_bytes != before.quarantined_bytes:
            kind = e.Quarantined if now.quarantined_bytes > before.quarantined_bytes else e.Freed
            self._journal.publish(kind(bytes=now.quarantined_bytes))

    # ---------------------------------------------------------------- the end of requests

    def mismatched(self, session: SessionRecord, lease: str, chunks: int) -> None:
        """Chunks of a lease did not have the bytes that were stored; the table has taken them out of use."""
        self._journal.publish(e.Mismatched(**session.who, lease=lease, chunks=chunks))

    def outcomes(self, session: SessionRecord, body: Heartbeat) -> None:
        """An engine has reported requests that have ended."""
        counters = self._counters_of(session)
        counters.outcomes += len(body.outcomes)
        counters.dropped_outcomes += body.outcomes_dropped
        for outcome in body.outcomes:
            view = view_of(outcome)
            counters.loaded_tokens += outcome.loaded_tokens
            for sums in session.all_sums:
                sums.ended(view)
            if session.is_bench:
                continue
            self.saved.ended(view)
            self.recent.ended(session.tenant, RequestView(
                at=self._wall_s(), kind="ended", session=session.id, label=session.label, request=outcome.request,
                tokens=outcome.prompt_tokens, hit_tokens=outcome.found_tokens, chunks=0, bytes=0, took_us=0,
                outcome=view,
            ), _detail(session))


def _break_of(table: Table, session: SessionRecord, keys: bytes, found: Found, now_ms: int) -> Break | None:
    """The reason why a lookup found less than it asked for; None: it found all. `keys`: all of them, 32 bytes each.

    The table is asked with the lookup, because a moment later the request itself may store what was missing.
    """
    space = session.namespace
    chunk_tokens = space.manifest.chunk_tokens
    at = found.hit_tokens // chunk_tokens * KEY_BYTES
    if at >= len(keys):
        return None
    why: str = found.limited or ("being_stored" if found.being_stored > found.hit_tokens else "")
    gone = None if why else table.gone(space.table_id, keys[at : at + KEY_BYTES])
    why = why or ("unknown" if gone is None else gone[0])
    made = Break(at_tokens=found.hit_tokens, why=why, in_words=BREAKS[why])
    if gone is not None:
        _, at_ms, used_ms = gone
        made.gone_s = max(0, now_ms - at_ms) / 1000
        made.unused_s = max(0, at_ms - used_ms) / 1000 if used_ms else None
    return made


def _detail(session: SessionRecord, broke: Break | None = None) -> Detail:
    return Detail(session.namespace.digest, broke, weights=session.namespace.use.weights)


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
