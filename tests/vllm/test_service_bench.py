"""`python -m bench.service` with a tiny model on the CPU: one engine, and every figure that it promises."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, ServerProcess, eventually
from engines import ENGINE_PYTHON
from paths import ROOT

from kvdock.client.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

NAMES = (
    "took_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "cached_share", "decode_gap_p50_ms", "decode_gap_p99_ms",
    "prompt_tokens",
)
OF_THE_TIER = ("tier_loaded_gb", "tier_stored_gb", "tier_load_gb_s", "tier_load_latency_ms", "tier_declined")


def write_trace(path: Path) -> None:
    """Three conversations in turns, each of four requests that grow by two blocks."""
    rows = []
    for turn in range(4):
        for session in range(3):
            blocks = [0, 1 + session, *(100 * (session + 1) + at for at in range(2 * turn + 2))]
            rows.append({
                "timestamp": 1000 * len(rows), "input_length": 512 * len(blocks) - 40, "output_length": 4,
                "hash_ids": blocks,
            })
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(models: dict[str, Path], server: ServerProcess, logs: Path, *arguments: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [
            ENGINE_PYTHON, "-m", "bench.service", "--json", "--device", "cpu", "--model", models["llama"], "--address",
            server.unix, "--block-tokens", "64", "--settle-s", "0", "--logs", logs,
            "--connector", '{"chunk_tokens": 64, "lookup_wait_s": 1.0}', *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_trace_is_served_and_measured(models: dict[str, Path], server: ServerProcess, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl")
    found = run(
        models, server, tmp_path, "--trace", tmp_path / "trace.jsonl", "--longest", "8192", "--sessions", "3", "--new",
        "4", "--kinds", "kvdock", "--modes", "one",
    )
    assert found["requests"] == 12 and set(found) == {"seed", "requests", *(f"one_kvdock_{n}" for n in NAMES)}
    assert 0.3 < found["one_kvdock_cached_share"] < 1.0
    assert found["one_kvdock_ttft_p99_ms"] >= found["one_kvdock_ttft_p50_ms"] > 0


@pytest.mark.sweep
def test_a_tier_on_disk_is_measured_beside_a_pool_without(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    write_trace(tmp_path / "trace.jsonl")
    with ServerProcess(
        pool_bytes=64 * MIB, segment_bytes=64 * MIB, disk_path=str(tmp_path / "disk"), disk_bytes=64 * MIB,
        tier_asks=1, heartbeat_s=0.2,
    ) as with_disk:
        found = run(
            models, server, tmp_path, "--trace", tmp_path / "trace.jsonl", "--longest", "8192", "--sessions", "3",
            "--new", "4", "--most", "6", "--kinds", "kvdock", "kvdock_disk", "--modes", "one", "--by-turns",
            "--disk-address", with_disk.unix,
        )
        with Client(with_disk.unix) as client:
            eventually(lambda: client.status().tiers[0].objects > 0, 30.0)
    assert set(found) == {
        "seed", "requests", "one_disk_ttft_ratio", "one_disk_ttft_p50_ratio",
        *(f"one_{kind}_{name}" for kind in ("kvdock", "kvdock_disk") for name in NAMES),
        *(f"one_kvdock_disk_{name}" for name in OF_THE_TIER),
    }
    assert found["one_kvdock_disk_tier_load_gb_s"] > 0
    assert found["one_disk_ttft_ratio"] == pytest.approx(
        found["one_kvdock_disk_ttft_mean_ms"] / found["one_kvdock_ttft_mean_ms"], abs=1e-3
    )


@pytest.mark.sweep
def test_two_engines_that_get_one_prompt_are_measured_with_the_setting_and_without(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    found = run(
        models, server, tmp_path, "--modes", "together", "--longest", "8192", "--rounds", "2", "--compute-once", "10",
    )
    names = ("all_first_tokens_ms", "all_first_tokens_max_ms", "computed_share")
    wanted = {f"together_{kind}_{name}" for kind in ("kvdock", "kvdock_once") for name in names}
    assert set(found) == {"seed", "requests", *wanted}
    for kind in ("kvdock", "kvdock_once"):
        assert found[f"together_{kind}_all_first_tokens_max_ms"] >= found[f"together_{kind}_all_first_tokens_ms"] > 0
        assert 0.5 <= found[f"together_{kind}_computed_share"] <= 1.0
