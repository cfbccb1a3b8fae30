"""What the server's answers say about how it does: rates and hit rates over spans of time, engines' liveness.

Everything is computed from `GET /v1/status`, `/v1/stats` and `/v1/sessions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvdock.cli.words import brief, counted, duration, percent, printable, size, span
from kvdock.protocol.reports import Stats, Status
from kvdock.protocol.schemas import SessionView
from kvdock.protocol.usage import Saved

MINUTE_S = 60.0


class Rates(msgspec.Struct, kw_only=True):
    """Averages over the last `seconds`. None: nothing was measured."""

    seconds: float
    hit_rate: float | None
    """Tokens found of those looked up, 0 to 1. None: nothing was looked up."""
    lookup_tokens_per_s: float | None
    hit_tokens_per_s: float | None
    stored_bytes_per_s: float | None
    loaded_bytes_per_s: float | None
    evicted_chunks_per_s: float | None


class EngineFigures(msgspec.Struct, kw_only=True):
    """An attached engine, and what it has used since it attached."""

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
    """None: it has not told how fast it computes, or what its loads took."""
    load_bytes_per_s: float | None
    """How fast it copies now. None: it does not."""
    ceiling_bytes_per_s: float | None
    """What plain copies reach there. None: not measured."""

    @property
    def hit_rate(self) -> float | None:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else None


def rates_of(stats: Stats) -> list[Rates]:
    """Over the last minute, if the history is clearly longer, and over all of it. Empty: the history is shorter than a
    second."""
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
    """Since the server's start."""
    asked = status.counters.get("lookup_tokens", 0)
    return status.counters.get("hit_tokens", 0) / asked if asked else None


def verdict(status: Status, rates: Sequence[Rates]) -> str:
    """Is it up, is it helping: one sentence."""
    if status.status != "ok":
        return f"up, but not ready: {'; '.join(map(printable, status.reasons)) or 'it does not say why'}"
    total = hit_rate(status)
    if total is None:
        return "up and ready; no engine has looked anything up yet"
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
    """How many, and who of them is not live."""
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
    """In the order of the sessions."""
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
        return f"{tokens}; no engine has told how fast it computes"
    if saved.seconds < 0:
        return f"{tokens}, which took {span(-saved.seconds)} longer than computing them"
    return f"{tokens}, {span(saved.seconds)} of engines' time saved"


def copies_in_words(views: Iterable[SessionView]) -> str:
    """How fast engines load, on average, beside what plain copies reach. Empty: none of them has told."""
    rates = [view.copy for view in views if view.copy.load_bytes_per_s]
    if not rates:
        return ""
    load = sum(rate.load_bytes_per_s or 0.0 for rate in rates) / len(rates)
    ceiling = sum(rate.ceiling_bytes_per_s or 0.0 for rate in rates) / len(rates)
    is_known = all(rate.ceiling_bytes_per_s for rate in rates)
    of = f", {percent(load / ceiling)} of what plain copies reach there" if is_known else ""
    return f"{size(load)}/s while an engine loads{of}"


def age_in_words(status: Status) -> str:
    """What goes when, and when the pool is full. Empty: nothing is stored."""
    if status.oldest_s is None:
        return ""
    full = "" if status.full_in_s is None else f"; full in {duration(status.full_in_s)} at the present rate"
    return f"the oldest chunk was unused for {duration(status.oldest_s)}{full}"
