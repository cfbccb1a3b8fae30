"""How long calls take, per route: a histogram that costs one bisection and two additions per call.

Invariant: the counts of a route's buckets sum to its calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvdock.api.record.counters import Counters
from kvdock.protocol.events import Event, Refused

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class RouteTimes(NamedTuple):
    method: str
    route: str
    """The path's template; "" for calls that matched no route."""
    cumulative: list[tuple[str, int]]
    """(upper bound in seconds, calls that took no longer), the last bound being +Inf."""
    total_s: float


class Timings:
    """Used from the event loop only; bounded by the number of routes."""

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
        for (method, route), counts in sorted(self._counts.items()):
            cumulative, so_far = [], 0
            for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts, strict=True):
                so_far += count
                cumulative.append((bound, so_far))
            yield RouteTimes(method, route, cumulative, self._totals_ns[method, route] / 1e9)


class Meter(NamedTuple):
    """What every answer adds to: its time, and a count if it is a refusal."""

    counters: Counters
    timings: Timings
    now_ns: Callable[[], int]
    refusals: dict[str, int]
    """By code; they sum to the counter."""
    tell: Callable[[Event], None]

    def refuse(self, code: str, detail: str, route: str = "") -> None:
        """`route`: the method and the path's template."""
        self.counters.refusals += 1
        self.refusals[code] = self.refusals.get(code, 0) + 1
        self.tell(Refused(code=code, route=route, detail=detail))
