"""Metrics as Prometheus text, computed from the server's state when they are scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import get_type_hints

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvdock.api.access.peer import NOBODY, Peer
from kvdock.api.feeds.kv import KvLog
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.quotas import Quotas
from kvdock.api.record.counters import Counters
from kvdock.api.record.durations import Durations
from kvdock.api.record.journal import Bus
from kvdock.api.record.pulse import Pulse
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.reports.lists import Reports
from kvdock.api.reports.tier_metrics import of_mover, of_tiers
from kvdock.protocol.admin_schemas import TenantView
from kvdock.protocol.events import Event, Loaded, Stored, kind_of
from kvdock.protocol.explain import BREAKS
from kvdock.protocol.reports import Status
from kvdock.protocol.usage import CopyRates, UseTotals

_HELP = {name: hint.__metadata__[0].description for name, hint in get_type_hints(Counters, include_extras=True).items()}


FRESH_S = 1.0
"""Scrapes within this time get the same text: to make it takes some ms of the event loop."""


class Metrics:
    """The server's metrics, computed when they are scraped, at most once within FRESH_S."""

    def __init__(
        self, *, pool: Pool, quotas: Quotas, reports: Reports, meter: Meter, pulse: Pulse, bus: Bus,
        durations: Durations, missed: Mapping[str, int], spans: Mapping[str, int], kv_log: KvLog | None,
        now_s: Callable[[], float],
    ) -> None:
        """`missed`: tokens that lookups asked for and did not get, by why. `spans`: by what became of them."""
        self._pool, self._quotas, self._reports, self._meter, self._pulse = pool, quotas, reports, meter, pulse
        self._bus, self._durations, self._missed, self._now_s = bus, durations, missed, now_s
        self._spans, self._kv_log = spans, kv_log
        self._process = ProcessCollector(registry=None)
        self._text, self._made_s = b"", -FRESH_S
        self._tenants: asyncio.Task[bytes] | None = None
        """Makes the text of all tenants, since `_tenants_s`."""
        self._tenants_s = -FRESH_S

    async def text(self, peer: Peer) -> bytes:
        """The totals, which are everybody's, and what each tenant uses of those that the caller may know of."""
        return self._totals() + await self._of_tenants(peer)

    async def _of_tenants(self, peer: Peer) -> bytes:
        if not peer.may("read"):
            return b""
        return await self._used_by_tenants(peer) + used_by_sessions(self._reports.most_used_sessions(peer))

    async def _used_by_tenants(self, peer: Peer) -> bytes:
        if not peer.may("admin"):
            return used_by({name: view for name, view in self._quotas.views().items() if peer.sees(name)})
        now_s = self._now_s()
        if self._tenants is None or now_s - self._tenants_s >= FRESH_S:
            self._tenants = asyncio.create_task(asyncio.to_thread(used_by, self._quotas.views()))
            self._tenants_s = now_s
        return await asyncio.shield(self._tenants)

    def _totals(self) -> bytes:
        now_s = self._now_s()
        if now_s - self._made_s >= FRESH_S:
            self._text, self._made_s = exposed(self.collect()), now_s
        return self._text

    def collect(self) -> Iterator[Metric]:
        self._bus.flush()
        status = self._reports.status(NOBODY)
        yield InfoMetricFamily("kvdock_build", "The server's version", {"version": status.version})
        yield from self._process.collect()
        for name, total in status.counters.items():
            if name != "refusals":
                yield CounterMetricFamily(f"kvdock_{name}", _HELP[name], value=total)
        refusals = CounterMetricFamily("kvdock_refusals", _HELP["refusals"], labels=["code"])
        for code, count in sorted(self._meter.refusals.items()):
            refusals.add_metric([code], count)
        yield refusals
        pool = GaugeMetricFamily("kvdock_pool_bytes", "Allocated bytes of the pool by state", labels=["state"])
        for state in ("free", "reserved", "ready", "quarantined"):
            pool.add_metric([state], getattr(status.pool, f"{state}_bytes"))
        yield pool
        chunks = GaugeMetricFamily("kvdock_chunks", "Chunks by state", labels=["state"])
        for state in ("reserved", "ready", "quarantined"):
            chunks.add_metric([state], getattr(status.chunks, state))
        yield chunks
        yield _hits(status)
        if status.mover is not None:
            yield from of_mover(status.mover)
            yield from of_tiers(status.tiers)
        yield _requested(status, self._missed)
        yield _copies(self._reports.copy_rates())
        yield _times(self._meter.timings)
        yield self._durations_of("kvdock_load_seconds", "From a lease until all of its ranks have read", Loaded)
        yield self._durations_of("kvdock_store_seconds", "From a reservation until its chunks are published", Stored)
        yield from self._of_events()
        for name, text, value in (
            ("kvdock_pool_limit_bytes", "The pool never grows beyond it", status.pool.limit_bytes),
            ("kvdock_pool_allocated_bytes", "Size of all segments", status.pool.allocated_bytes),
            ("kvdock_pool_held_bytes", "Bytes pinned by grants", status.pool.held_bytes),
            ("kvdock_pool_retained_bytes", "Bytes of chunks that hints retain", status.pool.retained_bytes),
            ("kvdock_pool_segments", "Segments", status.pool.segments),
            ("kvdock_sessions", "Sessions attached", status.sessions),
            ("kvdock_leases", "Leases that a rank has not released yet", status.leases),
            ("kvdock_open_reservations", "Reservations that a rank has not finished yet", status.reservations),
            ("kvdock_saved_seconds", "What computing the loaded tokens would have taken, less what loading them took",
             status.saved.seconds or 0.0),
            ("kvdock_oldest_chunk_unused_seconds", "How long the chunk was unused that was unused longest",
             status.oldest_s or 0.0),
            ("kvdock_pool_full_in_seconds", "When the pool is full at the rate of the last minutes; +Inf: never",
             inf if status.full_in_s is None else status.full_in_s),
            ("kvdock_pool_retiring_segments", "Segments that are being drained", len(self._pool.retiring)),
            ("kvdock_ready", "1 when slots can be given out", int(status.status == "ok")),
            ("kvdock_pool_growing", "0 while the pool cannot grow for want of memory",
             int(not self._pool.growth_error)),
            ("kvdock_loop_lag_seconds", "Longest wait for the event loop within the last 10 to 20 s",
             self._pulse.worst_lag_s),
            ("kvdock_uptime_seconds", "Server clock since start", status.uptime_s),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _of_events(self) -> Iterator[Metric]:
        events = CounterMetricFamily("kvdock_events", "Events handed to subscribers, by kind", labels=["kind"])
        for kind, count in self._bus.published.items():
            events.add_metric([kind_of(kind)], count)
        yield events
        yield CounterMetricFamily(
            "kvdock_events_dropped", "Events dropped because too many waited", value=self._bus.dropped
        )
        spans = CounterMetricFamily("kvdock_spans", "Spans of traces, by what became of them", labels=["outcome"])
        for outcome in ("sent", "failed", "dropped"):
            spans.add_metric([outcome], self._spans.get(outcome, 0))
        yield spans
        chunks, snapshots = (0, 0) if self._kv_log is None else (self._kv_log.chunks, self._kv_log.snapshots)
        yield GaugeMetricFamily("kvdock_kv_chunks", "Chunks that KV events say are there", value=chunks)
        yield CounterMetricFamily("kvdock_kv_snapshots", "Snapshots sent to routers that came late", value=snapshots)

    def _durations_of(self, name: str, text: str, kind: type[Event]) -> Metric:
        buckets, total_s = self._durations.view(kind)
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total_s)


def used_by(tenants: Mapping[str, TenantView]) -> bytes:
    """Takes 20 ms for hundreds of tenants."""
    used = GaugeMetricFamily("kvdock_tenant_used", "What a tenant uses, by what", labels=["tenant", "what"])
    for tenant, view in tenants.items():
        for what, amount in msgspec.structs.asdict(view.used).items():
            used.add_metric([tenant, what], amount)
    return exposed([used]) if tenants else b""


def used_by_sessions(sessions: Mapping[str, UseTotals]) -> bytes:
    """`sessions`: by label or id, those that looked up most."""
    used = CounterMetricFamily(
        "kvdock_engine_tokens", "Tokens of an attached engine, by what: looked up, found, loaded",
        labels=["engine", "what"],
    )
    for session, totals in sessions.items():
        for what, tokens in (
            ("looked_up", totals.lookup_tokens), ("found", totals.hit_tokens), ("loaded", totals.loaded_tokens)
        ):
            used.add_metric([session, what], tokens)
    return exposed([used]) if sessions else b""


def exposed(metrics: Iterable[Metric]) -> bytes:
    """As Prometheus reads it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Made(metrics))
    return generate_latest(registry)


class _Made(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _hits(status: Status) -> Metric:
    """Every token looked up, by where it was found: the samples sum to kvdock_lookup_tokens_total."""
    hits = CounterMetricFamily(
        "kvdock_lookup_tier_tokens", "Tokens looked up, by the tier that had them; none: to be computed",
        labels=["tier"],
    )
    hits.add_metric(["memory"], status.counters["hit_tokens"])
    hits.add_metric(["none"], status.counters["lookup_tokens"] - status.counters["hit_tokens"])
    return hits


def _requested(status: Status, missed: Mapping[str, int]) -> Metric:
    """Every token looked up, by what became of it: the samples sum to kvdock_lookup_tokens_total."""
    requested = CounterMetricFamily(
        "kvdock_requested_tokens", "Tokens looked up: found, or by why they were not", labels=["outcome"]
    )
    requested.add_metric(["found"], status.counters["hit_tokens"])
    for why in BREAKS:
        requested.add_metric([why], missed.get(why, 0))
    return requested


def _copies(rates: CopyRates) -> Metric:
    copies = GaugeMetricFamily(
        "kvdock_copy_bytes_per_second", "How fast an engine copies, on average, and what plain copies reach there",
        labels=["what"],
    )
    for what, rate in (("load", rates.load_bytes_per_s), ("store", rates.store_bytes_per_s),
                       ("ceiling", rates.ceiling_bytes_per_s)):
        copies.add_metric([what], rate or 0.0)
    return copies


def _times(timings: Timings) -> Metric:
    times = HistogramMetricFamily(
        "kvdock_call_seconds", "Time in the server, body included, per route", labels=["method", "route"]
    )
    for route in timings.view():
        times.add_metric([route.method, route.route], route.cumulative, route.total_s)
    return times
