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


def cut(keys: bytes) -> Iterator[bytes]:
    """Keys that stand in a row."""
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


class AskCounts:
    """Thread-safe. `wanted`: so often a chunk must have been asked for."""

    def __init__(self, wanted: int, most: int = MOST_COUNTED) -> None:
        self._wanted, self._most = wanted, most
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def asked(self, keys: Iterable[bytes]) -> None:
        if self._wanted == 1:
            return
        with self._lock:
            for key in keys:
                self._new[key] = self._new.get(key, 0) + 1
            if len(self._new) >= self._most:
                self._old, self._new = self._new, {}

    def worth(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those that have been asked for so often."""
        if self._wanted == 1:
            return keys
        new, old, wanted = self._new, self._old, self._wanted
        return [key for key in keys if new.get(key, 0) + old.get(key, 0) >= wanted]


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
