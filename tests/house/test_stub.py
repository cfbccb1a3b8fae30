"""The build writes types of the extension (csrc/bind/stub.py) that are as exact as the checks of types want them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from kvdock import _core


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    written = tmp_path_factory.mktemp("stub") / "_core.pyi"
    program = ROOT / "csrc/bind/stub.py"
    subprocess.run([sys.executable, program, str(_core.__file__), written], check=True, timeout=60)
    return written.read_text()


def test_the_stub_beside_the_extension_and_in_the_checkout_is_that_of_the_extension(stub: str) -> None:
    assert (ROOT / "kvdock/_core.pyi").read_text() == stub
    assert Path(str(_core.__file__)).with_name("_core.pyi").read_text() == stub


@pytest.mark.parametrize("exact", [
    "KEY_BYTES: typing.Final[int]", "POOL_FACTORS: typing.Final[list[float]]",
    "class CudaError(RuntimeError):", "    code: str",
    "def checksum(data: typing_extensions.Buffer) -> int:",
    "    def __buffer__(self, flags: int, /) -> memoryview: ...",
    "    def limited(self) -> typing.Literal['', 'held_bytes', 'pinning']:",
    "    def chunks(self) -> list[list[tuple[int, int, int, int, int, int]]]:",
    "    def chunks(self) -> list[tuple[int, list[tuple[int, int, int, int, int]]]]:",
    "    def distances(self) -> tuple[list[int], list[int], int]:",
    "    def adopt(region: Mapping, *, pool_id: int, lock_inode: int, ",
    "ask_ms: int = 60000, settle_ms: int = 3000, suspect_ms: int = 6000, session_cap: float = 0.5",
    ") -> tuple[Table, dict[str, int]]:",
    "    def retain(self, namespace: int, keys: builtins.bytes, priority: int, until_ms: int) -> tuple[int, int]:",
    "    def __iadd__(self, other: CurveSums) -> CurveSums: ...",
])
def test_a_type_is_exact(stub: str, exact: str) -> None:
    assert exact in stub


def test_no_type_is_left_open(stub: str) -> None:
    lines = stub.splitlines()
    assert not [line for line in lines if line.endswith((" -> list:", " -> dict:", " -> tuple:")) or "Supports" in line]
    assert not [line for line in lines if "object" in line and line.strip() not in ("found: object", "wanted: object")
                and "def " in line]


def test_every_function_and_class_of_the_extension_is_there(stub: str) -> None:
    names = [name for name in vars(_core) if not name.startswith("_")]
    assert names and all(f"def {name}(" in stub or f"class {name}" in stub or f"{name}: " in stub for name in names)
    members = [name for name in vars(_core.Table) if not name.startswith("_")]
    assert members and all(f"    def {name}(" in stub for name in members)
