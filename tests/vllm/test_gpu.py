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
        "engine": row.engine, "pack": "on" if row.packs else "off",
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
