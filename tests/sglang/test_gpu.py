"""The linker on a GPU: the conformance kit over SGLang's own pools, the order of copies and forward passes, and whole
engines.

By hand, with a Python that has SGLang for GPUs: `python -m pytest tests/sglang/test_gpu.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from cuda_helpers import WHY_NOT
from engines import HERE

from kvdock.connectors.conformance import CHECKS

WHY = WHY_NOT or ("" if find_spec("sglang") else f"SGLang is not installed for {sys.executable}")
pytestmark = [pytest.mark.sglang, pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY or "both are there")]
GIB = 1 << 30


def run(script: str, *said: object) -> Any:
    """The JSON that a script of support/ prints last."""
    done = subprocess.run(
        [sys.executable, HERE / script, *map(str, said)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def model_of(kind: str, tmp_path: Path) -> Path:
    subprocess.run([sys.executable, HERE / "models.py", kind, tmp_path / kind], check=True, capture_output=True)
    return tmp_path / kind


def test_the_linker_conforms_on_a_gpu_and_keeps_in_step_with_the_forward_pass(
    tmp_path: Path, server: ServerProcess
) -> None:
    with ServerProcess(pool_bytes=4 * GIB, segment_bytes=GIB, growth="ahead") as large:
        found = run("contract.py", model_of("llama", tmp_path), server.unix, large.unix)
    failed = {(kind, name): why for kind, checks in found.items() for name, why in checks.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert list(found) == ["mha", "mla", "window", "draft", "state", "linker", "streams"] and len(found["streams"]) == 3
    kinds = ("mha", "mla", "window", "draft", "state")
    assert all(set(found[kind]) == {check.__name__ for check in CHECKS} for kind in kinds)


@pytest.mark.parametrize("kind", ["wide", "wide-mla", "wide-states"], ids=["attention", "latent", "states"])
def test_what_is_loaded_gives_what_a_local_hit_gives(kind: str, tmp_path: Path, server: ServerProcess) -> None:
    found = run("gpu_engine.py", kind, model_of(kind, tmp_path), server.unix, tmp_path)
    assert (found["cold"][1], found["local"][1]) == (0, 320)
    assert found["loaded"] == found["local"], "tokens, their log-probabilities in every bit, what was not computed"


def test_drafts_are_accepted_after_a_load_as_after_a_local_hit(tmp_path: Path, server: ServerProcess) -> None:
    found = run("gpu_engine.py", "draft", model_of("wide", tmp_path), server.unix, tmp_path)
    (tokens, cached, _), local, loaded, forgotten = (
        found[name] for name in ("cold", "local", "loaded", "forgotten")
    )
    assert cached == 0 and local[:2] == [tokens, 320]
    assert loaded == local
    assert forgotten[:2] == local[:2] and forgotten[2] > local[2], "without its KV the draft guesses worse"
