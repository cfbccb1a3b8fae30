"""The extension once more, built in another way, in a folder of its own: with pause points for the kill tests, or with
a sanitizer for tests/support/sanitize.py."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from paths import ROOT

CMAKE = str(Path(sys.executable).parent / "cmake")
PAUSE_POINTS = "-DKVDOCK_PAUSE_POINTS"


def build(name: str = "pause-points", flags: str = PAUSE_POINTS) -> Path:
    """Configures and builds what has changed; minutes the first time. One at a time, whoever asks."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [
            CMAKE, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1",
            f"-DCMAKE_CXX_FLAGS={flags}", "-DKVDOCK_NVCC=", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        for command in (configure, [CMAKE, "--build", str(folder), "-j", str(os.cpu_count() or 1)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


if __name__ == "__main__":
    print(build())
