"""One vLLM engine in a process of its own, for bench.vllm: reads jobs as JSON lines and writes answers.

    python -m bench.vllm.engine '{"kind": "kvdock", …}'

Scheduler and worker run in this process. `model` is a folder or a configuration. A configuration gets weights from
N(0, 0.02), because the flat weights of vLLM's dummy loader would hide damaged KV. A time to first token runs from
add_request to the step that returns the token. After a step that runs no model the process sleeps `poll_s`, as vLLM's
own loop does (1 ms), so that background threads get the interpreter.

A job that fails is answered with {"error": …} and ends the process, because the state of its engine is unknown.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine_child import pace

Prompt = list[int]
Run = list[tuple[int, float, list[tuple[int, float]]]]
"""For each token of an answer: the token, its log-probability, and those of the most probable tokens."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_DEEP_GEMM": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # 1 imports flashinfer, which nothing else here needs
}
FILLER = [3] * 8
"""A request too short to be cached; it keeps an engine stepping."""
MOST_AT_ONCE = 4
"""Limit of fed requests under way, so that their queue does not grow when an engine falls behind."""


class Watch:
    """Counts what passes between the scheduler and its connector."""

    def __init__(self, scheduler: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._last_lookup: dict[str, tuple[int, bool]] = {}
        self._replace(scheduler, "_preempt_request", self._preempted)
        if scheduler.connector is not None:
            self._replace(scheduler.connector, "get_num_new_matched_tokens", self._looked_up)
            self._replace(scheduler.connector, "update_state_after_alloc", self._admitted)
            self._replace(scheduler.connector, "build_connector_meta", self._ordered)
        warnings = logging.Handler(logging.WARNING)
        warnings.emit = lambda record: self.counts.update(["warnings"])  # type: ignore[method-assign]  # it has one
        logging.getLogger("kvdock").addHandler(warnings)

    def take(self) -> dict[str, int]:
        taken, self.counts = self.counts, Counter()
        return dict(taken)

    def _replace(self, owner: Any, name: str, seen: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            answer = original(*args, **named)
            seen(answer, *args)
            return answer

        setattr(owner, name, call)

    def _preempted(self, answer: Any, request: Any, *rest: Any) -> None:
        self.counts["preemptions"] += 1

    def _looked_up(self, answer: Any, request: Any, local_tokens: int) -> None:
        self._last_lookup[request.request_id] = (local_tokens, bool(answer[1]))

    def _admitted(self, answer: Any, request: Any, blocks: Any, tokens: int) -> None:
        local_tokens, in_background = self._last_lookup.pop(request.request_id, (0, False))
        self.counts["local_tokens"] += local_tokens
        if tokens:
            kind = "async" if in_background else "sync"
            self.counts.update({"loads": 1, f"loads_{kind}": 1, "loaded_tokens": tokens})
            self.counts["loads_after_preemption"] += request.num_preemptions > 0

    def _ordered(self, answer: Any, *rest: Any) -> None:
        orders = getattr(answer, "orders", None)  # only kvdock's metadata has it
        if orders is not None:
            self.counts.update({"stores": len(orders.stores), "fences": len(orders.fences)})


class Engine:
    def __init__(self, said: dict[str, Any]) -> None:
        began = time.perf_counter()
        import torch
        from vllm import LLM

        imported = time.perf_counter()
        self.torch, self.poll_s = torch, said["poll_s"]
        options = {"skip_tokenizer_init": True, "seed": 0, **said["engine"], **transfer(said)}
        if isinstance(said["model"], str):
            self.llm = LLM(model=said["model"], **options)
        else:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(said["model"]))
                self.llm = LLM(model=folder, load_format="dummy", **options)
            self.llm.apply_model(randomise)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.watch = Watch(self.core.scheduler)
        self.on_gpu = torch.cuda.is_available()
        self.serial = 0
        self.ran_model = False
        self.deadline = 0.0
        self._notice_idle_steps()
        self.facts = {
            "kind": said["kind"], "import_s": imported - began, "build_s": time.perf_counter() - imported,
            "async_scheduling": bool(getattr(self.core, "async_scheduling", False)),
            "blocks": self.core.vllm_config.cache_config.num_gpu_blocks,
            "graphs": self.core.vllm_config.compilation_config.cudagraph_mode.name,
            "compilation": self.core.vllm_config.compilation_config.mode.name,
            "runner_v2": bool(getattr(self.core.vllm_config, "use_v2_model_runner", False)),
        }

    def _notice_idle_steps(self) -> None:
        original = self.core.step_fn

        def step() -> Any:
            outputs, self.ran_model = original()
            return outputs, self.ran_model

        self.core.step_fn = step

    # ------------------------------------------------------------------ steps

    def add(self, ids: Prompt, tokens: int, logprobs: int | None = None, *, deltas: bool = False) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind as Kind

        self.serial += 1
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs,
            output_kind=Kind.DELTA if deltas else Kind.FINAL_ONLY,
        )
        self.engine.add_request(str(self.serial), {"prompt_token_ids": ids}, params)
        return str(self.serial)

    def step(self) -> list[Any]:
        outputs: list[Any] = self.engine.step()
        if time.perf_counter() > self.deadline:
            raise TimeoutError("the job took longer than its limit")
        if not self.ran_model and self.poll_s and self.core.scheduler.has_requests():
            time.sleep(self.poll_s)  # as vLLM's core does
        return outputs

    def drain(self) -> None:
        """Steps until the scheduler has no request left and no transfer that its connector reports."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.step()
        if self.on_gpu:
            self.torch.cuda.synchronize()

    # ------------------------------------------------------------------ jobs

    def first_token(self, ids: Prompt, tokens: int = 1) -> dict[str, Any]:
        began = time.perf_counter()
        self.add(ids, tokens, deltas=True)
        while not (outputs := self.step()):
            pass
        first = time.perf_counter()
        self.drain()
        return {
            "ttft_s": first - began, "first_at_s": first, "idle_s": time.perf_counter() - began,
            "cached": outputs[0].num_cached_tokens,
        }

    def samples(self, ids: Prompt, count: int, tokens: int) -> dict[str, Any]:
        """One request for `count` samples. `blocks_peak`: the most blocks that requests held after a step."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind as Kind

        self.serial += 1
        pool, peak, first_s = self.core.scheduler.kv_cache_manager.block_pool, 0, dict[int, float]()
        began_s = time.perf_counter()
        self.engine.add_request(str(self.serial), {"prompt_token_ids": ids}, SamplingParams(
            n=count, max_tokens=tokens, temperature=1.0, seed=self.serial, ignore_eos=True, detokenize=False,
            output_kind=Kind.DELTA,
        ))
        while self.engine.has_unfinished_requests():
            outputs, now_s = self.step(), time.perf_counter()
            peak = max(peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one block is vLLM's null block
            for completion in (one for output in outputs for one in output.outputs if one.token_ids):
                first_s.setdefault(completion.index, now_s - began_s)
        took_s = time.perf_counter() - began_s
        self.drain()
        return {"ttft_s": sorted(first_s.values()), "took_s": took_s, "blocks_peak": peak}

    def batch(self, prompts: list[Prompt], tokens: int, order: list[int], logprobs: int | None = 5) -> dict[str, Any]:
        """All requests at once, added in the order `order`; `runs` are in the order of `prompts`."""
        began = time.perf_counter()
        places = {self.add(prompts[at], tokens, logprobs): at for at in order}
        runs: list[Run] = [[] for _ in prompts]
        cached = [0] * len(prompts)
        while self.engine.has_unfinished_requests():
            for output in self.step():
                if output.finished:
                    at = places[output.request_id]
                    runs[at], cached[at] = run_of(output), output.num_cached_tokens
        took_s = time.perf_counter() - began
        self.drain()
        return {"runs": runs, "cached": cached, "took_s": took_s}

    def alone(
        self, prompts: list[Prompt], tokens: int, logprobs: int | None = 5, times: int = 1, fresh: bool = False
    ) -> dict[str, Any]:
        """One request after another, each `times` times in a row; `fresh` empties the GPU's prefix cache before each.

        `rounds` holds the answers of the first time, of the second, and so on."""
        rounds: list[dict[str, list[Any]]] = [{"runs": [], "cached": []} for _ in range(times)]
        for prompt in prompts:
            if fresh:
                self.forget()
            for into in rounds:
                answer = self.batch([prompt], tokens, [0], logprobs)
                into["runs"] += answer["runs"]
                into["cached"] += answer["cached"]
        return {"rounds": rounds}

    def forget(self, order: str | None = None, seed: int = 0) -> dict[str, Any]:
        """Empties the GPU's prefix cache, and sorts or shuffles the free blocks ("in_order", "shuffled")."""
        for _ in range(100):
            if self.llm.reset_prefix_cache():
                break
            self.batch([FILLER], 1, [0], None)  # a connector may hold blocks until later steps free them
        else:
            raise RuntimeError("the prefix cache could not be reset: blocks are still in use")
        if order is not None:
            queue = self.core.scheduler.kv_cache_manager.block_pool.free_block_queue
            blocks = queue.popleft_n(queue.num_free_blocks)
            blocks.sort(key=lambda block: block.block_id)
            if order == "shuffled":
                random.Random(seed).shuffle(blocks)
            queue.append_n(blocks)
        return {}

    def decode(
        self, prompts: list[Prompt], tokens: int, feed: list[Prompt] | None = None, interval_s: float = 0.0
    ) -> dict[str, Any]:
        """All of `prompts` decode together; meanwhile requests for one token arrive, made from `feed` in turns. Figures
        cover the time in which all of `prompts` ran."""
        times: dict[str, list[float]] = {self.add(prompt, tokens, deltas=True): [] for prompt in prompts}
        fed: dict[str, float] = {}
        cached: list[int] = []
        waits_ms: list[float] = []
        window: tuple[float, float] | None = None
        due, turn = 0.0, 0
        while any(len(seen) < tokens for seen in times.values()):
            now = time.perf_counter()
            if window is not None and feed and now >= due and len(fed) < MOST_AT_ONCE:
                fed[self.add(feed[turn % len(feed)], 1, deltas=True)] = now
                turn, due = turn + 1, max(due + interval_s, now)
            outputs = self.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id in times:
                    times[output.request_id] += [now] * len(output.outputs[0].token_ids)
                elif output.finished:
                    waits_ms.append((now - fed.pop(output.request_id)) * 1e3)
                    cached.append(output.num_cached_tokens)
            if window is None and all(times.values()):
                window, due = (now, now), now + interval_s
            elif window is not None and all(len(seen) < tokens for seen in times.values()):
                window = (window[0], now)
        self.drain()
        assert window is not None
        return {**pace(list(times.values()), *window), "fed": turn, "fed_cached": dict(Counter(cached)),
                "fed_ttft_ms": statistics.median(waits_ms) if waits_ms else None}

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        what: Callable[..., dict[str, Any]] = getattr(self, job.pop("do"))
        self.deadline = time.perf_counter() + job.pop("limit_s")
        self.watch.take()
        answer = what(**job)
        return answer | {"counts": self.watch.take()}


def run_of(output: Any) -> Run:
    (completion,) = output.outputs
    if completion.logprobs is None:
        return [(token, 0.0, []) for token in completion.token_ids]
    return [
        (token, at[token].logprob, sorted((other, entry.logprob) for other, entry in at.items()))
        for token, at in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def transfer(said: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that choose the connector."""
    if said["connector"] is None:
        return {}
    from vllm.config import KVTransferConfig

    return {"kv_transfer_config": KVTransferConfig(**said["connector"])}


def randomise(model: Any) -> None:
    """Fills the weights. On a CPU it has no effect: vLLM has packed them already."""
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02)


def main() -> None:
    said = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which is for answers
    for name, value in (ENVIRONMENT | said["environment"]).items():
        os.environ[name] = value
    try:
        engine = Engine(said)
        print(json.dumps(engine.facts), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(engine.do(json.loads(line))), file=answers, flush=True)
        engine.engine.engine_core.shutdown()
    except Exception as error:  # every failure is reported and ends the process
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
