"""What is vLLM's own in the stories of tests/whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE_PYTHON, HERE
from weight_routes import EXTENSION
from whole_engines import BEFORE, CONNECTOR, HITS, LATER, WITH, Load

from kvdock.connectors.vllm.figures import METRICS as METRICS


def several(shards: int, stages: int, connector: str = "Several", **environ: str) -> dict[str, Any]:
    """What Engine is told for an engine of several workers."""
    return {
        "engine": {
            "tensor_parallel_size": shards, "pipeline_parallel_size": stages, "distributed_executor_backend": "mp",
        },
        "connector": [connector, "odd_connectors"],
        "environ": environ,
    }


TENSOR_PARALLEL: list[dict[str, Any]] = [{}, several(2, 1), several(4, 1)]
DIVIDED = "llama", 2
"""A model whose heads these divide, and into how many parts: two of four workers have the same head."""
KEEPS = {"keeps_prefixes": True}
"""Else vLLM has no prefix cache for latent attention on a CPU, and nothing is loaded."""
LOADS = [
    pytest.param(
        Load("llama", several(2, 1), {**several(2, 1), "extra": {"load_async": False}}, shape=(1, 2)), id="two ranks"
    ),
    pytest.param(
        Load("mla", {**several(2, 1), **KEEPS}, KEEPS, reads_the_same=False), id="latent", marks=pytest.mark.any_tp
    ),
    pytest.param(Load("llama", several(1, 3), None, shape=(1, 3)), id="three stages", marks=pytest.mark.sweep),
    pytest.param(Load("deep", several(2, 2), None, shape=(1, 4)), id="two stages of two ranks"),
]
TIERED = [pytest.param("llama", {}, id="attention", marks=pytest.mark.sweep), pytest.param("gemma", {}, id="windows")]
RANKS = [pytest.param({}, id="one rank")]


def on_no_gpu(folder: Path) -> dict[str, Any]:
    """What an engine is told whose GPU cannot be used."""
    return {"connector": ["OnNoGpu", "odd_connectors"]}


def with_figures(folder: Path) -> dict[str, Any]:
    """What an engine is told that exports its figures."""
    return {"engine": {"disable_log_stats": False}}


EXPORTED = 'vllm:kvdock_attached{engine="0"'
BYTES = sum(HITS) * 3 * 2 * 2 * 32 * 4
"""What all those tokens take in llama: layers, K and V, heads, head size, bytes of a float32."""
COLD = {
    "kvdock_store_tokens_total": sum(HITS), "kvdock_store_bytes_total": BYTES, "kvdock_load_seconds_count": 0,
}
WARM = {
    "kvdock_load_bytes_total": BYTES, "kvdock_load_seconds_count": 3, "kvdock_load_failures_total": 0,
    "external_prefix_cache_hits_total": sum(HITS),
}

# ---------------------------------------------------------------------- weights

WEIGHTS: dict[str, Any] = {
    "engine": {"weight_transfer_config": {"backend": "folder"}, "worker_extension_cls": EXTENSION}
}
RELOAD = "reload"
CHANGES = [("reload", reset) for reset in (LATER, WITH, CONNECTOR, BEFORE)] + [
    (route, reset) for route in ("function", "extension", "transfer", "model") for reset in (LATER, WITH)
]
"""What is done to the first engine, one after the other. Its weights alternate, so each change is one."""
SWEPT = {("function", WITH), ("extension", LATER), ("transfer", WITH), ("model", LATER)}
"""Those that happen only with --sweeps: without them, each route and each reset is there."""
VERSIONS = {
    "equal versions": ("reload", "step-1", "step-1", "llama-b"),
    "equal versions of a transfer": ("transfer", "step-2", "step-2", "llama-c"),
    "equal versions of an extension's call": ("extension", "step-3", "step-3", "llama-b"),
    "other versions": ("reload", "step-4", "step-4b", "llama-c"),
    "no version": ("reload", None, None, "llama-b"),
}
"""Route, the version that each of two engines is told, and the model."""
SHARE = {"equal versions", "equal versions of a transfer", "equal versions of an extension's call"}

# ---------------------------------------------------------------------- the example

EXAMPLE_PROGRAM = f'{ENGINE_PYTHON} {HERE}/serve_process.py "$@"'
EXAMPLE_ARGS = (
    "--dtype float32 --max-model-len 2048 --enforce-eager --block-size 32 --num-gpu-blocks-override 200 "
    "--max-num-seqs 4"
)
EXAMPLE_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
TRAINER = str(ENGINE_PYTHON)
"""Runs examples/reinforce.py."""
TRAINING_ENVIRON = {
    "VLLM_ARGS": EXAMPLE_ARGS, "VLLM_SERVER_DEV_MODE": "1", "KVDOCK_VLLM_TIMEOUT_S": "20",
    "KVDOCK_VLLM_LOOKUP_WAIT_S": "1", "KVDOCK_VLLM_LOAD_IF_CHEAPER": "false",
}
REQUESTS_MORE = 0
"""Requests that the engine makes of one for several samples, beside one for each."""
EXAMPLE_LOADED = 1000
EXAMPLE_LOGS = [
    re.compile(rf"INFO \d\d-\d\d .*kvdock: attached to unix:\S+ as {who}-") for who in ("rank0", "scheduler")
]
"""A line of each worker, and of the scheduler."""
