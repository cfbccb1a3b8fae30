"""A test that is marked `sweep` runs with each value of its axis and each combination of its other parameters; without
an axis, only with --sweeps, and so does a single value of a parameter that is marked by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from paths import SUPPORT

MODULE = '''
import pytest

@pytest.fixture(params=["disk", "redis", "objects"])
def store(request): return request.param

@pytest.mark.sweep("store")
@pytest.mark.parametrize("change", ["clear", "delete"])
@pytest.mark.parametrize("step", [1, 2])
def test_swept(store, change, step): print(f"\\nran {store} {change} {step}")

@pytest.mark.sweep
def test_only_in_sweeps(): print("\\nran alone")

@pytest.mark.parametrize("store", ["disk", pytest.param("objects", marks=pytest.mark.sweep), "redis"], indirect=True)
def test_unmarked(store): print(f"\\nunmarked {store}")
'''
ALL = set(product(("disk", "redis", "objects"), ("clear", "delete"), ("1", "2")))
ALONE = ("alone",)


def ran(folder: Path, *arguments: str) -> tuple[list[tuple[str, ...]], int]:
    """The combinations of the swept test, and how many runs of the other there were."""
    (folder / "test_it.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = sweep\n")
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-s", "-p", "xdist.plugin", "-p", "workers", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *arguments], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=60, check=True,
    )
    lines = done.stdout.splitlines()
    swept = [tuple(line.split()[1:]) for line in lines if line.startswith("ran ")]
    return swept, sum(line.startswith("unmarked ") for line in lines)


def test_each_value_and_each_other_combination_runs_once(tmp_path: Path) -> None:
    swept, unmarked = ran(tmp_path)
    assert sorted(others for _, *others in swept) == sorted(map(list, product(("clear", "delete"), ("1", "2"))))
    assert {store for store, *_ in swept} == {"disk", "redis", "objects"}
    assert unmarked == 2


def test_sweeps_run_all(tmp_path: Path) -> None:
    swept, unmarked = ran(tmp_path, "--sweeps")
    assert len(swept) == len(ALL) + 1 and set(swept) == ALL | {ALONE}
    assert unmarked == 3, "and the value that is marked by itself"


@pytest.mark.parametrize(("name", "wanted"), [
    ("test_swept", ALL), ("test_swept[objects-1-clear]", {("objects", "clear", "1")}), ("test_only_in_sweeps", {ALONE}),
])
def test_what_is_asked_for_by_its_name_runs(tmp_path: Path, name: str, wanted: set[tuple[str, ...]]) -> None:
    swept, _ = ran(tmp_path, f"test_it.py::{name}")
    assert set(swept) == wanted
