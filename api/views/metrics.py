"""Prometheus text over the service's own counters: read when scraped, kept nowhere twice."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvdock.api.service import CacheService
from kvdock.api.views import views

__all__ = ["CONTENT_TYPE", "metrics_text"]

_HELP = {
    "lookups": "Lookups, repeats within an epoch not counted",
    "lookup_renewals": "Lookups repeated within their epoch",
    "lookup_tokens": "Tokens looked up",
    "hit_tokens": "Tokens found",
    "peeks": "Lookups without a session",
    "limited_lookups": "Lookups shortened by a byte cap",
    "unpinned_lookups": "Lookups shortened because a rank had not pinned where the hit lies",
    "unpinned_chunks": "Chunks that hits lost so",
    "unpinned_tokens": "Tokens that hits lost so",
    "loaded_chunks": "Chunks in leases",
    "loaded_bytes": "Bytes in leases, counted once per fetch",
    "reservations": "Reservations asked for",
    "short_reservations": "Reservations cut short for want of memory",
    "unpinned_reservations": "Reservations cut short for want of memory that every rank had pinned",
    "attached_members": "Attach calls that succeeded",
    "dead_members": "Members whose lock was seen free",
    "refusals": "Answers that were problems",
    "stored_chunks": "Chunks published",
    "stored_bytes": "Bytes published",
    "aborted_chunks": "Chunks reserved and never published",
    "evicted_chunks": "Chunks evicted",
    "mismatches": "Chunks taken out of use after a checksum mismatch",
}


class _ServiceCollector(Collector):
    def __init__(self, service: CacheService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        for name, total in msgspec.structs.asdict(service.totals()).items():
            yield CounterMetricFamily(f"kvdock_{name}", _HELP[name], value=total)
        status = views.status(service)
        pool = GaugeMetricFamily("kvdock_pool_bytes", "Allocated bytes of the pool by state", labels=["state"])
        for state in ("free", "reserved", "ready", "quarantined"):
            pool.add_metric([state], getattr(status.pool, f"{state}_bytes"))
        yield pool
        chunks = GaugeMetricFamily("kvdock_chunks", "Chunks by state", labels=["state"])
        for state in ("reserved", "ready", "quarantined"):
            chunks.add_metric([state], getattr(status.chunks, state))
        yield chunks
        yield from _hits(service)
        yield _times(service)
        for name, text, value in (
            ("kvdock_pool_limit_bytes", "The pool never grows beyond it", status.pool.limit_bytes),
            ("kvdock_pool_allocated_bytes", "Size of all segments", status.pool.allocated_bytes),
            ("kvdock_pool_held_bytes", "Bytes pinned by grants", status.pool.held_bytes),
            ("kvdock_pool_segments", "Segments", status.pool.segments),
            ("kvdock_sessions", "Sessions attached", status.sessions),
            ("kvdock_leases", "Leases with a rank that has not said done", status.leases),
            ("kvdock_open_reservations", "Reservations with a rank that has not said done", status.reservations),
            ("kvdock_pool_retiring_segments", "Segments that are being drained", len(service.pool.retiring)),
            ("kvdock_ready", "1 when slots can be given out", int(status.status == "ok")),
            ("kvdock_pool_growing", "0 while the pool cannot grow for want of memory",
             int(not service.pool.growth_error)),
            ("kvdock_loop_lag_seconds", "Longest wait for the event loop within the last 10 to 20 s",
             service.pulse.worst_lag_s),
            ("kvdock_uptime_seconds", "Server clock since start", status.uptime_s),
        ):
            yield GaugeMetricFamily(name, text, value=value)


def _hits(service: CacheService) -> Iterator[Metric]:
    """Every token looked up, by where it was found: the samples sum to kvdock_lookup_tokens_total."""
    counters = service.counters
    hits = CounterMetricFamily(
        "kvdock_lookup_tier_tokens", "Tokens looked up, by the tier that had them; none: to be computed",
        labels=["tier"],
    )
    hits.add_metric(["memory"], counters.hit_tokens)
    hits.add_metric(["none"], counters.lookup_tokens - counters.hit_tokens)
    yield hits


def _times(service: CacheService) -> Metric:
    times = HistogramMetricFamily(
        "kvdock_call_seconds", "Time in the server, body included, per route", labels=["method", "route"]
    )
    for route in service.timings.view():
        times.add_metric([route.method, route.route], route.cumulative, route.total_s)
    return times


def metrics_text(service: CacheService) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServiceCollector(service))
    return generate_latest(registry)
