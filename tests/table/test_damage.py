"""A table region damaged at random is refused, or what is adopted of it is what it was.

KVDOCK_DAMAGE_TRIALS makes it longer; a failure names seed and number of its trial.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import SUPPORT

SCRIPT = SUPPORT / "damage_helpers.py"


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
