"""Lets one node of several load a prefix from a store that they share, and the others read it from each other's pools.

A request's fetch that is about to load from such a store claims the prefix (kvdock/tiers/stores/peers/claims.py). If
other nodes have claimed it before, it is told one of them as its source, and follows: it loads from that node's pool
what has come there, and tells the next ones that it comes here. It goes to the store itself as soon as the source says
that no more comes, does not answer, or is slower than the store would be if all of them read there. Each node waits for
nodes of a smaller depth alone, so nobody waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Deadline, Place, SharesPool

STALL_S: Final = 0.5
"""For so long a fetch waits for the next chunk of the node that loads, and so much longer for each node between them:
where that one fails, those that read from it load first, and the others need not."""
LAGS: Final = 4
"""So many times the time that the source takes to answer come on top: where it is busy, its chunks come later, too."""
SLOW_S: Final = 10.0
"""For so long nobody is followed after another node was slower."""
WAIT_SHARE: Final = 0.5
"""The most of the request's time left that is spent on waiting for the next chunk."""
SHORTEST_S: Final = 0.15
"""With less time than this the other node is not asked: it would answer at once instead of waiting for a chunk."""
SILENT, NO_MORE = "it does not answer", "no more comes there"
SLOWER, STALLED = "the store is much quicker", "the next chunk does not come"
LEAST_BYTES: Final = 1 << 20
"""Smaller prefixes are loaded by each node itself: following would take longer, and spares the store little."""


class Following:
    """What comes at the source of `at`, for a fetch that would load `names` from `store`. Each of `names` is one part
    of a chunk of `chunk_bytes`. `clock`: a monotonic clock, in seconds."""

    def __init__(
        self, peers: SharesPool, at: Place, store: TierHandle, names: Sequence[PartName], *, chunk_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._peers, self._at, self._store, self._names = peers, at, store, names
        self._chunk_bytes, self._clock = chunk_bytes, clock
        self._began_s = self._came_s = clock()
        self._lease = 0
        self.why = ""
        """Why nothing more is read there."""

    def there(self, at: int, most: int, deadline: Deadline) -> int:
        """How many chunks from number `at` on the other node has, `most` at most. They are held there until the next
        call. 0: the rest is to be loaded from the store."""
        while (left_s := self._left_s(at, most, deadline)) >= SHORTEST_S:
            asked_s = self._clock()
            found = self._peers.coming(self._at, self._names[at : at + most], self._lease, Deadline(left_s))
            if found is None:
                if self._clock() - asked_s < SHORTEST_S:  # it cannot be asked; else its answer is late
                    self.why = SILENT
                    break
                continue
            self._lease = found.lease
            if found.there:
                return found.there
            if not found.expected:
                self.why = NO_MORE
                break
        return 0

    def came(self) -> None:
        """What was there is in this pool."""
        self._came_s = self._clock()

    def close(self) -> None:
        if self._lease:
            self._peers.release(self._at.source, self._lease, self._names[0])

    def _left_s(self, at: int, most: int, deadline: Deadline) -> float:
        now_s, steps = self._clock(), max(1, self._at.depth)
        patience_s = steps * (STALL_S + LAGS * self._peers.lag_s(self._at.source))
        left_s = min(self._came_s + patience_s - now_s, WAIT_SHARE * deadline.left_s)
        if self._store.fetches.count:  # else its speed is not known
            store_s = self._store.expected_s(min(at + most, len(self._names)) * self._chunk_bytes)
            fair_s = self._began_s + patience_s - now_s
            if fair_s + self._at.nodes * store_s < SHORTEST_S:
                self._ask_again(deadline)
            if fair_s + self._at.nodes * store_s < SHORTEST_S:
                self.why = SLOWER
            left_s = min(left_s, fair_s + self._at.nodes * store_s)
        self.why = self.why or (STALLED if left_s < SHORTEST_S else "")
        return left_s

    def _ask_again(self, deadline: Deadline) -> None:
        """More nodes may want the prefix by now, with which this one would share the store."""
        at = self._peers.claim(self._names[0], Deadline(min(SHORTEST_S, deadline.left_s)))
        if at.source == self._at.source:
            self._at = at
