"""`python -m bench.sglang` with a tiny model on the CPU: every figure that it promises, of kvdock alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE
from paths import ROOT
from whole_engines import run_to_its_end

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400), pytest.mark.xdist_group("programs")]
ON_CPU = {
    "PYTHONPATH": f"{HERE / 'on_cpu'}:{ROOT}", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "",
}


def test_loads_and_decodes_are_measured(models: dict[str, Path], server: ServerProcess, tmp_path: Path) -> None:
    command = [
        ENGINE_PYTHON, "-m", "bench.sglang", "--device", "cpu", "--model", models["llama"], "--address", server.unix,
        "--logs", tmp_path,
        "--connector", '{"lookup_wait_s": 1.0, "verify_wait_s": 10.0}',  # a busy machine is no lost server
    ]
    done = run_to_its_end(command, 350, os.environ | ON_CPU)
    assert done.returncode == 0, f"{done.stderr}\n{(tmp_path / 'sglang-kvdock.log').read_text()[-4000:]}"
    found = json.loads(done.stdout)
    ways = ("cold", "local", "load", "load_over_local")
    times = {f"kvdock_{length}_{way}_ms" for length in (128, 512) for way in ways}
    assert set(found["loads"]) == times | {"kvdock_same"} and found["loads"]["kvdock_same"] is True
    decode = found["decode"]
    assert decode["kvdock_loads"]["fed_cached"].keys() == {"512"}, "each fed request was loaded"
    assert decode["kvdock_stores"]["fed_cached"].keys() == {"0"}, "each fed request was computed"
    assert all(decode[f"kvdock_{name}"]["tokens_per_s"] > 0 for name in ("alone", "alone_after"))
    assert {"kvdock_loads_loss", "kvdock_stores_loss"} < decode.keys()


def test_conversations_are_measured(models: dict[str, Path], server: ServerProcess, tmp_path: Path) -> None:
    command = [
        ENGINE_PYTHON, "-m", "bench.sglang", "turns", "--device", "cpu", "--model", models["llama"], "--address",
        server.unix, "--logs", tmp_path, "--connector", '{"lookup_wait_s": 1.0, "verify_wait_s": 10.0}',
        "--scale", '{"rate_per_s": 20.0, "engines": [2]}',
    ]
    done = run_to_its_end(command, 380, os.environ | ON_CPU)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["turns"]["2"]
    plain, kvdock = found["plain"], found["kvdock"]
    for one in (plain, kvdock):
        assert (one["turns"], one["answers_compared"], one["other_answers"]) == (36, 36, 0)
        assert one["most_hit_rate"] == 0.45714, "2 and 4 pages of the second and third prompts"
        assert set(one["ttft_ms_by_round"]) == {"0", "1", "2"} and set(one["ttft_ms"]) == {"mean", "p50", "p99"}
        assert one["input_tokens_per_s"] > one["output_tokens_per_s"] > 0
        assert 0 < one["turns_moved"] < 24, "of the later turns, some come back to the other engine"
    assert kvdock["hit_rate"] > 0.9 * kvdock["most_hit_rate"] > plain["hit_rate"]
    assert min(kvdock["moved_hit_rate"], plain["stayed_hit_rate"]) > plain["moved_hit_rate"]


def test_what_cannot_be_measured_is_said_in_a_line(tmp_path: Path) -> None:
    for arguments, why in (
        (["--device", "cpu"], "--device cpu wants --model FOLDER"), ([], "no GPU: CUDA: found no NVIDIA driver"),
    ):
        done = run_to_its_end([ENGINE_PYTHON, "-m", "bench.sglang", *arguments], 60, os.environ | ON_CPU)
        assert done.returncode == 2 and done.stdout == "" and why in done.stderr, done.stderr
