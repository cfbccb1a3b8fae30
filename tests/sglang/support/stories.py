"""What is SGLang's own in the stories of tests/whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE_PYTHON, HERE, PP2, TP2, TP2_PP2
from paths import SUPPORT
from whole_engines import HITS, LATER, NEVER, WITH, Load

PAGES_128 = {"engine": {"page_size": 128}}
IN_TURN = {"engine": {"disable_overlap_schedule": True}}

TENSOR_PARALLEL: list[dict[str, Any]] = [
    {}, TP2, {"engine": {"tp_size": 4}, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}},
]
DIVIDED = "four-heads", 4
"""A model whose heads these divide, and into how many parts. On a CPU, SGLang does not give one head to
several ranks."""
LOADS = [
    pytest.param(Load("llama"), id="attention", marks=pytest.mark.sweep),
    pytest.param(Load("llama", PAGES_128, PAGES_128, [128, 256, 512]), id="pages of 128"),
    pytest.param(Load("llama", IN_TURN, IN_TURN), id="no overlap", marks=pytest.mark.sweep),
    pytest.param(Load("window", shape=(2, 1)), id="window"),
    pytest.param(Load("llama", TP2, TP2, shape=(1, 2)), id="two ranks", marks=pytest.mark.sweep),
    pytest.param(Load("mla", TP2, reads_the_same=False), id="latent", marks=pytest.mark.any_tp),  # one rank stores
    pytest.param(Load("states", TP2, TP2, shape=(3, 2)), id="states"),
    pytest.param(Load("llama", PP2, PP2, shape=(1, 2)), id="two stages"),
    pytest.param(Load("mla", TP2_PP2, TP2_PP2, shape=(1, 2)), id="two stages of two ranks, latent"),
    pytest.param(Load("llama", TP2_PP2, TP2_PP2, shape=(1, 4)), id="two stages of two ranks", marks=pytest.mark.sweep),
]
TIERED = [
    pytest.param("llama", {}, id="attention", marks=pytest.mark.sweep), pytest.param("window", {}, id="window"),
    pytest.param("states", {}, id="states"), pytest.param("llama", TP2, id="two ranks"),
    pytest.param("mla", TP2, id="latent", marks=pytest.mark.sweep), pytest.param("llama", PP2, id="two stages"),
]
RANKS = [
    pytest.param(TP2, id="two ranks"), pytest.param(PP2, id="two stages"),
    pytest.param({}, id="one rank", marks=pytest.mark.sweep),
]


def on_no_gpu(folder: Path) -> dict[str, Any]:
    """What an engine is told whose GPU cannot be used."""
    return {"linker": ["OnNoGpu", "odd_linkers"], "environ": {"KVDOCK_ODD": str(folder)}}


def with_figures(folder: Path) -> dict[str, Any]:
    """What an engine is told that exports its figures."""
    return {"engine": {"enable_metrics": True}, "environ": {"PROMETHEUS_MULTIPROC_DIR": str(folder)}}


METRICS = ()
"""Those that are exported before they have a value: with several processes, none."""
EXPORTED = "sglang:kvdock_attached 1.0"
COLD = {"kvdock_store_tokens_total": sum(HITS), "kvdock_lookup_seconds_count": 3}
WARM = {
    "kvdock_store_tokens_total": 2 * sum(HITS),  # once, and known after the load
    "kvdock_stores_known_total": 3,  # no call was made for them
    "kvdock_lookup_seconds_count": 6,
}

# ---------------------------------------------------------------------- weights

WEIGHTS: dict[str, Any] = {}
RELOAD = "disk"
CHANGES = [
    *[("rdma", reset) for reset in (WITH, LATER, NEVER)], ("unknown", WITH), ("memory", WITH),
    *[(route, reset) for route in ("disk", "tensor") for reset in (WITH, LATER, NEVER)],
    ("buckets", WITH), ("distributed", WITH), ("ipc", WITH),
]
"""What is done to the first engine, one after the other. Its weights alternate, so each change is one. What no call
gives away comes first: who does not notice it goes on under the name of the first weights."""
SWEPT = {("rdma", LATER), ("rdma", NEVER), ("disk", WITH), ("disk", NEVER), ("tensor", WITH), ("tensor", LATER)}
"""Those that happen only with --sweeps: without them, each route and each reset is there."""
VERSIONS = {
    "equal versions": ("disk", "step-1", "step-1", "llama-b"),
    "equal versions of an update in parts": ("buckets", "step-2", "step-2", "llama-c"),
    "equal versions of what trainers send": ("distributed", "step-3", "step-3", "llama-b"),
    "other versions": ("disk", "step-4", "step-4b", "llama-c"),
    "no version": ("disk", None, None, "llama-b"),
    "a version named afterwards": ("rdma", "step-5", "step-5", "llama-c"),
    "a version of a failed update": ("ipc", "step-6", "step-6", "llama-b"),
    "a version of an update that failed in part": ("memory and ipc", "step-7", "step-7", "llama-c"),
}
"""Route, the version that each of two engines is told, and the model."""
SHARE = {
    "equal versions", "equal versions of an update in parts", "equal versions of what trainers send",
    "a version named afterwards",
}

# ---------------------------------------------------------------------- the example

# What the command of a GPU's SGLang would run, prepared for a CPU.
EXAMPLE_PROGRAM = f'env PYTHONPATH={SUPPORT} {ENGINE_PYTHON} {HERE}/serve_process.py "$@"'
EXAMPLE_ARGS = (
    "--device cpu --dtype float32 --load-format safetensors --attention-backend torch_native --max-total-tokens 4096 "
    "--sampling-backend pytorch --disable-cuda-graph --grammar-backend none --skip-server-warmup "
    "--watchdog-timeout 3600 --sleep-on-idle"
)
EXAMPLE_ENVIRON: dict[str, str] = {}
TRAINER = f"{ENGINE_PYTHON} {HERE}/cpu_only.py"
"""Runs examples/reinforce.py."""
_LINKER = {
    "linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang",
    "linker_extra_config": {"timeout_s": 20, "lookup_wait_s": 1, "verify_wait_s": 10, "load_if_cheaper": False},
}
TRAINING_ENVIRON = {
    "SGLANG_ARGS": f"{EXAMPLE_ARGS} --enable-unified-cache-external-linker "
    "--unified-cache-external-linker-backend dynamic "
    f"--unified-cache-external-linker-config {json.dumps(_LINKER, separators=(',', ':'))}",
}
REQUESTS_MORE = 1
"""Requests that the engine makes of one for several samples, beside one for each."""
EXAMPLE_LOADED, EXAMPLE_LOGS = 256, ()
