"""`kvdock status`: is the server up, is it helping, and what does it hold; or all figures as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.cli.counters import folded, meaning_of, value_of
from kvdock.cli.figures import (
    Rates,
    age_in_words,
    copies_in_words,
    engines_in_words,
    hit_rate,
    rates_of,
    saved_in_words,
    verdict,
)
from kvdock.cli.lists import sessions_table
from kvdock.cli.operator import first, print_json, reached
from kvdock.cli.screen import say
from kvdock.cli.words import brief, counted, duration, percent, printable, size
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import MoverView, PoolView, Status, TierView
from kvdock.protocol.schemas import SessionView
from kvdock.protocol.tier_schemas import MOVER_LABEL

SILENT_S = 5.0
"""A mover that tells of its tiers less often hangs, or is starting."""
NARROW_COLUMNS = 60
AT_ITS_END = {
    "keep": "what is cached stays for the next server at its socket",
    "remove": "what is cached goes; `kvdock serve --takeover` replaces the server and keeps it",
}
"""What becomes of the pool, by the setting `on_exit`."""
NO_TOKEN = frozenset({"unauthenticated", "forbidden"})


class StatusFigures(Status, kw_only=True):
    """What `--json` prints: the server's answer, and what follows from its history."""

    hit_rate: float | None
    """Tokens found of those looked up since the start, 0 to 1."""
    rates: list[Rates]


def show_status(server: str, *, everything: bool, as_json: bool, console: Console) -> None:
    """`everything`: all counters, with what they mean, and all engines. Raises CommandError when no server answers;
    ApiError."""
    with reached(server) as client:
        status = client.status()
        rates = rates_of(client.stats())
        if as_json:
            known = {name: getattr(status, name) for name in status.__struct_fields__}
            print_json(console, StatusFigures(**known, hit_rate=hit_rate(status), rates=rates))
            return
        sessions, settings = attached(client), _settings(client)
        address = client.address
    say(console, f"kvdock is {verdict(status, rates)}", "", _rates_table(status, rates, console.width), "",
        _overview(status, rates, sessions, settings, address))
    if everything:
        if sessions:
            say(console, "", sessions_table(sessions))
        say(console, "", _all_counters(status))
    else:
        _say_folded(console, status)


def attached(client: Client) -> list[SessionView] | None:
    """The engines' sessions, without those of the server's mover. None: the caller may see totals only."""
    try:
        sessions = first(client.sessions, lambda page: page.sessions)[0]
        return [view for view in sessions if view.label != MOVER_LABEL]
    except ApiError as error:
        if error.code in NO_TOKEN:
            return None
        raise


def _settings(client: Client) -> dict[str, Any]:
    """Empty: the caller may see totals only."""
    try:
        return client.config().settings
    except ApiError as error:
        if error.code in NO_TOKEN:
            return {}
        raise


def _rates_table(status: Status, rates: Sequence[Rates], width: int) -> Table:
    shown = rates[:1] if width < NARROW_COLUMNS else rates
    totals, asked = status.counters, hit_rate(status)
    heads = [f"last {duration(one.seconds)}" for one in shown]
    table = Table("", *(Column(head, justify="right") for head in heads), Column("since start", justify="right"),
                  box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row(Text("hit rate", style="bold"), *(Text(percent(one.hit_rate), style="bold") for one in shown),
                  Text(percent(asked), style="bold"))
    for title, field, counter in (
        ("looked up", "lookup_tokens_per_s", "lookup_tokens"), ("found", "hit_tokens_per_s", "hit_tokens"),
        ("loaded", "loaded_bytes_per_s", "loaded_bytes"), ("stored", "stored_bytes_per_s", "stored_bytes"),
    ):
        total = totals.get(counter, 0)
        table.add_row(
            title, *(_rate(getattr(one, field), field) for one in shown),
            size(total) if counter.endswith("_bytes") else f"{brief(total)} tok",
        )
    return table


def _rate(value: float | None, field: str) -> str:
    if value is None:
        return "-"
    return f"{size(value)}/s" if "bytes" in field else f"{brief(value)} tok/s"


def _overview(
    status: Status, rates: Sequence[Rates], sessions: list[SessionView] | None, settings: dict[str, Any],
    address: str,
) -> Table:
    rows = dict(_rows(status, rates))
    rows["engines"] = (
        f"{status.sessions} attached; their names need an access token" if sessions is None
        else engines_in_words(sessions)
    )
    if sessions and len(sessions) <= 8:
        rows["engines"] += f": {', '.join(view.label or view.instance for view in sessions)}"
    if status.saved.tokens:
        rows["saved"] = saved_in_words(status.saved)
    if copies := copies_in_words(sessions or ()):
        rows["copies"] = copies
    rows |= {f"tier {tier.name}": tier_in_words(tier) for tier in status.tiers}
    if status.mover is not None and (said := _mover(status.mover)):
        rows["lower tiers"] = said
    rows["server"] = f"{status.version} at {address}, up {duration(status.uptime_s)}"
    if settings and status.chunks.ready:
        rows["at its end"] = AT_ITS_END[settings["on_exit"]]
    if status.reasons:
        rows["state"] = ", ".join([status.status, *status.reasons])
    return _two_columns(rows.items())


def _rows(status: Status, rates: Sequence[Rates]) -> Iterator[tuple[str, str]]:
    pool, chunks = status.pool, status.chunks
    evicted = rates[0].evicted_chunks_per_s if rates else None
    yield "pool", pool_in_words(pool) + f", {brief(evicted or 0)} chunks/s evicted"
    said = [f"{size(pool.ready_bytes)} in {counted(chunks.ready, 'chunk')}"]
    if chunks.reserved:
        said.append(f"{size(pool.reserved_bytes)} in {counted(chunks.reserved, 'chunk')} being written")
    if chunks.quarantined:
        said.append(f"{size(pool.quarantined_bytes)} in {counted(chunks.quarantined, 'chunk')} quarantined")
    if pool.retained_bytes:
        said.append(f"{size(pool.retained_bytes)} retained by hints")
    yield "content", ", ".join(said)
    if age := age_in_words(status):
        yield "age", age
    if pool.held_bytes or status.leases or status.reservations:
        holders = f"{counted(status.leases, 'lease')} and {counted(status.reservations, 'reservation')}"
        yield "held", f"{size(pool.held_bytes)} by {holders}"


def used_bytes(pool: PoolView) -> int:
    return pool.ready_bytes + pool.reserved_bytes + pool.quarantined_bytes


def pool_in_words(pool: PoolView) -> str:
    used = used_bytes(pool)
    return f"{size(used)} of {size(pool.limit_bytes)} used ({percent(used / pool.limit_bytes)})"


def _say_folded(console: Console, status: Status) -> None:
    groups = list(folded(status.counters))
    if groups:
        say(console, "", "since the start", _two_columns(groups))


def _all_counters(status: Status) -> Table:
    table = Table("counter", Column("since start", justify="right"), "meaning", box=None, pad_edge=False)
    for counter, total in status.counters.items():
        table.add_row(Text(printable(counter)), value_of(counter, total), Text(meaning_of(counter)))
    return table


def _two_columns(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(printable(value), overflow="fold"))
    return table


def tier_in_words(tier: TierView) -> str:
    said = "used" if tier.state == "open" else f"off: {tier.why}"
    if tier.error:
        said += f" ({tier.error})"
    if not tier.counters:  # it has never been open
        return said
    limit = f" of at most {size(tier.bytes_limit)}" if tier.bytes_limit else ""
    waits = f", {size(tier.queued_bytes)} wait to be written" if tier.queued_bytes else ""
    bad = f", {tier.counters['damaged']:,} damaged" if tier.counters.get("damaged") else ""
    owed = f", not told of {tier.untold:,} clears and deletions yet" if tier.untold else ""
    stored, loaded = (size(tier.counters.get(name, 0)) for name in ("stored_bytes", "loaded_bytes"))
    return (
        f"{said}; {size(tier.bytes_used)}{limit} in {tier.objects:,} parts{waits}; "
        f"{stored} stored, {loaded} loaded{bad}{owed}"
    )


def _mover(mover: MoverView) -> str:
    waits = ", ".join(
        f"{count:,} {how} after {mover.wait_s[how] / count:.2f} s on average"
        for how, count in mover.waits.items() if count
    )
    said = [f"requests that wait now: {mover.waiting}"] if mover.waiting else []
    if waits:
        said.append(f"requests that have waited: {waits}")
    if mover.restarts:
        said.append(f"times that the mover ended and was started again: {mover.restarts}")
    if mover.silent_s > SILENT_S:
        said.append(f"the mover has said nothing for {duration(mover.silent_s)}")
    if mover.declined:
        said.append(f"computed instead, as no tier is quicker: {mover.declined:,}")
    if mover.lost_lookups:
        said.append(f"lookups that it was not told of: {mover.lost_lookups:,}")
    return "; ".join(said)
