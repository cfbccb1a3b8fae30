"""Requests that come together and lack the same prefix cause one load, under real Schedulers and in whole engines.

Real Schedulers of vLLM 0.24 and 0.33: tests/vllm/support/load_once_scenarios.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from schedulers import Run, every_mode, every_version, run_where
from whole_engines import tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
SCENARIOS = "load_once_scenarios"

STORED = 128
"""Tokens of the scenarios' prompt that are found: whole chunks, in blocks of 16."""
ALL, NONE = 8 * STORED, 8 * 10
"""What eight requests load, and the blocks that they hold, when each loads for itself."""
ONE, TWO = [None], [None, 48]
WAITING = ["WAITING_FOR_REMOTE_KVS", "WAITING", "WAITING", "WAITING"]

every_policy = pytest.mark.parametrize("policy", ["fcfs", "priority"])


WRONG = ("bad_reads", "wrong_tokens", "unfinished", "held", "remembered")
run = run_where(lambda found: not any(found[name] for name in WRONG))


# ---------------------------------------------------------------------- vLLM's schedulers


@pytest.mark.every_minor
@every_version
@every_mode
@pytest.mark.parametrize(("overlap", "runner"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("own", [0, 5], ids=["samples", "prompts"])
def test_eight_requests_that_come_together_load_their_prefix_once(
    load_async: bool, overlap: bool, runner: int, own: int, run: Run
) -> None:
    found = run("together", own=own, load_async=load_async, overlap=overlap, runner=runner)
    assert found["loaded"] == STORED
    assert found["peak"] <= 8 + 8 * 2, "the prefix's blocks once, and each request's own"
    assert found["outcomes"] == ({"fulfilled": 7} if load_async else {}), "what one step loads the next finds at once"


@every_version
@pytest.mark.parametrize("how", [{"load_once": False}, {"prefix_caching": False}], ids=["off", "no prefix cache"])
def test_each_loads_for_itself_without_the_setting_or_without_vllms_prefix_cache(
    how: dict[str, object], run: Run
) -> None:
    found = run("together", **how)
    assert (found["loaded"], found["peak"], found["outcomes"]) == (ALL, NONE, {})


@every_version
def test_who_comes_while_a_prefix_is_being_loaded_waits_for_it(run: Run) -> None:
    found = run("together", load_steps=40, after=5)
    assert (found["loaded"], found["outcomes"]) == (STORED, {"fulfilled": 7})


@every_version
@every_policy
@pytest.mark.parametrize("windows", [ONE, TWO], ids=["1group", "2groups"])
def test_if_the_loaders_request_is_aborted_one_other_loads(policy: str, windows: list[int | None], run: Run) -> None:
    found = run("loader_goes", how="aborted", policy=policy, windows=windows)
    assert found["waiting"] == WAITING
    assert found["loads"] == 2 and found["loaded"] == 2 * STORED
    assert found["outcomes"] == {"failed": 3, "fulfilled": 2}


@every_version
@pytest.mark.parametrize("overlap", [False, True])
def test_if_the_load_is_damaged_no_other_loads_the_damage(overlap: bool, run: Run) -> None:
    found = run("loader_goes", how="damaged", overlap=overlap)
    assert found["waiting"] == WAITING
    assert found["loads"] == 1


@every_version
def test_a_slow_load_is_waited_for_no_longer_than_a_multiple_of_what_is_expected(run: Run) -> None:
    found = run("loader_goes", how="slow")
    assert found["waiting"] == WAITING
    assert (found["before"], found["after"]) == (1, 4)
    assert found["outcomes"] == {"expired": 3}


@pytest.mark.every_minor
@every_version
@every_policy
def test_requests_that_have_nothing_to_load_are_not_held_up_by_those_who_wait(policy: str, run: Run) -> None:
    found = run("others_go_on", policy=policy)
    assert found["waiting"] == WAITING
    assert found["loads"] == 1


@every_version
def test_other_salts_are_other_prefixes(run: Run) -> None:
    found = run("salted")
    assert found["loaded"] == 2 * STORED and found["outcomes"] == {"fulfilled": 2}


@every_version
def test_a_request_that_reads_no_prefix_cache_does_not_wait(run: Run) -> None:
    assert run("one_reads_no_cache")["outcomes"] == {}


@every_version
@pytest.mark.parametrize(("windows", "shared", "loads"), [(ONE, 100, 1), (TWO, 100, 2), (TWO, 140, 1)])
def test_behind_windows_only_who_shares_all_of_a_load_waits_for_it(
    windows: list[int | None], shared: int, loads: int, run: Run
) -> None:
    """The end alone of a window is loaded, which is of no use to a request that shares less."""
    found = run("longer", shared=shared, windows=windows)
    assert (found["loads"], found["outcomes"]) == (loads, {"fulfilled": 1} if loads == 1 else {})


@pytest.mark.every_minor
@every_version
@every_policy
def test_a_crowd_is_as_quick_as_when_each_loads_for_itself(policy: str, run: Run) -> None:
    once, each = (
        run("crowd", policy=policy, load_once=is_on) for is_on in (True, False))
    assert once["loaded"] == STORED and each["loaded"] > 8 * STORED
    assert once["steps"] <= each["steps"] and once["first"] <= each["first"]


# ---------------------------------------------------------------------- whole engines

PROMPT = [random.Random(7).randrange(5, 590) for _ in range(1000)]
FOUND = 960
"""Tokens of it that are stored: whole chunks."""
EIGHT = [[*PROMPT, number + 5, 9, 8] for number in range(8)]
HELD = 39
"""Blocks of 32 tokens: what the eight have in common once, and the last one of each."""
WIDE = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 300}


def test_samples_and_prompts_of_a_whole_engine_load_their_prefix_once(
    models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(models["llama"], None, engine=WIDE) as plain:
        wanted = plain.do("generate", prompts=EIGHT, at_once=True)
        assert wanted["held"] == HELD
    with Engine(models["llama"], server.unix, engine=WIDE) as engine:
        engine.generate([PROMPT])
        engine.flush()
        drawn = engine.do("generate", prompts=[PROMPT], samples=8)
        assert (drawn["brought"], len(drawn["samples"][0])) == (FOUND, 8)
        assert drawn["held"] <= HELD + 2
        engine.flush()
        found = engine.do("generate", prompts=EIGHT, at_once=True)
        assert found["brought"] == FOUND
        assert tokens_of(found["runs"]) == tokens_of(wanted["runs"])
        assert found["held"] <= HELD + 2


def test_a_whole_engine_without_the_setting_loads_a_prefix_for_each(
    models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(models["llama"], server.unix, engine=WIDE, extra={"load_once": False}) as engine:
        engine.generate([PROMPT])
        engine.flush()
        found = engine.do("generate", prompts=EIGHT, at_once=True, admitted="together")
        assert found["brought"] == 8 * FOUND and found["held"] > 6 * HELD
