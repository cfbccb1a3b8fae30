"""The extension once more, with its pause points, in a folder of its own: only the kill tests load it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11

ROOT = Path(__file__).parent.parent
CMAKE = str(Path(sys.executable).parent / "cmake")
FOLDER = ROOT / "build" / "pause-points"
BUILT = FOLDER / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> Path:
    """Configures and builds what has changed; minutes the first time. One at a time, whoever asks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [
            CMAKE, "-S", str(ROOT), "-B", str(FOLDER), "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1",
            "-DCMAKE_CXX_FLAGS=-DKVDOCK_PAUSE_POINTS", "-DKVDOCK_NVCC=", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        for command in (configure, [CMAKE, "--build", str(FOLDER), "-j", str(os.cpu_count() or 1)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return BUILT


if __name__ == "__main__":
    print(build())
