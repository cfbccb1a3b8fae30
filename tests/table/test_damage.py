"""A table region damaged at random is refused, or what is adopted of it is what it was.

KVDOCK_DAMAGE_TRIALS makes it longer; a failure names seed and number of its trial.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from damage_helpers import empty_region, region_of, used_words
from paths import SUPPORT
from random_use import RandomUse, adopted, new_table

from kvdock._core import TableError

SCRIPT = SUPPORT / "damage_helpers.py"
RECORD_SIZES = range(112 + 32, 112 + 32 * 9, 32)
"""What the table of pages has for records with 1 to 8 parts."""


@pytest.fixture
def trials(sweeps: bool) -> int:
    return int(os.environ.get("KVDOCK_DAMAGE_TRIALS") or (60 if sweeps else 30))


@pytest.mark.security
def test_engines_go_on_with_a_damaged_table_that_was_adopted(trials: int) -> None:
    """A thousand random calls and a second adoption after each damage: no call follows what was not judged."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "22", str(trials), "--use"],
        capture_output=True, text=True, timeout=60 + trials, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    outcomes: dict[str, int] = json.loads(ran.stdout)["outcomes"]
    assert sum(outcomes.values()) == trials
    assert sum(count for outcome, count in outcomes.items() if "used" in outcome) > trials / 10


@pytest.mark.parametrize("seed", [1, 2])
def test_a_damaged_table_never_crashes_hangs_or_changes_what_it_promised(seed: int, trials: int) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(seed), str(trials)],
        capture_output=True, text=True, timeout=60 + trials, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    outcomes: dict[str, int] = json.loads(ran.stdout)
    print(outcomes)
    assert sum(outcomes.values()) == trials
    for kind in ("flip", "overwrite", "cut"):
        assert any(outcome.startswith(kind) for outcome in outcomes), "every kind of damage was tried"
    assert any("refused" in outcome for outcome in outcomes) and any("same" in outcome for outcome in outcomes)


@pytest.mark.security
def test_a_page_of_records_whose_size_was_lost_is_empty_when_it_is_used_again() -> None:
    """The fuzz found it: the last page in use counts as one that never was, and its old bytes would be live records."""
    region, pages = empty_region()
    use = RandomUse(new_table(region), random.Random(7))
    use.calls(200)
    for engine in use.engines:
        use.table.leave(engine.member)  # a pool in which such a record is held is refused
    use.engines.clear()
    with memoryview(region) as view, view.cast("I") as words:
        found = [at // 4 + half for page in used_words(view, pages()) for at in page for half in (0, 1)]
        last = max(at for at in found if words[at] in RECORD_SIZES and words[at - 1] in RECORD_SIZES)
        words[last] = 0
    table, facts = adopted(region)
    use.go_on_with(table, facts["clock_ms"])
    for _ in range(40):
        use.calls(5)
        table.check_integrity()


@pytest.mark.security
def test_a_grant_that_counts_more_entries_than_there_can_be_is_refused() -> None:
    """The fuzz found it: rounded up to whole blocks, the count became that of an empty chain."""
    region, pages = empty_region()
    use = RandomUse(new_table(region), random.Random(11))
    use.calls(200)
    with memoryview(region) as view:
        content, looked_at = bytes(view), [at for page in used_words(view, pages()) for at in page]

    def refusals() -> Iterator[str]:
        words = memoryview(content).cast("I")
        for at in (at // 4 + half for at in looked_at for half in (0, 1)):
            if 0 < words[at] < 16 and words[at + 1] == words[at + 2] < 64:  # maybe a grant's entries, in one block
                damaged = region_of(content)
                with memoryview(damaged) as view, view.cast("I") as changed:
                    changed[at] = 0xFFFF_FFFF
                try:
                    adopted(damaged)
                except TableError as error:
                    yield str(error)

    assert any("a grant's entries are damaged" in refusal for refusal in refusals())
