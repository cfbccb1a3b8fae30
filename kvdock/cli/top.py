"""`kvdock top`: a live view of the server. On a terminal the picture is redrawn every interval; elsewhere the command
prints one picture, or JSON.

When the server is lost, the last picture stays, and `top` tries again every interval. Keys work without Return. Ctrl-C,
SIGTERM and SIGHUP end the view as `q` does, and restore the terminal. Ctrl-Z restores the terminal until the view is
continued. When the window's size changes, the picture is redrawn at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, NamedTuple

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from kvdock.cli.client import open_client, print_json, reached
from kvdock.cli.errors import FAILED, CommandProblem, problem_of_command
from kvdock.cli.hits import (
    COSTS,
    computed_of,
    computed_share,
    loaded_cell,
    loaded_of,
    local_of,
    saved_cell,
    saved_in_words,
    style_of_saved,
)
from kvdock.cli.render import brief, counted, duration, percent, printable, say, size
from kvdock.cli.status import (
    EngineFigures,
    Rates,
    attached,
    degraded_in_words,
    engines_of,
    finding_in_words,
    headline,
    pool_in_words,
    rates_of,
    tier_in_words,
    used_bytes,
)
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.reports import PoolView, RequestView, Stats, Status, Verdict

PATIENCE_S = 1.0
"""The timeout of a call. While a call waits, keys are not read, so a slower server counts as lost."""
REQUESTS = 256
"""How many of the latest requests are fetched."""
OWN = "kvdock top"
"""This command, whose picture has more of a finding below."""
END_KEYS = frozenset("qQ")


class Tick(msgspec.Struct, kw_only=True):
    """What `--json` prints at each interval."""

    at: float
    """Unix seconds, by the clock of this machine."""
    reachable: bool
    status: Status | None = None
    """The answer of `GET /v1/status`. This and the following fields are null when the server does not answer."""
    loaded_share: float | None = None
    """The share of the prompt tokens since the start that were loaded, 0 to 1."""
    local_share: float | None = None
    """The share that engines had in their own caches."""
    rates: list[Rates] | None = None
    verdict: Verdict | None = None
    engines: list[EngineFigures] | None = None
    """None: the caller may see only totals."""
    requests: list[RequestView] | None = None
    problem: CommandProblem | None = None
    """The reason why the server does not answer."""


def show_top(server: str, *, interval_s: float, once: bool, as_json: bool, console: Console) -> None:
    """Returns when the user ends it. Raises CommandError for a wrong address and, for one picture, when no server
    answers, and ApiError."""
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
    """Asks the server for the figures of one picture. Raises ServerUnavailable, ApiError."""
    status, stats, judged = client.status(), client.stats(), client.verdict()
    sessions = attached(client)
    requests = [] if sessions is None else client.requests(limit=REQUESTS).requests
    engines = None if sessions is None else engines_of(sessions)
    return Snapshot(time.time(), status, stats, rates_of(stats), judged, engines, requests)


def _tick(shown: Snapshot) -> Tick:
    return Tick(
        at=shown.at, reachable=True, status=shown.status, loaded_share=shown.status.hits.loaded_share,
        local_share=shown.status.hits.local_share, rates=shown.rates, verdict=shown.verdict, engines=shown.engines,
        requests=shown.requests,
    )


def _stream(client: Client, interval_s: float, console: Console) -> None:
    """Prints the figures as JSON at each interval, until Ctrl-C."""
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


NARROW_COLUMNS, WIDE_COLUMNS = 72, 100
NAME_CELLS = 10
YIELDING_CELLS = 12
"""A column that gives way to the others keeps this many cells."""
LOW_ROWS, INDENT = 24, 3
"""A window of fewer rows is low. Where a text goes on in the next line, it stands this far from the edge."""
HEALTH = {
    "ok": Text("ready", style="green"), "degraded": Text("degraded", style="bold yellow"),
    "not ready": Text("not ready", style="bold red"),
}
MOST_FINDINGS = 3
FEWEST_REQUESTS = 3
"""Rows that engines and tiers leave free for requests, if the screen is high enough."""


class Snapshot(NamedTuple):
    """What the server answered at one moment."""

    at: float
    """Unix seconds, by the clock of this machine."""
    status: Status
    stats: Stats
    rates: list[Rates]
    verdict: Verdict
    engines: list[EngineFigures] | None
    """None: the caller may see only totals."""
    requests: list[RequestView]


class Look(NamedTuple):
    columns: int
    rows: int
    plain: bool = False
    """The terminal cannot show block characters."""

    @property
    def narrow(self) -> bool:
        return self.columns < NARROW_COLUMNS

    def keep(self, narrowest: Sequence[int], narrow: Sequence[int], medium: Sequence[int], all_: int) -> list[int]:
        """Which of `all_` columns a table has at this width."""
        if self.columns < WIDE_COLUMNS:
            return list(narrowest if self.columns < 50 else narrow if self.narrow else medium)
        return list(range(all_))


Lines = list[Text]


def picture(shown: Snapshot | None, trouble: str, address: str, look: Look) -> Lines:
    """At most `look.rows` lines of at most `look.columns` cells. `trouble`: why the server does not answer now; then
    `shown` is its last answer. Empty: it answers."""
    lines = _header(shown, trouble, address, look)
    if shown is not None:
        lines += _totals(shown, look)
        blocks = [_engines(shown, look), _tiers(shown, look)]
        for block in blocks:
            left = look.rows - len(lines)
            room = left - FEWEST_REQUESTS - 2 if left > 2 * FEWEST_REQUESTS + 4 else left
            if block and room >= 3:
                lines += [Text(), *_cut(block, room - 1)]
        requests = _requests(shown, look)
        room = look.rows - len(lines) - 1
        if requests and room >= 2:
            lines += [Text(), *requests[:room]]
    if trouble and shown is not None:
        for line in lines[2:]:
            line.stylize("dim")
    return [_fit(line, look.columns) for line in lines[: look.rows]]


def _cut(block: Lines, room: int) -> Lines:
    return block if len(block) <= room else [*block[: room - 1], Text(f"… {len(block) - room + 1} more", style="dim")]


def _fit(line: Text, columns: int) -> Text:
    line.truncate(columns, overflow="ellipsis")
    line.rstrip()
    return line


def _header(shown: Snapshot | None, trouble: str, address: str, look: Look) -> Lines:
    clock = time.strftime("%H:%M:%S", time.localtime(shown.at)) if shown else ""
    if trouble:
        since = f" since {clock}" if shown else ""
        hint = [] if shown else [Text(), Text("`kvdock serve` starts a server; q ends this")]
        lost = Text(f"kvdock: no answer{since}, trying again", style="bold red")
        return [lost, Text(printable(trouble), style="red"), *hint]
    assert shown is not None
    status = shown.status
    health = HEALTH[status.status]
    about = [f"up {duration(status.uptime_s)}", clock, *([] if look.narrow else [address])]
    line = Text("kvdock ", style="bold") + health + Text("  " + "  ".join(about), style="not bold")
    reasons = [Text(printable(degraded_in_words(status)), style="yellow")] if status.degraded else []
    findings = [one for one in shown.verdict.findings if one.code != "not_ready"]  # the reasons have said it
    said = [headline(shown.verdict), *reasons, *(finding_in_words(one, OWN) for one in findings[:MOST_FINDINGS])]
    folded = [part for one in said for part in _folded(one, look)]
    return [line, *folded, Text()]


def _folded(text: Text, look: Look) -> Lines:
    """The text, broken between words where it does not fit in one line; a low window has no room for that."""
    lines: Lines = []
    while look.rows >= LOW_ROWS and len(text) > look.columns:
        at = text.plain.rfind(" ", INDENT, look.columns + 1)
        if at < 0:
            break
        line, rest = text.divide([at])
        lines.append(line)
        text = Text(" " * (INDENT - 1), style=text.style) + rest
    return [*lines, text]


def _totals(shown: Snapshot, look: Look) -> Lines:
    status, rates, hits = shown.status, shown.rates, shown.status.hits
    last = rates[0] if rates else None
    computed = computed_share(hits.loaded_share, hits.local_share)
    lines: Lines = []
    loaded, local, computing = (last.loaded_share, last.local_share, last.computed_share) if last else (None,) * 3
    for name, share, total, style in (
        ("loaded", loaded, hits.loaded_share, "bold"), ("own cache", local, hits.local_share, "not bold"),
        ("computed", computing, computed, "not bold"),
    ):
        recent = f"{percent(share)} in {duration(last.seconds)}, " if last else ""
        lines += _rows(name, f"{recent}{percent(total)} since start", look, style)
        if last is not None and name == "loaded":
            line = sparkline(_series(shown.stats, "loaded_share"), look.columns - NAME_CELLS, look.plain)
            lines += _rows("", line, look, "cyan")
    if last is not None:
        prompts, asked = last.prompt_tokens_per_s or 0, last.lookup_tokens_per_s or 0
        lines += _rows("tokens", f"{brief(prompts)}/s in prompts, {brief(asked)}/s asked for", look)
        read, stored = last.loaded_bytes_per_s or 0, last.stored_bytes_per_s or 0
        lines += _rows("bytes", f"{size(read)}/s loaded, {size(stored)}/s stored", look)
    evicted = last.evicted_chunks_per_s if last else None
    lines += _rows("pool", pool_bar(status.pool, look.columns - NAME_CELLS, look.plain), look)
    lines += _rows("", f"{pool_in_words(status.pool)}, {brief(evicted or 0)} chunks/s evicted", look)
    if hits.saved_s is not None:
        saved = saved_in_words(hits.saved_s)
        lines += _rows("saved", saved.plain, look, style_of_saved(hits.saved_s) or "not bold")
    if status.leases or status.reservations:
        holders = f"{counted(status.leases, 'lease')}, {counted(status.reservations, 'reservation')}"
        lines += _rows("held", f"{size(status.pool.held_bytes)} by {holders}", look)
    return lines


def _rows(name: str, value: str, look: Look, style: str = "not bold") -> Lines:
    """One line, or one for each part of a value that does not fit in one line."""
    parts = value.split(", ") if NAME_CELLS + len(value) > look.columns else [value]
    return [
        Text((name if number == 0 else "").ljust(NAME_CELLS), style="bold") + Text(part, style=style)
        for number, part in enumerate(parts)
    ]


def _series(stats: Stats, name: str) -> list[float | None]:
    return next((series.values for series in stats.series if series.name == name), [])


def sparkline(values: Sequence[float | None], columns: int, plain: bool) -> str:
    """Shares of 0 to 1, the newest on the right, averaged so that they fit. A missing measurement is a dot."""
    marks = "_.-=+*#@" if plain else "▁▂▃▄▅▆▇█"
    per = max(1, -(-len(values) // max(1, columns)))
    drawn = []
    for start in range(len(values) % per - per if len(values) % per else 0, len(values), per):
        measured = [value for value in values[max(0, start) : start + per] if value is not None]
        share = sum(measured) / len(measured) if measured else None
        drawn.append(
            (" " if plain else "·") if share is None else marks[min(len(marks) - 1, int(share * len(marks)))]
        )
    return "".join(drawn)


def pool_bar(pool: PoolView, columns: int, plain: bool) -> str:
    """A bar for the pool's limit: bytes that are stored, bytes that are being written or quarantined, free bytes."""
    stored, other, free = ("#", "+", ".") if plain else ("█", "▒", "·")
    width = max(10, min(columns, 60))
    used = round(width * min(1.0, used_bytes(pool) / pool.limit_bytes))
    ready = min(used, round(width * pool.ready_bytes / pool.limit_bytes))
    return stored * ready + other * (used - ready) + free * (width - used)


# ------------------------------------------------------------------ tables


def _engines(shown: Snapshot, look: Look) -> Lines:
    if shown.engines is None:
        return [Text(f"{counted(shown.status.sessions, 'engine')} attached; an access token shows them", style="bold")]
    if not shown.engines:
        return [Text("no engine is attached", style="bold")]
    heads = ["engine", "state", "own cache", "loaded", "bytes loaded", "stored", "held", "saved", "loads at"]
    rows = [
        [engine.name, engine.state, percent(engine.local_share), loaded_cell(engine.loaded_share, engine.lookup_tokens),
         size(engine.loaded_bytes), size(engine.stored_bytes), size(engine.held_bytes),
         "" if engine.hits.saved_s is None else saved_cell(engine.hits.saved_s), _speed(engine)]
        for engine in shown.engines
    ]
    keep = look.keep((0, 1, 3), (0, 1, 2, 3, 7), (0, 1, 2, 3, 5, 6, 7), len(heads))
    return _table([heads, *rows], keep, look, styles={1: _style_of_state, 7: _style_of_span})


def _style_of_state(state: str) -> str:
    return {"live": "green", "suspect": "bold yellow"}.get(state, "")


def _style_of_span(saved: str) -> str:
    return COSTS if saved.startswith("-") else ""


def _speed(engine: EngineFigures) -> str:
    load, ceiling = engine.load_bytes_per_s, engine.ceiling_bytes_per_s
    if not load:
        return ""
    return f"{size(load)}/s" + (f", {percent(load / ceiling)} of plain" if ceiling else "")


def _tiers(shown: Snapshot, look: Look) -> Lines:
    return [
        Text(f"tier {printable(tier.name)}: ", style="bold") + Text(printable(tier_in_words(tier)), style="not bold")
        for tier in shown.status.tiers
    ]


def _requests(shown: Snapshot, look: Look) -> Lines:
    if not shown.requests:
        return []
    heads = ["time", "kind", "engine", "request", "tokens", "own cache", "loaded", "computed", "mostly because"]
    rows = [
        [time.strftime("%H:%M:%S", time.localtime(view.at)), view.kind, view.label or view.session, view.request,
         f"{view.tokens:,}", *_outcome(view)]
        for view in shown.requests
    ]
    keep = look.keep((1, 3, 4, 6), (0, 1, 3, 4, 5, 6), (0, 1, 3, 4, 5, 6, 7), len(heads))
    return _table([heads, *rows[: look.rows]], keep, look, right={4, 5, 7}, yields=8)


def _outcome(view: RequestView) -> tuple[str, str, str, str]:
    """Where the prompt's tokens came from; empty until the engine has reported that the request ended."""
    if (found := view.outcome) is None:
        return "", "", "", ""
    computed, why = computed_of(found)
    return f"{local_of(found):,}", loaded_of(found), f"{computed:,}", why


def _table(
    rows: Sequence[Sequence[str]], keep: Sequence[int], look: Look, *, right: set[int] | None = None,
    styles: dict[int, Callable[[str], str]] | None = None, yields: int | None = None,
) -> Lines:
    """Columns are as wide as their widest cell. Until a row fits, the column `yields` shrinks, then the widest ones."""
    cells = [[printable(row[at]) for at in keep] for row in rows]
    widths = [max(cell_len(row[at]) for row in cells) for at in range(len(keep))]
    first = keep.index(yields) if yields in keep else None
    while sum(widths) + 2 * (len(widths) - 1) > look.columns and max(widths) > 6:
        at = first if first is not None and widths[first] > YIELDING_CELLS else widths.index(max(widths))
        widths[at] -= 1
    lines = []
    for number, row in enumerate(cells):
        line = Text()
        for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if cell_len(cell) > width:
                cell = set_cell_size(cell, width - 1) + "…"
            padded = cell.rjust(width) if right and keep[at] in right else set_cell_size(cell, width)
            style = "bold" if number == 0 else styles[keep[at]](cell) if styles and keep[at] in styles else ""
            line.append(padded + "  ", style=style)
        lines.append(line)
    return lines


ENTER = "\x1b[?1049h\x1b[?25l"
"""Switches to the alternate screen and hides the cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """Shows the view on the alternate screen while `held`."""

    def __init__(self, out: IO[str]) -> None:
        """`out`: the terminal. Keys are read from standard input, if that is a terminal as well."""
        self._out = out
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._saved = None if self._keys is None else termios.tcgetattr(self._keys)
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._ended = self._stops = False
        """Signals only set these: a handler that wrote to the terminal could do so in the middle of a picture."""

    @contextmanager
    def held(self) -> Iterator[None]:
        numbers = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)
        handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self._enter()
            yield
        finally:
            self._leave()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for fd in (self._wakes, self._wake):
                os.close(fd)

    @property
    def ended(self) -> bool:
        """Whether a signal has ended the view."""
        return self._ended

    def draw(self, picture: str) -> None:
        """Draws the picture from the first line of the screen on, and clears the lines below it."""
        lines = picture.replace("\n", "\x1b[K\n")  # the terminal adds the carriage returns
        self._out.write(f"\x1b[H{lines}\x1b[K\x1b[J")
        self._out.flush()

    def key(self, patience_s: float) -> str:
        """The next keys; empty when `patience_s` is over, or when the view must be redrawn. Other keys end the wait
        early: call again with the remaining time."""
        if self._ended:
            return ""
        watched = [self._wakes] if self._keys is None else [self._wakes, self._keys]
        ready, _, _ = select.select(watched, [], [], max(0.0, patience_s))
        if self._wakes in ready:
            os.read(self._wakes, 4096)
            if self._stops:
                self._stops = False
                self._stop()
                return ""
        if self._keys in ready and self._keys is not None:
            typed = os.read(self._keys, 64)
            if not typed:  # end of input
                self._ended = True
            return typed.decode(errors="replace")
        return ""

    def _enter(self) -> None:
        if self._keys is not None:
            tty.setcbreak(self._keys)
        self._out.write(ENTER)
        self._out.flush()

    def _leave(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            self._out.write(LEAVE)
            self._out.flush()
            if self._keys is not None and self._saved is not None:
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._stops = True
        elif number in _ENDING:
            self._ended = True
        with suppress(BlockingIOError):  # the pipe is full, so it wakes the reader anyway
            os.write(self._wake, b"\0")

    def _stop(self) -> None:
        """Restores the terminal, and stops as a program without a handler for Ctrl-Z does."""
        self._leave()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the shell continues this process
        signal.signal(signal.SIGTSTP, before)
        self._enter()
