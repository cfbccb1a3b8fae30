"""The real Schedulers of vLLM 0.24 and 0.33 around fingerprinted KV: nothing wrong is read, nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE

pytestmark = pytest.mark.vllm

VERSIONS = ("0.24.0", "0.33.0")
SEEDS = int(os.environ.get("VLLM_SEEDS", "8"))


def run(server: ServerProcess, version: str, scenario: str, *arguments: object) -> dict[str, Any]:
    """Figures of a scenario of sched_scenarios.py, in a process with that vLLM."""
    folders = [HERE.parent / f".venv-vllm-{version}", HERE]
    assert folders[0].is_dir(), f"no vLLM {version}: make test-vllm"
    words = [argument if isinstance(argument, str) else json.dumps(argument) for argument in arguments]
    done = subprocess.run(
        [ENGINE_PYTHON, HERE / "sched_scenarios.py", server.unix, scenario, *words], capture_output=True, text=True,
        timeout=170, env={**os.environ, "PYTHONPATH": ":".join(map(str, folders))},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("windows", [[None], [None, 48], [None, 48, 32]], ids=str)
def test_a_prefix_is_loaded_and_every_position_is_right(
    version: str, load_async: bool, windows: list[int | None], server: ServerProcess
) -> None:
    found = run(server, version, "warm", windows, load_async)
    assert found == {"bad_reads": 0, "unfinished": 0, "loaded": 128, "preempted": 0}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("windows", [[None], [None, 48], [None, 48, 32]], ids=str)
def test_under_pressure_nothing_wrong_is_read_and_all_requests_end(
    version: str, load_async: bool, windows: list[int | None], server: ServerProcess
) -> None:
    found = run(server, version, "pressure", windows, load_async, 0, SEEDS)
    assert found["bad_reads"] == 0 and found["unfinished"] == 0
    assert found["loaded"] > 0 and found["preempted"] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_an_aborted_load_gives_its_blocks_back(version: str, server: ServerProcess) -> None:
    found = run(server, version, "abort")
    assert found["held"] == 0 and found["bad_reads"] == 0 and found["loaded"] > 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("load_async", [True, False])
def test_a_damaged_chunk_is_computed_again(version: str, load_async: bool, server: ServerProcess) -> None:
    found = run(server, version, "load_error", load_async)
    assert found["loads"] == 1 and found["unfinished"] == 0
    # vLLM runs a synchronous load's step before it looks at errors, and throws that step's result away.
    assert found["bad_reads"] == (0 if load_async else 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_filled_in_the_wrong_order_are_seen(version: str, server: ServerProcess) -> None:
    """The negative control: what makes the other tests able to fail."""
    assert run(server, version, "wrong_order")["bad_reads"] > 0
