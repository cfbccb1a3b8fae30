"""load_if_cheaper in vLLM's real Schedulers: a hit is computed where its load takes longer."""

from __future__ import annotations

import pytest
from schedulers import Run, every_mode, every_version, run_where

pytestmark = pytest.mark.vllm
SCENARIOS = "cost_scenarios"
ALL = 512


run = run_where(lambda found: found["wrong"] == found["leased"] == 0 and found["first"] == [ALL] * 3)
"""At first all is loaded: nothing is known yet."""


@every_version
@every_mode
def test_what_takes_longer_to_load_is_computed(load_async: bool, run: Run) -> None:
    found = run("chosen", load_s=0.1, step_s=0.005, load_if_cheaper=True, load_async=load_async)
    assert found["last"] == [0] * 2 and found["declined"] == ["dear"] * 2


@every_version
def test_what_takes_longer_to_compute_is_loaded(run: Run) -> None:
    found = run("chosen", load_s=0.0, step_s=0.05, load_if_cheaper=True)
    assert found["last"] == [ALL] * 2 and not found["declined"]


@every_version
def test_all_is_loaded_where_it_is_so_wanted(run: Run) -> None:
    found = run("chosen", load_s=0.1, step_s=0.005, load_if_cheaper=False)
    assert found["last"] == [ALL] * 2 and not found["declined"]


@every_version
def test_now_and_then_a_load_is_made_to_see_what_it_takes(run: Run) -> None:
    found = run("chosen", load_s=0.1, step_s=0.005, probe_s=0.0, load_if_cheaper=True)
    assert found["last"] == [ALL] * 2
