"""From where each of the nodes that want one prefix reads it: one from the store that they share, and each other one
from a node that has asked before.

Each prefix has a keeper, which all nodes find by a hash of its first missing chunk and of the nodes' names. A node that
is about to load asks the keeper. The first one loads, and the others are told a source for CLAIM_S: in the order in
which they ask they make a tree, in which READERS_EACH nodes read from each. The keeper waits for nobody, and may be the
one that loads. If two nodes take different ones for the keeper, two may load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvdock.tiers.tier import AT_STORE, Place

CLAIM_S: Final = 5.0
"""For so long after its last claim a node counts as the one that loads. By then it has the first chunks."""
MOST_CLAIMS: Final = 1 << 14
READERS_EACH: Final = 2
"""How many nodes read from one at the same time. The last of 63 is five steps away from the one that loads."""
MOST_NODES: Final = 256
"""How many nodes of one prefix are remembered."""


def keeper_of(key: bytes, nodes: Iterable[str]) -> str:
    """The node that knows who loads the chunk `key` and those after it. If a node goes, other nodes' keys stay."""
    return max(nodes, key=lambda node: rank(node, key[:32]))


def rank(node: str, by: bytes) -> bytes:
    """By this, nodes are in another order for each `by`, of 64 bytes at most."""
    return blake2b(node.encode(), key=by[:64], digest_size=8).digest()


@dataclass
class _Herd:
    """`nodes`: those that want the prefix, in the order in which they asked; the first one loads it. `until_s`: until
    when it counts."""

    until_s: float
    nodes: list[str] = field(default_factory=list)

    def place(self, node: str) -> Place:
        if node not in self.nodes[:MOST_NODES]:
            self.nodes[MOST_NODES:] = []
            self.nodes.append(node)
        at = self.nodes.index(node)
        if not at:
            return AT_STORE
        source, depth = (at - 1) // READERS_EACH, 1
        above = source
        while above:
            above, depth = (above - 1) // READERS_EACH, depth + 1
        return Place(self.nodes[source], depth, len(self.nodes))


class Claims:
    """`clock`: a monotonic clock, in seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._herds: OrderedDict[tuple[bytes, int, bytes], _Herd] = OrderedDict()
        """By namespace, generation and key. The one that ends first comes first."""

    def claim(self, namespace: bytes, generation: int, key: bytes, claimer: str) -> Place:
        """Returns the place of `claimer`: at the store, if no other one has asked in the last CLAIM_S."""
        at = namespace, generation, key
        with self._lock:
            now_s = self._clock()
            herd = self._herds.get(at)
            if herd is None or herd.until_s <= now_s:
                herd = self._herds[at] = _Herd(now_s + CLAIM_S)
            place = herd.place(claimer)
            if not place.source:
                herd.until_s = now_s + CLAIM_S
                self._herds.move_to_end(at)
            while len(self._herds) > MOST_CLAIMS or next(iter(self._herds.values())).until_s <= now_s:
                self._herds.popitem(last=False)
            return place
