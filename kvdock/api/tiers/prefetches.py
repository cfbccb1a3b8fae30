"""Prefetches: which chunks lower tiers load ahead of requests, when, and how many at a time.

Whether a prefetch will be of use is not known. So all prefetches together may evict at most SHARE of the pool. A
prefetched chunk that fits into free memory counts only until it has come. Any other counts until a lookup asks for it,
or for REST_S after it has come. Hints may retain the same share at most: three quarters of the pool stay with the
chunks that requests have really asked for.

Used from the event loop alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvdock._core import TableError
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.record.counters import Counters
from kvdock.protocol import mover_schemas as m
from kvdock.protocol.schemas import PrefetchAnswer, Why
from kvdock.protocol.wire_types import KEY_BYTES

SHARE = 0.25
REST_S = 60.0
"""After this long, a prefetched chunk that no lookup has asked for is a chunk like any other."""
MOST = 256
"""The most prefetches that wait, run or still count at once."""
MOST_KEYS_BYTES = 8 << 20
"""The most bytes of keys that wait for their start or for the mover."""
GRACE_S = 5.0
"""A prefetch is lost if the mover has not reported on it this long after its deadline."""


@dataclass
class _Prefetch:
    space: NamespaceRecord
    keys: bytes
    start_s: float
    until_s: float
    """When the prefetch is dropped or, if it has ended, forgotten."""
    stored: int = 0
    """How many of its first chunks the pool has."""
    bytes_: int = 0
    evicts: int = 0
    """How many of `bytes_` do not fit into free memory."""
    is_sent: bool = False
    """To the mover."""
    has_ended: bool = False


class Prefetches:
    """`why_unavailable`: returns why no tier can load the chunk at an index of a namespace's chain; "": a tier may have
    it. `now_s`: a monotonic clock, in seconds."""

    def __init__(
        self, pool: Pool, counters: Counters, why_unavailable: Callable[[NamespaceRecord, bytes, int], Why],
        now_s: Callable[[], float],
    ) -> None:
        self._pool, self._counters, self._why_unavailable, self._now_s = pool, counters, why_unavailable, now_s
        self._numbers = itertools.count(1)
        self._all: dict[int, _Prefetch] = {}

    def start(self, space: NamespaceRecord, keys: bytes, after_s: float, deadline_s: float) -> PrefetchAnswer:
        """Returns at once what the pool has and what may come. `keys`: 32 bytes each."""
        self._counters.prefetches += 1
        start_s = self._now_s() + after_s
        one = _Prefetch(space, keys, start_s, start_s + deadline_s)
        chunks, why = self._loadable(one)
        if after_s > 0 and why in ("", "stored", "limited"):
            chunks, why = 0, "later"
        waiting_bytes = sum(len(other.keys) for other in self._all.values() if not other.is_sent)
        if (chunks or why == "later") and (len(self._all) >= MOST or waiting_bytes + len(keys) > MOST_KEYS_BYTES):
            chunks, why = 0, "limited"
        self._counters.prefetches_refused += why == "limited"
        if chunks or why == "later":
            if chunks:
                self._take(one, chunks)
            self._all[next(self._numbers)] = one
        tokens = space.manifest.chunk_tokens
        return PrefetchAnswer(stored_tokens=one.stored * tokens, coming_tokens=chunks * tokens, why=why)

    def _loadable(self, one: _Prefetch) -> tuple[int, Why]:
        """How many chunks after the stored ones may be loaded now, and why not all."""
        space = one.space
        one.stored = self._pool.table.peek(space.table_id, one.keys) // space.manifest.chunk_tokens
        missing = len(one.keys) // KEY_BYTES - one.stored
        if missing <= 0:
            return 0, "stored"
        if why := self._why_unavailable(space, one.keys, one.stored):
            return 0, why
        allowed = sum(self._left_bytes()) // space.chunk_bytes
        return (missing, "") if missing <= allowed else (allowed, "limited")

    def _left_bytes(self) -> tuple[int, int]:
        """Free bytes that no prefetch will fill, and bytes that prefetches may still evict."""
        coming = sum(one.bytes_ - one.evicts for one in self._all.values() if not one.has_ended)
        evicted = sum(one.evicts for one in self._all.values())
        return max(0, self._pool.free_bytes - coming), max(0, int(SHARE * self._pool.limit_bytes) - evicted)

    def _take(self, one: _Prefetch, chunks: int) -> None:
        one.bytes_ = chunks * one.space.chunk_bytes
        one.evicts = max(0, one.bytes_ - self._left_bytes()[0])
        one.keys = one.keys[: (one.stored + chunks) * KEY_BYTES]

    # ---------------------------------------------------------------- later

    def looked_up(self, keys: bytes) -> None:
        """A lookup has asked for `keys`: what was prefetched of them is of use, and does not count any more."""
        for number, one in list(self._all.items()):
            at = one.stored * KEY_BYTES
            if one.evicts and keys[at : at + KEY_BYTES] == one.keys[at : at + KEY_BYTES]:
                one.evicts = 0
                if one.has_ended:
                    del self._all[number]

    def due(self, most_bytes: int) -> list[m.PrefetchRequest]:
        """The prefetches that start now, for the mover, with about `most_bytes` of keys."""
        now_s = self._now_s()
        self._expire(now_s)
        found: list[m.PrefetchRequest] = []
        for number, one in list(self._all.items()):
            if one.is_sent or one.start_s > now_s:
                continue
            if most_bytes <= 0 or self._why_unavailable(one.space, one.keys, 0) in ("tiers_off", "draining"):
                break  # it is tried again until its deadline
            if not one.bytes_ and not self._is_still_loadable(number, one):
                continue
            one.is_sent = True
            most_bytes -= len(one.keys)
            found.append(m.PrefetchRequest(
                number=number, namespace=one.space.digest.hex(), keys=one.keys, hit_chunks=one.stored,
                wait_s=one.until_s - now_s,
            ))
        return found

    def _is_still_loadable(self, number: int, one: _Prefetch) -> bool:
        """The pool and the tiers may have changed since the call. False: the prefetch is dropped."""
        try:
            chunks, why = self._loadable(one)
        except TableError:  # the namespace does not exist any more
            chunks, why = 0, "not_served"
        self._counters.prefetches_refused += why == "limited"
        if chunks:
            self._take(one, chunks)
            return True
        self._counters.prefetches_dropped += why not in ("stored", "limited")
        del self._all[number]
        return False

    def _expire(self, now_s: float) -> None:
        for number, one in list(self._all.items()):
            if one.until_s + GRACE_S * one.is_sent < now_s:
                del self._all[number]
                self._counters.prefetches_dropped += not one.has_ended

    def ended(self, result: m.PrefetchResult) -> None:
        """The mover has finished a prefetch: it loads nothing more for it."""
        if (one := self._all.get(result.number)) is None:
            return
        self._counters.prefetched_chunks += result.chunks
        self._counters.prefetches_dropped += result.was_dropped
        one.has_ended, one.until_s = True, self._now_s() + REST_S
        one.evicts = min(one.evicts, result.chunks * one.space.chunk_bytes)
        if not one.evicts:
            del self._all[result.number]

    def mover_restarted(self) -> None:
        """Those that were sent to the mover that has ended are lost. The others wait for the new one."""
        for number, one in list(self._all.items()):
            if one.is_sent and not one.has_ended:
                del self._all[number]
                self._counters.prefetches_dropped += 1
