"""With KVDOCK_NO_SKIPS=1 only GPU tests may skip; without it any may."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT

MODULE = '''
import os
import pytest

def test_skips(): pytest.skip("no browser here")
@pytest.mark.skip(reason="marked")
def test_marked(): pass
@pytest.mark.gpu
def test_gpu(): pytest.skip("no device")
@pytest.mark.xfail
def test_expected_to_fail(): assert False
@pytest.fixture
def missing(): pytest.skip("fixture gave up")
def test_of_fixture(missing): pass
def test_children_do_not_inherit_the_variable(): assert "KVDOCK_NO_SKIPS" not in os.environ
'''


def outcomes(folder: Path, name: str, source: str, no_skips: str) -> tuple[dict[str, int], str]:
    """({'passed': n, …} from pytest's last line, all output) of a run over one module."""
    (folder / name).write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    environ = {
        **os.environ, "PYTHONPATH": str(SUPPORT), "KVDOCK_NO_SKIPS": no_skips,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no_skips", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    done = subprocess.run([*command, name], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    last = done.stdout.strip().splitlines()[-1]
    return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}, done.stdout


def test_every_skip_but_a_gpu_tests_fails_with_its_reason(tmp_path: Path) -> None:
    counts, output = outcomes(tmp_path, "test_module.py", MODULE, "1")
    assert counts.get("skipped") == 1 and counts.get("passed") == 1 and counts.get("xfailed") == 1
    assert counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0) == 3
    for reason in ("no browser here", "marked", "fixture gave up"):
        assert f"not allowed to skip here (KVDOCK_NO_SKIPS=1): Skipped: {reason}" in output


def test_without_the_variable_skips_are_skips(tmp_path: Path) -> None:
    counts, _ = outcomes(tmp_path, "test_module.py", MODULE, "")
    assert counts == {"skipped": 4, "passed": 1, "xfailed": 1}


@pytest.mark.parametrize(("no_skips", "word"), [("1", "error"), ("", "skipped")])
def test_a_module_that_skips_itself_fails_too(tmp_path: Path, no_skips: str, word: str) -> None:
    source = 'import pytest\npytest.skip("not installed", allow_module_level=True)\n'
    counts, output = outcomes(tmp_path, "test_module.py", source, no_skips)
    assert counts == {word: 1} and ("not installed" in output) == (no_skips == "1")
