"""Where prompts' tokens came from, summed by tenant and model: since the server's start, and by day. The days are kept
with the pool, so the next server of the pool goes on with them.

Used from the event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from kvdock.api.pool.sums import Hits
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.reports import DayOfHits

MOST_DAYS = 400
MOST_MODELS = 64
"""Pairs of tenant and model that are counted apart, since the start and on each day; the others together are OTHERS."""
OTHERS = ("", "(others)")

Key = tuple[str, str]
"""(tenant, model)"""


LATELY_S, SPANS_LATELY = 3600.0, 12
MOST_ENGINES = 256
"""Engines that are counted apart in each span of the last hour; the others are together."""


class Whose(NamedTuple):
    """Whose requests have ended. `name`: its label or session."""

    tenant: str
    model: str
    name: str


OTHER_ENGINES = Whose(*OTHERS, OTHERS[1])


class Lately:
    """The last hour by engine, in spans of five minutes: what is right or wrong now, whatever was before."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._spans: deque[tuple[float, dict[Whose, Hits]]] = deque(maxlen=SPANS_LATELY)
        """Each with its beginning, in Unix seconds."""

    def ended(self, engine: Whose, outcome: OutcomeView) -> None:
        now_s = self._wall_s()
        if not self._spans or not 0 <= now_s - self._spans[-1][0] < LATELY_S / SPANS_LATELY:
            self._spans.append((now_s, {}))
        _, span = self._spans[-1]
        if engine not in span and len(span) >= MOST_ENGINES:
            engine = OTHER_ENGINES
        span.setdefault(engine, Hits()).ended(outcome)

    def sums(self, sees: Callable[[str], bool]) -> dict[Whose, Hits]:
        """What engines did whose tenants the caller sees."""
        now_s, found = self._wall_s(), dict[Whose, Hits]()
        for began_s, span in self._spans:
            if abs(now_s - began_s) <= LATELY_S:
                for engine, hits in span.items():
                    if sees(engine.tenant):
                        found.setdefault(engine, Hits()).add(hits.view())
        return found


class HitRecord:
    """`wall_s`: Unix seconds; days are those of the server's time zone."""

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self.total = Hits()
        self.by_model: dict[Key, Hits] = {}
        self.lately = Lately(wall_s)
        self._wall_s = wall_s
        self._days: OrderedDict[str, dict[Key, Hits]] = OrderedDict()
        """By date, as 2026-11-25; the oldest first."""
        self._encoded: dict[str, bytes] = {}
        """Days that are over, as they are kept: to encode all of them each minute would take too long."""

    def ended(self, engine: Whose, outcome: OutcomeView) -> None:
        tenant, model, _ = engine
        self.total.ended(outcome)
        self.lately.ended(engine, outcome)
        _of(self.by_model, (tenant, model)).ended(outcome)
        today = self.today
        if today not in self._days:
            self._add_day(today)
        _of(self._days[today], (tenant, model)).ended(outcome)

    @property
    def today(self) -> str:
        """As dates of days are written."""
        return date_of(self._wall_s())

    def _add_day(self, date: str) -> None:
        self._days[date] = {}
        if len(self._days) > MOST_DAYS:
            oldest, _ = self._days.popitem(last=False)
            self._encoded.pop(oldest, None)

    def days(self, sees: Callable[[str], bool], most: int = MOST_DAYS) -> list[DayOfHits]:
        """The last `most` days, oldest first, of the tenants that the caller sees. A day takes some tenths of a ms."""
        return [day for date in reversed(self.dates()[:most]) for day in self.on(date, sees)]

    def dates(self) -> list[str]:
        """Newest first."""
        return list(reversed(self._days))

    def on(self, date: str, sees: Callable[[str], bool] = lambda tenant: True) -> list[DayOfHits]:
        """The tenants' that the caller sees; empty: nothing is known of that day."""
        return [
            DayOfHits(date=date, tenant=tenant, model=model, hits=hits.view())
            for (tenant, model), hits in self._days.get(date, {}).items() if sees(tenant)
        ]

    # ---------------------------------------------------------------- kept with the pool

    @property
    def has_changed(self) -> bool:
        """It is kept with each value of the series."""
        return False

    def kept(self) -> Iterator[bytes]:
        before, newest = b"[", next(reversed(self._days), "")
        for date in list(self._days):
            if date not in self._encoded or date == newest:
                self._encoded[date] = msgspec.json.encode(self.on(date))
            yield before
            yield self._encoded[date]
            before = b","
        yield b"]" if newest else b"[]"

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with the days of an earlier server. Raises msgspec.MsgspecError."""
        for of_day in msgspec.json.decode(kept, type=list[list[DayOfHits]]):
            for day in of_day:
                if day.date not in self._days:
                    self._add_day(day.date)
                _of(self._days[day.date], (day.tenant, day.model)).add(day.hits)


def date_of(wall_s: float) -> str:
    """As 2026-11-25, in the server's time zone."""
    return time.strftime("%Y-%m-%d", time.localtime(wall_s))


def _of(by_model: dict[Key, Hits], key: Key) -> Hits:
    if key not in by_model and len(by_model) >= MOST_MODELS:
        key = OTHERS
    return by_model.setdefault(key, Hits())
