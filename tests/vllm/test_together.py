"""Two engines that get one prompt together: with compute_once the second loads what the first computes.

Real Schedulers of vLLM 0.24 and 0.33: tests/vllm/support/together_scenarios.py.
"""

from __future__ import annotations

import pytest
from schedulers import Run, every_mode, every_version, run_where

pytestmark = pytest.mark.vllm
SCENARIOS = "together_scenarios"

TOKENS, CHUNK, BUDGET = 900, 32, 128


run = run_where(lambda found: found["wrong"] == found["remembered"] == 0)


@every_version
@every_mode
def test_the_second_engine_loads_what_the_first_computes(load_async: bool, run: Run) -> None:
    found = run("same_prompt", 5.0, load_async=load_async)
    assert found["computed"] == [TOKENS, TOKENS - found["loaded"]] and found["computed"][1] < CHUNK, found["waits"]
    assert found["waits"] == ["fulfilled"]
    assert found["other"] == 0, "the request behind it was not held up"


@every_version
def test_without_the_setting_both_compute(run: Run) -> None:
    found = run("same_prompt", 0.0)
    assert found["computed"][0] == TOKENS and found["computed"][1] > TOKENS - 2 * BUDGET
    assert found["waits"] == []


@every_version
def test_the_second_engine_computes_what_the_first_gives_up(run: Run) -> None:
    found = run("same_prompt", 5.0, after_steps=3)
    assert found["computed"][0] == 3 * BUDGET
    assert found["computed"][1] == TOKENS - found["loaded"] and found["loaded"] >= BUDGET
    assert found["waits"] == ["withdrawn"]
