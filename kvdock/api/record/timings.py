"""How long things take: calls by route, loads and stores, and turns of the event loop.

All of it is bounded, and used from the event loop only. To record a call costs one bisection and two additions. Each
bucket of a histogram keeps the last call whose trace is known and recorded: an exemplar (OpenMetrics 1.0).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvdock.api.record.counters import Counters
from kvdock.protocol.events import Event, Loaded, Refused, Stored
from kvdock.protocol.wire_types import trace_context

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Upper bounds of the buckets for calls."""
GRANT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets for loads and stores."""
WATCH_S = 0.1
WINDOW_S = 10.0


class Exemplar(NamedTuple):
    """One thing that was timed, of a trace."""

    trace_id: str
    """32 hex digits."""
    took_s: float
    at: float
    """Unix seconds."""


class Bucket(NamedTuple):
    """`most`: the upper bound in seconds, or +Inf. `total`: how many took no longer. `last`: the last one of a trace
    that took longer than the bound before."""

    most: str
    total: int
    last: Exemplar | None


Buckets = list[Bucket]
"""In rising order of their bounds."""


class Durations:
    """A histogram of durations in seconds."""

    __slots__ = ("_bounds_s", "_counts", "_last", "total_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._last: dict[int, Exemplar] = {}
        """By the index of a bucket."""
        self.total_s = 0.0

    def add(self, took_s: float, traceparent: str, at: float) -> None:
        """`at`: Unix seconds."""
        bucket = bisect_left(self._bounds_s, took_s)
        self._counts[bucket] += 1
        self.total_s += took_s
        if traceparent and (context := trace_context(traceparent)) is not None and context.is_sampled:
            self._last[bucket] = Exemplar(f"{context.trace_id:032x}", took_s, at)

    def view(self) -> Buckets:
        bounds = (*map(str, self._bounds_s), "+Inf")
        return [
            Bucket(most, total, self._last.get(index))
            for index, (most, total) in enumerate(zip(bounds, accumulate(self._counts), strict=True))
        ]


class RouteTimes(NamedTuple):
    method: str
    route: str
    """The path's template; "" for calls that matched no route."""
    cumulative: Buckets
    total_s: float


class Timings:
    """The times of calls. Invariant: the counts of a route's buckets sum to its calls."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        """`wall_s`: Unix seconds."""
        self._wall_s = wall_s
        self._times: dict[tuple[str, str], Durations] = {}

    def add(self, method: str, route: str, took_ns: int, traceparent: str = "") -> None:
        times = self._times.get((method, route))
        if times is None:
            times = self._times[method, route] = Durations(BOUNDS_S)
        times.add(took_ns / 1e9, traceparent, self._wall_s())

    def view(self) -> Iterator[RouteTimes]:
        """By method and route, in their order."""
        for (method, route), times in sorted(self._times.items(), key=lambda item: item[0]):
            yield RouteTimes(method, route, times.view(), times.total_s)


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
        self._times = {kind: Durations(GRANT_BOUNDS_S) for kind in self.kinds}

    def take(self, event: Event) -> None:
        assert isinstance(event, Loaded | Stored)
        self._times[type(event)].add(event.took_us / 1e6, event.traceparent, event.at)

    def view(self, kind: type[Event]) -> tuple[Buckets, float]:
        """(the buckets of all events of `kind`, the sum of their times in seconds)."""
        return self._times[kind].view(), self._times[kind].total_s


class Pulse:
    """Whether the server works: the event loop turns, and the keeper makes its rounds.

    `watch` is a task of its own. It asks to be woken every WATCH_S. The delay beyond that is how long something else
    occupied the loop, and so how long a call would have waited.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """`now_ns`: a monotonic clock, in nanoseconds."""
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
