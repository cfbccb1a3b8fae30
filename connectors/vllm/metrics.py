"""figures.py as vLLM's statistics: what it logs each interval, and Prometheus metrics named vllm:kvdock_…

The sides hand out KvdockStats with each step; vLLM adds them up, first over the workers, then with the scheduler's, and
sends their `data` to the process that logs and exports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvdock.connectors.vllm.figures import METRICS, Data, Figures, merge, summary

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Buckets: from a lookup to the load of a very long prompt."""


@dataclass
class KvdockStats(KVConnectorStats):
    """`data`: as figures.Data; vLLM carries nothing else from process to process."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> KvdockStats:
        """With numbers of its own: what vLLM hands to several loggers is one and the same."""
        made = cls()
        merge(made.data, data)
        return made

    @classmethod
    def taken(cls, figures: Figures) -> KvdockStats | None:
        data = figures.take()
        return cls(data=data) if data else None

    def reset(self) -> None:
        self.data: Data = {}

    def aggregate(self, other: KVConnectorStats) -> KvdockStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvdockPromMetrics(KVConnectorPromMetrics):
    """`metric_types`: vLLM's stand-ins for Counter, Gauge and Histogram, which may be Ray's."""

    def __init__(
        self, vllm_config: Any, metric_types: Mapping[type, Any], labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {
            "counter": lambda **named: metric_types[Counter](**named),
            "gauge": lambda **named: metric_types[Gauge](multiprocess_mode="mostrecent", **named),
            "seconds": lambda **named: metric_types[Histogram](buckets=SECONDS, **named),
        }
        self._by_engine: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, metric in METRICS.items():
            family = made[metric.kind](
                name=f"vllm:kvdock_{name}", documentation=metric.help, labelnames=list(labelnames)
            )
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][name] = family.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._by_engine[engine_idx][name]
            if METRICS[name].kind == "counter":
                metric.inc(value)
            elif METRICS[name].kind == "gauge":
                metric.set(value)
            else:
                for seconds in value:
                    metric.observe(seconds)
