"""Each promise of docs/evidence/security*.md and each row of ASVS names tests that exist and that `-m security` runs,
or a decision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from paths import ROOT

PAGES = sorted((ROOT / "docs/evidence").glob("security*.md"))


class Row(NamedTuple):
    """A line of a table, in a section of a page."""

    page: str
    section: str
    cells: list[str]


def rows() -> Iterator[Row]:
    for page in PAGES:
        section = ""
        for line in page.read_text().splitlines():
            section = line.removeprefix("## ") if line.startswith("## ") else section
            if line.startswith("| ") and not line.startswith(("| promise |", "| rows |")):
                yield Row(page.name, section, [cell.strip() for cell in line.strip("| ").split(" | ")])


ROWS = list(rows())
ASVS = [row for row in ROWS if row.section.startswith("ASVS")]


def named_in(text: str) -> list[str]:
    return re.findall(r"tests/[\w/]+(?:\.py|/)", text)


def test_both_pages_have_their_rows() -> None:
    assert len(PAGES) == 2 and len(ROWS) > 60 and len(ASVS) > 18


@pytest.mark.parametrize("row", ASVS, ids=lambda row: row.cells[0])
def test_each_row_of_asvs_passes_by_a_test_or_has_a_decision(row: Row) -> None:
    _, how, evidence = row.cells
    named = named_in(evidence)
    assert how.startswith("passes") or how == "decision", row
    assert named or how == "decision"
    if how != "passes":  # wholly
        assert "decisions/0" in evidence or "PyTorch" in evidence, f"{row.cells[0]}: no decision says why"


@pytest.mark.parametrize("name", sorted({name for row in ROWS for cell in row.cells for name in named_in(cell)}))
def test_each_test_that_is_named_is_run_with_the_mark(name: str) -> None:
    path = ROOT / name
    assert path.exists()
    modules = [path] if path.is_file() else sorted(path.glob("test_*.py"))
    marks = ("mark.security", "mark.kill_matrix")
    assert any(mark in module.read_text() for module in modules for mark in marks), f"{name}: no test has the mark"
