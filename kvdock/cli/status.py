"""`kvdock status`: whether the server is up, whether it helps, and what it holds; or all figures as JSON.

The figures come from `GET /v1/status`, `/v1/stats`, `/v1/sessions` and `/v1/config`. `kvdock top` uses them, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_type_hints

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.api.record.counters import Counters
from kvdock.cli.client import first, print_json, reached
from kvdock.cli.lists import sessions_table
from kvdock.cli.render import brief, counted, duration, percent, printable, say, size, span
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import MoverView, PoolView, Saved, Stats, Status, TierView
from kvdock.protocol.schemas import MOVER_LABEL, SessionView

SILENT_S = 5.0
"""A mover that has not reported for this long hangs, or is starting."""
NARROW_COLUMNS = 60
AT_ITS_END = {
    "keep": "the cached chunks stay for the next server at its socket",
    "remove": "the cached chunks are removed; `kvdock serve --takeover` replaces the server and keeps them",
}
"""What happens to the pool, by the setting `on_exit`."""
NO_TOKEN = frozenset({"unauthenticated", "forbidden"})


class StatusFigures(Status, kw_only=True):
    """What `--json` prints: the server's answer, and rates computed from its history."""

    hit_rate: float | None
    """The share of the tokens looked up since the start that were found, 0 to 1."""
    rates: list[Rates]


def show_status(server: str, *, everything: bool, as_json: bool, console: Console) -> None:
    """`everything`: print all counters with their meanings, and all engines. Raises CommandError when no server
    answers; ApiError."""
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
    """The sessions of engines, without those of the server's mover. None: the caller may see only totals."""
    try:
        sessions = first(client.sessions, lambda page: page.sessions)[0]
        return [view for view in sessions if view.label != MOVER_LABEL]
    except ApiError as error:
        if error.code in NO_TOKEN:
            return None
        raise


def _settings(client: Client) -> dict[str, Any]:
    """The server's settings. Empty: the caller may see only totals."""
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
        f"{status.sessions} attached; an access token shows their names" if sessions is None
        else engines_in_words(sessions)
    )
    if sessions and len(sessions) <= 8:
        rows["engines"] += f": {', '.join(view.label or view.instance for view in sessions)}"
    if status.saved.tokens:
        rows["saved"] = saved_in_words(status.saved)
    if copies := copies_in_words(sessions or ()):
        rows["copies"] = copies
    rows |= {f"tier {tier.name}": tier_in_words(tier) for tier in status.tiers}
    if status.mover is not None and (shown := _mover(status.mover)):
        rows["lower tiers"] = shown
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
    shown = [f"{size(pool.ready_bytes)} in {counted(chunks.ready, 'chunk')}"]
    if chunks.reserved:
        shown.append(f"{size(pool.reserved_bytes)} in {counted(chunks.reserved, 'chunk')} being written")
    if chunks.quarantined:
        shown.append(f"{size(pool.quarantined_bytes)} in {counted(chunks.quarantined, 'chunk')} quarantined")
    if pool.retained_bytes:
        shown.append(f"{size(pool.retained_bytes)} retained by hints")
    yield "content", ", ".join(shown)
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
    shown = "used" if tier.state == "open" else f"off: {tier.why}"
    if tier.error:
        shown += f" ({tier.error})"
    if not tier.counters:  # the tier has never been open
        return shown
    limit = f" of at most {size(tier.bytes_limit)}" if tier.bytes_limit else ""
    waits = f", {size(tier.queued_bytes)} waiting to be written" if tier.queued_bytes else ""
    bad = f", {tier.counters['damaged']:,} damaged" if tier.counters.get("damaged") else ""
    pending = f", {tier.pending_orders:,} clears and deletions pending" if tier.pending_orders else ""
    stored, loaded = (size(tier.counters.get(name, 0)) for name in ("stored_bytes", "loaded_bytes"))
    return (
        f"{shown}; {size(tier.bytes_used)}{limit} in {tier.objects:,} parts{waits}; "
        f"{stored} stored, {loaded} loaded{bad}{pending}"
    )


def _mover(mover: MoverView) -> str:
    waits = ", ".join(
        f"{count:,} {how} after {mover.wait_s[how] / count:.2f} s on average"
        for how, count in mover.waits.items() if count
    )
    shown = [f"requests waiting now: {mover.waiting}"] if mover.waiting else []
    if waits:
        shown.append(f"requests that have waited: {waits}")
    if mover.restarts:
        shown.append(f"restarts of the mover: {mover.restarts}")
    if mover.silent_s > SILENT_S:
        shown.append(f"the mover has not reported for {duration(mover.silent_s)}")
    if mover.declined:
        shown.append(f"requests that computed because no tier was quicker: {mover.declined:,}")
    if mover.lost_lookups:
        shown.append(f"lookups that were not sent to the mover: {mover.lost_lookups:,}")
    return "; ".join(shown)


GROUPS: Final[dict[str, dict[str, str]]] = {
    "lookups": {
        "lookups": "{} made", "lookup_renewals": "{} repeated", "peeks": "{} without a session",
        "lookup_tokens": "{} token|s looked up", "hit_tokens": "{} found",
    },
    "hits cut short": {
        "limited_lookups": "{} by a byte cap", "unpinned_lookups": "{} by a rank that had not registered memory",
        "unpinned_chunks": "{} chunk|s lost by that", "unpinned_tokens": "{} token|s lost by that",
    },
    "loaded": {"loaded_chunks": "{} chunk|s", "loaded_bytes": "{}", "loaded_tokens": "{} token|s, as engines report"},
    "stored": {
        "stored_chunks": "{} chunk|s", "stored_bytes": "{}", "reservations": "{} reservation|s",
        "aborted_chunks": "{} chunk|s aborted",
    },
    "stores cut short": {
        "short_reservations": "{} by lack of memory", "quota_reservations": "{} by a quota",
        "unpinned_reservations": "{} by lack of memory that every rank had registered",
    },
    "eviction": {"evicted_chunks": "{} chunk|s evicted", "refused_retains": "{} not retained, over the limit"},
    "loaded ahead": {
        "prefetched_chunks": "{} chunk|s", "prefetches": "{} call|s", "prefetches_refused": "{} refused",
        "prefetches_dropped": "{} dropped",
    },
    "requests": {"outcomes": "{} reported as ended", "dropped_outcomes": "{} ended without a report"},
    "engines": {"attached_members": "{} process|es attached", "dead_members": "{} found dead"},
    "trouble": {
        "mismatches": "{} chunk|s with a wrong checksum", "refusals": "{} call|s refused",
        "refused_connections": "{} connection|s refused",
    },
}
"""By group: counters, and a phrase for each total. The letters after a `|` are omitted if the total is 1."""


def value_of(counter: str, total: int) -> str:
    return size(total) if counter.endswith("_bytes") else f"{total:,}"


def folded(counters: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(group, its counters in words) for each group with a counter above 0. Counters that this version does not know
    are in the group "others"."""
    known: set[str] = set()
    for group, phrases in GROUPS.items():
        known |= phrases.keys()
        shown = [_phrase(phrase, name, counters[name]) for name, phrase in phrases.items() if counters.get(name)]
        if shown:
            yield group, ", ".join(shown)
    others = [f"{value_of(name, total)} {name.replace('_', ' ')}" for name, total in counters.items()
              if total and name not in known]
    if others:
        yield "others", ", ".join(others)


def _phrase(phrase: str, counter: str, total: int) -> str:
    return re.sub(r"\|(\w+)", "" if total == 1 else r"\1", phrase).format(value_of(counter, total))


def meaning_of(counter: str) -> str:
    """The counter's description in `/metrics`; empty for a counter that this version does not know."""
    hint = get_type_hints(Counters, include_extras=True).get(counter)
    return "" if hint is None else str(hint.__metadata__[0].description)


MINUTE_S = 60.0


class Rates(msgspec.Struct, kw_only=True):
    """Averages over the last `seconds`. None: nothing was measured."""

    seconds: float
    hit_rate: float | None
    """The share of the tokens looked up that were found, 0 to 1. None: nothing was looked up."""
    lookup_tokens_per_s: float | None
    hit_tokens_per_s: float | None
    stored_bytes_per_s: float | None
    loaded_bytes_per_s: float | None
    evicted_chunks_per_s: float | None


class EngineFigures(msgspec.Struct, kw_only=True):
    """An attached engine, with its totals since it attached."""

    session: str
    name: str
    state: str
    """The worst of its processes: live, suspect, dead or gone."""
    held_bytes: int
    looked_up_tokens: int
    hit_tokens: int
    loaded_bytes: int
    stored_bytes: int
    saved_s: float | None
    """Seconds saved. None: the engine has not reported how fast it computes, or how long its loads took."""
    load_bytes_per_s: float | None
    """How fast the engine loads now. None: it does not load."""
    ceiling_bytes_per_s: float | None
    """The speed of plain copies on the engine's machine. None: not measured."""

    @property
    def hit_rate(self) -> float | None:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else None


def rates_of(stats: Stats) -> list[Rates]:
    """Over the last minute, if the history is longer than 1.5 minutes, and over all of it. Empty: the history is
    shorter than a second."""
    values = {series.name: series.values for series in stats.series}
    samples = max(map(len, values.values()), default=0)
    if samples * stats.interval_s < 1:
        return []
    minute = round(MINUTE_S / stats.interval_s)
    spans = [minute, samples] if samples > 1.5 * minute else [samples]
    return [_rates(values, count, stats.interval_s) for count in spans]


def _rates(values: dict[str, list[float | None]], count: int, interval_s: float) -> Rates:
    def mean(name: str) -> float | None:
        measured = [value for value in values.get(name, ())[-count:] if value is not None]
        return sum(measured) / len(measured) if measured else None

    asked, found = mean("lookup_tokens"), mean("hit_tokens")
    return Rates(
        seconds=round(count * interval_s, 3), hit_rate=found / asked if asked and found is not None else None,
        lookup_tokens_per_s=asked, hit_tokens_per_s=found, stored_bytes_per_s=mean("stored_bytes"),
        loaded_bytes_per_s=mean("loaded_bytes"), evicted_chunks_per_s=mean("evicted_chunks"),
    )


def hit_rate(status: Status) -> float | None:
    """The share of tokens found since the server started."""
    asked = status.counters.get("lookup_tokens", 0)
    return status.counters.get("hit_tokens", 0) / asked if asked else None


def verdict(status: Status, rates: Sequence[Rates]) -> str:
    """One sentence: whether the server is up, and whether it helps."""
    if status.status != "ok":
        return f"up, but not ready: {'; '.join(map(printable, status.reasons)) or 'it gives no reason'}"
    total = hit_rate(status)
    if total is None:
        return "up and ready; no engine has looked up anything yet"
    if not rates or (recent := rates[-1].hit_rate) is None:
        span = f"nothing was looked up in the last {duration(rates[-1].seconds)}; " if rates else ""
        return f"up and ready; {span}since its start {percent(total)} of the tokens looked up were found"
    span = f"of the tokens looked up in the last {duration(rates[-1].seconds)}"
    if recent == 0:
        return f"up and ready, but none {span} were found"
    return f"up and helping: {percent(recent)} {span} were found"


def state_of(view: SessionView) -> str:
    """The worst state of the engine's processes."""
    order = ("gone", "dead", "suspect", "live")
    return min((member.state for member in view.members), key=order.index, default="gone")


def name_of(view: SessionView) -> str:
    return view.label or view.instance


def engines_in_words(views: Sequence[SessionView]) -> str:
    """The number of engines, and the names of those that are not live."""
    if not views:
        return "none is attached"
    by_state = Counter(map(state_of, views))
    if set(by_state) == {"live"}:
        return f"{counted(len(views), 'engine')} attached, {'live' if len(views) == 1 else 'all live'}"
    counts = ", ".join(f"{count} {state}" for state, count in by_state.most_common())
    troubled = [f"{printable(name_of(view))} is {state}" for view in views if (state := state_of(view)) != "live"]
    more = "; …" if len(troubled) > 4 else ""
    return f"{len(views)} attached: {counts} ({'; '.join(troubled[:4])}{more})"


def engines_of(views: Iterable[SessionView]) -> list[EngineFigures]:
    """The figures of the engines, in the order of `views`."""
    return [
        EngineFigures(
            session=view.session, name=name_of(view), state=state_of(view), held_bytes=view.held_bytes,
            looked_up_tokens=view.totals.lookup_tokens, hit_tokens=view.totals.hit_tokens,
            loaded_bytes=view.totals.loaded_bytes, stored_bytes=view.totals.stored_bytes, saved_s=view.totals.saved_s,
            load_bytes_per_s=view.copy.load_bytes_per_s, ceiling_bytes_per_s=view.copy.ceiling_bytes_per_s,
        )
        for view in views
    ]


def saved_in_words(saved: Saved) -> str:
    tokens = f"{brief(saved.tokens)} tok loaded instead of computed"
    if saved.seconds is None:
        return f"{tokens}; no engine has reported how fast it computes"
    if saved.seconds < 0:
        return f"{tokens}, which took {span(-saved.seconds)} longer than computing them"
    return f"{tokens}, {span(saved.seconds)} of computing time saved"


def copies_in_words(views: Iterable[SessionView]) -> str:
    """How fast engines load on average, compared with plain copies. Empty: no engine has reported it."""
    rates = [view.copy for view in views if view.copy.load_bytes_per_s]
    if not rates:
        return ""
    load = sum(rate.load_bytes_per_s or 0.0 for rate in rates) / len(rates)
    ceiling = sum(rate.ceiling_bytes_per_s or 0.0 for rate in rates) / len(rates)
    is_known = all(rate.ceiling_bytes_per_s for rate in rates)
    of = f", {percent(load / ceiling)} of the speed of plain copies" if is_known else ""
    return f"{size(load)}/s while an engine loads{of}"


def age_in_words(status: Status) -> str:
    """How long the oldest chunk was unused, and when the pool will be full. Empty: nothing is stored."""
    if status.oldest_s is None:
        return ""
    full = "" if status.full_in_s is None else f"; full in {duration(status.full_in_s)} at the present rate"
    return f"the oldest chunk was unused for {duration(status.oldest_s)}{full}"
