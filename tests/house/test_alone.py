"""Tests that are marked `alone` wait for no worker that has crashed, whatever it has left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paths import SUPPORT

MODULES = {
    "crashing": """
import os, signal, time

def test_that_crashes():
    if os.path.exists("left"):
        return  # another worker runs it once more
    pid = os.fork()
    if pid == 0:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if "kvdock-tests-" not in os.readlink(f"/proc/self/fd/{fd}"):
                    os.close(fd)  # pipes of this run among them
            except OSError:
                pass
        time.sleep(300)
        os._exit(0)
    open("left", "w").write(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "alone": """
import pytest

@pytest.mark.alone
def test_that_is_alone(): pass
""",
    "others": """
import os, time

def test_one():
    while not os.path.exists("left"):
        time.sleep(0.01)

def test_another(): pass
""",
}


def test_a_worker_that_crashed_holds_no_lock_although_its_children_live(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "workers", "-p", "no:cacheprovider", "-n", "2",
        "--dist", "loadgroup", "--rootdir", str(tmp_path),
    ]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=45)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert "1 failed, 4 passed" in done.stdout and "test_that_crashes" in done.stdout, done.stdout
