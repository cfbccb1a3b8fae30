"""A real vLLM Scheduler and the real connector, both sides, around a forward pass that only writes fingerprints.

KV memory is one tensor of integers, [block][slot], shared by all KV cache groups as vLLM's groups share pages; a group
with smaller blocks leaves the last slots of each unused. A position holds a fingerprint of its group and of all tokens
up to it. So before a chunk is "computed", every position that its attention may read can be checked: what is not right
was loaded wrongly, overwritten, or never there. What is computed from something wrong is wrong itself, as in a model,
so that it is seen again wherever it goes.

Runs in an environment with any vLLM from 0.24 to 0.33; none needs a GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import gcd, lcm
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_V2_MODEL_RUNNER="0", VLLM_NO_USAGE_STATS="1")

import numpy as np
import torch
from fingerprints import STATE, continued, export_state, fingerprints, next_token, reads_state, state_spec
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin

BLOCK = 16
LONGEST = 1024
WRONG_TOKEN = 3
IDLE_STEPS = 400
"""Steps in which nothing is computed, one after the other, until an engine that is stepped by hand stands still."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}


class Standstill(Exception):
    """Requests are there and none of them moves."""


class SchedEngine:
    """Per KV cache group `windows`, None for full attention, STATE for a recurrent state and a number below zero for
    chunked local attention, whose pieces have that many tokens, and `sizes`, the tokens of a block, BLOCK if not given.
    `states`: their mamba_cache_mode; `exports`: as export_state has it. `hash_tokens`: of each of vLLM's hashes, a
    block if 0. `overlap`: a step is scheduled before the last one's outcome is known. `runner`: vLLM's, 1 or 2.
    `extra`: settings of the connector. `late`: a step computes when the next one is launched, as a GPU may, and loads
    that do not wait for it come before it; for engines in lockstep that overlap. `events`: KV cache events are
    published, at an endpoint of this process. `algorithm`: of vLLM's hashes of blocks. `step_s`: how long a step takes
    that computes something. `policy`: vLLM's, of whom it schedules first. `model`: its name. An `address` of "" is no
    connector."""

    def __init__(
        self, address: str, *, windows: Sequence[int | None] = (None,), blocks: int = 64, budget: int = 256,
        seqs: int = 8, prefix_caching: bool = True, sizes: Sequence[int] = (), overlap: bool = False, runner: int = 1,
        events: bool = False, algorithm: str = "sha256", step_s: float = 0.0, late: bool = False,
        states: str = "align", exports: bool = False, hash_tokens: int = 0, policy: Any = "fcfs",
        model: str = "fingerprints", **extra: Any,
    ) -> None:
        self._states, self._exports = states, exports
        self.hash_tokens = hash_tokens or gcd(*(sizes or (BLOCK,)))
        self.is_late, self._compute = late, list[Callable[[], None]]()
        self.windows, self.blocks, self.steps = windows, blocks, 0
        self._step_s, self._is_connected = step_s, bool(address)
        self.sizes = tuple(sizes) or (BLOCK,) * len(windows)
        self.bad_reads: list[tuple[Any, ...]] = []
        self.remembered = 0
        self.seen: Counter[str] = Counter()
        self.memory = torch.zeros((blocks, max(self.sizes)), dtype=torch.int64)
        self._cells, self._mark = self.memory.numpy(), 0
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._prints: dict[tuple[str, int], list[int]] = {}
        self._runner, self._overlap = runner, overlap
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._idle = 0
        self.asks_for_layers = self._is_connected
        self.before_step: Callable[[], None] | None = None
        """Set: steps are made by hand, and what runs in the background moves here alone."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            self.config = VllmConfig(
                model_config=ModelConfig(
                    model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float16", seed=0,
                    max_model_len=LONGEST, served_model_name=model,
                ),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=LONGEST,
                    is_encoder_decoder=False, async_scheduling=overlap, watermark=0.0, policy=policy,
                ),
                cache_config=CacheConfig(
                    block_size=gcd(*self.sizes), enable_prefix_caching=prefix_caching,
                    prefix_caching_hash_algo=algorithm,
                    mamba_cache_mode=states if STATE in windows else "none",
                ),
                kv_transfer_config=KVTransferConfig(**self.transfer({
                    "address": address, "chunk_tokens": 32, "weights_digest": "fingerprints",
                    "timeout_s": 20.0, "lookup_wait_s": 1.0,  # a busy machine is no lost server
                    "load_if_cheaper": False, **extra,  # nothing is computed here, and that takes no time
                })) if address else None,
                device_config=DeviceConfig("cpu"),
                kv_events_config=KVEventsConfig(
                    enable_kv_cache_events=events, endpoint=f"inproc://{os.urandom(8).hex()}"
                ),
            )
        # A platform without devices switches this off; the scheduler takes the groups it is given.
        self.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        self.config.cache_config.num_gpu_blocks = blocks
        if hash_tokens:
            self.config.cache_config.prefix_match_unit = hash_tokens
        self._start(blocks)

    def transfer(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What makes vLLM's KVTransferConfig of the connector's settings."""
        return {
            "kv_connector": "KvdockConnector", "kv_connector_module_path": "kvdock.connectors.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": settings,
        }

    def orders(self, out: Any) -> Any:
        """The connector's, in what was scheduled."""
        return out.kv_connector_metadata.orders

    @property
    def half(self) -> Any:
        """The connector's side in the scheduler's process."""
        return self.scheduler.connector._scheduler

    def spec(self, window: int | None, size: int) -> Any:
        # K and V of one head of two fp16 elements: 8 bytes a token, one fingerprint.
        shape = {"block_size": size, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float16}
        if window == STATE:
            return state_spec(size, self._states, exports=self._exports)
        if window is None:
            return FullAttentionSpec(**shape)
        if window < 0:
            return ChunkedLocalAttentionSpec(attention_chunk_size=-window, **shape)
        return SlidingWindowSpec(sliding_window=window, **shape)

    def _start(self, blocks: int) -> None:
        groups = [
            KVCacheGroupSpec([f"layer.{n}"], self.spec(window, size))
            for n, (window, size) in enumerate(zip(self.windows, self.sizes, strict=True))
        ]
        kv_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(self.hash_tokens, hash_function)
        with set_current_vllm_config(self.config):
            self.scheduler = (AsyncScheduler if self._overlap else Scheduler)(
                vllm_config=self.config, kv_cache_config=kv_config, log_stats=True,
                structured_output_manager=StructuredOutputManager(self.config), block_size=lcm(*self.sizes),
                hash_block_size=self.hash_tokens,
            )
        self.scheduler.use_v2_model_runner = self._runner == 2
        if self._is_connected:
            self.connect(kv_config)
            self._count_loads()

    def connect(self, kv_config: KVCacheConfig) -> None:
        """The worker's side, and what it tells the scheduler's."""
        with set_current_vllm_config(self.config):
            self.worker = KVConnectorFactory.create_connector(
                config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
            )
        self.workers = [self.worker]
        finished = self.worker.get_finished

        def after_the_step(finished_ids: set[str]) -> Any:
            # Loads begin before the model runs or when it has been launched, and are asked for when it has run.
            time.sleep(self._step_s if self._idle == 0 else 0.0)
            return finished(finished_ids)

        self.worker.get_finished = after_the_step
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        tensors = {f"layer.{n}": self.memory[:, :size] for n, size in enumerate(self.sizes)}
        if self._runner == 2:
            self._active = ActiveKVConnector(self.config, tensors)
        else:
            self.worker.register_kv_caches(tensors)
        told = self.worker.get_handshake_metadata()
        if told is not None:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})

    def _count_loads(self) -> None:
        told, self.loaded_tokens = self.scheduler.connector.update_state_after_alloc, 0

        def counted(request: Request, blocks: Any, external_tokens: int) -> None:
            self.loaded_tokens += external_tokens
            told(request, blocks, external_tokens)

        self.scheduler.connector.update_state_after_alloc = counted

    def add(
        self, request_id: str, tokens: Sequence[int], max_tokens: int = 4, *,
        kv_transfer_params: dict[str, Any] | None = None, **more: Any,
    ) -> Request:
        """`more`: what newer versions know of a request."""
        request = self.made(request_id, tokens, max_tokens, kv_transfer_params=kv_transfer_params, **more)
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def made(
        self, request_id: str, tokens: Sequence[int], max_tokens: int = 4, *,
        kv_transfer_params: dict[str, Any] | None = None, **more: Any,
    ) -> Request:
        """As vLLM's core has it, before its scheduler has."""
        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params is not None else None
        return Request(
            request_id=request_id, prompt_token_ids=list(tokens), pooling_params=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
            block_hasher=self._hasher, **more,
        )

    def step(self) -> Any:
        """What was scheduled."""
        if self.before_step is not None:
            self.before_step()
        self.steps += 1
        out = self.scheduler.schedule()
        is_empty = out.total_num_scheduled_tokens == 0
        for load in self.orders(out).loads if self._is_connected else ():
            self.seen["async_loads" if load.is_async else "sync_loads"] += 1
        self._idle = self._idle + 1 if is_empty else 0
        if is_empty and self.before_step is None:
            time.sleep(0.0005)  # what is awaited ends in other threads
        with set_current_vllm_config(self.config):
            if not self._is_connected:
                result = self._forward(out)
            else:
                result = self._as_runner_2(out) if self._runner == 2 else self._as_runner_1(out)
        self._under_way.append((out, result))
        if not self._overlap or is_empty or len(self._under_way) > 1:
            self._learn()
        return out

    def _learn(self) -> None:
        """The scheduler is told the outcome of the oldest step."""
        out, result = self._under_way.popleft()
        if all(later.req_ids == [] for _, later in self._under_way):
            self.computes()
        told = result.kv_connector_output
        if told is not None and told.invalid_block_ids:
            # A synchronous load's step runs before its errors are looked at, and vLLM throws its outcome away.
            kept = [bad for bad in self.bad_reads if bad[-1] not in told.invalid_block_ids]
            self.seen["excused"] += len(self.bad_reads) - len(kept)
            self.bad_reads = kept
        self.scheduler.update_from_output(out, result)

    def _as_runner_1(self, out: Any) -> ModelRunnerOutput:
        self.worker.handle_preemptions(out.kv_connector_metadata)
        if out.total_num_scheduled_tokens == 0:
            return Mixin.kv_connector_no_forward(out, self.config)
        with set_forward_context(None, self.config), Mixin.maybe_get_kv_connector_output(out) as told:
            result = self._forward(out)
        result.kv_connector_output = told
        return result

    def _as_runner_2(self, out: Any) -> ModelRunnerOutput:
        if out.total_num_scheduled_tokens == 0:
            return self._active.no_forward(out)
        self._active.pre_forward(out)
        result = self._forward(out)
        if hasattr(self._active, "finish_forward"):
            self._active.finish_forward()
        result.kv_connector_output = self._active.post_forward(out.finished_req_ids)
        return result

    def run(self, most_s: float = 20.0) -> None:
        """Until no request and no store is left. Standstill: nothing moves, or too slowly."""
        end = time.monotonic() + most_s
        while self.scheduler.has_requests() or self._under_way:
            if self.scheduler.has_requests():
                self.step()
            else:
                self._learn()
            by_hand = self.before_step is not None
            if self._idle > IDLE_STEPS if by_hand else time.monotonic() > end:
                states = {name: r.status.name for name, r in self.requests.items() if not r.is_finished()}
                raise Standstill(f"after {self.steps} steps: {states}")

    def complete(self, *request: Any, **more: Any) -> Request:
        """Runs a request to its end, which is to be add()ed."""
        request = self.add(*request, **more)
        self.run()
        return request

    def forget_prefixes(self) -> None:
        """When run() has ended. What is there afterwards was loaded or computed anew."""
        assert self.scheduler.reset_prefix_cache()
        self.poison()

    def poison(self) -> None:
        self.memory.fill_(-1)

    @property
    def held_blocks(self) -> int:
        """All but the null block are free when no request is left."""
        return self.blocks - 1 - int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def wrong_tokens(self) -> int:
        """How many output tokens differ from what a right engine generates."""
        wrong = 0
        for request in self.requests.values():
            made = list(request.output_token_ids)
            wanted = continued(request.prompt_token_ids, len(made))
            wrong += sum(one != other for one, other in zip(made, wanted, strict=True))
        return wrong

    def close(self) -> None:
        if self._is_connected:
            self.remembered = self._remembered()
            self.worker.shutdown()
            self.scheduler.connector.shutdown()
        self.scheduler.kv_event_publisher.shutdown()

    def _remembered(self) -> int:
        """How much is still known of lookups and loads: nothing when all requests have ended."""
        half, lookups = self.half, self.half._connector.lookups
        once = lookups.waits.loads
        kept = (lookups._sent, lookups._checks, half._arrivals.early._open, half._arrivals.early._waiting)
        return sum(map(len, kept + ((once._loads, once._by_key, once._waits) if once is not None else ())))

    def _forward(self, out: Any) -> ModelRunnerOutput:
        if not self._is_connected:
            time.sleep(self._step_s)
        self.computes()
        for copy in getattr(out, "kv_cache_block_copies", None) or ():  # newer versions: a hit that ends inside a block
            self._cells[copy.dst_block_id] = self._cells[copy.src_block_id]
        starts = self._note(out)
        ids, sampled = list(out.num_scheduled_tokens), list[list[int]]()
        if self.asks_for_layers and ids:
            for worker in self.workers:
                for layer in range(len(self.windows)):
                    worker.wait_for_layer_load(f"layer.{layer}")
        self._compute.append(lambda: sampled.extend(self._computed(out, starts)))
        if not self.is_late:
            self.computes()
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: at for at, name in enumerate(ids)}, sampled_token_ids=sampled
        )

    def computes(self) -> None:
        """The step that was launched last is computed by now."""
        while self._compute:
            self._compute.pop()()

    def _computed(self, out: Any, starts: dict[str, int]) -> list[list[int]]:
        sampled = []
        for request_id, count in out.num_scheduled_tokens.items():
            tokens, start = self._tokens[request_id], starts[request_id]
            # Every layer reads before the next one writes, but all of them are wrong once one has read wrongly.
            reads = [self._reads(request_id, group, start) for group in range(len(self.windows))]
            for group in range(len(self.windows)):
                self._writes(request_id, group, start, count, all(reads))
            ended = start + count == len(tokens)
            if ended:
                tokens.append(next_token(self._prints[request_id, 0]) if all(reads) else WRONG_TOKEN)
            sampled.append(tokens[-1:] if ended else [])
        return sampled

    def _reads(self, request_id: str, group: int, start: int) -> bool:
        """Whether all is right that a chunk from `start` on reads."""
        prints = fingerprints(group, self._tokens[request_id], self._prints.setdefault((request_id, group), []))
        window, size, table = self.windows[group], self.sizes[group], np.array(self.tables[request_id][group])
        if window == STATE:
            return reads_state(self, request_id, group, start, prints)
        first = 0 if window is None else start // -window * -window if window < 0 else max(0, start - window + 1)
        at = np.arange(first, start)
        right = self._cells[table[at // size], at % size] ^ self._mark == np.array(prints, dtype=np.int64)[at]
        for wrong in at[~right].tolist():
            self.bad_reads.append((self.steps, request_id, group, wrong, int(table[wrong // size])))
        return bool(right.all())

    def _writes(self, request_id: str, group: int, start: int, count: int, is_right: bool) -> None:
        size, table = self.sizes[group], np.array(self.tables[request_id][group])
        at = np.arange(start, start + count)
        if self.windows[group] == STATE:  # in one cell, over the state before
            at = at[-1:]
        assert table[at // size].all(), f"{request_id}: the null block is written, tokens from {start} on"
        made = np.array(self._prints[request_id, group], dtype=np.int64)[at]
        # These cells and no others: loads in the background write beside them.
        slots = at % size if self.windows[group] != STATE else 0
        if self.windows[group] == STATE and self._exports:
            export_state(self, request_id, group, start, start + count, is_right)
        self._cells[table[at // size], slots] = (made if is_right else -made) ^ self._mark

    def _note(self, out: Any) -> dict[str, int]:
        """Block tables and tokens, and per request how many tokens are computed."""
        starts: dict[str, int] = {}
        for new in out.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            starts[request_id] = cached.num_computed_tokens[at]
            ids = cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, ids)
            else:
                self._take_back(request_id)
                for column, more in zip(self.tables[request_id], ids or (), strict=False):
                    column.extend(more)
        return starts

    def _begin(self, request_id: str, ids: Sequence[Sequence[int]]) -> None:
        self.tables[request_id] = [list(column) for column in ids]
        self._tokens[request_id] = list(self.requests[request_id].all_token_ids)
        self._drop_prints(request_id, len(self._tokens[request_id]))

    def _take_back(self, request_id: str) -> None:
        """A token whose step was thrown away was never generated."""
        if not self._overlap:
            tokens = self._tokens[request_id] = list(self.requests[request_id].all_token_ids)
            self._drop_prints(request_id, len(tokens))

    def _drop_prints(self, request_id: str, count: int) -> None:
        for group in range(len(self.windows)):
            del self._prints.setdefault((request_id, group), [])[count:]
