"""What is counted after a call was answered, so that its caller does not wait for that.

Lookups that were answered are counted before the next call changes the table, in the order of their answers. The
curves' simulated pools do not depend on the table: only whoever reads the curves waits until they have seen all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvdock.api.turns import SLICE_S, Slices

MOST_SIMULATIONS: Final = 64
"""How many lookups and stores wait for the curves at most: a turn may bring more of them than it simulates."""


class Later:
    """Counts in later turns of the event loop, for SLICE_S in each."""

    def __init__(self, go_on: Callable[[], bool]) -> None:
        """`go_on`: does a further part of what was simulated last; returns whether that is not the last part."""
        self._go_on = go_on
        self._is_simulating = False
        self._answered: deque[Callable[[], None]] = deque()
        self._simulations: deque[Callable[[], None]] = deque()
        self._begun = 0
        """How many simulations have begun."""
        self._slice: asyncio.Handle | None = None
        """The next one; None: nothing waits."""

    def count(self, count: Callable[[], None]) -> None:
        """Counts a lookup that was answered."""
        self._answered.append(count)
        self._begin()

    def simulate(self, simulate: Callable[[], None]) -> None:
        """Shows a lookup or a store to the curves. If too many wait, the oldest does not wait any more."""
        self._simulations.append(simulate)
        if len(self._simulations) > MOST_SIMULATIONS:
            self._simulate_oldest()
        self._begin()

    def count_answered(self) -> None:
        while self._answered:
            self._answered.popleft()()

    async def catch_up(self) -> None:
        """Counts and simulates all that waits now, in slices. What comes meanwhile need not be among it."""
        self.count_answered()
        slices, end = Slices(), self._begun + len(self._simulations)
        while self._begun < end or (self._begun == end and self._is_simulating):
            self._step()
            await slices.give_turn()
        if self._slice is not None and not self._waits:
            self._slice.cancel()
            self._slice = None

    @property
    def _waits(self) -> bool:
        return bool(self._answered or self._is_simulating or self._simulations)

    def _begin(self) -> None:
        if self._slice is None:
            self._slice = asyncio.get_running_loop().call_soon(self._count_slice)

    def _count_slice(self) -> None:
        began_s = time.thread_time()
        self._slice = None
        try:
            while time.thread_time() - began_s < SLICE_S:
                if not self._step():
                    return
        finally:  # what failed must not keep the rest waiting
            if self._waits:
                self._begin()

    def _step(self) -> bool:
        """Counts or simulates one of them, or a part of it. Returns whether there was one."""
        if self._answered:
            self._answered.popleft()()
        elif self._is_simulating:
            self._is_simulating = False  # if this part fails, the next lookup's turn comes
            self._is_simulating = self._go_on()
        elif self._simulations:
            self._is_simulating = True
            self._simulate_oldest()
        else:
            return False
        return True

    def _simulate_oldest(self) -> None:
        self._begun += 1
        self._simulations.popleft()()
