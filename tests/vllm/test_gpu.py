"""Whole vLLM engines on a GPU, as people start them: CUDA graphs, compilation, async scheduling.

By hand, with a Python that has vLLM for GPUs; the rows of two ranks want two GPUs:

    python -m pytest -n 10 -o pythonpath='tests/support tests/vllm/support .' tests/vllm/test_gpu.py

One thing is not as people start them: PyTorch's compiler chooses no kernel by timing it, for two engines that chose
otherwise would round otherwise.

Tokens and log-probabilities of a load are compared with those of a local hit of the same length, in every bit: loaded
by the engine that stored, whose KV memory was overwritten meanwhile, and by an engine that starts later.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from cuda_helpers import GPUS, WHY_NOT
from engines import HERE
from whole_engines import make_model, run_on_gpu

from kvdock.client.client import Client

WHY = WHY_NOT or ("" if find_spec("vllm") else f"vLLM is not installed for {sys.executable}")
pytestmark = [
    pytest.mark.vllm, pytest.mark.gpu, pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY), reason=WHY or "both are there"),
]
START_S = 300.0
"""Compiling takes most of it, where many engines share a few cores."""
CHUNKS = 320
"""Tokens of the prompt's whole chunks."""
TAIL = 9
GIB = 1 << 30
MODELS = HERE / "models.py"
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Row:
    """`model`: a kind of models.py. `tail`: tokens behind the whole chunks; with drafts of its own vLLM computes the
    last block of a local hit again. `engine`: more arguments of LLM. `packs`: KV is packed."""

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    tail: int = TAIL
    adapter: str | None = None
    drafts: bool = False
    plans_ahead: bool = True
    packs: bool = False


ROWS = {
    "llama": Row("llama"),
    "mla": Row("mla"),
    "gemma": Row("gemma"),
    "mtp": Row(
        "mimo", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, tail=16 + TAIL, drafts=True
    ),
    "ngram": Row("llama", {"speculative_config": LOOKUP}, drafts=True, plans_ahead=False),
    "llama packed": Row("llama", {"dtype": "bfloat16"}, packs=True),
    "gemma packed": Row("gemma", {"dtype": "bfloat16"}, packs=True),
    "mla packed": Row("mla", {"dtype": "bfloat16"}, packs=True),
    "fp8 KV": Row("llama", {"kv_cache_dtype": "fp8"}),
    "chunked prefill": Row("llama", {"max_num_batched_tokens": 96, "max_num_seqs": 16}),
    "lora": Row("llama", {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}, adapter="one"),
    "llama on two ranks": Row("llama", {"tensor_parallel_size": 2}, ranks=2),
    "mla on two ranks": Row("mla", {"tensor_parallel_size": 2}, ranks=2),
    "llama packed on two ranks": Row("llama", {"dtype": "bfloat16", "tensor_parallel_size": 2}, ranks=2, packs=True),
    "mla packed on two ranks": Row("mla", {"dtype": "bfloat16", "tensor_parallel_size": 2}, ranks=2, packs=True),
}


def prompt_of(row: Row) -> list[int]:
    """A fresh one. A phrase comes again and again, and at its end, so that drafts are found in it."""
    draw = random.SystemRandom()
    phrase = [draw.randrange(5, 590) for _ in range(8)]
    length, made = CHUNKS + row.tail, list[int]()
    while len(made) < length:
        made = [draw.randrange(5, 590) for _ in range(8)] + phrase + made
    return made[-length:]


@pytest.fixture
def large() -> Iterator[ServerProcess]:
    """A server whose pool grows by itself, so that it is being registered while graphs are captured."""
    with ServerProcess(pool_bytes=2 * GIB, segment_bytes=GIB // 4, growth="ahead") as process:
        yield process
        assert process.stop() == 0, process.log_text()


def set_up_as_usual(row: Row, found: dict[str, Any]) -> bool:
    told = found["about"]
    return (
        not told["eager"] and told["compilation"] == "VLLM_COMPILE" and "FULL" in told["graphs"] and told["sizes"] > 4
        and told["async"] == row.plans_ahead and told["ranks"] == row.ranks
    )


@pytest.mark.parametrize("name", ROWS)
def test_what_is_loaded_gives_the_bits_of_a_local_hit(name: str, tmp_path: Path, large: ServerProcess) -> None:
    row = ROWS[name]
    if row.ranks > GPUS:
        pytest.skip(f"{GPUS} GPU, {row.ranks} wanted")
    said = {
        "model": str(make_model(MODELS, row.model, tmp_path)), "address": large.unix, "prompt": prompt_of(row),
        "engine": row.engine, "extra": {"pack": "on" if row.packs else "off"},
        "adapter": ["sql", 1, str(make_model(MODELS, "lora", tmp_path) / row.adapter)] if row.adapter else None,
    }
    first, second = (
        run_on_gpu(
            HERE / "gpu_engine.py", json.dumps({**said, "is_first": is_first}), seconds=START_S,
            VLLM_LOGGING_STREAM="ext://sys.stderr",
        ) for is_first in (True, False)
    )
    assert set_up_as_usual(row, first) and first["about"] == second["about"], first["about"]
    local = first["local"]
    assert (first["cold"]["cached"], local["cached"]) == (0, CHUNKS), "the control: there is a local hit"
    assert first["poisoned"]["run"] != local["run"], "the control: what is in the KV memory shows"
    assert first["loaded"] == local, "loaded by the engine that stored it"
    assert first["untouched"] == second["untouched"], "the control: both engines compute the same bits"
    assert first["untouched"]["cached"] == 0
    assert second["loaded"] == local, "loaded by an engine that started later"
    assert first["again"] == local and second["again"] == local, "a local hit in what was loaded"
    assert bool(local["drafts"][0]) == row.drafts
    with Client(large.unix) as client:
        pool = client.status().pool
    assert (pool.kv_bytes > 1.1 * pool.ready_bytes) == row.packs


DTYPE = {"off": "auto", "on": "bfloat16"}
"""For each setting of `pack`: only bf16 packs."""
NEAR = 0.25
"""How far apart the log-probabilities of the first token of two tensor-parallel sizes may be: their kernels round
otherwise, by .003 to .075 where both computed."""


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far apart both are at the first token, which alone follows the same tokens; infinite if it is another one."""
    (token, made), (wanted, computed) = one["run"][0], other["run"][0]
    return abs(float.fromhex(made) - float.fromhex(computed)) if token == wanted else float("inf")


@pytest.mark.any_tp
@pytest.mark.parametrize("pack", DTYPE)
@pytest.mark.parametrize(("stores", "loads"), [(2, 1), (1, 2)])
def test_an_engine_of_another_tensor_parallel_size_loads_it(
    stores: int, loads: int, pack: str, tmp_path: Path, large: ServerProcess
) -> None:
    if max(stores, loads) > GPUS:
        pytest.skip(f"{GPUS} GPU, {max(stores, loads)} wanted")
    said = {
        "model": str(make_model(MODELS, "llama", tmp_path)), "address": large.unix, "adapter": None,
        "prompt": prompt_of(ROWS["llama"]), "extra": {"pack": pack, "any_tensor_parallel": True},
    }
    first, second = (
        run_on_gpu(
            HERE / "gpu_engine.py", json.dumps({
                **said, "engine": {"tensor_parallel_size": ranks, "dtype": DTYPE[pack]}, "is_first": ranks == stores,
            }), seconds=START_S, VLLM_LOGGING_STREAM="ext://sys.stderr",
        ) for ranks in (stores, loads)
    )
    local = first["local"]
    assert (local["cached"], second["loaded"]["cached"]) == (CHUNKS, CHUNKS)
    assert first["loaded"] == local, "loaded by the engine that stored it"
    assert apart(first["poisoned"], local) > NEAR, "the control: what is in the KV memory shows"
    assert apart(second["loaded"], local) < NEAR
    assert second["again"] == second["loaded"], "a local hit in what was loaded"
