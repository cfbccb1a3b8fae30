"""examples/two_instances.sh, run as it is, with SGLang on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from engines import ENGINE_PYTHON, HERE, ROOT
from ports import held_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SGLANG_ARGS = (
    "--device cpu --dtype float32 --load-format safetensors --attention-backend torch_native --max-total-tokens 4096 "
    "--sampling-backend pytorch --disable-cuda-graph --grammar-backend none --skip-server-warmup "
    "--watchdog-timeout 3600 --sleep-on-idle"
)


def test_the_second_instance_loads_what_the_first_computed(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "kvdock").symlink_to(Path(sys.executable).parent / "kvdock")
    # What the command of a GPU's SGLang would run, prepared for a CPU.
    (tmp_path / "sglang").write_text(f'#!/bin/sh\nshift\nexec {ENGINE_PYTHON} {HERE}/serve_process.py "$@"\n')
    (tmp_path / "sglang").chmod(0o755)
    first, second = str(held_port()), str(held_port())
    environ = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ENGINE": "sglang", "MODEL": str(models["llama"]),
        "POOL": "64MiB", "FIRST": first, "SECOND": second, "SENTENCES": "30", "SGLANG_ARGS": SGLANG_ARGS,
        "LOGS": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }
    script = ["sh", ROOT / "examples" / "two_instances.sh"]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=350)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    ours, theirs = (answer["choices"][0]["text"] for answer in answers)
    assert ours == theirs and ours
    cold, loaded = ((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers)
    assert cold == 0 and loaded > 256
