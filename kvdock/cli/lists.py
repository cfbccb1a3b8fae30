"""`kvdock sessions`, `kvdock leases` and `kvdock requests`: which engines are attached, what they hold, and what became
of their requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.cli.operator import first, print_json, reached
from kvdock.cli.screen import say
from kvdock.cli.words import duration, printable, size, space
from kvdock.protocol.reports import Leases, LeaseView, Requests, RequestView
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
    nothing = "none of the last requests has an id that begins so" if begins else "no engine has asked for anything yet"
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
    """Local and loaded tokens, and why not more were loaded; empty as long as the engine has not told them."""
    told = view.outcome
    return ("", "", "") if told is None else (f"{told.local_tokens:,}", f"{told.loaded_tokens:,}", told.why_in_words)


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
