"""Whether the server works: the event loop turns, and the keeper makes its rounds.

`watch` is a task of its own. It asks to be woken every tenth of a second. The delay beyond that is how long something
else occupied the loop, and so how long a call would have waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WATCH_S = 0.1
WINDOW_S = 10.0


class Pulse:
    """`now_ns`: a clock that never goes back. Used from the event loop only."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._round_ns = now_ns()
        self._window_ns = now_ns()
        self._worst_s = 0.0
        self._worst_before_s = 0.0

    def made_round(self) -> None:
        """Called by the keeper after each round."""
        self._round_ns = self._now_ns()

    @property
    def since_round_s(self) -> float:
        return (self._now_ns() - self._round_ns) / 1e9

    @property
    def worst_lag_s(self) -> float:
        """The longest time that the loop was occupied, within the last ten to twenty seconds."""
        return max(self._worst_s, self._worst_before_s)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            asked_ns = self._now_ns()
            await asyncio.sleep(WATCH_S)
            now_ns = self._now_ns()
            self._worst_s = max(self._worst_s, (now_ns - asked_ns) / 1e9 - WATCH_S)
            if now_ns - self._window_ns > WINDOW_S * 1e9:
                self._window_ns, self._worst_before_s, self._worst_s = now_ns, self._worst_s, 0.0
