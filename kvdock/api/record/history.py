"""Time series for people to read: of the last minutes, hours and days, each a ring of its own. All of it is bounded.

A series is a row of SERIES or TIER_SERIES; the status page draws all rows and knows none by name. Hours and days are
kept with the pool: in an object beside it (kvdock/api/pool/kept_object.py), from which the next server of the pool goes
on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from kvdock.api.clock import ServerClock, boot_s
from kvdock.api.pool.kept_object import KeptObject, Piece
from kvdock.api.pool.pool import Pool
from kvdock.api.record.counters import Counters
from kvdock.api.record.curve import Curves
from kvdock.api.record.tally import Tally
from kvdock.api.turns import Slices, next_slice
from kvdock.protocol.events import Event, LimitsChanged
from kvdock.protocol.reports import Mark, Over, PoolView, Series, Stats, TierView

log = logging.getLogger("kvdock.api")


class Sample(NamedTuple):
    """All that a series may be computed from, at one moment."""

    counters: Counters
    pool: PoolView
    tiers: list[TierView]
    elapsed_s: float


Unit = Literal["bytes", "chunks", "tokens", "ratio", "per_s", "bytes_per_s"]
Compute = Callable[[Sample, Sample], float | None]
"""(previous sample, this one) → value; None: there was nothing to measure."""


class SeriesSpec(NamedTuple):
    name: str
    title: str
    unit: Unit
    chart: str
    compute: Compute


def _rate(field: str) -> Compute:
    def per_second(before: Sample, after: Sample) -> float | None:
        grown = int(getattr(after.counters, field)) - int(getattr(before.counters, field))
        return grown / after.elapsed_s if after.elapsed_s > 0 else None

    return per_second


def _pool(field: str) -> Compute:
    return lambda before, after: float(getattr(after.pool, field))


def _tiers(counter: str) -> Compute:
    """The counter's rise per second, over all tiers. None where a tier's counter has started again."""

    def per_second(before: Sample, after: Sample) -> float | None:
        was = {tier.name: tier.counters.get(counter, 0) for tier in before.tiers}
        grown = [tier.counters.get(counter, 0) - was.get(tier.name, 0) for tier in after.tiers]
        return sum(grown) / after.elapsed_s if after.elapsed_s > 0 and min(grown, default=0) >= 0 else None

    return per_second


def _share(field: str) -> Compute:
    """The share of prompt tokens that are counted there."""

    def share(before: Sample, after: Sample) -> float | None:
        prompts = after.counters.prompt_tokens - before.counters.prompt_tokens
        part = int(getattr(after.counters, field)) - int(getattr(before.counters, field))
        return part / prompts if prompts > 0 else None

    return share


SERIES: tuple[SeriesSpec, ...] = (
    SeriesSpec("loaded_share", "Loaded from kvdock", "ratio", "Prompt tokens", _share("loaded_tokens")),
    SeriesSpec("local_share", "Engine's own cache", "ratio", "Prompt tokens", _share("local_tokens")),
    SeriesSpec("prompt_tokens", "In prompts", "per_s", "Tokens", _rate("prompt_tokens")),
    SeriesSpec("loaded_tokens", "Loaded", "per_s", "Tokens", _rate("loaded_tokens")),
    SeriesSpec("computed_tokens", "Computed", "per_s", "Tokens", _rate("computed_tokens")),
    SeriesSpec("lookup_tokens", "Asked for", "per_s", "Tokens", _rate("lookup_tokens")),
    SeriesSpec("stored_bytes", "Stored", "bytes_per_s", "Traffic", _rate("stored_bytes")),
    SeriesSpec("loaded_bytes", "Loaded", "bytes_per_s", "Traffic", _rate("loaded_bytes")),
    SeriesSpec("ready_bytes", "Ready", "bytes", "Pool", _pool("ready_bytes")),
    SeriesSpec("reserved_bytes", "Being written", "bytes", "Pool", _pool("reserved_bytes")),
    SeriesSpec("quarantined_bytes", "Quarantined", "bytes", "Pool", _pool("quarantined_bytes")),
    SeriesSpec("free_bytes", "Free", "bytes", "Pool", _pool("free_bytes")),
    SeriesSpec("lookups", "Lookups", "per_s", "Calls", _rate("lookups")),
    SeriesSpec("reservations", "Reservations", "per_s", "Calls", _rate("reservations")),
    SeriesSpec("evicted_chunks", "Evicted", "per_s", "Evictions", _rate("evicted_chunks")),
)
TIER_SERIES: tuple[SeriesSpec, ...] = (
    SeriesSpec("tier_stored_bytes", "Stored", "bytes_per_s", "Traffic of lower tiers", _tiers("stored_bytes")),
    SeriesSpec("tier_loaded_bytes", "Loaded", "bytes_per_s", "Traffic of lower tiers", _tiers("loaded_bytes")),
)
"""For servers that have tiers."""


class Level(NamedTuple):
    """The length and the resolution of a series."""

    name: Over
    interval_s: float
    values: int


KEPT_LEVELS = (Level("hours", 60.0, 720), Level("days", 1800.0, 672))
"""Half a day by the minute, two weeks by the half-hour."""


LATELY = 60
"""How many of the last values tell whether the pool still fills."""
START_S = 60.0
"""A view also has the marks of this many seconds before its first value: a server starts before its first sample."""


class _Rings:
    """A ring of values for each series."""

    def __init__(self, level: Level, specs: tuple[SeriesSpec, ...]) -> None:
        self.level, self._specs = level, specs
        self.values: list[deque[float | None]] = [deque(maxlen=level.values) for _ in specs]
        self._before: Sample | None = None
        self.sampled_at_s = 0.0
        self._stopped_s = 0.0
        """How long the server was stopped since the last value."""

    def sample(self, sample: Sample, now_s: float, stopped_s: float) -> bool:
        """Takes a value of each series if an interval has passed, and returns whether it did. The first sample gives no
        value: the second one is compared with it. `stopped_s`: how long the server was stopped since the sample
        before, for which there are no values."""
        elapsed_s = now_s - self.sampled_at_s
        self._stopped_s += stopped_s
        # An interval is some samples long, and those come a little late or early.
        if self._before is not None and elapsed_s < self.level.interval_s - sample.elapsed_s / 2:
            return False
        if self._before is not None:
            after, missed = sample._replace(elapsed_s=elapsed_s), round(self._stopped_s / self.level.interval_s)
            for spec, ring in zip(self._specs, self.values, strict=True):
                ring.extend([None] * min(missed, self.level.values))
                ring.append(spec.compute(self._before, after))
        is_first, self._before, self.sampled_at_s, self._stopped_s = self._before is None, sample, now_s, 0.0
        return not is_first

    @property
    def length_s(self) -> float:
        """How far back the values reach from the last one."""
        return self.level.interval_s * max(map(len, self.values), default=0)

    def view(self, now_s: float, marks: Marks | None = None) -> Stats:
        series = [
            Series(name=spec.name, title=spec.title, unit=spec.unit, chart=spec.chart, values=list(ring))
            for spec, ring in zip(self._specs, self.values, strict=True)
        ]
        age_s = max(0.0, now_s - self.sampled_at_s)
        known = [] if marks is None else marks.within(self.length_s + age_s + START_S)
        return Stats(interval_s=self.level.interval_s, age_s=age_s, series=series, marks=known)

    def kept(self, now_s: float) -> Iterator[Piece]:
        """A view as JSON, in pieces: one for each series."""
        whole = self.view(now_s)
        none = msgspec.json.encode(msgspec.structs.replace(whole, series=[]))
        before, after = none.split(b'"series":[')
        yield before + b'"series":['
        for number, series in enumerate(whole.series):
            yield b"," * (number > 0) + msgspec.json.encode(series)
        yield after

    def take_over(self, kept: Stats, missed: int) -> None:
        """Continues the series of an earlier server: `missed` intervals have passed without a value."""
        values = {series.name: series.values for series in kept.series}
        length = max(map(len, values.values()), default=0)
        for spec, ring in zip(self._specs, self.values, strict=True):
            known = values.get(spec.name, [])
            ring.extend([None] * (length - len(known)) + known + [None] * min(missed, self.level.values))


class KeptBeside(Protocol):
    """What is kept together with the history."""

    @property
    def has_changed(self) -> bool:
        """Whether it is to be kept now, rather than with the next value of the series."""

    def kept(self) -> Iterator[Piece]:
        """JSON, in pieces that are made in little time each."""

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with what an earlier server has kept. Raises msgspec.MsgspecError."""


class _Kept(msgspec.Struct):
    """The series as they are kept, and what is kept beside them, by name. `at_boot_s`: when, by boot_s."""

    at_boot_s: float
    levels: dict[Over, Stats]
    beside: dict[str, msgspec.Raw] = {}


class History:
    """`sample` is called once an interval of the finest level, by one task."""

    def __init__(
        self, values: int, interval_s: float, specs: tuple[SeriesSpec, ...] = SERIES, *, kept: KeptObject | None = None,
        beside: Mapping[str, KeptBeside] | None = None, boot_s: Callable[[], float] = boot_s,
    ) -> None:
        """`kept`: the object that keeps hours, days and marks; None: they end with the server. `beside`: by name, what
        the object keeps as well. `boot_s`: the time since this machine was started."""
        levels = (Level("minutes", interval_s, values), *KEPT_LEVELS)
        self._levels = {level.name: _Rings(level, specs) for level in levels}
        self.marks = Marks(boot_s)
        self._kept, self._beside = kept, {"marks": self.marks, **(beside or {})}
        self._boot_s, self._sampled_at_s, self._sampled_at_boot_s = boot_s, 0.0, 0.0
        self._keeping, self._begun = asyncio.Lock(), 0
        self._take_over()
        self.marks.started()

    def sample(self, counters: Counters, pool: PoolView, tiers: list[TierView], now_s: float) -> bool:
        """Returns whether the history is to be kept now, whatever has changed beside it."""
        sample = Sample(msgspec.structs.replace(counters), pool, tiers, now_s - self._sampled_at_s)
        since_boot_s = self._boot_s()
        # The server clock leaves out the time in which the server was stopped.
        stopped_s = 0.0
        if self._sampled_at_boot_s:
            stopped_s = max(0.0, since_boot_s - self._sampled_at_boot_s - sample.elapsed_s)
        self._sampled_at_s, self._sampled_at_boot_s = now_s, since_boot_s
        taken = {name for name, rings in self._levels.items() if rings.sample(sample, now_s, stopped_s)}
        return bool(taken.intersection(level.name for level in KEPT_LEVELS))

    async def has_changed_beside(self) -> bool:
        """Whether something that is kept beside the history has changed since it was last kept."""
        for one in self._beside.values():
            if one.has_changed:
                return True
            await next_slice()
        return False

    def view(self, over: Over, now_s: float) -> Stats:
        return self._levels[over].view(now_s, self.marks)

    def filling_bytes_per_s(self) -> float | None:
        """How fast the pool has filled: over the finest level, or over its last values if that is less. None: not
        known yet."""
        rings = self._levels["minutes"]
        ready = next(ring for spec, ring in zip(SERIES, rings.values, strict=False) if spec.name == "ready_bytes")
        known = [value for value in ready if value is not None]
        if len(known) < 2:
            return None
        return min(
            (some[-1] - some[0]) / ((len(some) - 1) * rings.level.interval_s) for some in (known, known[-LATELY:])
        )

    # ---------------------------------------------------------------- kept with the pool

    @property
    def unkept(self) -> str:
        """Why the next server would not find what is kept now, or not all of it; "": it would."""
        return "" if self._kept is None else self._kept.failure

    def keep(self, now_s: float) -> None:
        """Writes hours and days for the next server of the pool."""
        if self._kept is not None:
            self._kept.write(*self._content(now_s))

    async def keep_in_slices(self, now_s: float) -> None:
        """The same, with turns for others in between. Those who ask meanwhile wait, and share the next one."""
        if self._kept is None:
            return
        begun = self._begun
        async with self._keeping:
            if self._begun > begun:
                return  # somebody began after this was asked for
            self._begun += 1
            pieces, slices = list[Piece](), Slices()
            for piece in self._content(now_s):
                pieces.append(piece)
                await slices.give_turn()
            await self._kept.write_aside(*pieces)

    def _content(self, now_s: float) -> Iterator[Piece]:
        """A _Kept in pieces, each made in little time: together they may be megabytes, which are not copied."""
        yield b'{"at_boot_s":%b,"levels":{' % msgspec.json.encode(self._boot_s())
        for number, level in enumerate(KEPT_LEVELS):
            yield b'%b"%b":' % (b"," if number else b"", level.name.encode())
            yield from self._levels[level.name].kept(now_s)
        yield b'},"beside":{'
        for number, (name, one) in enumerate(self._beside.items()):
            yield b'%b"%b":' % (b"," if number else b"", name.encode())
            yield from one.kept()
        yield b"}}"

    def _take_over(self) -> None:
        content = self._kept.read() if self._kept is not None else b""
        if not content:
            return
        try:
            kept = msgspec.json.decode(content, type=_Kept)
        except msgspec.MsgspecError as error:
            log.warning("the history of hours and days begins anew: %s", error)
            return
        for name, one in self._beside.items():
            try:
                if name in kept.beside:
                    one.take_over(kept.beside[name])
            except msgspec.MsgspecError as error:
                log.warning("what an earlier server has kept as %s is lost: %s", name, error)
        for level in KEPT_LEVELS:
            stats = kept.levels.get(level.name)
            if stats is not None and stats.interval_s == level.interval_s:
                away_s = max(0.0, self._boot_s() - kept.at_boot_s) + stats.age_s
                self._levels[level.name].take_over(stats, int(away_s / level.interval_s))


class Sampler:
    """Takes the samples of a server's history."""

    def __init__(
        self, history: History, pool: Pool, tally: Tally, tiers: Callable[[], list[TierView]], clock: ServerClock,
        curves: Curves | None,
    ) -> None:
        """`tiers`: what the mover has last reported of them."""
        self._history, self._pool, self._tally, self._tiers, self._clock = history, pool, tally, tiers, clock
        self._curves = curves

    async def sample(self) -> None:
        """Takes one more value of each series. The keeper calls it once in each interval of the finest level."""
        now_s = self._clock.now_ms() / 1000
        is_due = self._history.sample(self._tally.totals(), self._pool.view(), self._tiers(), now_s)
        await next_slice()
        if is_due or await self._history.has_changed_beside():
            await self._history.keep_in_slices(now_s)

    async def keep_quotas(self) -> None:
        """At once, with all that is kept beside them."""
        await self._history.keep_in_slices(self._clock.now_ms() / 1000)

    async def keep(self) -> None:
        """Writes hours, days and the curve for the next server of the pool."""
        self._history.keep(self._clock.now_ms() / 1000)
        if self._curves is not None:
            await self._tally.catch_up()
            self._curves.keep()

    async def keep_curve_when_due(self) -> None:
        if self._curves is not None:
            await self._curves.keep_when_due(self._tally.catch_up)


# --------------------------------------------------------------------------- marks

# When servers of the pool were started and limits were changed, kept with the history: charts mark these moments,
# because the series may look otherwise from then on.
#
# Used from the event loop only.

MOST_MARKS = 256
TOGETHER_S = 1.0
"""Changes of limits within this time are one mark."""
QUOTAS: Final = "quotas"


class _KeptMark(msgspec.Struct, omit_defaults=True):
    """`at_boot_s`: when, by boot_s."""

    at_boot_s: float
    kind: Literal["started", "limits"]
    limits: list[str] = []
    pool_bytes: int | None = None


class Marks:
    """The last MOST_MARKS; a subscriber of the journal. `boot_s`: the time since this machine was started."""

    name = "marks"
    kinds = (LimitsChanged,)

    def __init__(self, boot_s: Callable[[], float]) -> None:
        self._boot_s = boot_s
        self._known: deque[_KeptMark] = deque(maxlen=MOST_MARKS)
        self._has_changed = False

    def started(self) -> None:
        """A server of the pool begins."""
        self._known.append(_KeptMark(self._boot_s(), "started"))
        self._has_changed = True

    def take(self, event: Event) -> None:
        """An operator has changed limits."""
        if isinstance(event, LimitsChanged):
            size = event.changed.get("pool_bytes", [None])[-1]
            self._add(list(event.changed), size if isinstance(size, int) else None)

    def quotas_changed(self) -> None:
        """Those of one tenant or more."""
        self._add([QUOTAS], None)

    def _add(self, names: Sequence[str], pool_bytes: int | None) -> None:
        now, last = self._boot_s(), self._known[-1] if self._known else None
        if last is not None and last.kind == "limits" and 0 <= now - last.at_boot_s < TOGETHER_S:
            last.limits += [name for name in names if name not in last.limits]
            last.pool_bytes = last.pool_bytes if pool_bytes is None else pool_bytes
        else:
            self._known.append(_KeptMark(now, "limits", list(names), pool_bytes))
        self._has_changed = True

    def within(self, seconds: float) -> list[Mark]:
        """Those of the last `seconds`, oldest first."""
        now = self._boot_s()
        return [
            Mark(age_s=max(0.0, now - one.at_boot_s), kind=one.kind, limits=one.limits, pool_bytes=one.pool_bytes)
            for one in self._known if now - one.at_boot_s <= seconds
        ]

    # ---------------------------------------------------------------- kept with the pool

    @property
    def has_changed(self) -> bool:
        """Whether there are other marks than those last kept."""
        return self._has_changed

    def kept(self) -> Iterator[bytes]:
        self._has_changed = False
        yield msgspec.json.encode(list(self._known))

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with the marks of an earlier server. Raises msgspec.MsgspecError."""
        self._known.extend(msgspec.json.decode(kept, type=list[_KeptMark]))
