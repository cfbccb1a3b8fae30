"""Every mutant of tests/mutants still breaks the code that it names, and names a test that exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT

from tests.mutants import ROOMS
from tests.mutants.mutant import DoesNotApply, Mutant, Outcome, Verdict, outcome_of

MUTANTS = [mutant for mutants in ROOMS.values() for mutant in mutants]


def files_of(guard: tuple[str, ...]) -> list[Path]:
    """The test files of a guard; an argument of `-k` is no path."""
    folders = [ROOT / argument for argument in guard if argument.startswith("tests/")]
    return [file for folder in folders for file in ([folder] if folder.is_file() else folder.glob("test_*.py"))]


def why_not_applied(mutant: Mutant) -> str:
    """Empty: it applies to the code as it is."""
    try:
        broken = mutant.broken(ROOT)
        if mutant.file.endswith(".py"):
            ast.parse(broken)
    except (DoesNotApply, SyntaxError) as error:
        return f"{mutant.name}: {error}"
    return f"{mutant.name}: it breaks nothing" if broken == (ROOT / mutant.file).read_text() else ""


def why_not_killed(mutant: Mutant) -> str:
    """Empty: its killer is a test that its guard runs, or it has none and changes nothing."""
    files = files_of(mutant.guard)
    if not files or not all(file.is_file() for file in files):
        return f"{mutant.name}: {mutant.guard} are no tests"
    if bool(mutant.killer) == bool(mutant.equivalent):
        return f"{mutant.name}: a break that changes something has a killer, and no other"
    claim = re.compile(rf"^(def|class)? ?{mutant.killer}\b", re.MULTILINE)
    if mutant.killer and not any(claim.search(file.read_text()) for file in files):
        return f"{mutant.name}: no {mutant.killer} in {mutant.guard}"
    return ""


@pytest.mark.parametrize("mutants", ROOMS.values(), ids=ROOMS)
def test_mutants_apply_to_the_code_as_it_is(mutants: tuple[Mutant, ...]) -> None:
    assert list(filter(None, map(why_not_applied, mutants))) == []


@pytest.mark.parametrize("mutants", ROOMS.values(), ids=ROOMS)
def test_the_killers_of_mutants_are_tests_that_their_guards_run(mutants: tuple[Mutant, ...]) -> None:
    assert list(filter(None, map(why_not_killed, mutants))) == []


def test_each_mutant_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter([*ROOMS, *(m.name for m in MUTANTS)]).items() if count > 1] == []


# --------------------------------------------------------------------------- the program itself

ONE = Mutant("X1", "breaks", "some.py", "x = 1", "x = 2", ("tests/house",), "test_x_is_one")
KILLED = "F\nFAILED tests/house/test_x.py::test_x_is_one[a-b] - assert 2 == 1\n1 failed in 0.1s\n"


@pytest.mark.parametrize(("output", "outcome"), [
    (KILLED, Outcome.KILLED),
    (KILLED.replace("x_is_one", "y"), Outcome.KILLED_BY_ANOTHER),
    (KILLED.replace("FAILED", "ERROR"), Outcome.KILLED),
    ("ERROR tests/house/test_x.py - SyntaxError\n1 error in 0.1s\n", Outcome.KILLED_BY_ANOTHER),
    ("....\n4 passed, 1 skipped in 0.2s\n", Outcome.SURVIVED),
    ("s\n1 skipped in 0.1s\n", Outcome.NOT_TESTED),
    ("no tests ran in 0.01s\n", Outcome.NOT_TESTED),
    ("", Outcome.NOT_TESTED),
])
def test_the_output_of_a_guard_is_an_outcome(output: str, outcome: Outcome) -> None:
    assert outcome_of(ONE, output)[0] is outcome


@pytest.mark.parametrize(("text", "found"), [("x = 1\ny = 1\n", 1), ("y = 1\n", 0), ("x = 1\nx = 1\n", 2)])
def test_a_mutant_whose_code_is_gone_or_there_twice_does_not_apply(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "some.py").write_text(text)
    if found == 1:
        assert ONE.broken(tmp_path) == "x = 2\ny = 1\n"
    else:
        with pytest.raises(DoesNotApply, match=f"{found} times"):
            ONE.broken(tmp_path)


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_break_that_a_test_notices_is_as_wanted(outcome: Outcome) -> None:
    assert Verdict(ONE, outcome).is_wanted == (outcome in (Outcome.KILLED, Outcome.KILLED_BY_ANOTHER))
    unseen = replace(ONE, killer="", equivalent="nothing changes")
    assert Verdict(unseen, outcome).is_wanted == (outcome is Outcome.SURVIVED)
