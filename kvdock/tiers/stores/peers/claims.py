"""Which of the nodes that want one prefix loads it from the store that they share. The others read it in its pool.

Each prefix has a keeper, which all nodes find by a hash of its first missing chunk and of the nodes' names. A node that
is about to load asks the keeper: the first one loads, and the others are told its name for CLAIM_S. The keeper waits
for nobody, and may be the one that loads. If two nodes take different ones for the keeper, two may load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final

CLAIM_S: Final = 5.0
"""For so long after its last claim a node counts as the one that loads. By then it has the first chunks."""
MOST_CLAIMS: Final = 1 << 14


def keeper_of(key: bytes, nodes: Iterable[str]) -> str:
    """The node that knows who loads the chunk `key` and those after it. If a node goes, other nodes' keys stay."""
    return max(nodes, key=lambda node: blake2b(node.encode(), key=key[:32], digest_size=8).digest())


class Claims:
    """`clock`: a monotonic clock, in seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._loaders: OrderedDict[tuple[bytes, int, bytes], tuple[str, float]] = OrderedDict()
        """The loader by namespace, generation and key, and until when it counts. The one that ends first comes
        first."""

    def claim(self, namespace: bytes, generation: int, key: bytes, claimer: str) -> str:
        """Returns the name of the node that loads: `claimer`, if no other one has asked in the last CLAIM_S."""
        at = namespace, generation, key
        with self._lock:
            now_s = self._clock()
            loader, until_s = self._loaders.get(at, (claimer, 0.0))
            if loader != claimer and until_s > now_s:
                return loader
            self._loaders[at] = claimer, now_s + CLAIM_S
            self._loaders.move_to_end(at)
            while len(self._loaders) > MOST_CLAIMS or next(iter(self._loaders.values()))[1] <= now_s:
                self._loaders.popitem(last=False)
            return claimer
