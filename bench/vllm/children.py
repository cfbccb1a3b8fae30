"""The engines to measure, each a process of its own (bench/vllm/engine.py), and the scale at which they are measured.

Invariant: only one engine has a job at a time; the others wait for a line on their stdin.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine_child import CPU_SLOWER, LLAMA_8B, Child, Failed, wait_until_pinned

TAIL = 8
"""Tokens of a prompt that no hit may cover."""
OURS = ("kvdock", "packed")
KINDS = ("none", "native", *OURS)

@dataclass(frozen=True)
class Scale:
    """Sizes that `--scale` may change. Lengths are in tokens."""

    layers: int = 32
    """Layers of the engines that are timed."""
    dtype: str = "bfloat16"
    backend: str = "FLASH_ATTN"
    block: int = 16
    chunk: int = 128
    """kvdock's chunk_tokens, except in the preemption mode, where a chunk is a block."""
    batched: int = 8192
    """max_num_batched_tokens."""
    gpu_gib: int = 8
    """KV memory of a timed engine: less than `feed_prompts` prompts of `feed` tokens need, so each is loaded anew."""
    cpu_gib: int = 16
    """Host KV memory of vLLM's native offload."""
    check_dtype: str = "float16"
    """Type of the engines whose outputs are compared: it has fewer ties than bfloat16."""
    preempt_layers: int = 2
    preempt_seeds: int = 10
    preempt_blocks: int = 10
    preempt_new: int = 72
    requests: int = 50
    request_layers: int = 8
    request_blocks: int = 1024
    prefixes: int = 8
    prefix_least: int = 1024
    prefix_most: int = 4096
    tail_least: int = 16
    tail_most: int = 200
    new: int = 64
    lens: Sequence[int] = (2048, 8192, 32768)
    reps: int = 5
    decoders: int = 16
    decoded: int = 512
    decoder_prompt: int = 32
    feed: int = 8192
    feed_prompts: int = 12
    feed_interval_s: float = 0.1
    stored: int = 1024
    """Length of the new prompts in the decode mode."""
    stored_interval_s: float = 0.2
    samples: int = 16
    """How many samples one request has in the samples mode; `sampled`: tokens of its prompt, beside the tail;
    `sampled_new`: tokens of each sample."""
    sampled: int = 8192
    sampled_new: int = 16


CPU_SCALE = Scale(
    dtype="float32", backend="", block=32, chunk=64, batched=256, check_dtype="float32", preempt_seeds=2,
    preempt_new=150, requests=12, request_blocks=24, prefixes=3, prefix_least=64, prefix_most=256, tail_least=8,
    tail_most=48, new=40, lens=(128, 512), reps=2, decoders=4, decoded=100, feed=512, feed_prompts=6,
    feed_interval_s=0.02, stored=128, stored_interval_s=0.02, samples=4, sampled=256, sampled_new=4,
)
"""Shows that the benchmark works, with a tiny model and no GPU. Its figures mean nothing."""


@dataclass(frozen=True)
class Setting:
    """The settings that all engines of a run have in common."""

    scale: Scale
    device: str
    address: str
    runner: str
    poll_s: float
    logs: Path
    model: Path | None
    """A model's folder; None: random weights in the shape of Llama 3 8B."""
    namespace: str
    connector: dict[str, Any]
    """Further kv_connector_extra_config of kvdock."""
    eager: bool
    """Without CUDA graphs and compilation."""
    kinds: Sequence[str]
    """The kinds of engines that are timed."""

    @property
    def vocabulary(self) -> int:
        config = json.loads((self.model / "config.json").read_text()) if self.model else LLAMA_8B
        return int(config["vocab_size"])

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


Figures = dict[str, Any]


def say(text: str) -> None:
    print(f"bench.vllm: {text}", file=sys.stderr, flush=True)


def described(setting: Setting, kind: str, *, layers: int, dtype: str, chunk: int, **engine: Any) -> dict[str, Any]:
    """The argument of bench/vllm/engine.py; `engine` goes to LLM(…)."""
    scale = setting.scale
    environment: dict[str, str] = {}
    common: dict[str, Any] = {
        "dtype": dtype, "max_num_batched_tokens": scale.batched, "block_size": scale.block,
        "enforce_eager": setting.eager,
    }
    if setting.on_gpu:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if setting.runner == "v2" else "0"
        # The size of the KV memory is given; vLLM uses this share only to check how much memory is free.
        common |= {"attention_backend": scale.backend, "gpu_memory_utilization": 0.1}
    ours = {
        "kv_connector": "KvdockConnector", "kv_connector_module_path": "kvdock.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "address": setting.address, "weights_digest": setting.namespace, "chunk_tokens": chunk,
            "pack": "on" if kind == "packed" else "off", **setting.connector,
        },
    }
    connectors = {
        "none": None,
        "native": {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": scale.cpu_gib << 30},
        },
        **dict.fromkeys(OURS, ours),
    }
    return {
        "kind": kind, "connector": connectors[kind], "environment": environment, "poll_s": setting.poll_s,
        "model": str(setting.model) if setting.model else LLAMA_8B | {"num_hidden_layers": layers},
        "engine": common | engine,
    }


Engines = Mapping[str, Child]


@contextlib.contextmanager
def engines(setting: Setting, name: str, descriptions: list[dict[str, Any]]) -> Iterator[dict[str, Child]]:
    """The described engines, by kind; they start at the same time. Native is left out when it does not start."""
    children = {
        one["kind"]: Child(
            "bench.vllm.engine", one, address=setting.address, log_at=setting.logs / f"{name}-{one['kind']}.log",
            slower=1 if setting.on_gpu else CPU_SLOWER,
        )
        for one in descriptions
    }
    try:
        for child in list(children.values()):
            try:
                child.started()
            except Failed as error:
                if child.kind != "native":
                    raise
                say(f"without native: {error}")
                children.pop("native").close()
        if setting.on_gpu and any(kind in OURS for kind in children):
            wait_until_pinned(setting.address)
        yield children
    finally:
        for child in children.values():
            child.close()
