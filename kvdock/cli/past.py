"""`kvdock history`: how the server did over the last minutes, hours or days, some rows of means."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.cli.operator import print_json, reached
from kvdock.cli.screen import say
from kvdock.cli.words import brief, percent, size, span
from kvdock.protocol.reports import Over, Stats

MOST_ROWS = 24
COLUMNS = (
    ("looked up", "lookup_tokens", lambda mean: f"{brief(mean)} tok/s"),
    ("found", "hit_tokens", lambda mean: f"{brief(mean)} tok/s"),
    ("loaded", "loaded_bytes", lambda mean: f"{size(mean)}/s"),
    ("stored", "stored_bytes", lambda mean: f"{size(mean)}/s"),
    ("cached", "ready_bytes", size),
    ("evicted", "evicted_chunks", lambda mean: f"{brief(mean)} chunks/s"),
)


def show_past(server: str, *, over: Over, as_json: bool, console: Console) -> None:
    """`--json` prints what `GET /v1/stats` answers. Raises CommandError when no server answers; ApiError."""
    with reached(server) as client:
        stats = client.stats(over)
        now = client.status().now
    if as_json:
        print_json(console, stats)
        return
    rows = list(_rows(stats, now))
    nothing = f"nothing was measured yet: the first value comes after {span(stats.interval_s)}"
    say(console, _table(rows) if rows else nothing)


def _rows(stats: Stats, now: float) -> Iterator[tuple[str, ...]]:
    """Oldest first. What was not measured is a dash."""
    series = {one.name: one.values for one in stats.series}
    count = max(map(len, series.values()), default=0)
    each = max(1, -(-count // MOST_ROWS))
    for start in range(count % each - each if count % each else 0, count, each):
        means = {name: _mean(values[max(0, start) : start + each]) for name, values in series.items()}
        began = now - stats.age_s - (count - max(0, start)) * stats.interval_s
        asked, found = means.get("lookup_tokens"), means.get("hit_tokens")
        yield (
            time.strftime("%a %H:%M:%S" if stats.interval_s < 60 else "%a %d %b %H:%M", time.localtime(began)),
            percent(found / asked if asked and found is not None else None),
            *("-" if (mean := means.get(name)) is None else shown(mean) for _, name, shown in COLUMNS),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    heads = ("from", "hit rate", *(head for head, _, _ in COLUMNS))
    table = Table(*(Column(head, justify="right" if at else "left") for at, head in enumerate(heads)), box=None,
                  pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
