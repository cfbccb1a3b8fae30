"""What a session or a namespace has used since this server first saw it, and how fast its members copy."""

from __future__ import annotations

from msgspec import Struct, field

from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import Copied, OutcomeView
from kvdock.protocol.reports import CopyRates, UseTotals

KEPT_SHARE = 0.8
"""The weight of older copies when newer ones are added: rates are those of the last few heartbeats with copies."""


class Hits(Struct, gc=False):
    """Sums over requests that have ended; HitTotals explains them."""

    requests: int = 0
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    reloaded_tokens: int = 0
    saved_s: float | None = None

    def ended(self, outcome: OutcomeView) -> None:
        self.requests += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.reloaded_tokens += outcome.reloaded_tokens
        for run in outcome.runs:
            if run.origin == "local":
                self.local_tokens += run.tokens
            elif run.origin == "loaded":
                _add(self.loaded, run.source, run.tokens)
            else:
                _add(self.computed, run.why, run.tokens)
        if outcome.saved_s is not None:
            self.saved_s = (self.saved_s or 0.0) + outcome.saved_s

    def add(self, other: HitTotals) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.local_tokens += other.local_tokens
        for sums, more in ((self.loaded, other.loaded), (self.computed, other.computed)):
            for name, tokens in more.items():
                _add(sums, name, tokens)
        self.reloaded_tokens += other.reloaded_tokens
        if other.saved_s is not None:
            self.saved_s = (self.saved_s or 0.0) + other.saved_s

    def view(self) -> HitTotals:
        return HitTotals(
            requests=self.requests, prompt_tokens=self.prompt_tokens, local_tokens=self.local_tokens,
            loaded=dict(self.loaded), computed=dict(self.computed), reloaded_tokens=self.reloaded_tokens,
            saved_s=self.saved_s,
        )


def _add(sums: dict[str, int], name: str, tokens: int) -> None:
    sums[name] = sums.get(name, 0) + tokens


class Sums(Struct, gc=False):
    lookups: int = 0
    lookup_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    hits: Hits = field(default_factory=Hits)

    def add(self, other: Sums) -> None:
        self.lookups += other.lookups
        self.lookup_tokens += other.lookup_tokens
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes
        self.hits.add(other.hits.view())

    def view(self) -> UseTotals:
        return UseTotals(
            lookups=self.lookups, lookup_tokens=self.lookup_tokens, loaded_bytes=self.loaded_bytes,
            stored_bytes=self.stored_bytes, hits=self.hits.view(),
        )


class Speed(Struct, gc=False):
    size_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size_bytes: int, took_us: int) -> None:
        if size_bytes and took_us:
            self.size_bytes = KEPT_SHARE * self.size_bytes + size_bytes
            self.seconds = KEPT_SHARE * self.seconds + took_us / 1e6

    @property
    def bytes_per_s(self) -> float | None:
        return self.size_bytes / self.seconds if self.seconds else None


class Copies(Struct, gc=False):
    """How fast one member copies, as its heartbeats report."""

    loads: Speed = field(default_factory=Speed)
    stores: Speed = field(default_factory=Speed)
    ceiling_bytes_per_s: float = 0.0

    def add(self, copied: Copied) -> None:
        self.loads.add(copied.load_bytes, copied.load_us)
        self.stores.add(copied.store_bytes, copied.store_us)
        self.ceiling_bytes_per_s = copied.ceiling_bytes_per_s or self.ceiling_bytes_per_s


def rates_of(members: list[Copies]) -> CopyRates:
    """The rates of one session: its members copy at the same time, so their rates add up, as far as they are known."""

    def total(rates: list[float | None]) -> float | None:
        known = [rate for rate in rates if rate]
        return sum(known) if known else None

    return CopyRates(
        load_bytes_per_s=total([one.loads.bytes_per_s for one in members]),
        store_bytes_per_s=total([one.stores.bytes_per_s for one in members]),
        ceiling_bytes_per_s=total([one.ceiling_bytes_per_s for one in members]),
    )


def mean_of(sessions: list[CopyRates]) -> CopyRates:
    """The rates of several sessions, which do not copy at the same time: the means of those that load, or store."""
    loading = [one for one in sessions if one.load_bytes_per_s is not None]

    def mean(rates: list[float | None]) -> float | None:
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else None

    return CopyRates(
        load_bytes_per_s=mean([one.load_bytes_per_s for one in loading]),
        store_bytes_per_s=mean([one.store_bytes_per_s for one in sessions]),
        ceiling_bytes_per_s=mean([one.ceiling_bytes_per_s for one in loading]),
    )
