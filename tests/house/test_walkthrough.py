"""docs/understand/walkthrough.md tells the truth about where things are, and its numbers are the code's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from paths import ROOT

from kvdock.engine.blocks import BlockManager
from kvdock.engine.config import FullAttention, SlidingWindow

PAGE = ROOT / "docs" / "understand" / "walkthrough.md"
PARTS = [part for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE) if "\n1. " in part]


def steps(part: str) -> list[str]:
    return [step for step in re.split(r"^(?=\d+\. )", part, flags=re.MULTILINE) if step[:1].isdigit()]


def wrong_references(step: str) -> list[str]:
    """Links that lead nowhere, files of which the step names nothing, and names that are not in their file."""
    wrong = []
    pieces = re.split(r"\[([^]]+)\]\(([^)]+)\)", step)
    if len(pieces) == 1:
        return ["no link"]
    for label, target, behind in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        file = (PAGE.parent / target).resolve()
        if target != f"../../{label}" or not file.is_file():
            wrong.append(f"{label} is not there")
            continue
        names = re.findall(r"`([\w.:]+)`", behind)
        wrong += [] if names else [f"{label}: no name"]
        wrong += [f"{name} is not in {label}" for name in names if not defines(file, name)]
    return wrong


def defines(file: Path, name: str) -> bool:
    """`name`: a function or class, Class.method, or Class::method of C++."""
    text = file.read_text()
    if file.suffix != ".py":
        return re.search(rf"^[^\n(;]*\b{name}\(", text, re.MULTILINE) is not None
    within: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        named = [node for outer in within for node in ast.walk(outer) if getattr(node, "name", "") == part]
        within = [node for node in named if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return bool(within)


def test_two_engines_are_followed_by_numbered_steps() -> None:
    assert len(PARTS) == 2
    for part in PARTS:
        assert [int(step.split(".")[0]) for step in steps(part)] == list(range(1, len(steps(part)) + 1))


@pytest.mark.parametrize("step", [step for part in PARTS for step in steps(part)], ids=lambda step: step.split("**")[1])
def test_a_step_names_what_its_files_hold(step: str) -> None:
    assert wrong_references(step) == []


@pytest.mark.parametrize(("step", "wrong"), [
    ("1. It arrives.", ["no link"]),
    ("1. [kvdock/gone.py](../../kvdock/gone.py) `Engine`", ["kvdock/gone.py is not there"]),
    ("1. [kvdock/api/service.py](../../kvdock/api/service.py), [csrc/table/table.h](../../csrc/table/table.h) `Table`",
     ["kvdock/api/service.py: no name"]),
    ("1. [kvdock/api/service.py](../../kvdock/api/service.py) `CacheService.lookup`, `CacheService.look`, `lookup.x`",
     ["CacheService.look is not in kvdock/api/service.py", "lookup.x is not in kvdock/api/service.py"]),
    ("1. [csrc/table/lookup.cpp](../../csrc/table/lookup.cpp) `Table::lookup`, `Table::seek`",
     ["Table::seek is not in csrc/table/lookup.cpp"]),
])  # fmt: skip
def test_a_wrong_reference_is_found(step: str, wrong: list[str]) -> None:
    assert wrong_references(step) == wrong


def test_the_walks_numbers_are_those_of_the_block_manager() -> None:
    """96 local tokens, 960 from elsewhere, a window of 128: what step 5 of the small engine says."""
    blocks = BlockManager((FullAttention(), SlidingWindow(128)), 200, 16, step_tokens=512)
    names = [b"%d" % index for index in range(6)]
    first = blocks.admit(blocks.match(names), 0, 96)
    blocks.register(first, names, 0)
    blocks.release(first)
    hit = blocks.match(names)
    assert [sum(block is not None for block in column) for column in hit.blocks] == [6, 6]
    free = len(blocks.pool.free)
    table = blocks.admit(hit, 960, 960)
    assert [sum(block is not None for block in column) for column in table] == [6 + 54, 8]
    assert free - len(blocks.pool.free) == 60 + 8
