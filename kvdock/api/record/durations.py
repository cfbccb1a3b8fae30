"""How long loads and stores take, from what the events say: histograms for `/metrics`.

A load is timed from the answer that gave the lease until the last rank has released it, a store from the answer that
gave the slots until its chunks were published. So both have the engine's own waiting and copying in them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from itertools import accumulate

from kvdock.protocol.events import Event, Loaded, Stored

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Durations:
    name = "metrics"
    kinds: Collection[type[Event]] = frozenset({Loaded, Stored})

    def __init__(self) -> None:
        self._counts: dict[type[Event], list[int]] = {kind: [0] * (len(BOUNDS_S) + 1) for kind in self.kinds}
        self._totals_us: dict[type[Event], int] = dict.fromkeys(self.kinds, 0)

    def take(self, event: Event) -> None:
        assert isinstance(event, Loaded | Stored)
        self._counts[type(event)][bisect_left(BOUNDS_S, event.took_us / 1e6)] += 1
        self._totals_us[type(event)] += event.took_us

    def view(self, kind: type[Event]) -> tuple[list[tuple[str, int]], float]:
        """([(upper bound in seconds, how many took no longer)], the last bound being +Inf; their sum in seconds)."""
        bounds = (*map(str, BOUNDS_S), "+Inf")
        return list(zip(bounds, accumulate(self._counts[kind]), strict=True)), self._totals_us[kind] / 1e6
