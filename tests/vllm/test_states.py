"""Models with recurrent states in vLLM's real Schedulers, around blocks whose state is overwritten as steps go on."""

from __future__ import annotations

from typing import Any

import pytest
from schedulers import SEEDS, Run

pytestmark = pytest.mark.vllm
SCENARIOS = "state_scenarios"

STATE = 0
SHAPES = {"two": [None, STATE], "two-of-states": [None, STATE, STATE], "window": [None, 48, STATE]}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "ahead": {"overlap": True, "runner": 2}, "exported": {"exports": True},
    "finer-hashes": {"hash_tokens": 8},
}
"""How states are kept: `exported` ones come from inside a step's chunk, as newer kernels have them."""
every_shape = pytest.mark.parametrize("windows", SHAPES.values(), ids=list(SHAPES))
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


@every_way
def test_a_hit_ends_where_a_state_was_stored_and_nothing_else_is_read(way: dict[str, Any], run: Run) -> None:
    """A prefix is loaded up to the last block in which some prompt before it ended."""
    found = run("shared", **way)
    assert found == {"loaded": [144, 128, 128, 96, 96, 208, 240]}


@pytest.mark.parametrize(("overlap", "loaded"), [
    (False, [96] + [112] * 16 + [128]),
    (True, [96] * 2 + [112] * 16),  # what the last step ends with is not known when it is planned
])
def test_a_conversation_goes_on_from_the_last_whole_block_of_its_answer(
    overlap: bool, loaded: list[int], run: Run
) -> None:
    """The first answer ends at the end of a block (its last token is never computed), and each further one later."""
    found = run("answered", overlap=overlap)
    assert found == {"loaded": loaded}


@pytest.mark.sweep("way")
@every_shape
@every_way
def test_under_pressure_no_state_is_read_that_is_not_right(
    windows: list[int | None], way: dict[str, Any], run: Run
) -> None:
    found = run("pressure", windows, 0, SEEDS // 2, **way, module="sched_scenarios")
    assert found["wrong"] == {}
    assert found["loaded"] > 0 and found["preempted"] > 0 and found["async_loads"] > 0
    assert found["aborted_running"] > 0 and "sync_loads" not in found


@every_shape
def test_misfortune_with_every_other_load_harms_no_state(windows: list[int | None], run: Run) -> None:
    found = run("pressure", windows, 0, SEEDS // 2, likely=0.2, module="sched_scenarios")
    assert found["wrong"] == {}
    assert found["loaded"] > 0 and found["damaged"] > 0 and found["damaged_loads"] > 0


def test_under_pressure_with_real_threads_no_state_is_read_that_is_not_right(run: Run) -> None:
    found = run("pressure", [None, STATE], 0, SEEDS // 4, by_hand=False, module="sched_scenarios")
    assert found["wrong"] == {}
    assert found["loaded"] > 0


@pytest.mark.parametrize("how", [{"states": "none", "prefix_caching": False}, {"load_async": False}])
def test_where_states_are_not_served_vllm_makes_what_it_makes_without_kvdock(how: dict[str, Any], run: Run) -> None:
    assert run("aside", **how) == {"wrong": 0, "loaded": 0, "stood_aside": True}


def test_beside_other_connectors_no_worker_begins(run: Run) -> None:
    found = run("beside")
    assert found == {"wrong": 0, "loaded": 0, "groups": [0, 2], "has_begun": False}


@pytest.mark.parametrize("version", ["0.24.0"])
def test_a_vllm_whose_own_hits_end_where_there_is_no_state_is_refused(run: Run) -> None:
    """Beside any connector, also one that stands aside: vLLM 0.24 reads the null block then."""
    found = run("aside")
    assert "--no-enable-prefix-caching is wanted" in found["refused"]
    unguarded = run("unguarded")
    assert unguarded["wrong"] > 0, "the control: it is as bad as that"
    off = run("aside", states="none", prefix_caching=False)
    assert off == {"wrong": 0, "loaded": 0, "stood_aside": True}


def test_a_state_of_another_place_is_seen(run: Run) -> None:
    """The negative control: what makes the other tests able to fail."""
    found = run("misplaced")
    assert found["bad_reads"] > 0
