"""How long things take: calls by route, loads and stores, and turns of the event loop.

All of it is bounded, and used from the event loop only. To record a call costs one bisection and two additions.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import NamedTuple

from kvdock.api.record.counters import Counters
from kvdock.protocol.events import Event, Loaded, Refused, Stored

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Upper bounds of the buckets for calls."""
GRANT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets for loads and stores."""
WATCH_S = 0.1
WINDOW_S = 10.0

Buckets = list[tuple[str, int]]
"""(upper bound in seconds, how many took no longer), in rising order; the last bound is +Inf."""


class RouteTimes(NamedTuple):
    method: str
    route: str
    """The path's template; "" for calls that matched no route."""
    cumulative: Buckets
    total_s: float


class Timings:
    """The times of calls. Invariant: the counts of a route's buckets sum to its calls."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._totals_ns: dict[tuple[str, str], int] = {}

    def add(self, method: str, route: str, took_ns: int) -> None:
        key = (method, route)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(BOUNDS_S) + 1)
            self._totals_ns[key] = 0
        counts[bisect_left(BOUNDS_S, took_ns / 1e9)] += 1
        self._totals_ns[key] += took_ns

    def view(self) -> Iterator[RouteTimes]:
        """By method and route, in their order."""
        for (method, route), counts in sorted(self._counts.items()):
            yield RouteTimes(method, route, _cumulative(BOUNDS_S, counts), self._totals_ns[method, route] / 1e9)


class Meter(NamedTuple):
    """The figures that every answer adds to: its time, and a count if it is a refusal."""

    counters: Counters
    timings: Timings
    now_ns: Callable[[], int]
    refusals: dict[str, int]
    """By code; they sum to the counter."""
    publish: Callable[[Event], None]

    def refuse(self, code: str, detail: str, route: str = "") -> None:
        """`route`: the method and the path's template."""
        self.counters.refusals += 1
        self.refusals[code] = self.refusals.get(code, 0) + 1
        self.publish(Refused(code=code, route=route, detail=detail))


class GrantTimes:
    """The times of loads and stores, from their events.

    A load lasts from the answer that gave the lease until the last rank has released it, a store from the answer that
    gave the slots until its chunks are published. Both include the time that the engine waits and copies.
    """

    name = "metrics"
    kinds: Collection[type[Event]] = frozenset({Loaded, Stored})

    def __init__(self) -> None:
        self._counts: dict[type[Event], list[int]] = {kind: [0] * (len(GRANT_BOUNDS_S) + 1) for kind in self.kinds}
        self._totals_us: dict[type[Event], int] = dict.fromkeys(self.kinds, 0)

    def take(self, event: Event) -> None:
        assert isinstance(event, Loaded | Stored)
        self._counts[type(event)][bisect_left(GRANT_BOUNDS_S, event.took_us / 1e6)] += 1
        self._totals_us[type(event)] += event.took_us

    def view(self, kind: type[Event]) -> tuple[Buckets, float]:
        """(the buckets of all events of `kind`, the sum of their times in seconds)."""
        return _cumulative(GRANT_BOUNDS_S, self._counts[kind]), self._totals_us[kind] / 1e6


def _cumulative(bounds_s: tuple[float, ...], counts: list[int]) -> Buckets:
    return list(zip((*map(str, bounds_s), "+Inf"), accumulate(counts), strict=True))


class Pulse:
    """Whether the server works: the event loop turns, and the keeper makes its rounds.

    `watch` is a task of its own. It asks to be woken every WATCH_S. The delay beyond that is how long something else
    occupied the loop, and so how long a call would have waited.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """`now_ns`: a clock that never goes back."""
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
