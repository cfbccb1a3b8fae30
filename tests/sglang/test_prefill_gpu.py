"""Engines on GPUs of which one computes prompts, beside kvdock, for one that decodes.

By hand, with a Python that has SGLang for GPUs, and Mooncake, NIXL or both: `python -m pytest
tests/sglang/test_prefill_gpu.py`. Neither needs RDMA: Mooncake sends over TCP, and NIXL by what UCX finds.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cuda_helpers import WHY_NOT
from engines import HERE
from whole_engines import make_model, run_on_gpu

SENDS = {"mooncake_tcp": "mooncake", "nixl": "nixl"}
"""SGLang's names of what sends KV, and the packages of both."""
pytestmark = [
    pytest.mark.sglang, pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY_NOT) or not find_spec("sglang"), reason=WHY_NOT or "SGLang is not installed"),
]


@pytest.mark.parametrize("backend", SENDS)
def test_what_is_loaded_is_sent_as_a_local_hit_is(backend: str, tmp_path: Path, server: ServerProcess) -> None:
    if not find_spec(SENDS[backend]):
        pytest.skip(f"{SENDS[backend]} is not installed")
    model = make_model(HERE / "models.py", "wide", tmp_path)
    found = run_on_gpu(HERE / "gpu_apart.py", backend, model, server.unix, tmp_path)
    for name, cached in (("cold", 0), ("local", 320), ("loaded", 320)):
        assert [found[name][engine][1] for engine in ("prefill", "decode")] == [cached, cached], name
        assert found[name]["prefill"][0] == found[name]["decode"][0][:1], name
    for name in ("cold", "local"):
        assert found[name]["decode"] == found[name]["alone"], f"{name}: tokens, and log-probabilities in every bit"
    assert found["loaded"]["decode"] == found["local"]["decode"]
    failed = found["failed"]
    assert "External KV cache load failed" in failed["prefill"][0]
    assert "KVTransferError" in failed["decode"][0] and "timed out" not in failed["decode"][0]
    (first, _), (again, cached) = found["again"]["prefill"], found["again"]["decode"]
    assert first == again[:1] and len(again) == 40 and cached == 256, "the damaged page is computed"
