"""examples/two_instances.sh, run as it is, with vLLM on the CPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from engines import ENGINE_PYTHON, HERE
from whole_engines import EXAMPLE, run_example, run_to_its_end

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

VLLM_ARGS = (
    "--dtype float32 --max-model-len 2048 --enforce-eager --block-size 32 --num-gpu-blocks-override 200 "
    "--max-num-seqs 4"
)


def test_the_second_instance_loads_what_the_first_computed(models: dict[str, Path], tmp_path: Path) -> None:
    program = f'{ENGINE_PYTHON} {HERE}/serve_process.py "$@"'
    loaded, logs = run_example(
        "vllm", program, tmp_path, 550, MODEL=str(models["llama"]), VLLM_ARGS=VLLM_ARGS, VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1", TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    assert loaded > 1000
    for log in logs:
        assert re.search(r"INFO \d\d-\d\d .*kvdock: attached to unix:\S+ as rank0-", log), "a worker"
        assert re.search(r"INFO \d\d-\d\d .*kvdock: attached to unix:\S+ as scheduler-", log)


def test_what_kept_it_from_starting_is_shown(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL": "any"}
    done = run_to_its_end(EXAMPLE, 60, {**environ, "POOL": "3TiB", "LOGS": str(tmp_path)})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("kvdock ended:\n") and "does not fit" in done.stderr
