"""Whether a request's hit is worth loading: what its load would take, against what computing its tokens would take.

What loads take is learned from those that ended: a fixed time and a time for each token, the line through them with the
least squares, in which older loads count less and less. So a bus that others keep busy shows, and so does a slow copy.
What computing takes is the speed of the engine's own steps (PrefillSpeed). Until both are known, every hit is loaded.

If no load has been made for PROBE_S, the next hit is loaded whatever was learned, for the bus may be free again.

Threads: the engine's, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdock.connectors.prefill_speed import PrefillSpeed

PROBE_S = 10.0
"""How long hits may be computed before one is loaded, to see what loads take now."""
LEAST_LOADS = 3
"""Fewer loads say too little."""
KEPT_SHARE = 0.9
"""What the older loads count for when a new one is added."""


class LoadCost:
    """How many seconds a load takes, by its number of tokens: the line through the loads that have ended."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def loaded(self, tokens: int, seconds: float) -> None:
        self._count += 1
        kept = KEPT_SHARE
        self._weight = kept * self._weight + 1.0
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self._squares = kept * self._squares + tokens * tokens
        self._products = kept * self._products + tokens * seconds

    def seconds(self, tokens: int) -> float | None:
        """None: too few loads have ended."""
        if self._count < LEAST_LOADS:
            return None
        spread = self._weight * self._squares - self._tokens**2
        slope = self._seconds / self._tokens  # where all are of one length, and where a line would begin below zero
        if spread > 1e-6 * self._weight * self._squares:
            fitted = (self._weight * self._products - self._tokens * self._seconds) / spread
            slope = min(max(0.0, fitted), slope)
        fixed = (self._seconds - slope * self._tokens) / self._weight
        return fixed + slope * tokens


class LoadOrCompute:
    """`speed`: of the engine's prefill. `clock`: seconds, monotonic."""

    def __init__(self, speed: PrefillSpeed, clock: Callable[[], float]) -> None:
        self._speed, self._clock, self._cost = speed, clock, LoadCost()
        self._newest_s = clock()

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` has ended. It took `seconds`, counted from the moment when it could begin."""
        self._cost.loaded(tokens, seconds)
        self._newest_s = self._clock()

    def is_dearer(self, tokens: int) -> bool:
        """Whether it takes longer to load `tokens` than to compute them."""
        load_s = self._cost.seconds(tokens)
        if load_s is None or not self._speed.is_known or load_s * self._speed.tokens_per_s <= tokens:
            return False
        if self._clock() - self._newest_s < PROBE_S:
            return True
        self._newest_s = self._clock()
        return False
