"""Counts what lookups and stores did: a repeated call adds nothing.

It remembers a bounded number of requests and grants. A repeat of a forgotten one is counted again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdock._core import Lookup as Found, Reservation as Granted, Table
from kvdock.api.pool.registry import Recent, SessionRecord
from kvdock.api.views.history import TABLE_COUNTERS, Counters, RecentRequests
from kvdock.protocol.outcomes import view_of
from kvdock.protocol.reports import RequestView
from kvdock.protocol.schemas import Heartbeat, Lookup, Reserve
from kvdock.protocol.wire_types import KEY_BYTES


class Tally:
    """`counters` may be raised directly; lookups and reservations are counted here."""

    def __init__(
        self, table: Table, counters: Counters, recent: RecentRequests, *, keep: int,
        perf_ns: Callable[[], int], wall_s: Callable[[], float],
    ) -> None:
        """`keep`: how many requests and grants to remember. `perf_ns` times calls, `wall_s` dates them."""
        self.counters = counters
        self.recent = recent
        self.now_ns = perf_ns
        self._table = table
        self._wall_s = wall_s
        self._lookups: Recent[tuple[int, bytes, int], int] = Recent(keep)
        """(session, request, epoch) → number of chunks already counted as loaded."""
        self._stores: Recent[int, None] = Recent(keep)

    def totals(self) -> Counters:
        """The counters, with those that the table keeps brought up to date."""
        stats = self._table.stats()
        for name in TABLE_COUNTERS:
            setattr(self.counters, name, stats.get(name, 0))
        return self.counters

    def lookup(
        self, session: SessionRecord, body: Lookup, request: bytes, keys: bytes, found: Found, started_ns: int
    ) -> None:
        counters, manifest = self.counters, session.namespace.manifest
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
        else:
            counters.lookup_renewals += 1
        chunks, before = found.chunk_count, counted or 0
        # If all readers share one writer's parts (MLA), each of them fetches them.
        fetches = max(1, body.readers // manifest.writers)
        loaded_bytes = fetches * found.bytes_from(before)
        counters.loaded_chunks += max(0, chunks - before)
        counters.loaded_bytes += loaded_bytes
        self._lookups.put(key, max(before, chunks))
        if counted is None:
            self.recent.add(session.tenant, RequestView(
                at=self._wall_s(), kind="lookup", session=session.id, label=session.label, request=body.request,
                tokens=tokens, hit_tokens=found.hit_tokens, chunks=chunks, bytes=loaded_bytes,
                took_us=(self.now_ns() - started_ns) // 1000,
            ))

    def reservation(
        self, session: SessionRecord, body: Reserve, keys: bytes, granted: Granted, started_ns: int
    ) -> None:
        if granted.grant in self._stores:
            return
        self.counters.reservations += 1
        self.counters.short_reservations += granted.limited in ("held_bytes", "no_space")
        self.counters.unpinned_reservations += granted.limited == "pinning"
        self.counters.quota_reservations += granted.limited == "quota"
        if granted.grant:
            self._stores.put(granted.grant, None)
        chunk_tokens = session.namespace.manifest.chunk_tokens
        self.recent.add(session.tenant, RequestView(
            at=self._wall_s(), kind="store", session=session.id, label=session.label, request=body.store,
            tokens=len(keys) // KEY_BYTES * chunk_tokens, hit_tokens=len(granted.present) * chunk_tokens,
            chunks=granted.chunk_count, bytes=granted.part_bytes, took_us=(self.now_ns() - started_ns) // 1000,
        ))

    def outcomes(self, session: SessionRecord, body: Heartbeat) -> None:
        """What an engine tells of requests that have ended."""
        self.counters.outcomes += len(body.outcomes)
        self.counters.dropped_outcomes += body.outcomes_dropped
        for outcome in body.outcomes:
            self.recent.tell(session.tenant, RequestView(
                at=self._wall_s(), kind="ended", session=session.id, label=session.label, request=outcome.request,
                tokens=outcome.prompt_tokens, hit_tokens=outcome.found_tokens, chunks=0, bytes=0, took_us=0,
                outcome=view_of(outcome),
            ))
