"""What the engines of bench.sglang are told, and the sizes of its workloads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.engine_child import LLAMA_8B

Figures = dict[str, Any]
KINDS = ("hicache", "kvdock")
PLAIN = "plain"
"""SGLang with its cache on the device alone."""
PAGE = 64
TAIL = 8
"""Tokens of a prompt that no hit may cover."""
POOL_BYTES = {"cuda": 28 << 30, "cpu": 256 << 20}
FIRST_S = 150.0
"""Limit of a request: the first ones compile kernels."""
HICACHE_GB = 30
"""POOL_BYTES, in SGLang's unit."""


@dataclass(frozen=True)
class Scale:
    """Sizes that `--scale` may change. Lengths are in tokens."""

    layers: int = 32
    device_tokens: int = 72 << 10
    """Capacity of the KV on the device: more than all of `lens`, less than the prompts of `feed`."""
    lens: Sequence[int] = (2048, 8192, 32768)
    reps: int = 4
    checked: int = 2048
    """Length of the prompt whose output is compared; `checked_new`: how many tokens of output."""
    checked_new: int = 16
    decoders: int = 16
    decoded: int = 256
    decoder_prompt: int = 32
    feed: int = 8192
    feed_prompts: int = 12
    feed_interval_s: float = 0.1
    stored: int = 1024
    """Length of the new prompts in the decode mode."""
    stored_interval_s: float = 0.2
    most_fed: int = 4
    """Limit of fed requests under way, so that their queue does not grow when an engine falls behind."""
    settle_s: float = 0.5
    """Seconds from a request's end until all of its KV is in host memory."""
    engines: Sequence[int] = (1, 2)
    """With how many engines conversations are held, for the mode turns. The next ones are fields of Workload."""
    clients: int = 64
    rounds: int = 5
    question: int = 512
    answer: int = 64
    parallel: int = 16
    rate_per_s: float = 0.0
    warms: bool = True
    """Whether all conversations are held once before with other questions, so that all kernels are compiled."""


CPU_SCALE = Scale(
    device_tokens=2048, lens=(128, 512), reps=1, checked=128, checked_new=8, decoders=2, decoded=40, feed=512,
    feed_prompts=5, feed_interval_s=0.08, stored=128, stored_interval_s=0.08,
    most_fed=1,  # SGLang computes prompts first: on a busy machine, more would leave no time for tokens
    clients=12, rounds=3, question=136, answer=8, parallel=2, warms=False,
)
"""Shows that the benchmark works, with a tiny model and no GPU. Its figures mean nothing."""


def say(text: str) -> None:
    print(f"bench.sglang: {text}", file=sys.stderr, flush=True)


def described(
    kind: str, chosen: argparse.Namespace, scale: Scale, address: str, namespace: str, engines: int = 1
) -> dict[str, Any]:
    """The argument of bench/sglang/engine.py. `engines`: how many share the host memory."""
    longest = max(*scale.lens, scale.feed, scale.rounds * (scale.question + scale.answer)) + 128
    engine: dict[str, Any] = {
        "device": chosen.device, "skip_tokenizer_init": True, "page_size": PAGE, "context_length": longest,
        "max_total_tokens": scale.device_tokens, "grammar_backend": "none",
        "disable_cuda_graph": not chosen.graphs or chosen.device != "cuda",
        "sampling_backend": "pytorch", "log_level": "warning", "skip_server_warmup": True, "random_seed": 0,
        "max_running_requests": max(2 * scale.decoders, scale.parallel), "watchdog_timeout": 3600,
    }
    if chosen.device == "cuda":
        engine |= {
            "dtype": "bfloat16", "attention_backend": chosen.attention, "chunked_prefill_size": 8192,
            "mem_fraction_static": 0.6,
        }
    else:
        engine |= {
            "dtype": "float32", "attention_backend": "torch_native", "chunked_prefill_size": 256,
            "mem_fraction_static": 0.2, "sleep_on_idle": True,  # a loop that turns idly takes a core of few
        }
    if kind == "hicache":
        engine |= {"enable_hierarchical_cache": True, "hicache_size": HICACHE_GB // engines}
        engine["hicache_write_policy"] = "write_through"
    elif kind == "kvdock":
        extra = {"address": address, "weights_digest": namespace, "load_if_cheaper": False, **chosen.connector}
        engine |= {
            "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang",
                "linker_extra_config": extra,
            },
        }
    model = str(chosen.model) if chosen.model else LLAMA_8B | {"num_hidden_layers": scale.layers, "dtype": "bfloat16"}
    return {"kind": kind, "model": model, "engine": engine, "count": engines}
