"""A real vLLM Scheduler and the real connector, both sides, around a forward pass that only writes fingerprints.

KV memory is one tensor of integers, [block][slot], shared by all KV cache groups as vLLM's groups share pages. A
position holds a fingerprint of its group and of all tokens up to it. So before a chunk is "computed", every position
that its attention may read can be checked: what is not right was loaded wrongly, overwritten, or never there.

Runs in an environment with vLLM 0.24, 0.32 or 0.33; none needs a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_V2_MODEL_RUNNER="0", VLLM_NO_USAGE_STATS="1")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
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
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin

BLOCK = 16
LONGEST = 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}


def fingerprint(group: int, tokens: Sequence[int]) -> int:
    """63 bits; never 0, which is what fresh memory holds."""
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, salt=bytes([group])).digest(), "little") >> 1 | 1


class SchedEngine:
    """`windows`: per KV cache group, None for full attention."""

    def __init__(
        self, address: str, *, windows: Sequence[int | None] = (None,), blocks: int = 64, budget: int = 256,
        seqs: int = 8, prefix_caching: bool = True, **extra: Any,
    ) -> None:
        self.windows, self.steps = windows, 0
        self.bad_reads: list[tuple[Any, ...]] = []
        self.memory = torch.zeros((blocks, BLOCK), dtype=torch.int64)
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[list[int]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            self.config = VllmConfig(
                model_config=ModelConfig(
                    model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float16", seed=0,
                    max_model_len=LONGEST,
                ),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=LONGEST,
                    is_encoder_decoder=False, async_scheduling=False, watermark=0.0,
                ),
                cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
                kv_transfer_config=KVTransferConfig(
                    kv_connector="KvdockConnector", kv_connector_module_path="kvdock.connectors.vllm",
                    kv_role="kv_both", kv_load_failure_policy="recompute",
                    kv_connector_extra_config={
                        "address": address, "chunk_tokens": 32, "weights_digest": "fingerprints", **extra
                    },
                ),
                device_config=DeviceConfig("cpu"),
            )
        # A platform without devices switches this off; the scheduler takes the groups it is given.
        self.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        self.config.cache_config.num_gpu_blocks = blocks
        self._start(blocks)

    def _start(self, blocks: int) -> None:
        # K and V of one head of two fp16 elements: 8 bytes a token, one fingerprint.
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float16}
        groups = [
            KVCacheGroupSpec([f"layer.{n}"], FullAttentionSpec(**shape) if window is None
                             else SlidingWindowSpec(sliding_window=window, **shape))
            for n, window in enumerate(self.windows)
        ]
        kv_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        with set_current_vllm_config(self.config):
            self.scheduler = Scheduler(
                vllm_config=self.config, kv_cache_config=kv_config, log_stats=True,
                structured_output_manager=StructuredOutputManager(self.config), block_size=BLOCK, hash_block_size=BLOCK,
            )
            self.worker = KVConnectorFactory.create_connector(
                config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
            )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.worker.register_kv_caches({f"layer.{n}": self.memory for n in range(len(self.windows))})
        self.scheduler.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.scheduler.use_v2_model_runner = False
        self._count_loads()

    def _count_loads(self) -> None:
        told, self.loaded_tokens = self.scheduler.connector.update_state_after_alloc, 0

        def counted(request: Request, blocks: Any, external_tokens: int) -> None:
            self.loaded_tokens += external_tokens
            told(request, blocks, external_tokens)

        self.scheduler.connector.update_state_after_alloc = counted

    def add(self, request_id: str, tokens: Sequence[int], max_tokens: int = 4) -> Request:
        request = Request(
            request_id=request_id, prompt_token_ids=list(tokens), pooling_params=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True), block_hasher=self._hasher,
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        self.steps += 1
        out = self.scheduler.schedule()
        with set_current_vllm_config(self.config):
            self.worker.handle_preemptions(out.kv_connector_metadata)
            if out.total_num_scheduled_tokens == 0:
                time.sleep(0.001)  # what is awaited ends in other threads
                result = Mixin.kv_connector_no_forward(out, self.config)
            else:
                with set_forward_context(None, self.config), Mixin.maybe_get_kv_connector_output(out) as told:
                    result = self._forward(out)
                result.kv_connector_output = told
        self.scheduler.update_from_output(out, result)
        return out

    def run(self, most_s: float = 20.0) -> None:
        """Until no request and no store is left. TimeoutError: it stands still, or is too slow."""
        end = time.monotonic() + most_s
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > end:
                states = {name: r.status.name for name, r in self.requests.items() if not r.is_finished()}
                raise TimeoutError(f"after {self.steps} steps: {states}")

    def forget_prefixes(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    def _forward(self, out: Any) -> ModelRunnerOutput:
        starts = self._note(out)
        ids, sampled = [], []
        for request_id, count in out.num_scheduled_tokens.items():
            tokens, start = self.requests[request_id].all_token_ids, starts[request_id]
            for group, window in enumerate(self.windows):
                table = self.tables[request_id][group]
                first = 0 if window is None else max(0, start - window + 1)
                for at in range(first, start):
                    found = int(self.memory[table[at // BLOCK], at % BLOCK])
                    if found != fingerprint(group, tokens[: at + 1]):
                        self.bad_reads.append((self.steps, request_id, group, at, table[at // BLOCK]))
                for at in range(start, start + count):
                    assert table[at // BLOCK], f"{request_id}: the null block is written at token {at}"
                    self.memory[table[at // BLOCK], at % BLOCK] = fingerprint(group, tokens[: at + 1])
            ids.append(request_id)
            ended = start + count == len(tokens)
            sampled.append([fingerprint(255, tokens) % 900 + 5] if ended else [])
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: at for at, name in enumerate(ids)}, sampled_token_ids=sampled
        )

    def _note(self, out: Any) -> dict[str, int]:
        """Block tables, and per request how many tokens are computed."""
        starts: dict[str, int] = {}
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = [list(column) for column in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            starts[request_id] = cached.num_computed_tokens[at]
            ids = cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(column) for column in ids]
            elif ids is not None:
                for column, more in zip(self.tables[request_id], ids, strict=True):
                    column.extend(more)
        return starts
