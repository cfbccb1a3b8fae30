"""How a server did over time: `kvdock history` by the minute or half-hour, `kvdock saved` by the day."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from kvdock.api.pool.registry import Hits
from kvdock.cli.client import print_json, reached
from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.help import Moment
from kvdock.cli.hits import computed_share, saved_cell, style_of_saved
from kvdock.cli.render import brief, counted, percent, printable, say, say_table, size, span
from kvdock.client.client import Client
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.reports import DayOfHits, HitDays, Over, Series, Stats

# ------------------------------------------------------------------ series


def means(series: Mapping[str, Series], start: int, stop: int) -> dict[str, float | None]:
    """By series, the mean of the values from `start` to `stop`. Shares of prompt tokens are weighted by the tokens.
    None: nothing was measured."""
    prompts = series["prompt_tokens"].values[start:stop] if "prompt_tokens" in series else []
    return {
        name: _weighted(one.values[start:stop], prompts) if one.unit == "ratio" else _mean(one.values[start:stop])
        for name, one in series.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _weighted(shares: Sequence[float | None], weights: Sequence[float | None]) -> float | None:
    pairs = [
        (share, weight) for share, weight in zip(shares, weights, strict=False)
        if share is not None and weight is not None
    ]
    total = sum(weight for _, weight in pairs)
    return sum(share * weight for share, weight in pairs) / total if total else None


def length(stats: Stats) -> int:
    """How many values the series have."""
    return max((len(one.values) for one in stats.series), default=0)


# ------------------------------------------------------------------ history


MOST_ROWS = 24
LEVELS: tuple[Over, ...] = ("minutes", "hours", "days")
"""The finest first."""


class Wanted(NamedTuple):
    """The options of `kvdock history`. None: not given."""

    over: Over | None = None
    since: Moment | None = None
    until: Moment | None = None
    step_s: float | None = None

    @property
    def is_part(self) -> bool:
        return bool(self.since or self.until or self.step_s)


class Rows(NamedTuple):
    """A part of the history, divided into rows."""

    stats: Stats
    """The values of the part, one for each interval."""
    began_s: float
    """When its first value began, in Unix seconds."""
    parts: list[tuple[int, int]]
    """The first value of each row, and that of the next one."""


def show_past(server: str, wanted: Wanted, *, as_json: bool, console: Console) -> None:
    """`--json` prints what `GET /v1/stats` answers; of a part of it, the same with a value for each row. Raises
    CommandError for times that do not fit, and when no server answers, and ApiError."""
    with reached(server) as client:
        now_s = client.status().now
        since_s, until_s = _bounds(wanted, now_s)
        stats = _fetched(client, wanted.over, since_s, now_s)
    if as_json and not wanted.is_part:
        print_json(console, stats)
        return
    rows = rows_of(part_of(stats, now_s, since_s, until_s), now_s, wanted.step_s)
    if as_json:
        print_json(console, as_stats(rows))
    elif rows.parts:
        _say_history(console, rows)
    elif length(stats):
        began = _when(now_s - stats.age_s - length(stats) * stats.interval_s, 60.0)
        say(console, f"nothing was measured in that time: the history of {span(stats.interval_s)} a value "
                     f"begins at {began}")
    else:
        say(console, f"there are no measurements yet: the first comes after {span(stats.interval_s)}")


def _bounds(wanted: Wanted, now_s: float) -> tuple[float, float]:
    """Unix seconds. Raises CommandError when there is no time between them."""
    since_s = wanted.since.at(now_s) if wanted.since else 0.0
    until_s = wanted.until.at(now_s) if wanted.until else now_s
    if wanted.since and since_s >= now_s:
        raise CommandError(f"--from: wanted a time before now, found {wanted.since.text!r}", WRONG)
    if wanted.since and wanted.until and since_s >= until_s:
        raise CommandError(
            f"--to: wanted a time after --from {wanted.since.text!r}, found {wanted.until.text!r}", WRONG
        )
    return since_s, until_s


def _fetched(client: Client, over: Over | None, since_s: float, now_s: float) -> Stats:
    """The series of `over`. None: the finest ones that reach back to `since_s`, or else furthest."""
    if over is not None or not since_s:
        return client.stats(over or "hours")
    longest: Stats | None = None
    began_s = math.inf
    for level in LEVELS:
        stats = client.stats(level)
        count = length(stats)
        from_s = now_s - stats.age_s - count * stats.interval_s if count else math.inf
        if longest is None or from_s < began_s:
            longest, began_s = stats, from_s
        if from_s <= since_s:
            break
    return longest or stats


def part_of(stats: Stats, now_s: float, since_s: float, until_s: float) -> Stats:
    """The values whose intervals are at least half between those times."""
    count, interval_s = length(stats), stats.interval_s
    middle_s = now_s - stats.age_s - (count - 0.5) * interval_s
    inside = [at for at in range(count) if since_s <= middle_s + at * interval_s < until_s]
    start, stop = (inside[0], inside[-1] + 1) if inside else (count, count)
    series = [msgspec.structs.replace(one, values=one.values[start:stop]) for one in stats.series]
    return Stats(interval_s=interval_s, age_s=stats.age_s + (count - stop) * interval_s, series=series)


def rows_of(stats: Stats, now_s: float, step_s: float | None) -> Rows:
    """Rows of `step_s`, or at most MOST_ROWS. The first one may be shorter than the others. Raises CommandError."""
    count = length(stats)
    if step_s is not None and step_s < stats.interval_s:
        raise CommandError(f"--step: wanted at least {span(stats.interval_s)}, the time between two measurements here, "
                           f"found {span(step_s)}; with --over minutes it is shortest", WRONG)
    each = round(step_s / stats.interval_s) if step_s is not None else max(1, -(-count // MOST_ROWS))
    first = count % each or each
    parts = [(max(0, stop - each), stop) for stop in range(first, count + 1, each)] if count else []
    return Rows(stats, now_s - stats.age_s - count * stats.interval_s, parts)


def as_stats(rows: Rows) -> Stats:
    """The rows as series."""
    series = {one.name: one for one in rows.stats.series}
    found = [means(series, start, stop) for start, stop in rows.parts]
    each = rows.parts[-1][1] - rows.parts[-1][0] if rows.parts else 1
    return Stats(
        interval_s=each * rows.stats.interval_s, age_s=rows.stats.age_s,
        series=[msgspec.structs.replace(one, values=[row[name] for row in found]) for name, one in series.items()],
    )


def _tokens_per_s(mean: float) -> str:
    return f"{brief(mean)}/s"


def _bytes_per_s(mean: float) -> str:
    return f"{size(mean)}/s"


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("prompt tokens", "prompt_tokens", _tokens_per_s),
    ("own cache", "local_share", percent),
    ("loaded", "loaded_share", percent),
    ("computed", "computed_share", percent),
    ("tokens asked for", "lookup_tokens", _tokens_per_s),
    ("bytes loaded", "loaded_bytes", _bytes_per_s),
    ("bytes stored", "stored_bytes", _bytes_per_s),
    ("cached", "ready_bytes", size),
    ("chunks evicted", "evicted_chunks", lambda mean: f"{brief(mean)}/s"),
)
"""Columns of the table: head, series, and the value in words."""
FIRST_LEFT_OUT = ("bytes loaded", "bytes stored", "tokens asked for")
"""Columns that a narrow terminal does not show, in this order."""


def _say_history(console: Console, rows: Rows) -> None:
    """Oldest first. A missing measurement is a dash. Rows of one day name it once."""
    interval_s = rows.stats.interval_s
    days = {time.strftime("%a %d %b", time.localtime(rows.began_s + start * interval_s)) for start, _ in rows.parts}
    is_one_day = len(days) == 1 and interval_s >= 60
    heads = (days.pop() if is_one_day else "from", *(head for head, _, _ in COLUMNS))
    cells = list(_cells(rows, "%H:%M" if is_one_day else ""))
    say_table(console, heads, cells, texts=heads[:1], yields=FIRST_LEFT_OUT)


def _cells(rows: Rows, form: str) -> Iterator[list[Text]]:
    """`form`: the format of the time at which a row begins; empty: one that suits the length of the intervals."""
    series = {one.name: one for one in rows.stats.series}
    for start, stop in rows.parts:
        found = means(series, start, stop)
        found["computed_share"] = computed_share(found.get("loaded_share"), found.get("local_share"))
        began_s = rows.began_s + start * rows.stats.interval_s
        cells = ["-" if (mean := found.get(name)) is None else shown(mean) for _, name, shown in COLUMNS]
        yield [Text(_when(began_s, rows.stats.interval_s, form)), *map(Text, cells)]


def _when(at_s: float, interval_s: float, form: str = "") -> str:
    usual = "%a %H:%M:%S" if interval_s < 60 else "%a %d %b %H:%M"
    return time.strftime(form or usual, time.localtime(at_s))


# ------------------------------------------------------------------ days


def show_saved(server: str, *, days: int | None, as_json: bool, console: Console) -> None:
    """`days`: the last ones on which requests ended; None: all. `--json` prints them as `GET /v1/hits` answers. Raises
    CommandError when no server answers, and ApiError."""
    with reached(server) as client:
        found = client.hits().days
    dates = sorted({day.date for day in found})
    shown = [day for day in found if days is None or day.date in dates[-days:]]
    if as_json:
        print_json(console, HitDays(days=shown))
        return
    if not shown:
        say(console, "no request has ended that an engine has reported")
        return
    _say_days(console, shown)
    if more := len(dates) - len({day.date for day in shown}):
        say(console, f"… and {counted(more, 'day')} before: --days N or --all")


def sum_of(days: Sequence[DayOfHits]) -> HitTotals:
    total = Hits()
    for day in days:
        total.add(day.hits)
    return total.view()


def _say_days(console: Console, days: Sequence[DayOfHits]) -> None:
    heads = ("day", "tenant", "model", "requests", "prompt tokens", "own cache", "loaded", "computed", "saved")
    rows = [_day((day.date, day.tenant or "-", day.model), day.hits) for day in days]
    if len(days) > 1:
        rows.append(_day(("together", "", ""), sum_of(days)))
    say_table(console, heads, rows, texts=heads[:3], yields=("requests", "own cache", "prompt tokens"))


def _day(names: tuple[str, str, str], hits: HitTotals) -> list[Text]:
    computed = computed_share(hits.loaded_share, hits.local_share)
    return [
        *(Text(printable(name)) for name in names), Text(f"{hits.requests:,}"), Text(brief(hits.prompt_tokens)),
        *(Text(percent(share)) for share in (hits.local_share, hits.loaded_share, computed)),
        Text(saved_cell(hits.saved_s), style=style_of_saved(hits.saved_s)),
    ]
