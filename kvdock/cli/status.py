"""`kvdock status`: whether the server is up, whether it helps, and what it holds; or all figures as JSON.

What to say first comes from `GET /v1/verdict`, the figures from `/v1/status`, `/v1/stats`, `/v1/sessions` and
`/v1/config`, and those of one model from `/v1/hits`. `kvdock top` uses them, too.
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
from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.history import means, sum_of
from kvdock.cli.hits import COSTS, asked_in_words, computed_share, hits_table, saved_in_words, style_of_saved
from kvdock.cli.lists import of_engines, say_sessions
from kvdock.cli.render import brief, counted, duration, percent, printable, say, size
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.reports import (
    DayOfHits,
    Finding,
    MoverView,
    PoolView,
    Stats,
    Status,
    TierContents,
    TierView,
    Verdict,
)
from kvdock.protocol.schemas import SessionView

SILENT_S = 5.0
"""A mover that has not reported for this long hangs, or is starting."""
NARROW_COLUMNS = 60
AT_ITS_END = {
    "keep": "the cached chunks stay for the next server at its socket",
    "remove": "the cached chunks are removed; `kvdock serve --takeover` replaces the server and keeps them",
}
"""What happens to the pool, by the setting `on_exit`."""
OWN = "kvdock status"
"""This command, whose output has more of a finding below."""
NO_TOKEN = frozenset({"unauthenticated", "forbidden"})


class StatusFigures(Status, kw_only=True):
    """What `--json` prints: the server's answer, and rates computed from its history."""

    loaded_share: float | None
    """The share of the prompt tokens since the start that were loaded, 0 to 1. None: no request has ended."""
    local_share: float | None
    """The share that engines had in their own caches."""
    rates: list[Rates]
    verdict: Verdict


def show_status(server: str, *, everything: bool, as_json: bool, console: Console) -> None:
    """`everything`: print all counters with their meanings, and all engines. Raises CommandError when no server
    answers, and ApiError."""
    with reached(server) as client:
        status = client.status()
        rates, judged = rates_of(client.stats()), client.verdict()
        if as_json:
            known = {name: getattr(status, name) for name in status.__struct_fields__}
            print_json(console, StatusFigures(
                **known, loaded_share=status.hits.loaded_share, local_share=status.hits.local_share, rates=rates,
                verdict=judged,
            ))
            return
        sessions, settings = attached(client), _settings(client)
        address = client.address
    say(console, headline(judged), *map(finding_in_words, judged.findings), "",
        _rates_table(status, rates, console.width))
    if status.hits.prompt_tokens:
        say(console, "", _since(status.uptime_s), hits_table(status.hits, everything=everything))
    say(console, "", _overview(status, rates, sessions, settings, address))
    if everything:
        if sessions:
            say(console, "")
            say_sessions(console, sessions)
        say(console, "", _all_counters(status))
    else:
        _say_folded(console, status)


def attached(client: Client) -> list[SessionView] | None:
    """The sessions of engines, without those of the server's mover. None: the caller may see only totals."""
    try:
        return of_engines(first(client.sessions, lambda page: page.sessions)[0])
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


def _since(uptime_s: float) -> str:
    return f"where prompts' tokens came from, since the start {duration(uptime_s)} ago"


def _rates_table(status: Status, rates: Sequence[Rates], width: int) -> Table:
    shown = rates[:1] if width < NARROW_COLUMNS else rates
    hits, totals = status.hits, status.counters
    heads = [f"last {duration(one.seconds)}" for one in shown]
    table = Table("", *(Column(head, justify="right") for head in heads), Column("since start", justify="right"),
                  box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, shares, total, style in (
        ("loaded", [one.loaded_share for one in shown], hits.loaded_share, "bold"),
        ("own cache", [one.local_share for one in shown], hits.local_share, ""),
        ("computed", [one.computed_share for one in shown], computed_share(hits.loaded_share, hits.local_share), ""),
    ):
        table.add_row(Text(title, style=style), *(Text(percent(share), style=style) for share in [*shares, total]))
    for title, field, counter in (
        ("prompts", "prompt_tokens_per_s", "prompt_tokens"), ("asked for", "lookup_tokens_per_s", "lookup_tokens"),
        ("bytes loaded", "loaded_bytes_per_s", "loaded_bytes"), ("bytes stored", "stored_bytes_per_s", "stored_bytes"),
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
    rows: dict[str, str | Text] = dict(_rows(status, rates))
    rows["engines"] = (
        f"{status.sessions} attached; an access token shows their names" if sessions is None
        else engines_in_words(sessions)
    )
    if sessions and len(sessions) <= 8:
        rows["engines"] += f": {', '.join(view.label or view.instance for view in sessions)}"
    if unreported := unreported_in_words(sessions or ()):
        rows["unreported"] = unreported
    if status.hits.loaded_tokens or status.hits.saved_s is not None:
        rows["saved"] = saved_in_words(status.hits.saved_s)
    if copies := copies_in_words(sessions or ()):
        rows["copies"] = copies
    rows |= {f"tier {tier.name}": tier_in_words(tier) for tier in status.tiers}
    if status.mover is not None and (shown := _mover(status.mover)):
        rows["lower tiers"] = shown
    rows["server"] = f"{status.version} at {address}, up {duration(status.uptime_s)}"
    if settings and status.chunks.ready:
        rows["at its end"] = AT_ITS_END[settings["on_exit"]]
    if status.degraded:
        rows["state"] = state_in_words(status)
    return _two_columns(rows.items())


def state_in_words(status: Status) -> str:
    return f"{status.status}: {degraded_in_words(status)}"


def degraded_in_words(status: Status) -> str:
    """What the server cannot give or do now, since when, and who has most of it."""
    return ", ".join(
        "; ".join(filter(None, (f"{one.reason} (for {duration(max(0.0, status.now - one.since))})", one.most)))
        for one in status.degraded
    )


def _rows(status: Status, rates: Sequence[Rates]) -> Iterator[tuple[str, str]]:
    pool, chunks = status.pool, status.chunks
    evicted = rates[0].evicted_chunks_per_s if rates else None
    yield "pool", pool_in_words(pool) + f", {brief(evicted or 0)} chunks/s evicted"
    shown = [f"{size(pool.ready_bytes)} in {counted(chunks.ready, 'chunk')}"]
    if chunks.reserved:
        shown.append(f"{size(pool.reserved_bytes)} in {counted(chunks.reserved, 'chunk')} being written")
    if chunks.quarantined:
        shown.append(f"{size(pool.quarantined_bytes)} in {counted(chunks.quarantined, 'chunk')} quarantined")
    if pool.kv_bytes > pool.ready_bytes:
        raw = f", {counted(pool.raw_parts, 'part')} raw" if pool.raw_parts else ""
        shown[0] += f" ({size(pool.kv_bytes)} of KV, packed {pool.packed_ratio:.2f} times{raw})"
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


def _two_columns(rows: Iterable[tuple[str, str | Text]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        shown = value if isinstance(value, Text) else Text(printable(value), overflow="fold")
        table.add_row(Text(printable(name), style="bold"), shown)
    return table


def pending_in_words(tier: TierView | TierContents) -> str:
    why = f" ({tier.pending_why})" if tier.pending_why else ""
    return f"{counted(tier.pending_orders, 'clear or deletion', 'clears and deletions')} pending{why}"


def tier_in_words(tier: TierView) -> str:
    shown = ": ".join(filter(None, ("used" if tier.state == "open" else tier.state.replace("_", "-"), tier.why)))
    if tier.error:
        shown += f" ({tier.error})"
    if not tier.counters:  # the tier has never been open
        return shown
    limit = f" of at most {size(tier.bytes_limit)}" if tier.bytes_limit else ""
    waits = f", {size(tier.queued_bytes)} waiting to be written" if tier.queued_bytes else ""
    limited = tier.day_limit_bytes
    day = f", {size(tier.day_left_bytes)} of {size(limited)} a day left to write" if limited else ""
    bad = f", {tier.counters['damaged']:,} damaged" if tier.counters.get("damaged") else ""
    pending = f", {pending_in_words(tier)}" if tier.pending_orders else ""
    requests = sum(count for name, count in tier.counters.items() if name.startswith("request_"))
    cost = f" (${tier.dollars:,.2f})" if tier.dollars else ""
    asked = f", {counted(requests, 'request')}{cost}" if requests else ""
    stored, loaded = (size(tier.counters.get(name, 0)) for name in ("stored_bytes", "loaded_bytes"))
    return (
        f"{shown}; {size(tier.bytes_used)}{limit} in {tier.objects:,} parts{waits}{day}; "
        f"{stored} stored, {loaded} loaded{asked}{bad}{pending}"
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
        "lookup_tokens": "{} token|s asked for",
    },
    "hits cut short": {
        "limited_lookups": "{} by a byte cap", "unpinned_lookups": "{} by a rank that had not registered memory",
        "unpinned_chunks": "{} chunk|s lost by that", "unpinned_tokens": "{} token|s lost by that",
    },
    "leased and read": {"loaded_chunks": "{} chunk|s", "loaded_bytes": "{}"},
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
    "ended requests": {
        "outcomes": "{} reported", "dropped_outcomes": "{} without a report", "prompt_tokens": "{} prompt token|s",
        "local_tokens": "{} in engines' own caches", "loaded_tokens": "{} loaded", "computed_tokens": "{} computed",
        "reloaded_tokens": "{} loaded again after preemptions",
    },
    "engines": {"attached_members": "{} process|es attached", "dead_members": "{} found dead"},
    "trouble": {
        "mismatches": "{} chunk|s with a wrong checksum",
        "refuted_mismatches": "{} reported as damaged that are not", "refused_connections": "{} connection|s refused",
    },
    # Most are no trouble: engines that meet a new server call it by a session that it does not know.
    "calls": {"refusals": "{} answered with an error; a few are normal when a server or a request has ended"},
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
    loaded_share: float | None
    """The share of the prompt tokens of requests that ended then that were loaded, 0 to 1. None: none has ended."""
    local_share: float | None
    """The share that the engines' own caches had."""
    prompt_tokens_per_s: float | None
    loaded_tokens_per_s: float | None
    computed_tokens_per_s: float | None
    lookup_tokens_per_s: float | None
    """Tokens that lookups asked for."""
    stored_bytes_per_s: float | None
    loaded_bytes_per_s: float | None
    evicted_chunks_per_s: float | None

    @property
    def computed_share(self) -> float | None:
        return computed_share(self.loaded_share, self.local_share)


class EngineFigures(msgspec.Struct, kw_only=True):
    """An attached engine, with its totals since it attached."""

    session: str
    name: str
    state: str
    """The worst of its processes: live, suspect, dead or gone."""
    held_bytes: int
    lookup_tokens: int
    """Tokens that its lookups asked for."""
    hits: HitTotals
    """Where the tokens of its ended requests' prompts came from, and what loading saved."""
    loaded_share: float | None
    """The share of the prompt tokens that were loaded, 0 to 1. None: it has not reported that a request ended."""
    local_share: float | None
    """The share that its own cache had."""
    loaded_bytes: int
    stored_bytes: int
    load_bytes_per_s: float | None
    """How fast the engine loads now. None: it does not load."""
    ceiling_bytes_per_s: float | None
    """The speed of plain copies on the engine's machine. None: not measured."""


def rates_of(stats: Stats) -> list[Rates]:
    """Over the last minute, if the history is longer than 1.5 minutes, and over all of it. Empty: the history is
    shorter than a second."""
    samples = max((len(series.values) for series in stats.series), default=0)
    if samples * stats.interval_s < 1:
        return []
    minute = round(MINUTE_S / stats.interval_s)
    spans = [minute, samples] if samples > 1.5 * minute else [samples]
    return [_rates(stats, samples, count) for count in spans]


def _rates(stats: Stats, samples: int, count: int) -> Rates:
    found = means({series.name: series for series in stats.series}, samples - count, samples)
    return Rates(
        seconds=round(count * stats.interval_s, 3),
        loaded_share=found.get("loaded_share"), local_share=found.get("local_share"),
        prompt_tokens_per_s=found.get("prompt_tokens"), loaded_tokens_per_s=found.get("loaded_tokens"),
        computed_tokens_per_s=found.get("computed_tokens"), lookup_tokens_per_s=found.get("lookup_tokens"),
        stored_bytes_per_s=found.get("stored_bytes"), loaded_bytes_per_s=found.get("loaded_bytes"),
        evicted_chunks_per_s=found.get("evicted_chunks"),
    )


STYLES: Final[dict[str, str]] = {"costing": COSTS, "not_ready": "bold red"}
"""Styles of the headline, by effect."""


def headline(judged: Verdict) -> Text:
    return Text(printable(judged.headline), style=STYLES.get(judged.effect, ""))


def finding_in_words(finding: Finding, own: str = OWN) -> Text:
    """What goes wrong, and the command that says more of it, or mends it, unless it is `own`: the one that says this.
    """
    text = Text(f"{'✗' if finding.severity == 'bad' else '!'} ", style="red" if finding.severity == "bad" else "yellow")
    text.append(printable(finding.text), style="not bold")
    if finding.remedy != own:
        text.append(f" → {finding.remedy}", style="italic")
    return text


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
            lookup_tokens=view.totals.lookup_tokens, hits=view.totals.hits,
            loaded_share=view.totals.hits.loaded_share, local_share=view.totals.hits.local_share,
            loaded_bytes=view.totals.loaded_bytes, stored_bytes=view.totals.stored_bytes,
            load_bytes_per_s=view.copy.load_bytes_per_s, ceiling_bytes_per_s=view.copy.ceiling_bytes_per_s,
        )
        for view in views
    ]


def unreported_in_words(views: Iterable[SessionView]) -> str:
    """Engines that have looked up tokens, and reported no ended request."""
    silent = [view for view in views if view.totals.lookup_tokens and not view.totals.hits.requests]
    shown = [f"{name_of(view)} asked for {counted(view.totals.lookup_tokens, 'token')}" for view in silent[:4]]
    if not shown:
        return ""
    return f"{', '.join(shown)}{', …' if len(silent) > 4 else ''}; what they load is not reported"


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


# ------------------------------------------------------------------ one model


class ModelFigures(msgspec.Struct, kw_only=True):
    """What `--json` prints for one model: sums of the days that the server has kept, and the engines of the model."""

    model: str
    hits: HitTotals
    """Sums over all tenants that the caller may see, and all days."""
    loaded_share: float | None
    """The share of the prompt tokens that were loaded, 0 to 1. None: no request has ended."""
    local_share: float | None
    """The share that engines had in their own caches."""
    days: list[DayOfHits]
    """Oldest first."""
    engines: list[EngineFigures]


def show_model(server: str, model: str, *, everything: bool, as_json: bool, console: Console) -> None:
    """`everything`: show all reasons. Raises CommandError for a model that the server does not know, and when no server
    answers, and ApiError."""
    with reached(server) as client:
        days = client.hits().days
        sessions = attached(client) or []
    known = sorted({*(day.model for day in days), *(view.model for view in sessions)})
    if model not in known:
        raise CommandError(f"--model: found {model!r}, wanted {_listed(known)}", WRONG)
    days = [day for day in days if day.model == model]
    sessions = [view for view in sessions if view.model == model]
    hits = sum_of(days)
    if as_json:
        print_json(console, ModelFigures(
            model=model, hits=hits, loaded_share=hits.loaded_share, local_share=hits.local_share, days=days,
            engines=engines_of(sessions),
        ))
        return
    say(console, effect_on_model(model, hits, sessions))
    if hits.prompt_tokens:
        say(console, "", f"where its prompts' tokens came from, since {days[0].date}",
            hits_table(hits, everything=everything))
    if sessions:
        say(console, "")
        say_sessions(console, sessions)


def _listed(models: Sequence[str]) -> str:
    if not models:
        return "a model, but no engine is attached and no request has ended"
    return f"one of: {', '.join(map(printable, models))}"


def effect_on_model(model: str, hits: HitTotals, sessions: Sequence[SessionView]) -> Text:
    """One sentence: whether kvdock helps the model."""
    asked = sum(view.totals.lookup_tokens for view in sessions)
    if not hits.prompt_tokens:
        said = asked_in_words(asked) if asked else "its engines have looked up nothing yet"
    else:
        said = (
            f"{percent(hits.loaded_share)} of prompt tokens were loaded; {percent(hits.local_share)} were in the "
            "engines' own caches"
        )
        if hits.saved_s is not None:
            said += f"; {'cost' if hits.saved_s < 0 else 'saved'}: {saved_in_words(hits.saved_s).plain}"
    return Text(f"{printable(model)}: {said}", style=style_of_saved(hits.saved_s))
