"""Counts what calls did, once each: a repeated lookup or store adds nothing.

It remembers recent requests and grants, bounded; forgetting one can only count it twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvdock._core import Lookup as Found, Reservation as Granted
from kvdock.api.pool.registry import SessionRecord
from kvdock.api.views.history import Counters, RecentRequests
from kvdock.protocol.schemas import KEY_BYTES, Lookup, RequestView, Reserve

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict of the last `keep` keys."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._items: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        if len(self._items) > self._keep:
            self._items.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return key in self._items


class Tally:
    def __init__(self, counters: Counters, recent: RecentRequests, keep: int) -> None:
        self._counters = counters
        self._recent = recent
        self._lookups: Recent[tuple[int, bytes, int], int] = Recent(keep)
        """(session, request, epoch) → chunks already counted as loaded."""
        self._stores: Recent[int, None] = Recent(keep)

    def lookup(
        self, session: SessionRecord, body: Lookup, request: bytes, keys: bytes, found: Found, *,
        at: float, took_us: int,
    ) -> None:
        counters, manifest = self._counters, session.namespace.manifest
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
        # Each reader of a part that all writers share (MLA) fetches it once more.
        fetches = max(1, body.readers // manifest.writers)
        loaded_bytes = fetches * found.bytes_from(before)
        counters.loaded_chunks += max(0, chunks - before)
        counters.loaded_bytes += loaded_bytes
        self._lookups.put(key, max(before, chunks))
        if counted is None:
            self._recent.add(RequestView(
                at=at, kind="lookup", session=session.id, label=session.label, request=body.request, tokens=tokens,
                hit_tokens=found.hit_tokens, chunks=chunks, bytes=loaded_bytes, took_us=took_us,
            ))

    def reservation(
        self, session: SessionRecord, body: Reserve, keys: bytes, granted: Granted, *, at: float, took_us: int
    ) -> None:
        if granted.grant in self._stores:
            return
        self._counters.reservations += 1
        self._counters.short_reservations += granted.limited in ("held_bytes", "no_space")
        self._counters.unpinned_reservations += granted.limited == "pinning"
        if granted.grant:
            self._stores.put(granted.grant, None)
        chunk_tokens = session.namespace.manifest.chunk_tokens
        self._recent.add(RequestView(
            at=at, kind="store", session=session.id, label=session.label, request=body.store,
            tokens=len(keys) // KEY_BYTES * chunk_tokens, hit_tokens=len(granted.present) * chunk_tokens,
            chunks=granted.chunk_count, bytes=granted.part_bytes, took_us=took_us,
        ))
