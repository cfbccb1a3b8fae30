"""A process killed at every step leaves nothing wrong behind: the cases of kill_cases.py, and their table in the docs.

`KVDOCK_REWRITE=1 make test ARGS="--sweeps -m kill_matrix"` writes the table anew into docs/evidence/kill_matrix.md.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from kill_cases import CASES, ROLES, Case, run_case
from kill_helpers import nursery
from paths import ROOT

pytestmark = [pytest.mark.kill_matrix, pytest.mark.timeout(900)]  # the first run compiles the extension

DOC = ROOT / "docs" / "evidence" / "kill_matrix.md"
BEGIN, END = "<!-- kill matrix: written by tests/kill/test_matrix.py -->\n", "<!-- end of the kill matrix -->\n"
AT_ONCE = 4
"""Cases mostly wait, for back-off and for settling."""


def name_of(case: Case) -> str:
    return f"{case.operation}-{case.point}-{case.victim}"


FIRST = frozenset({(case.point, case.victim): case for case in reversed(CASES)}.values())
"""Each process at each of its points once; the same in other operations runs with --sweeps."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[None]]]:
    """Each case's, as far as it was asked for."""
    chosen = {item.callspec.params["case"] for item in request.session.items if hasattr(item, "callspec")
              and "case" in item.callspec.params and item.path == Path(__file__)}
    with (
        nursery() as children, tempfile.TemporaryDirectory(prefix="kvdock-kill-") as folder,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        def run(number: int, case: Case) -> None:
            place = Path(folder) / str(number)
            place.mkdir()
            run_case(children, place, case)

        yield {case: threads.submit(run, number, case) for number, case in enumerate(CASES) if case in chosen}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FIRST else [pytest.mark.sweep]) for case in CASES], ids=name_of
)
def test_a_kill_leaves_nothing_wrong_behind(case: Case, outcomes: dict[Case, Future[None]]) -> None:
    outcomes[case].result()


def table(passed: set[Case]) -> str:
    """One row for each operation and point; ✓: killed there, and everything held."""
    lines = [f"| operation | point | {' | '.join(ROLES)} |", f"|{'---|' * (2 + len(ROLES))}"]
    for operation, point in dict.fromkeys((case.operation, case.point) for case in CASES):
        cells = []
        for role in ROLES:
            here = [case for case in CASES if case[:3] == (operation, point, role)]
            cells.append("" if not here else "✓" if set(here) <= passed else "✗")
        lines.append(f"| {operation} | {point} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_table_in_the_docs_is_what_was_seen(outcomes: dict[Case, Future[None]]) -> None:
    if not outcomes.keys() >= FIRST:
        pytest.fail("the table wants all cases: run the whole file")
    rewrites = bool(os.environ.get("KVDOCK_REWRITE"))
    if rewrites and len(outcomes) < len(CASES):
        pytest.fail("a new table wants what sweeps run: add --sweeps")
    seen = table(set(CASES) - {case for case, outcome in outcomes.items() if outcome.exception() is not None})
    head, _, rest = DOC.read_text().partition(BEGIN)
    old, _, tail = rest.partition(END)
    if rewrites:
        DOC.write_text(head + BEGIN + seen + END + tail)
        return
    assert old == seen, "docs/evidence/kill_matrix.md has another table: see this file's first lines"


def test_every_point_in_the_source_is_in_the_matrix() -> None:
    """And none in the matrix is missing there."""
    sources = [path.read_text() for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    native = {point for text in sources for line in text.splitlines() if "KVDOCK_PAUSE(" in line
              and not line.startswith(("//", "#")) for point in re.findall(r'"([a-z]+\.[a-z_]+)"', line)}
    launcher = (ROOT / "tests/support/kill_launch.py").read_text()
    hooked = set(re.findall(r'"((?:open|grow|retire|adopt)\.[a-z_]+)"', launcher))
    calls = {case.point for case in CASES if case.point.startswith(("ask.", "told."))}
    assert native | hooked | calls == {case.point for case in CASES}
    assert len(native) > 40


def test_the_extension_that_is_shipped_has_no_pause_points() -> None:
    from kvdock import _core

    assert not hasattr(_core, "pause_at")
    assert b"KVDOCK_PAUSE_PAGE" not in Path(_core.__file__).read_bytes()
