"""Metrics of lower tiers, from what the mover has told of them and what the server counts itself. Nobody is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from kvdock.protocol.reports import WAIT_BOUNDS_S, MoverView, TierView

_GAUGES: tuple[tuple[str, str, Callable[[TierView], float]], ...] = (
    ("parts", "Parts of chunks that the tier has", lambda tier: tier.objects),
    ("bytes", "Bytes that the tier uses", lambda tier: tier.bytes_used),
    ("limit_bytes", "Bytes that the tier may use; 0: it knows no limit", lambda tier: tier.bytes_limit),
    ("queued_bytes", "Bytes of chunks that wait to be written", lambda tier: tier.queued_bytes),
    ("untold", "Clears and deletions that the tier has not been told of yet", lambda tier: tier.untold),
    ("load_bytes_per_second", "How fast loads are expected to go", lambda tier: tier.load_bytes_per_s),
    ("load_latency_seconds", "How long a load of few bytes is expected to take", lambda tier: tier.load_latency_s),
)
_COUNTERS = {
    "loaded_bytes": "Bytes of parts loaded from the tier",
    "stored_bytes": "Bytes of parts stored in the tier",
    "failures": "Calls at which the tier failed or was late",
    "damaged": "Parts loaded that were not what was stored; they are deleted",
    "declined_as_dear": "Requests whose chunks were not loaded because to compute them was expected to be quicker",
    "fetched_elsewhere": "Chunks that were in the pool, or on their way there, when they were to be loaded",
}
"""Counters of the mover that have no label of their own."""
_LABELLED = {
    "loads": ("load_", "outcome", "Parts asked of the tier, by outcome"),
    "stores": ("store_", "outcome", "Parts given to the tier, by outcome"),
    "left_out": ("left_out_", "reason", "Chunks that waited to be written and were not, by reason"),
}
"""By metric: how such counters of the mover begin, and of what the rest of their names is the label."""


def of_tiers(tiers: Sequence[TierView]) -> Iterator[Metric]:
    """Totals begin anew with each mover. Of a tier that is not open it is only known that it is off."""
    used = GaugeMetricFamily("kvdock_tier_used", "1 while the tier is used, 0 while it is off", labels=["tier"])
    for tier in tiers:
        used.add_metric([tier.name], tier.state == "open")
    yield used
    opened = [tier for tier in tiers if tier.counters]
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"kvdock_tier_{name}", text, labels=["tier"])
        for tier in opened:
            gauge.add_metric([tier.name], value(tier))
        yield gauge
    wear = CounterMetricFamily("kvdock_tier_wear_bytes", "Bytes that the tier wrote to its storage", labels=["tier"])
    fetches = SummaryMetricFamily("kvdock_tier_fetch_seconds", "Loads of a request's chunks", labels=["tier"])
    for tier in opened:
        wear.add_metric([tier.name], tier.wear_bytes)
        fetches.add_metric([tier.name], tier.fetches, tier.fetch_s)
    yield wear
    yield fetches
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"kvdock_tier_{name}", text, labels=["tier"])
        for tier in opened:
            counter.add_metric([tier.name], tier.counters.get(name, 0))
        yield counter
    for name, (begins, label, text) in _LABELLED.items():
        counter = CounterMetricFamily(f"kvdock_tier_{name}", text, labels=["tier", label])
        for tier in opened:
            for key, total in tier.counters.items():
                if key.startswith(begins):
                    counter.add_metric([tier.name, key.removeprefix(begins)], total)
        yield counter


def of_mover(mover: MoverView) -> Iterator[Metric]:
    waits = HistogramMetricFamily("kvdock_tier_wait_seconds", "Waits of requests for tiers", labels=["outcome"])
    for how, counts in mover.wait_counts.items():
        bounds = zip((*map(str, WAIT_BOUNDS_S), "+Inf"), accumulate(counts), strict=True)
        waits.add_metric([how], list(bounds), mover.wait_s[how])
    yield waits
    yield GaugeMetricFamily("kvdock_tier_waiting_requests", "Requests that wait for tiers now", value=mover.waiting)
    yield GaugeMetricFamily(
        "kvdock_mover_silent_seconds", "Since the mover has last told of its tiers", value=mover.silent_s
    )
    yield CounterMetricFamily("kvdock_mover_restarts", "Movers that have ended and were replaced", value=mover.restarts)
    yield CounterMetricFamily(
        "kvdock_mover_lost_lookups", "Lookups that the mover was not told of, because too many waited for it",
        value=mover.lost_lookups,
    )
    yield CounterMetricFamily(
        "kvdock_tier_declined_requests", "Requests that did not wait: to compute was expected to be quicker",
        value=mover.declined,
    )
