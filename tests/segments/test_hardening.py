"""The extension is built so that a fault in it is hard to use: what the compiler and the linker add is in the file."""

from __future__ import annotations

import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from kvdock import _core

pytestmark = pytest.mark.security

BUILT: Final = Path(_core.__file__)
LANDING: Final = {
    "x86_64": (bytes.fromhex("f30f1efa"),),  # endbr64
    "aarch64": (bytes.fromhex("3f2303d5"), bytes.fromhex("5f2403d5")),  # paciasp, bti c
}
"""By architecture: what a function begins with that an indirect call may enter."""


@cache
def readelf(*what: str) -> str:
    """What binutils, which every C++ compiler brings along, says of the extension."""
    command = ["readelf", "--wide", *what, str(BUILT)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def imported() -> frozenset[str]:
    """Names of the functions that the extension takes from other libraries."""
    return frozenset(re.findall(r" UND (\w+)", readelf("--dyn-syms")))


def test_what_the_loader_writes_is_read_only_before_any_code_runs() -> None:
    assert "GNU_RELRO" in readelf("--program-headers")
    assert re.search(r"\(FLAGS\) .*\bBIND_NOW\b", readelf("--dynamic"))


def test_no_memory_is_both_written_and_executed() -> None:
    headers = readelf("--program-headers")
    segments = re.findall(r"^ +(LOAD|GNU_STACK) .* 0x\w+ ([RWE ]{3}) 0x\w+$", headers, re.MULTILINE)
    assert {kind for kind, _ in segments} == {"LOAD", "GNU_STACK"}
    assert [flags for _, flags in segments if {"W", "E"} <= set(flags)] == []
    assert "TEXTREL" not in readelf("--dynamic")


def test_stack_frames_are_guarded() -> None:
    assert "__stack_chk_fail" in imported()


def test_calls_that_fill_buffers_know_their_size() -> None:
    assert "__snprintf_chk" in imported() and "snprintf" not in imported()


def test_containers_check_their_bounds() -> None:
    """The text of the assertion in std::vector's operator[]."""
    assert b"__n < this->size()" in BUILT.read_bytes()


def test_indirect_calls_land_on_marked_functions_only() -> None:
    marks = LANDING.get(platform.machine())
    if marks is None:
        pytest.skip(f"no such marks on {platform.machine()}")
    entry = re.search(r"(\w+) +\d+ FUNC .* PyInit__core$", readelf("--dyn-syms"), re.MULTILINE)
    text = re.search(r"\] \.text +PROGBITS +(\w+) (\w+)", readelf("--section-headers"))
    assert entry and text
    address, in_file = (int(found, 16) for found in text.groups())
    at = int(entry[1], 16) - address + in_file
    assert BUILT.read_bytes()[at:at + 4] in marks
