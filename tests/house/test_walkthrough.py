"""docs/walkthrough.md tells the truth about where things are, and its numbers are the code's."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from kvdock.engine.block_manager import BlockManager
from kvdock.engine.groups import FullAttention, SlidingWindow

DOCS = ROOT / "docs"
TEXT = (DOCS / "walkthrough.md").read_text()
STEPS = [step for step in re.split(r"^(?=\d+\. )", TEXT, flags=re.MULTILINE) if step[:1].isdigit()]


def test_steps_are_numbered_in_order() -> None:
    assert [int(step.split(".")[0]) for step in STEPS] == list(range(1, len(STEPS) + 1))
    assert len(STEPS) >= 10


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split(".")[0])
def test_a_step_links_to_files_that_hold_the_names_it_gives(step: str) -> None:
    links = re.findall(r"\[([^]]+)\]\(([^)]+)\)", step)
    assert links, "no link"
    for label, target in links:
        assert (DOCS / target).resolve().is_file(), f"{target} is not there"
        assert target == f"../{label}"
    source = "\n".join((DOCS / target).read_text() for _, target in links)
    references = step[step.index("](") :]
    for name in re.findall(r"`([\w.]+)`", references):
        for part in name.split("."):
            assert re.search(rf"^\s*(?:def|class) {part}\b", source, re.MULTILINE), f"{name} is in none of the files"


def test_the_walks_numbers_are_those_of_the_block_manager() -> None:
    """96 local tokens, 960 from elsewhere, a window of 128: what step 5 says."""
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
