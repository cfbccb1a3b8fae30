"""Which chunks are worth writing to lower tiers: those that prompts ask for again.

How often a chunk was asked for is counted in two generations of a table, of which the older is forgotten when the newer
is full (as in Einziger et al., TinyLFU, 2017, whose counts age by halving): what was asked for once, long ago, is new
again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvdock.protocol.wire_types import KEY_BYTES

MOST_COUNTED = 1 << 18
"""Keys in one generation."""
MOST_SETTLED = 1 << 18
MOST_GONE = 1 << 16
LEAST_SHARE = 0.25
"""Share of the chunks evicted after one asking that must come again for all of them to be written: to compute a chunk
anew costs an engine about what it costs a disk to take four."""
JUDGED, MOST_JUDGED = 64, 2048
"""So many such chunks tell at least; what is older than so many counts half."""


def cut(keys: bytes) -> Iterator[bytes]:
    """Keys that stand in a row."""
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


class AskCounts:
    """Thread-safe. `wanted`: so often a chunk must have been asked for; 0: once or twice, whichever pays."""

    def __init__(self, wanted: int, most: int = MOST_COUNTED) -> None:
        self._wanted, self._most = wanted, most
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._returns = Returns()

    def asked(self, keys: Sequence[bytes]) -> None:
        if self._wanted == 1:
            return
        with self._lock:
            for key in keys:
                self._new[key] = self._new.get(key, 0) + 1
            if len(self._new) >= self._most:
                self._old, self._new = self._new, {}
            self._returns.asked(keys)

    def evicted(self, keys: Iterable[bytes], room: int) -> None:
        """The pool has let go of them. `room`: how many chunks the tiers could have kept since."""
        if self._wanted == 0:
            with self._lock:
                self._returns.evicted((key for key in keys if self._count(key) <= 1), room)

    def worth(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those that have been asked for so often."""
        wanted = self._wanted or (1 if self._returns.pay else 2)
        return keys if wanted == 1 else [key for key in keys if self._count(key) >= wanted]

    def _count(self, key: bytes) -> int:
        return self._new.get(key, 0) + self._old.get(key, 0)


class Returns:
    """Whether what the pool evicts after one asking is asked for again while a tier would still have it. Until that is
    known it is taken to be. Not thread-safe."""

    def __init__(self) -> None:
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._came, self._stayed_away = 0, 0
        self.pay = True

    def asked(self, keys: Sequence[bytes]) -> None:
        came = [key for key in keys if key in self._gone]
        for key in came:
            del self._gone[key]
        self._judge(len(came), 0)

    def evicted(self, keys: Iterable[bytes], room: int) -> None:
        self._gone.update(dict.fromkeys(keys))
        late = max(0, len(self._gone) - min(room, MOST_GONE))
        for _ in range(late):
            self._gone.popitem(last=False)
        self._judge(0, late)

    def _judge(self, came: int, stayed_away: int) -> None:
        self._came += came
        self._stayed_away += stayed_away
        if (total := self._came + self._stayed_away) >= JUDGED:
            self.pay = self._came >= LEAST_SHARE * total
        if total > 2 * MOST_JUDGED:
            self._came, self._stayed_away = self._came // 2, self._stayed_away // 2


class Settled:
    """Chunks that a tier is known to have, so that nobody asks it; of the last `most`. Not thread-safe."""

    def __init__(self, most: int = MOST_SETTLED) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def lacking(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that it is not known to have."""
        settled = self._keys
        return [key for key in keys if key not in settled]

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
