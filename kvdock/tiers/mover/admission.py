"""Decides which chunks are written to lower tiers: those that prompts ask for again, within a budget of writes.

How often each chunk was asked for is counted in two tables. When the newer one is full, the older one is forgotten (as
in Einziger et al., TinyLFU, 2017, whose counts age by halving). So a chunk that was asked for once, long ago, counts as
new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

MOST_COUNTED = 1 << 18
"""The most keys in one table."""
MOST_EVICTED = 1 << 16
DAY_S = 86400.0
LEAST_SHARE = 0.25
"""As long as at least this share of the chunks that were evicted after one lookup is asked for again, all chunks are
written: computing one chunk costs an engine about as much as storing four costs a disk."""
JUDGED, MOST_JUDGED = 64, 2048
"""The share is computed from at least JUDGED chunks; beyond twice MOST_JUDGED, older chunks count half."""


class AskCounts:
    """Thread-safe. `wanted`: how often a chunk must have been asked for; 0: once or twice, whichever pays."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._returns = Returns()

    def asked(self, keys: Sequence[bytes]) -> None:
        """A lookup has asked for these chunks."""
        if self._wanted == 1:
            return
        with self._lock:
            for key in keys:
                self._new[key] = self._new.get(key, 0) + 1
            if len(self._new) >= MOST_COUNTED:
                self._old, self._new = self._new, {}
            self._returns.asked(keys)

    def evicted(self, keys: Iterable[bytes], capacity: int) -> None:
        """The pool has evicted these chunks. `capacity`: how many chunks fit into the tiers."""
        if self._wanted == 0:
            with self._lock:
                self._returns.evicted((key for key in keys if self._count(key) <= 1), capacity)

    def worth(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The chunks of `keys` that have been asked for often enough."""
        wanted = self._wanted or (1 if self._returns.pay else 2)
        return keys if wanted == 1 else [key for key in keys if self._count(key) >= wanted]

    def _count(self, key: bytes) -> int:
        return self._new.get(key, 0) + self._old.get(key, 0)


class WriteBudget:
    """How much may be written to a storage that wears out: `day_bytes` in a day, which come evenly, and add up to a
    day's if they are not spent. A new mover begins with an hour's. `day_bytes` 0: there is no limit. `written_bytes`:
    returns what was written so far. `now_s`: a monotonic clock, in seconds."""

    def __init__(self, day_bytes: int, written_bytes: Callable[[], int], now_s: Callable[[], float]) -> None:
        self.day_bytes = day_bytes
        self._written_bytes, self._now_s, self._lock = written_bytes, now_s, threading.Lock()
        self._left, self._counted, self._at_s = day_bytes / 24, written_bytes(), now_s()

    @property
    def left_bytes(self) -> int:
        """Below 0 if more was written than allowed; then nothing is written until it is made up for."""
        with self._lock:
            now_s, written = self._now_s(), self._written_bytes()
            earned = self.day_bytes * (now_s - self._at_s) / DAY_S
            self._left = min(self.day_bytes, self._left + earned - (written - self._counted))
            self._at_s, self._counted = now_s, written
            return int(self._left)

    @property
    def is_spent(self) -> bool:
        return self.day_bytes > 0 and self.left_bytes <= 0


class Returns:
    """Whether chunks that the pool evicts after one lookup are asked for again while a tier would still have them. The
    answer is yes until enough chunks have been seen. Not thread-safe."""

    def __init__(self) -> None:
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._returned, self._stayed_away = 0, 0
        self.pay = True

    def asked(self, keys: Sequence[bytes]) -> None:
        returned = [key for key in keys if key in self._evicted]
        for key in returned:
            del self._evicted[key]
        self._judge(len(returned), 0)

    def evicted(self, keys: Iterable[bytes], capacity: int) -> None:
        self._evicted.update(dict.fromkeys(keys))
        late = max(0, len(self._evicted) - min(capacity, MOST_EVICTED))
        for _ in range(late):
            self._evicted.popitem(last=False)
        self._judge(0, late)

    def _judge(self, returned: int, stayed_away: int) -> None:
        self._returned += returned
        self._stayed_away += stayed_away
        if (total := self._returned + self._stayed_away) >= JUDGED:
            self.pay = self._returned >= LEAST_SHARE * total
        if total > 2 * MOST_JUDGED:
            self._returned, self._stayed_away = self._returned // 2, self._stayed_away // 2
