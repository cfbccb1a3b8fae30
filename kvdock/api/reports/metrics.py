"""Metrics in Prometheus' text format and in OpenMetrics, computed from the server's state when they are scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple, get_type_hints

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from kvdock.api.access.peer import ALL_SCOPES, NOBODY, Peer
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.quotas import Quotas
from kvdock.api.record.counters import Counted, Counters
from kvdock.api.record.timings import Buckets
from kvdock.api.reports.lists import Lists
from kvdock.api.reports.recorded import Answers, CallTimes, Curves, FeedFigures, Totals
from kvdock.api.reports.status import Overview, Probes
from kvdock.api.reports.verdict import Judge
from kvdock.api.turns import Slices, next_slice
from kvdock.protocol.admin_schemas import TenantView
from kvdock.protocol.events import Event, Loaded, Stored, kind_of
from kvdock.protocol.hits import COMPUTED, HitTotals, by_source
from kvdock.protocol.reports import REMEDIES, WAIT_BOUNDS_S, CopyRates, FindingCode, MoverView, TierView, UseTotals
from kvdock.protocol.wire_types import OWN_TENANT

_HELP = {name: hint.__metadata__[0].description for name, hint in get_type_hints(Counters, include_extras=True).items()}
_TENANT_USE = {
    "bytes": "Bytes of stored chunks", "chunks": "Chunks, stored and being stored", "namespaces": "Namespaces",
    "sessions": "Attached sessions", "members": "Attached members", "grants": "Open leases and reservations",
}
"""By the fields of Amounts."""
FRESH_S = 1.0
"""Scrapes within this time get the same text: to make it takes some ms."""
_TOTALS, _OF_ALL = "totals/", "all tenants/"
"""In place of a tenant's name: no tenant's has a slash."""
EVERYBODYS: Final = Peer("metrics", ALL_SCOPES, OWN_TENANT, is_unix=False)
_UNITS = ("seconds", "bytes")
"""Base units that end the names of metrics."""
_REUSE = {
    "hit_age": ("kvdock_hit_age_seconds", "Since the last use of a chunk (it was stored, a lookup found it, or a store "
                "named it) until a lookup found it"),
    "eviction_age": ("kvdock_eviction_age_seconds", "Since the last use of a chunk until it was evicted"),
    "eviction_uses": ("kvdock_eviction_uses", "How many lookups had found a chunk until it was evicted"),
}
"""By the histograms of the table: name and help text."""


class Format(NamedTuple):
    """A text format. `end`: its last line."""

    media_type: str
    encode: Callable[[CollectorRegistry], bytes]
    end: bytes


CLASSIC = Format(CONTENT_TYPE_LATEST, generate_latest, b"")
OPEN_METRICS = Format(openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest, b"# EOF\n")
"""With units and exemplars."""


class Metrics:
    """The text of `GET /metrics`. Each part is made when it is asked for, in a format at most once within FRESH_S."""

    def __init__(
        self, server: ServerMetrics, lists: Lists, quotas: Quotas, judge: Judge, totals: Totals,
        now_s: Callable[[], float],
    ) -> None:
        self._server, self._lists, self._quotas, self._judge, self._now_s = server, lists, quotas, judge, now_s
        self._totals = totals
        self._made: dict[tuple[Format, str | None], tuple[float, asyncio.Task[bytes]]] = {}
        """By format and whose it is: since when, and what makes the text."""

    async def text(self, peer: Peer, form: Format) -> bytes:
        """The totals, which every caller may see, and the use of each tenant that the caller may know of."""
        totals = await self._fresh(form, _TOTALS, lambda: self._of_server(form))
        if not peer.may("read"):
            return totals + form.end
        whose = _OF_ALL if peer.may("admin") else peer.tenant
        return totals + await self._fresh(form, whose, lambda: self._of_tenants(peer, form)) + form.end

    async def _fresh(self, form: Format, whose: str | None, make: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        now_s = self._now_s()
        self._made = {key: made for key, made in self._made.items() if now_s - made[0] < FRESH_S}
        if (form, whose) not in self._made:
            self._made[form, whose] = now_s, asyncio.create_task(make())
        return await asyncio.shield(self._made[form, whose][1])

    async def _of_server(self, form: Format) -> bytes:
        """The verdict's codes are in it, which name nobody."""
        found = {one.code for one in (await self._judge.verdict(EVERYBODYS)).findings}
        rates = await self._lists.copy_rates()
        await self._totals.catch_up()
        await self._server.catch_up()
        return await in_slices(self._server.collect(rates, found), form)

    async def _of_tenants(self, peer: Peer, form: Format) -> bytes:
        """In a thread, in slices of its time: hundreds of tenants or models take tens of ms."""
        tenants = {name: view for name, view in (await self._quotas.views()).items() if peer.sees(name)}
        await next_slice()
        models = self._lists.hits_by_model(peer)
        await next_slice()
        sessions = await self._lists.most_used_sessions(peer)
        await next_slice()
        return await asyncio.to_thread(
            lambda: used_by(tenants, form) + used_by_models(models, form) + used_by_sessions(sessions, form)
        )


class ServerMetrics:
    """The metrics of the server as a whole, computed from its state."""

    def __init__(
        self, pool: Pool, overview: Overview, probes: Probes, answers: Answers, feeds: FeedFigures,
        curves: Curves | None,
    ) -> None:
        self._pool, self._overview, self._probes = pool, overview, probes
        self._answers, self._feeds, self._curves = answers, feeds, curves
        self._process = ProcessCollector(registry=None)

    async def catch_up(self) -> None:
        """Before `collect`: hands out the events that its figures count."""
        await self._feeds.catch_up()

    def collect(self, rates: CopyRates, found: Collection[FindingCode] = ()) -> Iterator[Metric]:
        """`rates`: those of copies. `found`: what the verdict has."""
        status = self._overview.status(NOBODY)
        yield InfoMetricFamily("kvdock_build", "The server's version", {"version": status.version})
        yield from self._process.collect()
        for name, total in status.counters.items():
            if name != "refusals":
                yield CounterMetricFamily(f"kvdock_{name}", _HELP[name], value=total)
        yield _findings(found)
        refusals = CounterMetricFamily("kvdock_refusals", _HELP["refusals"], labels=["code"])
        for code, count in sorted(self._answers.refusals.items()):
            refusals.add_metric([code], count)
        yield refusals
        pool_bytes = GaugeMetricFamily("kvdock_pool_bytes", "Allocated bytes of the pool by state", labels=["state"])
        for state in ("free", "reserved", "ready", "quarantined"):
            pool_bytes.add_metric([state], getattr(status.pool, f"{state}_bytes"))
        yield pool_bytes
        chunks = GaugeMetricFamily("kvdock_chunks", "Chunks by state", labels=["state"])
        for state in ("reserved", "ready", "quarantined"):
            chunks.add_metric([state], getattr(status.chunks, state))
        yield chunks
        yield from _hits(status.hits)
        if status.mover is not None:
            yield from _of_mover(status.mover)
            yield from _of_tiers(status.tiers)
        yield _copies(rates)
        yield _times(self._answers.timings)
        yield self._durations_of("kvdock_load_seconds", "From a lease until all of its ranks have read", Loaded)
        yield self._durations_of("kvdock_store_seconds", "From a reservation until its chunks are published", Stored)
        yield from self._of_events()
        yield from self._of_reuse()
        for name, text, value in (
            ("kvdock_pool_limit_bytes", "The pool never grows beyond it", status.pool.limit_bytes),
            ("kvdock_pool_allocated_bytes", "Size of all segments", status.pool.allocated_bytes),
            ("kvdock_pool_held_bytes", "Bytes pinned by grants", status.pool.held_bytes),
            ("kvdock_pool_retained_bytes", "Bytes of chunks that hints retain", status.pool.retained_bytes),
            ("kvdock_pool_kv_bytes", "The KV of ready chunks as engines have it", status.pool.kv_bytes),
            ("kvdock_packed_ratio", "Bytes of KV for each byte of ready chunks", status.pool.packed_ratio),
            ("kvdock_raw_parts", "Parts of packed groups that could not be packed", status.pool.raw_parts),
            ("kvdock_pool_segments", "Segments", status.pool.segments),
            ("kvdock_sessions", "Sessions attached", status.sessions),
            ("kvdock_leases", "Leases that a rank has not released yet", status.leases),
            ("kvdock_open_reservations", "Reservations that a rank has not finished yet", status.reservations),
            ("kvdock_saved_seconds", "What computing the loaded tokens would have taken, less what loading them took",
             status.hits.saved_s or 0.0),
            ("kvdock_oldest_chunk_unused_seconds", "How long the chunk was unused that was unused longest",
             status.oldest_s or 0.0),
            ("kvdock_pool_full_in_seconds", "When the pool is full at the rate of the last minutes; +Inf: never",
             inf if status.full_in_s is None else status.full_in_s),
            ("kvdock_pool_retiring_segments", "Segments that are being drained", len(self._pool.retiring)),
            ("kvdock_ready", "1 when slots can be given out", int(status.status != "not ready")),
            ("kvdock_degraded", "What the server cannot give or do now: how many things", len(status.degraded)),
            ("kvdock_drained", "1 while an operator has drained the server", int(self._probes.is_drained)),
            ("kvdock_pool_growing", "0 while the pool cannot grow for want of memory",
             int(not self._pool.growth_error)),
            ("kvdock_loop_lag_seconds", "Longest wait for the event loop within the last 10 to 20 s",
             self._probes.worst_lag_s),
            ("kvdock_uptime_seconds", "Server clock since start", status.uptime_s),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _of_reuse(self) -> Iterator[Metric]:
        """Whether chunks live long enough to be used again."""
        found = self._pool.table.reuse()
        for part, (name, text) in _REUSE.items():
            yield _counted(name, text, Counted(*found[part]))
        if self._curves is not None:
            yield _counted(
                "kvdock_reuse_distance_bytes", "Of sampled chunks: bytes of different chunks used between two uses of "
                "one, itself included", self._curves.distances,
            )

    def _of_events(self) -> Iterator[Metric]:
        events = CounterMetricFamily("kvdock_events", "Events handed to subscribers, by kind", labels=["kind"])
        for kind, count in self._feeds.published.items():
            events.add_metric([kind_of(kind)], count)
        yield events
        yield CounterMetricFamily(
            "kvdock_events_dropped", "Events dropped because too many waited", value=self._feeds.dropped
        )
        spans = CounterMetricFamily("kvdock_spans", "Spans of traces, by what became of them", labels=["outcome"])
        for outcome in ("sent", "failed", "dropped"):
            spans.add_metric([outcome], self._feeds.spans.get(outcome, 0))
        yield spans
        yield GaugeMetricFamily("kvdock_kv_chunks", "Chunks that KV events say are there", value=self._feeds.kv_chunks)
        yield CounterMetricFamily(
            "kvdock_kv_snapshots", "Snapshots sent to routers that came late", value=self._feeds.kv_snapshots
        )

    def _durations_of(self, name: str, text: str, kind: type[Event]) -> Metric:
        buckets, total_s = self._feeds.grant_times.view(kind)
        return HistogramMetricFamily(name, text, buckets=_with_exemplars(buckets), sum_value=total_s)


def used_by(tenants: Mapping[str, TenantView], form: Format) -> bytes:
    """The use of each tenant. Takes 20 ms with hundreds of tenants."""
    used = {
        what: GaugeMetricFamily(f"kvdock_tenant_{what}", f"{text}, by tenant", labels=["tenant"])
        for what, text in _TENANT_USE.items()
    }
    for tenant, view in tenants.items():
        for what, gauge in used.items():
            gauge.add_metric([tenant], getattr(view.used, what))
    return exposed(used.values(), form) if tenants else b""


def used_by_sessions(sessions: Mapping[str, UseTotals], form: Format) -> bytes:
    """`sessions`: by label or id, those that looked up most."""
    used = CounterMetricFamily(
        "kvdock_engine_tokens", "Tokens of an attached engine: asked for in lookups; of ended requests' prompts, those "
        "that it had, loaded and computed", labels=["engine", "what"],
    )
    for session, totals in sessions.items():
        hits = totals.hits
        for what, tokens in (
            ("asked", totals.lookup_tokens), ("local", hits.local_tokens), ("loaded", hits.loaded_tokens),
            ("computed", hits.computed_tokens),
        ):
            used.add_metric([session, what], tokens)
    return exposed([used], form) if sessions else b""


async def in_slices(metrics: Iterable[Metric], form: Format) -> bytes:
    """As `exposed`, with turns of the event loop for others in between: the text is made in a thread, which takes
    several ms."""
    made, slices = list[Metric](), Slices()
    for metric in metrics:
        made.append(metric)
        await slices.give_turn()
    return await asyncio.to_thread(exposed, made, form)


def exposed(metrics: Iterable[Metric], form: Format) -> bytes:
    """The metrics as Prometheus reads them, without the format's end."""
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(_Made(metrics))
    return form.encode(collectors).removesuffix(form.end)


class _Made(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            metric.unit = next((unit for unit in _UNITS if metric.name.endswith(f"_{unit}")), "")
            yield metric


def _with_exemplars(buckets: Buckets) -> list[tuple[str, float, Exemplar] | tuple[str, float]]:
    return [
        (one.most, one.total) if one.last is None
        else (one.most, one.total, Exemplar({"trace_id": one.last.trace_id}, one.last.took_s, one.last.at))
        for one in buckets
    ]


def _counted(name: str, text: str, found: Counted) -> Metric:
    bounds = (*(str(float(bound)) for bound in found.bounds), "+Inf")
    buckets = list(zip(bounds, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.total)


def _hits(hits: HitTotals) -> Iterator[Metric]:
    """Every token of the prompts of ended requests, by source, and every computed one, by reason."""
    sources = CounterMetricFamily(
        "kvdock_prompt_source_tokens", "Tokens of prompts, by where they came from: local is the engine's own cache; "
        "the samples sum to kvdock_prompt_tokens_total", labels=["source"],
    )
    for source, tokens in by_source(hits).items():
        sources.add_metric([source], tokens)
    yield sources
    reasons = CounterMetricFamily(
        "kvdock_computed_reason_tokens", "Tokens that engines computed, by why; the samples sum to "
        "kvdock_computed_tokens_total", labels=["why"],
    )
    for why in COMPUTED:
        reasons.add_metric([why], hits.computed.get(why, 0))
    yield reasons


def used_by_models(models: Mapping[tuple[str, str], HitTotals], form: Format) -> bytes:
    """`models`: by tenant and model."""
    labels = ["tenant", "model"]
    requests = CounterMetricFamily("kvdock_model_requests", "Ended requests", labels=labels)
    sources = CounterMetricFamily(
        "kvdock_model_prompt_tokens", "As kvdock_prompt_source_tokens_total", labels=[*labels, "source"]
    )
    reasons = CounterMetricFamily(
        "kvdock_model_computed_tokens", "As kvdock_computed_reason_tokens_total", labels=[*labels, "why"]
    )
    saved = GaugeMetricFamily("kvdock_model_saved_seconds", "As kvdock_saved_seconds", labels=labels)
    for names, hits in models.items():
        requests.add_metric(names, hits.requests)
        for source, tokens in by_source(hits).items():
            sources.add_metric([*names, source], tokens)
        for why, tokens in hits.computed.items():
            reasons.add_metric([*names, why], tokens)
        if hits.saved_s is not None:
            saved.add_metric(names, hits.saved_s)
    return exposed([requests, sources, reasons, saved], form) if models else b""


def _findings(found: Collection[FindingCode]) -> Metric:
    metric = GaugeMetricFamily("kvdock_finding", "1: the verdict (GET /v1/verdict) has this finding", labels=["code"])
    for code in REMEDIES:
        metric.add_metric([code], int(code in found))
    return metric


def _copies(rates: CopyRates) -> Metric:
    copies = GaugeMetricFamily(
        "kvdock_copy_bytes_per_second", "How fast an engine copies, on average, and what plain copies reach there",
        labels=["what"],
    )
    for what, rate in (("load", rates.load_bytes_per_s), ("store", rates.store_bytes_per_s),
                       ("ceiling", rates.ceiling_bytes_per_s)):
        copies.add_metric([what], rate or 0.0)
    return copies


def _times(timings: CallTimes) -> Metric:
    times = HistogramMetricFamily(
        "kvdock_call_seconds", "Time in the server, body included, per route", labels=["method", "route"]
    )
    for route in timings.view():
        times.add_metric([route.method, route.route], _with_exemplars(route.cumulative), route.total_s)
    return times


# --------------------------------------------------------------------------- lower tiers, as the mover has reported

_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierView], float]], ...] = (
    ("parts", "Parts of chunks that the tier has", lambda tier: tier.objects),
    ("bytes", "Bytes that the tier uses", lambda tier: tier.bytes_used),
    ("limit_bytes", "Bytes that the tier may use; 0: it knows no limit", lambda tier: tier.bytes_limit),
    ("queued_bytes", "Bytes of chunks that wait to be written", lambda tier: tier.queued_bytes),
    ("pending_orders", "Clears and deletions that the tier has not carried out yet", lambda tier: tier.pending_orders),
    ("load_bytes_per_second", "How fast loads are expected to go", lambda tier: tier.load_bytes_per_s),
    ("day_limit_bytes", "Bytes that may be written to it in a day; 0: no limit", lambda tier: tier.day_limit_bytes),
    ("day_left_bytes", "Bytes that may be written to it now", lambda tier: tier.day_left_bytes),
    ("load_latency_seconds", "How long a load of few bytes is expected to take", lambda tier: tier.load_latency_s),
)
_TIER_COUNTERS = {
    "loaded_bytes": "Bytes of parts loaded from the tier",
    "stored_bytes": "Bytes of parts stored in the tier",
    "failures": "Calls at which the tier failed or was late",
    "damaged": "Parts loaded that were not what was stored; they are deleted",
    "declined_too_slow": "Requests whose chunks were not loaded because computing them was expected to be quicker",
    "declined_too_late": "Requests whose chunks were not loaded because their time was over before loads could begin",
    "followed": "Chunks that were read in another node's pool while that node loaded them from a store",
    "fetched_elsewhere": "Chunks that were in the pool, or on their way there, when they were to be loaded",
}
"""Counters of the mover that have no label of their own."""
_TIER_LABELLED = {
    "loads": ("load_", "outcome", "Parts asked of the tier, by outcome"),
    "stores": ("store_", "outcome", "Parts given to the tier, by outcome"),
    "requests": ("request_", "verb", "Requests to the store"),
    "left_out": ("left_out_", "reason", "Chunks that waited to be written and were not, by reason"),
}
"""By metric: the prefix of the names of the mover's counters in it, its label, and its help text. The rest of a
counter's name is the value of the label."""


def _of_tiers(tiers: Sequence[TierView]) -> Iterator[Metric]:
    """Totals start again with each mover process. A tier that this mover has not opened yet has only
    kvdock_tier_used."""
    used = GaugeMetricFamily("kvdock_tier_used", "1 while the tier is used, 0 while it is off", labels=["tier"])
    for tier in tiers:
        used.add_metric([tier.name], tier.state != "off")
    yield used
    opened = [tier for tier in tiers if tier.counters]
    for name, text, value in _TIER_GAUGES:
        gauge = GaugeMetricFamily(f"kvdock_tier_{name}", text, labels=["tier"])
        for tier in opened:
            gauge.add_metric([tier.name], value(tier))
        yield gauge
    wear = CounterMetricFamily("kvdock_tier_wear_bytes", "Bytes that the tier wrote to its storage", labels=["tier"])
    dollars = CounterMetricFamily(
        "kvdock_tier_request_dollars", "What requests to the store have cost, by the prices in its URL", labels=["tier"]
    )
    fetches = SummaryMetricFamily("kvdock_tier_fetch_seconds", "Loads of a request's chunks", labels=["tier"])
    for tier in opened:
        wear.add_metric([tier.name], tier.wear_bytes)
        dollars.add_metric([tier.name], tier.dollars)
        fetches.add_metric([tier.name], tier.fetches, tier.fetch_s)
    yield wear
    yield dollars
    yield fetches
    for name, text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"kvdock_tier_{name}", text, labels=["tier"])
        for tier in opened:
            counter.add_metric([tier.name], tier.counters.get(name, 0))
        yield counter
    for name, (begins, label, text) in _TIER_LABELLED.items():
        counter = CounterMetricFamily(f"kvdock_tier_{name}", text, labels=["tier", label])
        for tier in opened:
            for key, total in tier.counters.items():
                if key.startswith(begins):
                    counter.add_metric([tier.name, key.removeprefix(begins)], total)
        yield counter


def _of_mover(mover: MoverView) -> Iterator[Metric]:
    waits = HistogramMetricFamily("kvdock_tier_wait_seconds", "Waits of requests for tiers", labels=["outcome"])
    for how, counts in mover.wait_counts.items():
        bounds = zip((*map(str, WAIT_BOUNDS_S), "+Inf"), accumulate(counts), strict=True)
        waits.add_metric([how], list(bounds), mover.wait_s[how])
    yield waits
    yield GaugeMetricFamily("kvdock_tier_waiting_requests", "Requests that wait for tiers now", value=mover.waiting)
    yield GaugeMetricFamily(
        "kvdock_mover_silent_seconds", "Since the mover last reported on its tiers", value=mover.silent_s
    )
    yield CounterMetricFamily("kvdock_mover_restarts", "Movers that have ended and were replaced", value=mover.restarts)
    yield CounterMetricFamily(
        "kvdock_mover_lost_lookups", "Lookups that were not sent to the mover, because too many waited",
        value=mover.lost_lookups,
    )
    yield CounterMetricFamily(
        "kvdock_tier_declined_requests", "Requests that did not wait: to compute was expected to be quicker",
        value=mover.declined,
    )
