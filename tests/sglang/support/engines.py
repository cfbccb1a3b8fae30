"""Engines in processes of their own, in the environment that `make test-sglang` makes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from api_helpers import comes_true
from paths import ROOT
from whole_engines import EngineFork, WholeEngine

from kvdock.client.client import Client

HERE = Path(__file__).parent
ENGINE_PYTHON = ROOT / os.environ.get("SGLANG_ENVIRONMENT", ".venv-sglang-cpu") / "bin" / "python"
"""With SGLANG_ENVIRONMENT: `make test-newest`."""
KINDS = (
    "llama", "window", "states", "mla", "adapter-a", "adapter-b", "llama-b", "llama-c", "four-heads", "media", "grids",
)
"""What models.py makes."""
MARK = pytest.mark.sglang

TP2 = {"engine": {"tp_size": 2}, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
"""What an engine of two ranks is told."""
PP2 = {"engine": {"pp_size": 2}, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
"""What an engine of two stages is told."""
TP2_PP2 = {"engine": {"tp_size": 2, "pp_size": 2}, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}}


def odd(linker: str, folder: Path) -> dict[str, Any]:
    """What an engine is told for a linker of odd_linkers.py, which looks into `folder`."""
    return {"linker": [linker, "odd_linkers"], "environ": {"KVDOCK_ODD": str(folder)}}


class Engine(WholeEngine):
    """A whole SGLang (engine_process.py)."""

    program = (ENGINE_PYTHON, HERE / "engine_process.py")

    def drain(self) -> None:
        with Client(self.address) as client:
            assert comes_true(lambda: self._is_stored(client)), self.log_text()[-4000:]

    def _is_stored(self, client: Client) -> bool:
        """A pause in which nobody stores: an offer is reserved within a few turns of SGLang's loop."""
        before = client.status().counters["stored_chunks"]
        time.sleep(0.1)
        status = client.status()
        return not status.reservations and status.counters["stored_chunks"] == before


def contract_of(model: Path, address: str) -> dict[str, dict[str, str]]:
    """What contract.py finds."""
    with (model / "contract.log").open("w+") as log:
        fork = EngineFork(Engine.program, {"contract": [str(model), address]}, log.fileno())
        said = fork.stdout.read()
        fork.stdin.close()
        assert fork.wait(60) == 0, (model / "contract.log").read_text()[-4000:]
        fork.close()
    found: dict[str, dict[str, str]] = json.loads(said.splitlines()[-1])
    return found
