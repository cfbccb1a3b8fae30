"""KVDOCK_CUDA says whether the extension gets GPU kernels, and a build without them says so when it is configured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest
from kill_build import CMAKE
from paths import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build folder for all: what CMake finds out about the compiler takes long."""
    return tmp_path_factory.mktemp("build")


def configured(folder: Path, cuda: str, *defines: str) -> tuple[int, str]:
    """The status and what CMake says, on one line."""
    command = [
        CMAKE, "-S", str(ROOT), "-B", str(folder), f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DKVDOCK_CUDA={cuda}", *defines,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


WITHOUT_NVCC = "-DKVDOCK_NVCC="


@pytest.mark.parametrize(("cuda", "fails", "said"), [
    ("auto", False, "There is no nvcc, so this build has no GPU kernels: engines on a GPU cannot use it."),
    ("require", True, "KVDOCK_CUDA=require, and there is no nvcc: install the CUDA toolkit, or set CUDA_HOME"),
    ("off", False, "GPU kernels: left out (KVDOCK_CUDA=off)"),
    ("yes", True, "KVDOCK_CUDA: found yes, wanted auto, require or off"),
])
def test_a_machine_without_nvcc(folder: Path, cuda: str, fails: bool, said: str) -> None:
    status, text = configured(folder, cuda, WITHOUT_NVCC)
    assert (status != 0) == fails and said in text, text[-2000:]


def test_kernels_that_were_compiled_before_need_no_nvcc(folder: Path) -> None:
    status, text = configured(folder, "require", WITHOUT_NVCC, "-DKVDOCK_FATBIN=/kernels.fatbin")
    assert status == 0 and "GPU kernels: /kernels.fatbin" in text, text[-2000:]


def test_device_code_has_only_names_that_do_not_depend_on_the_folder() -> None:
    """nvcc puts a hash of the folder into the names of an unnamed namespace."""
    listed = (ROOT / "CMakeLists.txt").read_text().partition("DEPENDS csrc/cuda/kernels.cu")[2].partition("VERBATIM")[0]
    files = ["csrc/cuda/kernels.cu", *listed.split()]
    assert "csrc/cuda/pack_kernels.h" in files
    assert [name for name in files if re.search(r"^namespace \{", (ROOT / name).read_text(), re.MULTILINE)] == []
