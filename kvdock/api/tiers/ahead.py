"""What is loaded from lower tiers ahead of requests: which of it, when, and how much at a time.

Nobody knows that a prefetch will be of use, so all of them together push out at most SHARE of the pool that no lookup
has asked for since: what comes into free room counts while it is on its way, the rest for REST_S longer. That is what
hints may retain at most: three quarters of the pool stay with what requests have really asked for.

Used from the event loop alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvdock._core import Table, TableError
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.record.counters import Counters
from kvdock.protocol import mover_schemas as t
from kvdock.protocol.tier_schemas import PrefetchAnswer, Why
from kvdock.protocol.wire_types import KEY_BYTES

SHARE = 0.25
REST_S = 60.0
"""After so long what came and was not asked for is a chunk like any other."""
MOST = 256
"""So many prefetches may wait, run or rest at once."""
MOST_KEYS_BYTES = 8 << 20
"""So much of keys may wait for its time or for the mover."""
GRACE_S = 5.0
"""A mover that says nothing so long after a deadline has lost the prefetch."""


@dataclass
class _Prefetch:
    space: NamespaceRecord
    keys: bytes
    begin_s: float
    until_s: float
    """Behind it the prefetch is dropped or, if it has ended, forgotten."""
    stored: int = 0
    """So many of its first chunks the pool has."""
    bytes_: int = 0
    pushes: int = 0
    """So many of `bytes_` have no free room."""
    is_told: bool = False
    has_ended: bool = False


class Ahead:
    """`room`: the pool's bytes that nothing is in, and all of them. `why_not`: why no tier has the chunk that a place
    of a chain has; "": one may."""

    def __init__(
        self, table: Table, counters: Counters, room: Callable[[], tuple[int, int]],
        why_not: Callable[[NamespaceRecord, bytes, int], Why], now_s: Callable[[], float],
    ) -> None:
        self._table, self._counters, self._room, self._why_not, self._now_s = table, counters, room, why_not, now_s
        self._numbers = itertools.count(1)
        self._all: dict[int, _Prefetch] = {}

    def begin(self, space: NamespaceRecord, keys: bytes, after_s: float, deadline_s: float) -> PrefetchAnswer:
        """Says at once what may come."""
        self._counters.prefetches += 1
        begin_s = self._now_s() + after_s
        one = _Prefetch(space, keys, begin_s, begin_s + deadline_s)
        chunks, why = self._worth(one)
        if after_s > 0 and why in ("", "stored", "limited"):
            chunks, why = 0, "later"
        waiting_bytes = sum(len(other.keys) for other in self._all.values() if not other.is_told)
        if (chunks or why == "later") and (len(self._all) >= MOST or waiting_bytes + len(keys) > MOST_KEYS_BYTES):
            chunks, why = 0, "limited"
        self._counters.prefetches_refused += why == "limited"
        if chunks or why == "later":
            if chunks:
                self._take(one, chunks)
            self._all[next(self._numbers)] = one
        tokens = space.manifest.chunk_tokens
        return PrefetchAnswer(stored_tokens=one.stored * tokens, coming_tokens=chunks * tokens, why=why)

    def _worth(self, one: _Prefetch) -> tuple[int, Why]:
        """How many chunks behind the stored ones may be loaded now, and why not all."""
        space = one.space
        one.stored = self._table.peek(space.table_id, one.keys) // space.manifest.chunk_tokens
        missing = len(one.keys) // KEY_BYTES - one.stored
        if missing <= 0:
            return 0, "stored"
        if why := self._why_not(space, one.keys, one.stored):
            return 0, why
        allowed = sum(self._left()) // space.chunk_bytes
        return (missing, "") if missing <= allowed else (allowed, "limited")

    def _left(self) -> tuple[int, int]:
        """Free bytes that nothing is on its way to, and bytes that may still be pushed out."""
        free, pool_bytes = self._room()
        coming = sum(one.bytes_ - one.pushes for one in self._all.values() if not one.has_ended)
        pushed = sum(one.pushes for one in self._all.values())
        return max(0, free - coming), max(0, int(SHARE * pool_bytes) - pushed)

    def _take(self, one: _Prefetch, chunks: int) -> None:
        one.bytes_ = chunks * one.space.chunk_bytes
        one.pushes = max(0, one.bytes_ - self._left()[0])
        one.keys = one.keys[: (one.stored + chunks) * KEY_BYTES]

    # ---------------------------------------------------------------- what becomes of them

    def asked(self, keys: bytes) -> None:
        """A lookup has come. What it asks for was not loaded in vain."""
        for number, one in list(self._all.items()):
            at = one.stored * KEY_BYTES
            if one.pushes and keys[at : at + KEY_BYTES] == one.keys[at : at + KEY_BYTES]:
                one.pushes = 0
                if one.has_ended:
                    del self._all[number]

    def news(self, most_bytes: int) -> list[t.Wanted]:
        """Those whose time has come, with about so much of keys."""
        now_s = self._now_s()
        self._expire(now_s)
        found: list[t.Wanted] = []
        for number, one in list(self._all.items()):
            if one.is_told or one.begin_s > now_s:
                continue
            if most_bytes <= 0 or self._why_not(one.space, one.keys, 0) in ("tiers_off", "draining"):
                break  # later, if its time is not over by then
            if not one.bytes_ and not self._is_still_worth(number, one):
                continue
            one.is_told = True
            most_bytes -= len(one.keys)
            found.append(t.Wanted(
                number=number, namespace=one.space.digest.hex(), keys=one.keys, hit_chunks=one.stored,
                wait_s=one.until_s - now_s,
            ))
        return found

    def _is_still_worth(self, number: int, one: _Prefetch) -> bool:
        """The pool may have changed since it was asked for."""
        try:
            chunks, why = self._worth(one)
        except TableError:  # the namespace is gone
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
            if one.until_s + GRACE_S * one.is_told < now_s:
                del self._all[number]
                self._counters.prefetches_dropped += not one.has_ended

    def ended(self, said: t.Prefetched) -> None:
        """The mover does no more for it."""
        if (one := self._all.get(said.number)) is None:
            return
        self._counters.prefetched_chunks += said.chunks
        self._counters.prefetches_dropped += said.was_dropped
        one.has_ended, one.until_s = True, self._now_s() + REST_S
        one.pushes = min(one.pushes, said.chunks * one.space.chunk_bytes)
        if not one.pushes:
            del self._all[said.number]

    def lost(self) -> None:
        """The mover is a new process. What it was not told of yet waits for it."""
        for number, one in list(self._all.items()):
            if one.is_told and not one.has_ended:
                del self._all[number]
                self._counters.prefetches_dropped += 1
