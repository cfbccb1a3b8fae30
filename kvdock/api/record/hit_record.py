"""Where prompts' tokens came from, summed by tenant and model: since the server's start, and by day. The days are kept
with the pool, so the next server of the pool goes on with them.

Used from the event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

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


class HitRecord:
    """`wall_s`: Unix seconds; days are those of the server's time zone."""

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self.total = Hits()
        self.by_model: dict[Key, Hits] = {}
        self._wall_s = wall_s
        self._days: OrderedDict[str, dict[Key, Hits]] = OrderedDict()
        """By date, as 2026-11-25; the oldest first."""
        self._encoded: dict[str, bytes] = {}
        """Days that are over, as they are kept: to encode all of them each minute would take too long."""

    def ended(self, tenant: str, model: str, outcome: OutcomeView) -> None:
        self.total.ended(outcome)
        _of(self.by_model, (tenant, model)).ended(outcome)
        today = time.strftime("%Y-%m-%d", time.localtime(self._wall_s()))
        if today not in self._days:
            self._add_day(today)
        _of(self._days[today], (tenant, model)).ended(outcome)

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


def _of(by_model: dict[Key, Hits], key: Key) -> Hits:
    if key not in by_model and len(by_model) >= MOST_MODELS:
        key = OTHERS
    return by_model.setdefault(key, Hits())
