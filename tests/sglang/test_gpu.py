"""The linker over SGLang's own pools on a GPU: the conformance kit, and the order of copies and forward passes.

By hand, with a Python that has SGLang for GPUs: `python -m pytest tests/sglang/test_gpu.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cuda_helpers import WHY_NOT
from engines import HERE

from kvdock.connectors.conformance import CHECKS

WHY = WHY_NOT or ("" if find_spec("sglang") else f"SGLang is not installed for {sys.executable}")
pytestmark = [pytest.mark.sglang, pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY or "both are there")]
GIB = 1 << 30


def test_the_linker_conforms_on_a_gpu_and_keeps_in_step_with_the_forward_pass(
    tmp_path: Path, server: ServerProcess
) -> None:
    model = tmp_path / "llama"
    subprocess.run([sys.executable, HERE / "models.py", "llama", model], check=True, capture_output=True)
    with ServerProcess(pool_bytes=4 * GIB, segment_bytes=GIB, growth="ahead") as large:
        done = subprocess.run(
            [sys.executable, HERE / "contract.py", model, server.unix, large.unix], capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {(kind, name): why for kind, checks in found.items() for name, why in checks.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert list(found) == ["mha", "mla", "window", "linker", "streams"] and len(found["streams"]) == 3
    assert all(set(found[kind]) == {check.__name__ for check in CHECKS} for kind in ("mha", "mla", "window"))
