"""A whole vLLM on a GPU, as people start it: with CUDA graphs, compilation and async scheduling, its core and its
workers in processes of their own.

    python gpu_engine.py SAID

SAID is JSON: "model", "address", "prompt" (token ids), "adapter" ([name, number, folder], or null), "engine" (more
arguments of vLLM's LLM), "extra" (more settings of the connector), and "is_first": this engine computes and stores the
prompt; else another one has stored it.

Prints, as one line of JSON, {name: {"run": [[token, log-probability as hex]], "cached": tokens that were not computed,
"drafts": [verified, drafted, accepted]}}. Of the first engine: "cold", "local" (a hit in its own prefix cache),
"poisoned" (the same, after its KV memory was overwritten), "loaded" (its prefix cache was reset as well) and "again" (a
hit in what was loaded). Of another one: "loaded" and "again". Of both: "untouched", another prompt that kvdock leaves
alone, which shows whether they compute the same bits at all, and "about": how vLLM was set up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from gpu_waits import wait_until_flushed, wait_until_stored

from bench.engine_child import wait_until_pinned

NEW = 32
UNTOUCHED = {"kv_transfer_params": {"kvdock": {"load": False, "store": False}}}
POISON = 0x55
"""A byte that makes a large finite number of each type of KV: what is masked must stay masked."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # 1 imports flashinfer, which nothing else here needs
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # else each process chooses kernels by timing them, and rounds as they do
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it uses NVLink multicast, which hosts may forbid
}


def settings_of(said: dict[str, Any]) -> dict[str, Any]:
    """What the engine is made with. What is not named here is as vLLM has it."""
    extra = {
        "address": said["address"], "chunk_tokens": 64, "timeout_s": 20.0, "lookup_wait_s": 1.0,
        "load_if_cheaper": False,  # a tiny model computes as fast as it loads
        **said["extra"],
    }
    return {
        "model": said["model"], "skip_tokenizer_init": True, "disable_log_stats": False,  # it counts drafts
        "worker_extension_cls": "gpu_engine.KvMemory",
        "max_model_len": 1024, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 29,  # others share the GPU
        "kv_transfer_config": {
            "kv_connector": "KvdockConnector", "kv_connector_module_path": "kvdock.connectors.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
        },
        **said["engine"],
    }


def about(config: Any) -> dict[str, Any]:
    """How vLLM was set up, by its VllmConfig."""
    compilation = config.compilation_config
    return {
        "eager": config.model_config.enforce_eager, "compilation": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name, "sizes": len(compilation.cudagraph_capture_sizes or ()),
        "async": bool(config.scheduler_config.async_scheduling),
        "ranks": config.parallel_config.tensor_parallel_size,
        "runner_v2": bool(getattr(config, "use_v2_model_runner", False)),
    }


class KvMemory:
    """A worker extension: vLLM adds it to the class of each worker."""

    model_runner: Any

    def report_poisoned(self) -> None:
        """Overwrites all KV of this worker. The name begins with `report_`, as kvdock expects of methods that only
        read. Under any other unknown name the call would count as a change of the weights, and nothing that was stored
        before it would be loaded."""
        import torch

        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                memory.fill_(POISON)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Engine:
    def __init__(self, said: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        self._said = said
        self.llm = LLM(**settings_of(said))
        common = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 2}
        self._params = SamplingParams(**common)
        self._untouched = SamplingParams(**common, extra_args=UNTOUCHED)
        self._adapter = LoRARequest(*said["adapter"]) if said["adapter"] else None

    def run(self) -> dict[str, Any]:
        return self._run(self._said["prompt"], self._params)

    def untouched(self) -> dict[str, Any]:
        return self._run(self._said["prompt"][::-1], self._untouched)

    def _run(self, prompt: list[int], params: Any) -> dict[str, Any]:
        before = self._drafts()
        [out] = self.llm.generate(
            [{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=self._adapter
        )
        made = out.outputs[0]
        bits = [[token, at[token].logprob.hex()] for token, at in zip(made.token_ids, made.logprobs, strict=True)]
        drafts = [now - then for now, then in zip(self._drafts(), before, strict=True)]
        return {"run": bits, "cached": out.num_cached_tokens, "drafts": drafts}

    def _drafts(self) -> list[int]:
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return [int(found.get(f"vllm:spec_decode_{name}", 0)) for name in names]

    def poison(self) -> None:
        self.llm.collective_rpc("report_poisoned")


def main(said: dict[str, Any]) -> dict[str, Any]:
    began_s = time.monotonic()
    engine = Engine(said)
    found: dict[str, Any] = {"about": about(engine.llm.llm_engine.vllm_config), "start_s": time.monotonic() - began_s}
    print(f"started in {found['start_s']:.1f} s: {found['about']}", file=sys.stderr, flush=True)
    wait_until_pinned(said["address"])
    if said["is_first"]:
        found |= {"cold": engine.run(), "local": engine.run()}
        wait_until_stored(said["address"])
        engine.poison()
        found["poisoned"] = engine.run()
        engine.poison()
        wait_until_flushed(engine.llm.reset_prefix_cache)
    else:
        engine.poison()
    found |= {"loaded": engine.run(), "again": engine.run(), "untouched": engine.untouched()}
    engine.llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    os.environ.update({name: value for name, value in OFFLINE.items() if name not in os.environ})
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # to take a whole engine apart takes seconds
