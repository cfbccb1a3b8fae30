"""`kvdock top`: the server, live. On a terminal a picture that is drawn anew; elsewhere one picture, or JSON.

A server that is lost is asked again every interval, and the last picture stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group
from rich.text import Text

from kvdock.cli.figures import EngineFigures, Rates, engines_of, hit_rate, rates_of
from kvdock.cli.operator import open_client, print_json, reached
from kvdock.cli.outcome import FAILED, CommandProblem, problem_of_command
from kvdock.cli.screen import say
from kvdock.cli.status import attached
from kvdock.cli.terminal import Terminal
from kvdock.cli.top_view import Look, Snapshot, picture
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.reports import RequestView, Status

PATIENCE_S = 1.0
"""A server that is slower than this is as good as lost: keys are not read meanwhile."""
REQUESTS = 256
"""How many of the last requests are asked for."""
END_KEYS = frozenset("qQ")


class Tick(msgspec.Struct, kw_only=True):
    """What `--json` prints at each interval."""

    at: float
    """Unix seconds at this machine."""
    reachable: bool
    status: Status | None = None
    """As of `GET /v1/status`; this and the next are absent when the server does not answer."""
    hit_rate: float | None = None
    """Tokens found of those looked up since the start, 0 to 1."""
    rates: list[Rates] | None = None
    engines: list[EngineFigures] | None = None
    """None: the caller may see totals only."""
    requests: list[RequestView] | None = None
    problem: CommandProblem | None = None
    """Why the server does not answer."""


def show_top(server: str, *, interval_s: float, once: bool, as_json: bool, console: Console) -> None:
    """Returns when the person ends it. Raises CommandError for a wrong address, and, for one picture, when no server
    answers; ApiError."""
    live = as_json or (sys.stdout.isatty() and not console.is_dumb_terminal)
    if once or not live:
        with reached(server) as client:
            shown = snapshot(client)
            if as_json:
                print_json(console, _tick(shown))
            else:
                look = Look(console.width, max(24, console.height), console.options.ascii_only)
                say(console, Group(*picture(shown, "", client.address, look)))
        return
    with open_client(server, PATIENCE_S) as client:
        if as_json:
            _stream(client, interval_s, console)
        else:
            _watch(client, interval_s, console)


def snapshot(client: Client) -> Snapshot:
    """Raises ServerUnavailable, ApiError."""
    status, stats = client.status(), client.stats()
    sessions = attached(client)
    requests = [] if sessions is None else client.requests(limit=REQUESTS).requests
    engines = None if sessions is None else engines_of(sessions)
    return Snapshot(time.time(), status, stats, rates_of(stats), engines, requests)


def _tick(shown: Snapshot) -> Tick:
    return Tick(
        at=shown.at, reachable=True, status=shown.status, hit_rate=hit_rate(shown.status), rates=shown.rates,
        engines=shown.engines, requests=shown.requests,
    )


def _stream(client: Client, interval_s: float, console: Console) -> None:
    """Ctrl-C is how it ends."""
    try:
        due_s = time.monotonic()
        while True:
            try:
                tick = _tick(snapshot(client))
            except (ServerUnavailable, ApiError) as error:
                tick = Tick(at=time.time(), reachable=False, problem=problem_of_command(error, str(error), FAILED))
            print_json(console, tick)
            sys.stdout.flush()
            now_s = time.monotonic()
            due_s = max(due_s + interval_s, now_s)
            time.sleep(due_s - now_s)  # 0 if the answer took longer than the interval; never negative
    except KeyboardInterrupt:
        return


def _watch(client: Client, interval_s: float, console: Console) -> None:
    terminal = Terminal(console.file)
    shown: Snapshot | None = None
    trouble = ""
    with terminal.held():
        while not terminal.ended:
            try:
                shown, trouble = snapshot(client), ""
            except (ServerUnavailable, ApiError) as error:
                trouble = str(error)
            until_s = time.monotonic() + interval_s
            while not terminal.ended:
                look = Look(console.width, console.height, console.options.ascii_only)
                terminal.draw(_drawn(console, picture(shown, trouble, client.address, look)))
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    break
                if END_KEYS & set(terminal.key(left_s)):
                    return


def _drawn(console: Console, lines: Sequence[Text]) -> str:
    with console.capture() as captured:
        console.print(*lines, sep="\n", highlight=False, markup=False, no_wrap=True, crop=True)
    return captured.get().rstrip("\n")
