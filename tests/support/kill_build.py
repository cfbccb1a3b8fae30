"""The extension once more, built in another way: with pause points for the kill tests, with a sanitizer for
tests/support/sanitize.py, or from broken sources for tests/mutants."""

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
EXTENSION = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
INSTALLED = ROOT / "build" / f"{PYTHON}-{PYTHON}-{sysconfig.get_platform().replace('-', '_')}"
"""Where the checkout's own extension is compiled."""


def build(name: str, flags: str = "") -> Path:
    """The extension compiled with `flags` in a folder of its own."""
    return _build(ROOT / "build" / name, "_core", flags) / EXTENSION


def build_paused() -> Path:
    """The extension with pause points: what has none is taken as the checkout's own extension has it."""
    is_there = (INSTALLED / "CMakeCache.txt").exists()
    return _build(INSTALLED if is_there else ROOT / "build" / "core", "_core_paused") / "pause-points" / EXTENSION


def _build(folder: Path, target: str, flags: str = "") -> Path:
    """Compiles what has changed; minutes the first time. One at a time, whoever asks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [
            CMAKE, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1",
            f"-DCMAKE_CXX_FLAGS={flags}", "-DKVDOCK_CUDA=off", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        compile_it = [CMAKE, "--build", str(folder), "--target", target, "-j", str(os.cpu_count() or 1)]
        for command in (compile_it,) if folder == INSTALLED else (configure, compile_it):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return folder


if __name__ == "__main__":
    print(build_paused())
