"""The linker's metrics, in SGLang's own registry: sglang:kvdock_…

With --enable-metrics SGLang collects the metrics of all its processes, including kvdock's. Only rank 0 counts events
that are the same on all ranks (tokens, lookups).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdock.connectors.outcomes import SHARED, Metric

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The buckets of histograms, in seconds: from a lookup to the load of a very long prompt."""

METRICS: Mapping[str, Metric] = {
    **SHARED,
    "lookup_tokens": Metric("counter", "Tokens that requests lacked and that kvdock was asked for."),
    "hit_tokens": Metric("counter", "Tokens of them that were promised to SGLang."),
    "lookups_unverified": Metric("counter", "Lookups taken for a miss because the find was not verified in time."),
    "load_seconds": Metric("seconds", "Duration of a batch's loads, rank 0's."),
    "load_failures": Metric("counter", "Loads that failed after they were promised: SGLang aborts their requests."),
    "loads_given_up": Metric("counter", "Loads that were promised and could not begin: computed instead."),
    "loads_early": Metric("counter", "Loads that had ended before SGLang admitted their requests."),
    "store_tokens": Metric("counter", "Tokens of which the server has all that SGLang offered, as rank 0 knows."),
    "stores_failed": Metric("counter", "Offers not stored: no room, no answer, or rank 0's copy failed."),
    "stores_outdated": Metric("counter", "Offers not stored, for weights other than those of now had a part in them."),
    "weights_changes": Metric("counter", "Changes of the engine's weights, and names given to them."),
    "weights_private": Metric("gauge", "1: the engine shares with no other what it computes with the weights of now."),
    "shares": Metric("gauge", "0: nothing is looked up or stored: weights change, or a change may be missed."),
    "stores_known": Metric("counter", "Offers of what was loaded or stored a moment ago: no call was made for them."),
}
"""By name without the prefix: `load_tokens` is exported as sglang:kvdock_load_tokens_total."""


class Figures:
    """`prometheus`: the module prometheus_client, with which SGLang makes its metrics, too; None: nothing is exported.
    A process makes one Figures."""

    def __init__(self, prometheus: Any = None) -> None:
        self._made: dict[str, Any] = {}
        self.counted: dict[str, float] = {}
        """The value of each metric since the start, for log lines and tests."""
        for name, metric in METRICS.items() if prometheus is not None else ():
            full = f"sglang:kvdock_{name}"
            if metric.kind == "counter":
                self._made[name] = prometheus.Counter(full, metric.help)
            elif metric.kind == "gauge":
                self._made[name] = prometheus.Gauge(full, metric.help, multiprocess_mode="mostrecent")
            else:
                self._made[name] = prometheus.Histogram(full, metric.help, buckets=SECONDS)

    def waited(self, prefix: str, how: str, seconds: float) -> None:
        """Counts a wait that has ended. `prefix`: the kind of wait."""
        self.add(f"{prefix}waits_{how}")
        self.add(f"{prefix}wait_seconds", seconds)

    def add(self, name: str, amount: float = 1) -> None:
        """Adds `amount` to a counter, observes it as a duration, or makes it a gauge's value."""
        kind, made = METRICS[name].kind, self._made.get(name)
        if kind == "gauge" and self.counted.get(name) == amount:
            return
        self.counted[name] = amount if kind == "gauge" else self.counted.get(name, 0) + amount
        if made is not None:
            update = {"counter": "inc", "gauge": "set", "seconds": "observe"}[kind]
            getattr(made, update)(amount)
