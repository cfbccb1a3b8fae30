"""How fast this engine computes prompts: by the time between the steps that it plans, or by that of each step.

Threads: the engine's, one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

START_TOKENS_PER_S = 50_000.0
"""Until this engine's speed is known. A fast engine waits least."""
KEPT_SHARE = 0.9
"""What the older steps count for when a new one is added to the speed."""
LARGE_SHARE = 0.5
"""Steps that compute less of prompts than this share of the largest one are not counted: they take as long for less."""


class PrefillSpeed:
    """How many tokens of prompts this engine computes in a second. `clock`: seconds, monotonic. `ahead`: how many steps
    are under way when the engine plans another one. It plans the next one when the oldest of them has ended."""

    def __init__(self, clock: Callable[[], float], ahead: int = 0) -> None:
        self._clock = clock
        self._largest = 0
        self._tokens = self._seconds = 0.0
        self._planned_s, self._under_way = 0.0, deque([0], maxlen=ahead + 1)

    def step(self, tokens: int) -> None:
        """A step that computes `tokens` of prompts is planned, so the oldest one under way has ended."""
        now_s, ended = self._clock(), self._under_way[0] if len(self._under_way) == self._under_way.maxlen else 0
        self.ended(ended, now_s - self._planned_s)
        self._planned_s = now_s
        self._under_way.append(tokens)

    def ended(self, tokens: int, seconds: float) -> None:
        """A step that took `seconds` has computed `tokens` of prompts."""
        if tokens > self._largest / LARGE_SHARE:  # the first large one: smaller ones say little
            self._tokens = self._seconds = 0.0
        self._largest = max(self._largest, tokens)
        if tokens and tokens >= LARGE_SHARE * self._largest:
            self._tokens = KEPT_SHARE * self._tokens + tokens
            self._seconds = KEPT_SHARE * self._seconds + seconds

    @property
    def is_known(self) -> bool:
        return self._seconds > 0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self.is_known else START_TOKENS_PER_S
