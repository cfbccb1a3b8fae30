"""Prometheus text over the service's own counters: read when scraped, kept nowhere twice."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvdock.api import views
from kvdock.api.service import CacheService

__all__ = ["CONTENT_TYPE", "metrics_text"]

_HELP = {
    "lookups": "Lookups, repeats within an epoch not counted",
    "lookup_renewals": "Lookups repeated within their epoch",
    "lookup_tokens": "Tokens looked up",
    "hit_tokens": "Tokens found",
    "peeks": "Lookups without a session",
    "limited_lookups": "Lookups shortened by a byte cap",
    "loaded_chunks": "Chunks in leases",
    "loaded_bytes": "Bytes in leases, counted once per fetch",
    "reservations": "Reservations asked for",
    "short_reservations": "Reservations cut short for want of memory",
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
        for name, text, value in (
            ("kvdock_pool_limit_bytes", "The pool never grows beyond it", status.pool.limit_bytes),
            ("kvdock_pool_allocated_bytes", "Size of all segments", status.pool.allocated_bytes),
            ("kvdock_pool_held_bytes", "Bytes pinned by grants", status.pool.held_bytes),
            ("kvdock_pool_segments", "Segments", status.pool.segments),
            ("kvdock_sessions", "Sessions attached", status.sessions),
            ("kvdock_leases", "Leases with a rank that has not said done", status.leases),
            ("kvdock_open_reservations", "Reservations with a rank that has not said done", status.reservations),
            ("kvdock_uptime_seconds", "Server clock since start", status.uptime_s),
        ):
            yield GaugeMetricFamily(name, text, value=value)


def metrics_text(service: CacheService) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServiceCollector(service))
    return generate_latest(registry)
