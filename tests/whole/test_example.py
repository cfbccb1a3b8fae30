"""examples/two_instances.sh, run as it is, with engines on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from engines import MARK
from stories import EXAMPLE_ARGS, EXAMPLE_ENVIRON, EXAMPLE_LOADED, EXAMPLE_LOGS, EXAMPLE_PROGRAM
from whole_engines import EXAMPLE, run_example, run_to_its_end

pytestmark = [MARK, pytest.mark.timeout(600), pytest.mark.xdist_group("programs")]


def test_the_second_instance_loads_what_the_first_computed(models: dict[str, Path], tmp_path: Path) -> None:
    environ = {"MODEL": str(models["llama"]), f"{MARK.name.upper()}_ARGS": EXAMPLE_ARGS, **EXAMPLE_ENVIRON}
    loaded, logs = run_example(MARK.name, EXAMPLE_PROGRAM, tmp_path, 550, **environ)
    assert loaded > EXAMPLE_LOADED
    for log in logs:
        assert all(pattern.search(log) for pattern in EXAMPLE_LOGS), log[-4000:]


def test_what_kept_it_from_starting_is_shown(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MODEL": "any"}
    done = run_to_its_end(EXAMPLE, 60, {**environ, "POOL": "3TiB", "LOGS": str(tmp_path)})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("kvdock ended:\n") and "does not fit" in done.stderr
