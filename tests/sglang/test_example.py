"""examples/two_instances.sh, run as it is, with SGLang on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import ENGINE_PYTHON, HERE
from paths import SUPPORT
from whole_engines import run_example

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SGLANG_ARGS = (
    "--device cpu --dtype float32 --load-format safetensors --attention-backend torch_native --max-total-tokens 4096 "
    "--sampling-backend pytorch --disable-cuda-graph --grammar-backend none --skip-server-warmup "
    "--watchdog-timeout 3600 --sleep-on-idle"
)


def test_the_second_instance_loads_what_the_first_computed(models: dict[str, Path], tmp_path: Path) -> None:
    # What the command of a GPU's SGLang would run, prepared for a CPU.
    program = f'env PYTHONPATH={SUPPORT} {ENGINE_PYTHON} {HERE}/serve_process.py "$@"'
    loaded, _ = run_example("sglang", program, tmp_path, 350, MODEL=str(models["llama"]), SGLANG_ARGS=SGLANG_ARGS)
    assert loaded > 256
