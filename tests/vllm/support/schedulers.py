"""Real Schedulers in processes of their own, one for each version of vLLM (sched_process.py)."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE_PYTHON, HERE
from paths import ROOT
from whole_engines import python_path

# With VLLM_VERSIONS: `make test-vllm-versions`.
VERSIONS = tuple(os.environ.get("VLLM_VERSIONS", "0.24.0 0.33.0").split())
ITSELF = "0.32.0+cpu"
"""The version of the environment, which whole engines run with."""

SEEDS = int(os.environ.get("VLLM_SEEDS", "24"))
"""Each of the 12 kinds of engine runs so many seeds with each version. `make test-all` and the mutants run 40."""

every_version = pytest.mark.parametrize("version", VERSIONS)


def versions_in_turn(test: Callable[..., None]) -> Callable[..., None]:
    """As every_version, but one version for each combination of the other parameters, unless with `--sweeps`."""
    swept: Callable[..., None] = pytest.mark.sweep("version")(every_version(test))
    return swept


Run = Callable[..., dict[str, Any]]
"""The fixture of that name (tests/vllm/conftest.py): run("a scenario", …) gives its figures."""


def run_where(holds: Callable[[dict[str, Any]], bool]) -> Any:
    """The fixture for a module of which the figures of each scenario are such."""

    @pytest.fixture
    def run(run: Run) -> Run:
        def scenario(*arguments: object, **named: object) -> dict[str, Any]:
            found = run(*arguments, **named)
            assert holds(found), found
            return found

        return scenario

    return run


every_mode = pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])


def minor(version: str) -> int:
    return int(version.split(".")[1])


class Schedulers:
    """Starts a version's process when it is first asked for, and runs scenarios in it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvdock-test-")
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def run(
        self, version: str, scenario: str, *arguments: object, module: str = "sched_scenarios", **named: object
    ) -> dict[str, Any]:
        """Figures of a scenario of `module`."""
        process = self._processes.get(version)
        if process is None or process.poll() is not None:
            process = self._processes[version] = self._start(version)
        assert process.stdin is not None and process.stdout is not None
        job = {"module": module, "scenario": scenario, "arguments": arguments, "named": named}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = ""
        try:
            line = process.stdout.readline()
        finally:
            if not line:  # it ended, or the test's time is over: the next test gets another one
                with process:
                    process.kill()
        assert line, f"the process ended:\n{self._log(version).read_text()[-4000:]}"
        answer = json.loads(line)
        assert "figures" in answer, f"{answer['raised']}\n{self._log(version).read_text()[-4000:]}"
        figures: dict[str, Any] = answer["figures"]
        return figures

    def close(self) -> None:
        for process in self._processes.values():
            with process:  # closes its pipes
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(30)
                finally:
                    process.kill()
        self._folder.cleanup()

    def _log(self, version: str) -> Path:
        return Path(self._folder.name) / f"{version}.log"

    def _start(self, version: str) -> subprocess.Popen[str]:
        vllm = ROOT / f".venv-vllm-{version}"
        assert version == ITSELF or vllm.is_dir(), f"no vLLM {version}: make .venv-vllm-{version}/.deps"
        folders = [HERE] if version == ITSELF else [vllm, HERE]
        with self._log(version).open("w") as log:
            ours = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
            return subprocess.Popen(
                [ENGINE_PYTHON, HERE / "sched_process.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env={**ours, "PYTHONPATH": python_path(*folders), "OMP_NUM_THREADS": "1"},
            )
