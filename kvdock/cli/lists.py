"""Lists of what a server has: `kvdock sessions`, `leases`, `requests` and `cached`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.cli.client import first, print_json, reached
from kvdock.cli.hits import computed_of, loaded_cell, loaded_of, local_of
from kvdock.cli.render import brief, counted, duration, percent, printable, say, size, space
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.reports import Leases, LeaseView, Prefixes, PrefixView, Requests, RequestView
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


REASON_CELLS = 110
"""A window of fewer columns has no room for the reasons of requests."""


def show_requests(server: str, *, begins: str, limit: int | None, as_json: bool, console: Console) -> None:
    """The last lookups and stores whose ids begin with `begins`, newest first. `limit` None: all. Raises CommandError,
    ApiError."""
    with reached(server) as client:
        requests, following = first(partial(client.requests, request=begins), lambda page: page.requests, limit)
    if as_json:
        print_json(console, Requests(requests=requests, next=following))
        return
    nothing = "no recent request has such an id" if begins else "no engine has looked up or stored anything yet"
    is_narrow = console.width < REASON_CELLS
    say(console, _requests_table(requests, is_narrow=is_narrow) if requests else nothing)
    if requests and is_narrow:
        say(console, "`kvdock explain ID` says why tokens were computed")
    _say_more(console, following)


def sessions_table(sessions: Iterable[SessionView]) -> Table:
    return _table("sessions", ("engine", "model", "namespace", "processes", "leases", "reservations", "held",
                               "own cache", "loaded", "attached"), (
        (view.label or view.instance, view.model, space(view.namespace, view.weights),
         ", ".join(map(_member, view.members)), str(view.leases), str(view.reservations), size(view.held_bytes),
         percent(view.totals.hits.local_share),
         loaded_cell(view.totals.hits.loaded_share, view.totals.lookup_tokens), duration(view.age_s))
        for view in sessions
    ))


def _leases_table(leases: Iterable[LeaseView], engines: dict[str, str]) -> Table:
    return _table("leases and reservations", ("kind", "request", "engine", "unfinished ranks", "chunks", "bytes",
                                              "age", "grant"), (
        (view.kind + (" (closed)" if view.closed else ""), _request(view), engines.get(view.session, view.session),
         _waiting(view), f"{view.chunks:,}", size(view.bytes), duration(view.age_s), view.grant)
        for view in leases
    ))


def _requests_table(requests: Iterable[RequestView], *, is_narrow: bool) -> Table:
    """`is_narrow`: without the reason, which would be cut to pieces."""
    heads = ("time", "kind", "request", "engine", "tokens", "prompt", "own cache", "loaded", "computed",
             "most of these because")
    return _table("requests", heads[:-1] if is_narrow else heads, (
        (time.strftime("%H:%M:%S", time.localtime(view.at)), view.kind, view.request, view.label or view.session,
         f"{view.tokens:,}", *_outcome(view))[: -1 if is_narrow else None]
        for view in requests
    ))


def _outcome(view: RequestView) -> tuple[str, str, str, str, str]:
    """Where the prompt's tokens came from; empty until the engine has reported that the request ended."""
    if (found := view.outcome) is None:
        return "", "", "", "", ""
    computed, why = computed_of(found)
    return f"{found.prompt_tokens:,}", f"{local_of(found):,}", loaded_of(found), f"{computed:,}", why


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    columns = [Column(head, overflow="fold", no_wrap=head == "time") for head in heads]  # an id that is cut is useless
    table = Table(*columns, box=None, pad_edge=False, title=title, title_justify="left")
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
    unfolded: dict[str, Prefixes] = {}
    """With `--unfold`, the branches of prefixes, by namespace and `fork_key`, with a space between."""


MOST_ROWS = 256
"""The most prefixes that are listed with those unfolded."""
MOST_BRANCHES = 8
"""The most branches of one prefix that are listed."""


def show_cached(
    server: str, *, limit: int, search: str, unfold: int, as_json: bool, console: Console
) -> None:
    """`search`: "": all. `unfold`: levels of branches. Raises CommandError when no server answers, and ApiError."""
    with reached(server) as client:
        namespaces, _ = first(client.namespaces, lambda page: page.namespaces)
        prefixes = client.prefixes(limit, search=search)
        unfolded = _unfolded(client, prefixes, unfold)
    namespaces = sorted(namespaces, key=lambda view: view.bytes, reverse=True)
    if as_json:
        print_json(console, Cached(namespaces=namespaces, prefixes=prefixes, unfolded=unfolded))
        return
    if not any(view.chunks for view in namespaces):
        say(console, "nothing is cached")
        return
    if not search:
        say(console, _namespaces_table(namespaces), "")
    elif not prefixes.prefixes:
        say(console, f"no cached prefix has {printable(search)} in a label, model, tenant or key")
        return
    say(console, _prefixes_table(list(_rows(prefixes, unfolded))))
    if (more := prefixes.prefix_count - len(prefixes.prefixes)) > 0:
        say(console, f"… and {counted(more, 'prefix', 'prefixes')} more: --limit N")


def _unfolded(client: Client, prefixes: Prefixes, levels: int) -> dict[str, Prefixes]:
    found: dict[str, Prefixes] = {}
    rows, level = len(prefixes.prefixes), prefixes.prefixes
    for _ in range(levels):
        deeper: list[PrefixView] = []
        for view in level:
            if view.branches and rows < MOST_ROWS:
                page = client.prefixes(MOST_BRANCHES, namespace=view.namespace, below=view.fork_key)
                found[_place(view)] = page
                deeper += page.prefixes
                rows += len(page.prefixes)
        level = deeper
    return found


def _place(view: PrefixView) -> str:
    return f"{view.namespace} {view.fork_key}"


def _rows(prefixes: Prefixes, unfolded: dict[str, Prefixes], depth: int = 0) -> Iterator[tuple[str, PrefixView | None]]:
    """The first cell of each row, and the prefix; None: the row says how many more branches there are."""
    indent = "  " * (depth - 1) + "└ " if depth else ""
    for view in prefixes.prefixes:
        yield indent + view.key[:12], view
        if (below := unfolded.get(_place(view))) is not None:
            yield from _rows(below, unfolded, depth + 1)
    if depth and (more := prefixes.prefix_count - len(prefixes.prefixes)) > 0:
        yield f"{indent}{more:,} more", None


def _namespaces_table(views: Iterable[NamespaceView]) -> Table:
    heads = ("model", "tenant", "namespace", "cached", "chunks", "own cache", "loaded", "last used", "oldest",
             "engines")
    return _cached_table(heads, [
        (
            view.model, view.tenant or "-", space(view.namespace, view.weights), size(view.bytes),
            f"{view.chunks:,}", percent(view.totals.hits.local_share),
            loaded_cell(view.totals.hits.loaded_share, view.totals.lookup_tokens),
            _ago(view.unused_s), _ago(view.oldest_s), f"{view.sessions:,}" + _beside(view),
        )
        for view in views
    ], left=3)


def _prefixes_table(rows: Sequence[tuple[str, PrefixView | None]]) -> Table:
    heads: tuple[str, ...] = (
        "prefix", "label", "model", "namespace", "used", "shared", "cached", "branches", "stored", "last used"
    )
    cells: list[tuple[str, ...]] = [
        (named, *("",) * (len(heads) - 1)) if view is None else (
            named, _label(view), view.model, space(view.namespace, view.weights), counted(view.uses, "time"),
            f"{brief(view.shared_tokens)} tok", size(view.bytes), _branches(view), _ago(view.age_s),
            _ago(view.unused_s),
        )
        for named, view in rows
    ]
    if not any(label for _, label, *_ in cells):
        heads, cells = _without_label(heads), [_without_label(row) for row in cells]
    return _cached_table(heads, cells, left=len(heads) - 6)


def _without_label(row: tuple[str, ...]) -> tuple[str, ...]:
    return row[0], *row[2:]


def _label(view: PrefixView) -> str:
    return ", ".join(view.labels) + (" (kept)" if view.is_kept else "")


def _branches(view: PrefixView) -> str:
    return f"{view.branches:,} of {size(view.branch_bytes)}" if view.branches else "-"


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
