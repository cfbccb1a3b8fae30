"""An engine of several workers around a real Scheduler: each has its own memory and its own connector.

What a worker holds of a token is marked with whose part it is, so that bytes of another worker are as wrong as bytes
of another token. Workers run one after the other, and vLLM's own aggregator joins what they report.
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from sched_engine import SchedEngine
from sched_scenarios import figures, prompt
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin

from kvdock.connectors.worker import Loading, WorkerConnector


class RanksEngine(SchedEngine):
    """`shards`: tensor-parallel workers a stage; `stages`: of the pipeline; `latent`: MLA, where the workers of a stage
    hold the same bytes."""

    def __init__(self, address: str, *, shards: int, stages: int = 1, latent: bool = False, **more: Any) -> None:
        self.shards, self.stages, self.latent = shards, stages, latent
        self.workers: list[Any] = []
        super().__init__(address, **more)

    def spec(self, window: int | None, size: int) -> Any:
        if self.latent:
            return MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=4, dtype=torch.float16)
        return super().spec(window, size)

    def _start(self, blocks: int) -> None:
        parallel = self.config.parallel_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = self.shards, self.stages
        parallel.world_size = self.shards * self.stages
        super()._start(blocks)

    def connect(self, kv_config: Any) -> None:
        told, self.cells, self.marks = {}, [], []
        self.seen["failed_stores"] = 0
        for stage in range(self.stages):
            for shard in range(self.shards):
                memory, config = torch.zeros_like(self.memory), copy.copy(self.config)
                config.parallel_config = copy.copy(config.parallel_config)
                config.parallel_config.rank = stage * self.shards + shard
                with set_current_vllm_config(config):
                    worker = KVConnectorFactory.create_connector(
                        config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
                    )
                worker.register_kv_caches({f"layer.{n}": memory[:, :size] for n, size in enumerate(self.sizes)})
                told[stage, shard] = worker.get_handshake_metadata()
                self.workers.append(worker)
                self._count_failed_stores(worker._worker._connector)
                self.cells.append(memory.numpy())
                self.marks.append((stage * self.shards + (0 if self.latent else shard)) << 40)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
        self._joined = KVOutputAggregator.from_connector(self.scheduler.connector, len(self.workers))

    def _count_failed_stores(self, half: WorkerConnector) -> None:
        """They are nobody's error: what could not be stored is missed later."""
        real = half.finish_store

        def finish_store(storing: Any, **how: Any) -> int:
            self.seen["failed_stores"] += 1
            ready = real(storing, **how)
            self.seen["failed_stores"] -= 1
            return ready

        half.finish_store = finish_store  # type: ignore[method-assign]  # the real store, counted

    @property
    def halves(self) -> list[WorkerConnector]:
        return [worker._worker._connector for worker in self.workers]

    def _as_runner_1(self, out: Any) -> ModelRunnerOutput:
        told = []
        for worker in self.workers:
            worker.handle_preemptions(out.kv_connector_metadata)
        if out.total_num_scheduled_tokens == 0:
            for worker in self.workers:
                kv_transfer_state._KV_CONNECTOR_AGENT = worker
                told.append(copy.copy(Mixin.kv_connector_no_forward(out, self.config)))
            return self._joined.aggregate(told)
        with ExitStack() as around:
            around.enter_context(set_forward_context(None, self.config))
            outputs = []
            for worker in self.workers:
                kv_transfer_state._KV_CONNECTOR_AGENT = worker
                outputs.append(around.enter_context(Mixin.maybe_get_kv_connector_output(out)))
            result = self._forward(out)
        told = [result, *(copy.copy(EMPTY_MODEL_RUNNER_OUTPUT) for _ in self.workers[1:])]
        for one, output in zip(told, outputs, strict=True):
            one.kv_connector_output = output
        return self._joined.aggregate(told)

    def _reads(self, request_id: str, group: int, start: int) -> bool:
        right = []
        for cells, mark in zip(self.cells, self.marks, strict=True):
            self._cells, self._mark = cells, mark
            right.append(super()._reads(request_id, group, start))
        return all(right)

    def _writes(self, request_id: str, group: int, start: int, count: int, is_right: bool) -> None:
        for cells, mark in zip(self.cells, self.marks, strict=True):
            self._cells, self._mark = cells, mark
            super()._writes(request_id, group, start, count, is_right)

    def poison(self) -> None:
        for cells in self.cells:
            cells.fill(-1)

    def close(self) -> None:
        for worker in (*self.workers, self.scheduler.connector):
            worker.shutdown()


def warmed(engine: RanksEngine) -> None:
    engine.complete("warm", prompt(1, 150))


def cold(address: str, **how: Any) -> RanksEngine:
    """An engine whose prefix is at the server, and not at hand."""
    engine = RanksEngine(address, **how)
    engine.complete("cold", prompt(1, 150))
    engine.forget_prefixes()
    return engine


def warm(address: str, **how: Any) -> dict[str, Any]:
    engine = cold(address, **how)
    warmed(engine)
    readers = engine.scheduler.connector._scheduler._connector.lookups._readers
    engine.close()
    return figures(engine, readers=readers)


def pressure(address: str, first: int, end: int, **how: Any) -> dict[str, Any]:
    """Random requests with shared prefixes in a pool too small for them. Sums over seeds [first, end)."""
    total: Counter[str] = Counter()
    for seed in range(first, end):
        source = random.Random(seed)
        groups = len(how.get("windows", (None,)))
        engine = RanksEngine(address, seqs=4, budget=64, blocks=source.choice((24, 32)) * groups // 2 + 1, **how)
        bases = [prompt(100 + at, 160) for at in range(3)]
        for number in range(14):
            head = source.choice(bases)[: source.randrange(20, 150)]
            engine.add(f"r{number}", head + prompt(1000 + number, 5), source.randrange(1, 20))
            for _ in range(source.randrange(1, 5)):
                engine.step()
        engine.run()
        engine.close()
        total.update(figures(engine))
    return dict(total)


def shared(address: str, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What one engine stored, another of maybe another shape looks for."""
    cold(address, **ours).close()
    engine = RanksEngine(address, **theirs)
    warmed(engine)
    engine.close()
    return figures(engine)


def swapped(address: str, **how: Any) -> dict[str, Any]:
    """Negative control: two workers load each other's parts."""
    engine = cold(address, **how)
    first, *_, second = engine.halves
    first.ranks, second.ranks, first._owns, second._owns = second.ranks, first.ranks, second._owns, first._owns
    warmed(engine)
    engine.close()
    return figures(engine)


def damage(half: WorkerConnector, attachment: Any, plan: Any) -> None:
    """Flips a byte of the worker's part of the plan's second chunk."""
    part = next(part for part in plan.pieces[1].parts if part.writer == half.rank)
    byte = ctypes.c_uint8.from_address(attachment.segments.address(part.segment, part.offset, part.length) + 5)
    byte.value ^= 1


def one_damaged(address: str, rank: int, **how: Any) -> dict[str, Any]:
    """What one worker's second chunk holds at the server has a byte flipped."""
    engine = cold(address, **how)
    half = next(half for half in engine.halves if half.rank == rank)
    real, loads = half.submit_load, []

    def submit_load(attachment: Any, plan: Any, bands: Any, **how: Any) -> Loading:
        damage(half, attachment, plan)
        loads.append(plan.hit_tokens)
        return real(attachment, plan, bands, **how)

    half.submit_load = submit_load  # type: ignore[method-assign]  # the real load, with the pool damaged under it
    warmed(engine)
    engine.close()
    return figures(engine, loads=loads)


def one_gone(address: str, **how: Any) -> dict[str, Any]:
    """One worker has lost the server, the scheduler's side and the other worker have not."""
    engine = cold(address, **how)
    engine.workers[-1]._worker._connector.session.attachment_to = lambda epoch: None
    engine.add("warm", prompt(1, 150))
    engine.complete("other", prompt(2, 150))
    engine.close()
    return figures(engine)


def two_short(address: str, **how: Any) -> dict[str, Any]:
    """One worker has nothing of a load and says so at once; the other has a chunk, and says so some steps later."""
    engine = cold(address, **how)
    engine.workers[0]._worker._connector.session.attachment_to = lambda epoch: None
    half, waits = engine.halves[1], iter([False] * 5)
    real, loads = half.submit_load, []

    def submit_load(attachment: Any, plan: Any, bands: Any, **how: Any) -> Loading:
        damage(half, attachment, plan)
        loads.append(plan.hit_tokens)
        loading = real(attachment, plan, bands, **how)
        done = loading.done
        loading.done = lambda: next(waits, True) and done()  # type: ignore[method-assign]  # later than it is
        return loading

    half.submit_load = submit_load  # type: ignore[method-assign]  # the real load, told of late
    warmed(engine)
    engine.close()
    return figures(engine, loads=loads)
