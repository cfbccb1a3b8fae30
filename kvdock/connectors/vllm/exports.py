"""kvdock's statistics, Prometheus metrics (vllm:kvdock_…) and KV cache events, in vLLM's own types.

Scheduler and workers return KvdockStats in each step. vLLM adds up those of the workers, then adds the scheduler's, and
sends their `data` to the process that logs and exports. Events are for routers that send a request to an engine that
can load its prefix: a chunk is named by its blocks in each group of full attention, with the hashes of vLLM's own
events, and its medium is "CPU", as for vLLM's own offloading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvdock.connectors.announcer import Announcer, Chunk, ChunkChange
from kvdock.connectors.session import EngineSession
from kvdock.connectors.vllm.block_names import Cutter, Namer, chunk_of
from kvdock.connectors.vllm.figures import METRICS, Data, Figures, merge, summary
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.protocol.kv_events import BlockNames, named

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The buckets of histograms, in seconds: from a lookup to the load of a very long prompt."""


@dataclass
class KvdockStats(KVConnectorStats):
    """`data`: see figures.Data; vLLM sends no other field between processes."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> KvdockStats:
        """A copy of `data`, because vLLM passes the same object to several loggers."""
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


# ---------------------------------------------------------------------- KV cache events

MEDIUM = "CPU"


class Events:
    """Turns the changes of `announcer` into vLLM's events. vLLM makes one hash for each `hash_tokens` tokens."""

    def __init__(self, announcer: Announcer, groups: Sequence[KVGroup], kv_cache_config: Any, hash_tokens: int) -> None:
        self.announcer, self._hash_tokens = announcer, hash_tokens
        kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in kv_cache_config.kv_cache_groups]
        self._groups = [
            (index, kind, max(1, group.block_tokens // hash_tokens))
            for index, (group, kind) in enumerate(zip(groups, kinds, strict=True)) if group.window_tokens is None
        ]

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call: chunks that can be loaded now, and chunks that no longer can."""
        return [self._event(change, *group) for change in self.announcer.take() for group in self._groups]

    def _event(self, change: ChunkChange, group: int, kind: str, step: int) -> KVCacheEvent:
        hashes = _of_blocks(change.chunk, step)
        if not change.is_there:
            return BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=group)
        return BlockStored(
            block_hashes=hashes, parent_block_hash=_before(change.chunk), token_ids=list(change.chunk.tokens),
            block_size=step * self._hash_tokens, lora_id=None, lora_name=None, medium=MEDIUM, group_idx=group,
            kv_cache_spec_kind=kind,
        )


def _of_blocks(chunk: Chunk, step: int) -> list[Any]:
    """The hashes of the chunk's blocks. A hash covers all tokens up to its end, so a block's hash is the last one in
    it."""
    return [maybe_convert_block_hash(BlockHash(one)) for one in chunk.hashes[step - 1 :: step]]


def _before(chunk: Chunk) -> Any:
    return maybe_convert_block_hash(BlockHash(chunk.parent)) if chunk.parent is not None else None


def namer_of(groups: Sequence[KVGroup], chunk_tokens: int, hash_tokens: int) -> Namer | None:
    """Names chunks as vLLM's own events name the blocks of the first group of full attention; None if there is no such
    group."""
    sizes = [group.block_tokens for group in groups if group.window_tokens is None]
    if not sizes:
        return None
    step, hashes = max(1, sizes[0] // hash_tokens), chunk_tokens // hash_tokens

    def name(request: Any, at: int) -> BlockNames | None:
        chunk = chunk_of(request, at, hashes=hashes, chunk_tokens=chunk_tokens)
        return None if chunk is None else named(_before(chunk), _of_blocks(chunk, step), chunk.tokens)

    return name


def events_of(
    config: Any, kv_cache_config: Any, groups: Sequence[KVGroup], session: EngineSession, hash_tokens: int
) -> Events | None:
    """None when this engine publishes no events."""
    wanted = config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    return Events(Announcer(session), groups, kv_cache_config, hash_tokens)


def cutter_of(chunk_tokens: int, hash_tokens: int) -> Cutter:
    return partial(chunk_of, hashes=chunk_tokens // hash_tokens, chunk_tokens=chunk_tokens)
