"""Which blocks the steps under way may still use, although they may have been given to another request since.

vLLM plans steps ahead. It keeps the blocks of a request that ended or was preempted until the steps are over that were
planned before (defer_block_free in its scheduler; since 0.24), but gives away at once what a window has left behind. A
load into such a block must come after those steps on the GPU. All other loads need not wait for what is computed.

What a step uses of a group lies behind what its request has computed, less the window.

Threads: vLLM's scheduler thread, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set


class InFlight:
    """`steps`: the most that may be under way when another one begins. `keeps_back`: vLLM keeps back what requests lose
    when they end or are preempted, so that only what windows leave behind is to be noted."""

    def __init__(self, steps: int, *, keeps_back: bool) -> None:
        self.keeps_back = keeps_back
        self._used: deque[set[int] | None] = deque([set()], maxlen=steps)
        """By step; None: it may use any."""

    def begin_step(self) -> None:
        self._used.append(set())

    def uses(self, blocks: Iterable[int | None]) -> None:
        """The newest step writes these, or steps under way may read them although their request has lost them."""
        used = self._used[-1]
        if used is not None:
            used.update(block for block in blocks if block is not None)

    def uses_any(self) -> None:
        """It is not known what the newest step writes."""
        self._used[-1] = None

    def touches(self, blocks: Set[int]) -> bool:
        return any(used is None or not used.isdisjoint(blocks) for used in self._used)
