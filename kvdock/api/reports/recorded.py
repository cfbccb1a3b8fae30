"""What reports see of the records: these protocols have no method that records anything.

kvdock/api/record/ and kvdock/api/feeds/ implement them; kvdock/api/build.py passes the real objects. Reports import
only values of those folders, which tests/house/test_imports.py checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from kvdock.api.access.peer import Peer
from kvdock.api.pool.registry import Hits, NamespaceRecord
from kvdock.api.record.beginnings import Alike, Held
from kvdock.api.record.counters import Counted, Counters
from kvdock.api.record.hits import Whose
from kvdock.api.record.labels import Chunk
from kvdock.api.record.requests import Detail
from kvdock.api.record.timings import Buckets, RouteTimes
from kvdock.api.record.troubles import Trouble
from kvdock.protocol.events import Event
from kvdock.protocol.reports import Curve, DayOfHits, Over, RequestView, SpaceCurve, Stats, TroubleKind


class Recent(Protocol):
    """The recent requests, newest first: `RecentRequests`. `sees`: whether the caller may know of a tenant."""

    async def view(
        self, limit: int, cursor: int, sees: Callable[[str], bool], request: str = ""
    ) -> tuple[list[RequestView], str | None]: ...

    async def named(
        self, request: str, sees: Callable[[str], bool], most: int
    ) -> list[tuple[RequestView, Detail]]: ...


class Beginnings(Protocol):
    """Where prompts with the same first tokens are stored: `Beginnings`."""

    def alike(self, beginnings: str, space: NamespaceRecord) -> Alike: ...

    def holding(self, beginnings: str) -> Iterator[Held]: ...


class Labels(Protocol):
    """The labels of prefixes: `Labels`."""

    def chunks(self) -> list[Chunk]: ...


class Troubles(Protocol):
    """What went wrong last: `Troubles`."""

    def within(self, kind: TroubleKind, seconds: float) -> list[Trouble]: ...


class Totals(Protocol):
    """What all calls did since the start: `Tally`."""

    @property
    def hits(self) -> HitRecord: ...

    def totals(self) -> Counters: ...

    async def catch_up(self) -> None: ...


class HitRecord(Protocol):
    """Where the tokens of prompts came from: `HitRecord`."""

    @property
    def total(self) -> Hits: ...

    @property
    def by_model(self) -> Mapping[tuple[str, str], Hits]:
        """By tenant and model, since the server's start."""

    @property
    def lately(self) -> Lately: ...

    @property
    def today(self) -> str: ...

    async def days(self, sees: Callable[[str], bool], most: int = ...) -> list[DayOfHits]: ...

    def dates(self) -> list[str]: ...

    def on(self, date: str, sees: Callable[[str], bool] = ...) -> list[DayOfHits]: ...


class Lately(Protocol):
    """The last hour: `Lately`."""

    async def sums(self, sees: Callable[[str], bool]) -> dict[Whose, Hits]:
        """By engine."""


class Series(Protocol):
    """The time series: `History`."""

    @property
    def unkept(self) -> str: ...

    def view(self, over: Over, now_s: float) -> Stats: ...

    def filling_bytes_per_s(self) -> float | None: ...


class Curves(Protocol):
    """The hit shares of simulated pools."""

    @property
    def distances(self) -> Counted: ...

    async def total(self, peer: Peer) -> SpaceCurve: ...
    async def view(self, peer: Peer) -> Curve: ...


class Loop(Protocol):
    """Whether the server works: `Pulse`."""

    @property
    def since_round_s(self) -> float: ...

    @property
    def worst_lag_s(self) -> float: ...


class CallTimes(Protocol):
    """`Timings`."""

    def view(self) -> Iterator[RouteTimes]: ...


class Answers(Protocol):
    """The figures to which answers add: `Meter`."""

    @property
    def refusals(self) -> Mapping[str, int]:
        """By code."""

    @property
    def timings(self) -> CallTimes: ...


class GrantTimes(Protocol):
    """The times of loads and stores."""

    def view(self, kind: type[Event]) -> tuple[Buckets, float]: ...


class FeedFigures(Protocol):
    """Counts of events: `Feeds`."""

    async def catch_up(self) -> None:
        """Hands out the events that wait, in slices, so that all figures are of now."""

    @property
    def grant_times(self) -> GrantTimes: ...

    @property
    def published(self) -> Mapping[type[Event], int]: ...

    @property
    def dropped(self) -> int: ...

    @property
    def spans(self) -> Mapping[str, int]: ...

    @property
    def kv_chunks(self) -> int: ...

    @property
    def kv_snapshots(self) -> int: ...
