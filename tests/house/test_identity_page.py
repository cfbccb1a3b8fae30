"""Each row of docs/understand/identity.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

PAGE = ROOT / "docs" / "understand" / "identity.md"
TEST = re.compile(r"\[`(?P<name>test_\w+)`\]\((?P<file>[^)]+)\)")


def rows(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return lines[2:]


def missing(text: str, folder: Path) -> list[str]:
    """Rows without a test, and tests that are not there. `folder`: links start there."""
    found = []
    for row in rows(text):
        tests = list(TEST.finditer(row.split("|")[-2]))
        if not tests:
            found.append(f"no test: {row}")
        for test in tests:
            path = folder / test["file"]
            if not path.is_file() or not re.search(rf"^def {test['name']}\(", path.read_text(), re.MULTILINE):
                found.append(f"{test['name']} is not in {test['file']}")
    return found


def test_every_row_is_held_by_tests_that_exist() -> None:
    text = PAGE.read_text()
    assert len(rows(text)) > 30
    assert not missing(text, PAGE.parent)


@pytest.mark.parametrize(("cell", "count"), [
    ("[`test_every_row_is_held_by_tests_that_exist`](../../tests/house/test_identity_page.py)", 0),
    ("nothing", 1),
    ("[`test_of_nothing`](../../tests/house/test_identity_page.py)", 1),
    ("[`test_of_nothing`](../../tests/house/gone.py), [`test_of_nothing`](../../tests/house/test_tidy.py)", 2),
])
def test_a_row_without_its_test_is_found(cell: str, count: int) -> None:
    assert len(missing(f"| a | b |\n|---|---|\n| row | {cell} |\n", PAGE.parent)) == count
