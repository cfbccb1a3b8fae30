"""A request ends after vLLM has taken back what it had computed: nothing is stored under its keys but its own KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess
from schedulers import Run, every_version

pytestmark = pytest.mark.vllm
SCENARIOS = "undone_scenarios"
MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=16 * MIB, segment_bytes=16 * MIB) as process:
        yield process


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize(
    "scenario", ["given_to_another", "computed_in_part", "damaged_and_no_room", "shares_what_is_damaged"]
)
def test_a_request_that_ends_before_it_has_its_kv_again_stores_nothing_wrong(scenario: str, run: Run) -> None:
    assert run(scenario)["wrong"] == 0


@every_version
def test_a_load_into_blocks_that_a_step_under_way_still_writes_comes_after_it(run: Run) -> None:
    found = run("left_behind_in_a_step")
    assert found == {"loaded": 64, "wrong": 0, "after": 1}


@every_version
def test_what_a_request_stores_as_it_ends_is_read_before_its_blocks_are_written(run: Run) -> None:
    found = run("blocks_go_as_it_ends")
    assert found == {"loaded": 192, "wrong": 0}


@every_version
def test_a_request_that_goes_on_stores_what_it_computes_again(run: Run) -> None:
    found = run("goes_on")
    assert found["wrong"] == 0 and found["loaded"] >= 384
