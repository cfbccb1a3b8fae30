"""Lists of what a server has: `kvdock sessions`, `leases`, `requests` and `cached`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec
from rich.console import Console

from kvdock.cli.client import first, print_json, reached
from kvdock.cli.hits import computed_of, loaded_cell, loaded_of, local_of
from kvdock.cli.render import brief, counted, duration, percent, printable, say, say_table, size, space
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.reports import Leases, LeaseView, Prefixes, PrefixView, Requests, RequestView
from kvdock.protocol.schemas import MOVER_LABEL, MemberView, Sessions, SessionView


def show_sessions(server: str, *, limit: int | None, as_json: bool, console: Console) -> None:
    """`limit` None: all. As JSON, those of the server's mover are among them. Raises CommandError, ApiError."""
    with reached(server) as client:
        sessions, following = first(client.sessions, lambda page: page.sessions, limit)
    if as_json:
        print_json(console, Sessions(sessions=sessions, next=following))
        return
    if engines := of_engines(sessions):
        say_sessions(console, engines)
    else:
        say(console, "no engine is attached")
    _say_more(console, following)


def of_engines(sessions: Iterable[SessionView]) -> list[SessionView]:
    """The sessions without those of the server's mover."""
    return [view for view in sessions if view.label != MOVER_LABEL]


def show_leases(server: str, *, limit: int | None, as_json: bool, console: Console) -> None:
    """Leases and reservations, oldest first. `limit` None: all. Raises CommandError, ApiError."""
    with reached(server) as client:
        leases, following = first(client.leases, lambda page: page.leases, limit)
        attached, _ = ([], None) if as_json else first(client.sessions, lambda page: page.sessions)
        engines = {view.session: view.label or view.instance for view in attached}
    if as_json:
        print_json(console, Leases(leases=leases, next=following))
        return
    if leases:
        _say_leases(console, leases, engines)
    else:
        say(console, "no engine holds a lease or a reservation")
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
    if requests:
        _say_requests(console, requests)
    else:
        say(console, nothing)
    _say_more(console, following)


def say_sessions(console: Console, sessions: Iterable[SessionView]) -> None:
    heads = ("engine", "model", "namespace", "processes", "leases", "reservations", "held", "own cache", "loaded",
             "attached")
    say_table(console, heads, [
        (view.label or view.instance, view.model, space(view.namespace, view.weights),
         ", ".join(map(_member, view.members)), str(view.leases), str(view.reservations), size(view.held_bytes),
         percent(view.totals.hits.local_share),
         loaded_cell(view.totals.hits.loaded_share, view.totals.lookup_tokens), duration(view.age_s))
        for view in sessions
    ], texts=heads[:4], yields=("reservations", "leases", "held", "attached", "namespace"), title="sessions")


def _say_leases(console: Console, leases: Iterable[LeaseView], engines: dict[str, str]) -> None:
    heads = ("kind", "request", "engine", "unfinished ranks", "chunks", "bytes", "age", "grant")
    say_table(console, heads, [
        (view.kind + (" (closed)" if view.closed else ""), _request(view), engines.get(view.session, view.session),
         _waiting(view), f"{view.chunks:,}", size(view.bytes), duration(view.age_s), view.grant)
        for view in leases
    ], texts=(*heads[:4], "grant"), yields=("grant", "chunks"), title="leases and reservations")


def _say_requests(console: Console, requests: Iterable[RequestView]) -> None:
    heads = ["time", "kind", "request", "engine", "tokens", "prompt", "own cache", "loaded", "computed"]
    is_narrow = console.width < REASON_CELLS
    if not is_narrow:
        heads.append("most of these because")
    say_table(console, heads, [
        (time.strftime("%H:%M:%S", time.localtime(view.at)), view.kind, view.request, view.label or view.session,
         f"{view.tokens:,}", *_outcome(view))[: len(heads)]
        for view in requests
    ], texts=("time", "kind", "request", "engine", "most of these because"), yields=("tokens", "own cache"),
        title="requests")
    if is_narrow:
        say(console, "`kvdock explain ID` says why tokens were computed")


def _outcome(view: RequestView) -> tuple[str, str, str, str, str]:
    """Where the prompt's tokens came from; empty until the engine has reported that the request ended."""
    if (found := view.outcome) is None:
        return "", "", "", "", ""
    computed, why = computed_of(found)
    return f"{found.prompt_tokens:,}", f"{local_of(found):,}", loaded_of(found), f"{computed:,}", why


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
        _say_namespaces(console, namespaces)
        say(console, "")
    elif not prefixes.prefixes:
        say(console, f"no cached prefix has {printable(search)} in a label, model, tenant or key")
        return
    _say_prefixes(console, list(_rows(prefixes, unfolded)))
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


def _say_namespaces(console: Console, views: Iterable[NamespaceView]) -> None:
    heads = ("model", "tenant", "namespace", "cached", "chunks", "own cache", "loaded", "last used", "oldest",
             "engines")
    say_table(console, heads, [
        (
            view.model, view.tenant or "-", space(view.namespace, view.weights), size(view.bytes),
            f"{view.chunks:,}", percent(view.totals.hits.local_share),
            loaded_cell(view.totals.hits.loaded_share, view.totals.lookup_tokens),
            _ago(view.unused_s), _ago(view.oldest_s), f"{view.sessions:,}" + _beside(view),
        )
        for view in views
    ], texts=heads[:3], yields=("oldest", "chunks", "own cache"))


def _say_prefixes(console: Console, rows: Sequence[tuple[str, PrefixView | None]]) -> None:
    heads: tuple[str, ...] = (
        "prefix", "label", "model", "namespace", "used", "shared", "cached", "branches", "stored", "last used"
    )
    cells: list[tuple[str, ...]] = [
        (named, *("",) * (len(heads) - 1)) if view is None else (
            named, _label(view), view.model, space(view.namespace, view.weights), _uses(view),
            f"{brief(view.shared_tokens)} tok", size(view.bytes), _branches(view), _ago(view.age_s),
            _ago(view.unused_s),
        )
        for named, view in rows
    ]
    if not any(label for _, label, *_ in cells):
        heads, cells = _without_label(heads), [_without_label(row) for row in cells]
    say_table(
        console, heads, cells, texts=("prefix", "label", "model", "namespace"),
        yields=("stored", "namespace", "branches", "model"),
    )


def _without_label(row: tuple[str, ...]) -> tuple[str, ...]:
    return row[0], *row[2:]


def _uses(view: PrefixView) -> str:
    """A dash: there were none since this server's start, and the prefix is older."""
    return counted(view.uses, "time") if view.uses or view.age_s is not None else "-"


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
