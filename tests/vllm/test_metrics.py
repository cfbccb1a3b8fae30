"""vLLM's own hooks: statistics as it logs and exports them, its reset, its sleep mode."""

from __future__ import annotations

import pytest
from schedulers import ITSELF, VERSIONS, Run

pytestmark = pytest.mark.vllm
SCENARIOS = "hook_scenarios"


@pytest.fixture(params=[*VERSIONS, pytest.param(ITSELF, marks=pytest.mark.sweep)])
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.every_minor
def test_a_load_is_in_prometheus_and_in_the_log(run: Run) -> None:
    found = run("statistics")
    cold, warm, lines = found["cold"], found["warm"], "\n".join(found["lines"])
    assert cold["attached"] == 1
    assert "load_tokens_total" not in cold and "load_seconds_count" not in cold
    assert warm["load_tokens_total"] == warm["store_tokens_total"] == 128
    assert warm["load_bytes_total"] == warm["store_bytes_total"] == 128 * 8
    assert warm["load_seconds_count"] == 1 and 0 < warm["load_seconds_sum"] < 10
    assert warm["store_seconds_count"] >= 1
    assert 2 <= warm["lookup_seconds_count"] <= 4, "two requests, each asked about once more if its answer was old"
    assert "load_failures_total" not in warm
    assert "KV Transfer metrics: " in lines and "Loads=1, Load MB=0.001, Avg load GB/s=" in lines


def test_figures_of_two_workers_are_added(run: Run) -> None:
    one = {"load_bytes": 5, "load_seconds": [0.5]}
    both = {"load_bytes": 12, "load_seconds": [0.5, 0.25], "fence_seconds": 0.125}
    assert run("two_workers") == {"sums": [one, both, None], "untouched": one}


@pytest.mark.every_minor
def test_what_vllm_receives_and_refuses_leaves_nothing_behind(run: Run) -> None:
    nothing = dict.fromkeys(("tracked", "open", "waiting", "asked", "stories"), 0)
    assert run("refused") == {"leases": [4, 0], "hit": 128, "left": nothing}


@pytest.mark.every_minor
def test_nothing_stored_before_a_reset_is_loaded_after_it(run: Run) -> None:
    assert run("reset") == {"hits": [0, 128, 0, 128], "answer": True, "bad_reads": 0}


def test_a_store_that_ends_after_a_reset_publishes_nothing(run: Run) -> None:
    found = run("reset_during_store")
    assert found["stores"] >= 1 and found["published"] == 0
    assert found["answer"] is True and found["bad_reads"] == 0
    assert found["hits"][0] == 0 and found["hits"][-1] == 128


def test_what_a_running_request_computes_over_a_reset_is_not_stored(run: Run) -> None:
    assert run("reset_running", preempts=False) == {"hits": [0, 128], "answer": False, "bad_reads": 0}


def test_a_request_that_a_reset_preempts_is_computed_and_stored_anew(run: Run) -> None:
    found = run("reset_running", preempts=True)
    assert found["answer"] is True and found["hits"][-1] == 128 and found["bad_reads"] == 0


def test_sleep_mode_wants_a_word_on_the_pool_and_a_vllm_that_says_when_memory_goes(
    version: str, run: Run
) -> None:
    found = run("sleep")
    assert "on_reset is 'clear'" in found["clear"] and "wanted: 'leave' if" in found["clear"]
    for on_reset in ("apart", "leave"):
        assert found[on_reset] == "" if version == "0.33.0" else "wanted: off, or vLLM 0.33" in found[on_reset]


def test_beside_recurrent_states_without_a_prefix_cache_it_stands_aside(run: Run) -> None:
    found = run("aside")
    assert [line for line in found["said"] if "aside" in line] == [
        "kvdock stands aside, and vLLM runs as without it: kvdock cannot cache recurrent states here: prefix caching "
        "is off, and --enable-prefix-caching --mamba-cache-mode align is wanted."
    ]
    assert found["made"] == [4, 4] and found["loaded"] == 0 and found["remembered"] == 0
    assert found["told"] == [None, False, False]
