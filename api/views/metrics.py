"""Metrics as Prometheus text, computed from the server's state when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_type_hints

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvdock.api.pool.pool import Pool
from kvdock.api.views.history import Counters
from kvdock.api.views.pulse import Pulse
from kvdock.api.views.reports import Reports
from kvdock.api.views.timing import Timings
from kvdock.protocol.reports import Status

_HELP = {name: hint.__metadata__[0].description for name, hint in get_type_hints(Counters, include_extras=True).items()}


class Metrics(Collector):
    """The server's metrics, computed when they are scraped."""

    def __init__(self, *, pool: Pool, reports: Reports, timings: Timings, pulse: Pulse) -> None:
        self._pool, self._reports, self._timings, self._pulse = pool, reports, timings, pulse

    def text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        status = self._reports.status()
        for name, total in status.counters.items():
            yield CounterMetricFamily(f"kvdock_{name}", _HELP[name], value=total)
        pool = GaugeMetricFamily("kvdock_pool_bytes", "Allocated bytes of the pool by state", labels=["state"])
        for state in ("free", "reserved", "ready", "quarantined"):
            pool.add_metric([state], getattr(status.pool, f"{state}_bytes"))
        yield pool
        chunks = GaugeMetricFamily("kvdock_chunks", "Chunks by state", labels=["state"])
        for state in ("reserved", "ready", "quarantined"):
            chunks.add_metric([state], getattr(status.chunks, state))
        yield chunks
        yield _hits(status)
        yield _times(self._timings)
        for name, text, value in (
            ("kvdock_pool_limit_bytes", "The pool never grows beyond it", status.pool.limit_bytes),
            ("kvdock_pool_allocated_bytes", "Size of all segments", status.pool.allocated_bytes),
            ("kvdock_pool_held_bytes", "Bytes pinned by grants", status.pool.held_bytes),
            ("kvdock_pool_segments", "Segments", status.pool.segments),
            ("kvdock_sessions", "Sessions attached", status.sessions),
            ("kvdock_leases", "Leases that a rank has not released yet", status.leases),
            ("kvdock_open_reservations", "Reservations that a rank has not finished yet", status.reservations),
            ("kvdock_pool_retiring_segments", "Segments that are being drained", len(self._pool.retiring)),
            ("kvdock_ready", "1 when slots can be given out", int(status.status == "ok")),
            ("kvdock_pool_growing", "0 while the pool cannot grow for want of memory",
             int(not self._pool.growth_error)),
            ("kvdock_loop_lag_seconds", "Longest wait for the event loop within the last 10 to 20 s",
             self._pulse.worst_lag_s),
            ("kvdock_uptime_seconds", "Server clock since start", status.uptime_s),
        ):
            yield GaugeMetricFamily(name, text, value=value)


def _hits(status: Status) -> Metric:
    """Every token looked up, by where it was found: the samples sum to kvdock_lookup_tokens_total."""
    hits = CounterMetricFamily(
        "kvdock_lookup_tier_tokens", "Tokens looked up, by the tier that had them; none: to be computed",
        labels=["tier"],
    )
    hits.add_metric(["memory"], status.counters["hit_tokens"])
    hits.add_metric(["none"], status.counters["lookup_tokens"] - status.counters["hit_tokens"])
    return hits


def _times(timings: Timings) -> Metric:
    times = HistogramMetricFamily(
        "kvdock_call_seconds", "Time in the server, body included, per route", labels=["method", "route"]
    )
    for route in timings.view():
        times.add_metric([route.method, route.route], route.cumulative, route.total_s)
    return times
