"""The linker on a GPU: the conformance kit over SGLang's own pools, the order of copies and forward passes, and whole
engines.

By hand, with a Python that has SGLang for GPUs: `python -m pytest tests/sglang/test_gpu.py`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cuda_helpers import WHY_NOT
from engines import HERE
from whole_engines import make_model, run_on_gpu

from kvdock.connectors.conformance import CHECKS

WHY = WHY_NOT or ("" if find_spec("sglang") else f"SGLang is not installed for {sys.executable}")
pytestmark = [pytest.mark.sglang, pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY or "both are there")]
GIB = 1 << 30
ENGINE, MODELS = HERE / "gpu_engine.py", HERE / "models.py"


def test_the_linker_conforms_on_a_gpu_and_keeps_in_step_with_the_forward_pass(
    tmp_path: Path, server: ServerProcess
) -> None:
    with ServerProcess(pool_bytes=4 * GIB, segment_bytes=GIB, growth="ahead") as large:
        found = run_on_gpu(HERE / "contract.py", make_model(MODELS, "llama", tmp_path), server.unix, large.unix)
    failed = {(kind, name): why for kind, checks in found.items() for name, why in checks.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    kinds = ("mha", "mla", "sparse", "blocks", "window", "draft", "state", "state and draft", "compressed")
    assert list(found) == [*kinds, "linker", "streams"] and len(found["streams"]) == 3
    assert all(set(found[kind]) == {check.__name__ for check in CHECKS} for kind in kinds)


@pytest.mark.parametrize("kind", ["wide", "wide-mla", "wide-states"], ids=["attention", "latent", "states"])
def test_what_is_loaded_gives_what_a_local_hit_gives(kind: str, tmp_path: Path, server: ServerProcess) -> None:
    found = run_on_gpu(ENGINE, kind, make_model(MODELS, kind, tmp_path), server.unix, tmp_path)
    assert (found["cold"][1], found["local"][1]) == (0, 320)
    assert found["loaded"] == found["local"], "tokens, their log-probabilities in every bit, what was not computed"


def test_drafts_are_accepted_after_a_load_as_after_a_local_hit(tmp_path: Path, server: ServerProcess) -> None:
    found = run_on_gpu(ENGINE, "draft", make_model(MODELS, "wide", tmp_path), server.unix, tmp_path)
    (tokens, cached, _), local, loaded, forgotten = (
        found[name] for name in ("cold", "local", "loaded", "forgotten")
    )
    assert cached == 0 and local[:2] == [tokens, 320]
    assert loaded == local
    assert forgotten[:2] == local[:2] and forgotten[2] > local[2], "without its KV the draft guesses worse"
