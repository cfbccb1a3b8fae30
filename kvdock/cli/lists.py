"""Lists of what a server has: `kvdock sessions`, `leases`, `requests`, `cached` and `history`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.cli.client import first, print_json, reached
from kvdock.cli.render import brief, counted, duration, percent, printable, say, size, space, span
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.reports import Leases, LeaseView, Over, Prefixes, PrefixView, Requests, RequestView, Stats
from kvdock.protocol.schemas import MemberView, Sessions, SessionView


def show_sessions(server: str, *, limit: int | None, as_json: bool, console: Console) -> None:
    """`limit` None: all. Raises CommandError, ApiError."""
    with reached(server) as client:
        sessions, following = first(client.sessions, lambda page: page.sessions, limit)
    if as_json:
        print_json(console, Sessions(sessions=sessions, next=following))
        return
    say(console, sessions_table(sessions) if sessions else "no engine is attached")
    _say_more(console, following)


def show_leases(server: str, *, limit: int | None, as_json: bool, console: Console) -> None:
    """Leases and reservations, oldest first. `limit` None: all. Raises CommandError, ApiError."""
    with reached(server) as client:
        leases, following = first(client.leases, lambda page: page.leases, limit)
        attached, _ = ([], None) if as_json else first(client.sessions, lambda page: page.sessions)
        engines = {view.session: view.label or view.instance for view in attached}
    if as_json:
        print_json(console, Leases(leases=leases, next=following))
        return
    say(console, _leases_table(leases, engines) if leases else "no engine holds a lease or a reservation")
    _say_more(console, following)


def show_requests(server: str, *, begins: str, limit: int | None, as_json: bool, console: Console) -> None:
    """The last lookups and stores whose ids begin with `begins`, newest first. `limit` None: all. Raises CommandError,
    ApiError."""
    with reached(server) as client:
        requests, following = first(partial(client.requests, request=begins), lambda page: page.requests, limit)
    if as_json:
        print_json(console, Requests(requests=requests, next=following))
        return
    nothing = "no recent request has such an id" if begins else "no engine has looked up or stored anything yet"
    say(console, _requests_table(requests) if requests else nothing)
    _say_more(console, following)


def sessions_table(sessions: Iterable[SessionView]) -> Table:
    return _table("sessions", ("engine", "model", "namespace", "processes", "leases", "reservations", "held",
                               "attached"), (
        (view.label or view.instance, view.model, space(view.namespace, view.weights),
         ", ".join(map(_member, view.members)), str(view.leases), str(view.reservations), size(view.held_bytes),
         duration(view.age_s))
        for view in sessions
    ))


def _leases_table(leases: Iterable[LeaseView], engines: dict[str, str]) -> Table:
    return _table("leases and reservations", ("kind", "request", "engine", "unfinished ranks", "chunks", "bytes",
                                              "age", "grant"), (
        (view.kind + (" (closed)" if view.closed else ""), _request(view), engines.get(view.session, view.session),
         _waiting(view), f"{view.chunks:,}", size(view.bytes), duration(view.age_s), view.grant)
        for view in leases
    ))


def _requests_table(requests: Iterable[RequestView]) -> Table:
    return _table("requests", ("time", "kind", "request", "engine", "tokens", "found", "local", "loaded",
                               "why less"), (
        (time.strftime("%H:%M:%S", time.localtime(view.at)), view.kind, view.request, view.label or view.session,
         f"{view.tokens:,}", f"{view.hit_tokens:,}", *_outcome(view))
        for view in requests
    ))


def _outcome(view: RequestView) -> tuple[str, str, str]:
    """Local and loaded tokens, and why not more were loaded; empty until the engine has reported them."""
    if (found := view.outcome) is None:
        return "", "", ""
    return f"{found.local_tokens:,}", f"{found.loaded_tokens:,}", found.why_in_words


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*heads, box=None, pad_edge=False, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _say_more(console: Console, following: str | None) -> None:
    if following is not None:
        say(console, "… and more: --limit N or --all")


def _member(view: MemberView) -> str:
    ranks = f"rank {','.join(map(str, view.ranks))}" if view.ranks else "scheduler"
    return f"{ranks} {view.state}"


def _request(view: LeaseView) -> str:
    return f"{view.request} (epoch {view.epoch})" if view.epoch else view.request


def _waiting(view: LeaseView) -> str:
    ranks = f": rank {','.join(map(str, view.remaining[:8]))}{'…' if len(view.remaining) > 8 else ''}"
    return f"{len(view.remaining)} of {view.readers}{ranks if view.remaining else ''}"


class Cached(msgspec.Struct, kw_only=True):
    """What `--json` prints."""

    namespaces: list[NamespaceView]
    """Sorted by stored bytes, the largest first."""
    prefixes: Prefixes


def show_cached(server: str, *, limit: int, as_json: bool, console: Console) -> None:
    """Raises CommandError when no server answers; ApiError."""
    with reached(server) as client:
        namespaces, _ = first(client.namespaces, lambda page: page.namespaces)
        prefixes = client.prefixes(limit)
    namespaces = sorted(namespaces, key=lambda view: view.bytes, reverse=True)
    if as_json:
        print_json(console, Cached(namespaces=namespaces, prefixes=prefixes))
        return
    if not any(view.chunks for view in namespaces):
        say(console, "nothing is cached")
        return
    say(console, _namespaces_table(namespaces), "", _prefixes_table(prefixes.prefixes))
    if (more := prefixes.prefix_count - len(prefixes.prefixes)) > 0:
        say(console, f"… and {counted(more, 'prefix', 'prefixes')} more: --limit N")


def _namespaces_table(views: Iterable[NamespaceView]) -> Table:
    heads = ("model", "tenant", "namespace", "cached", "chunks", "hit rate", "last used", "oldest", "engines")
    return _cached_table(heads, [
        (
            view.manifest.model, view.tenant or "-", space(view.namespace, view.weights), size(view.bytes),
            f"{view.chunks:,}",
            percent(view.totals.hit_tokens / view.totals.lookup_tokens if view.totals.lookup_tokens else None),
            _ago(view.unused_s), _ago(view.oldest_s), f"{view.sessions:,}" + _beside(view),
        )
        for view in views
    ], left=3)


def _prefixes_table(views: Iterable[PrefixView]) -> Table:
    return _cached_table(("prefix", "model", "namespace", "used", "tokens", "cached", "stored", "last used"), [
        (
            view.key[:12], view.model, space(view.namespace, view.weights), counted(view.uses, "time"),
            brief(view.tokens), size(view.bytes), _ago(view.age_s), _ago(view.unused_s),
        )
        for view in views
    ], left=3)


def _beside(view: NamespaceView) -> str:
    """The text that the list adds to the number of engines."""
    if view.left_s is not None:
        return f" (left {duration(view.left_s)} ago)"
    return " (bench)" if view.is_bench else ""


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{duration(seconds)} ago"


def _cached_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> Table:
    """The first `left` columns are text and aligned left, the others are numbers."""
    columns = [Column(head, justify="left" if at < left else "right") for at, head in enumerate(heads)]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


MOST_HISTORY_ROWS = 24
HISTORY_COLUMNS = (
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
    nothing = f"there are no measurements yet: the first comes after {span(stats.interval_s)}"
    say(console, _history_table(rows) if rows else nothing)


def _rows(stats: Stats, now: float) -> Iterator[tuple[str, ...]]:
    """The rows of the table, oldest first. A missing measurement is a dash."""
    series = {one.name: one.values for one in stats.series}
    count = max(map(len, series.values()), default=0)
    each = max(1, -(-count // MOST_HISTORY_ROWS))
    for start in range(count % each - each if count % each else 0, count, each):
        means = {name: _mean(values[max(0, start) : start + each]) for name, values in series.items()}
        began = now - stats.age_s - (count - max(0, start)) * stats.interval_s
        asked, found = means.get("lookup_tokens"), means.get("hit_tokens")
        yield (
            time.strftime("%a %H:%M:%S" if stats.interval_s < 60 else "%a %d %b %H:%M", time.localtime(began)),
            percent(found / asked if asked and found is not None else None),
            *("-" if (mean := means.get(name)) is None else shown(mean) for _, name, shown in HISTORY_COLUMNS),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _history_table(rows: Sequence[tuple[str, ...]]) -> Table:
    heads = ("from", "hit rate", *(head for head, _, _ in HISTORY_COLUMNS))
    table = Table(*(Column(head, justify="right" if at else "left") for at, head in enumerate(heads)), box=None,
                  pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
