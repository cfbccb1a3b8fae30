"""vLLM resets its prefix cache with `reset_running_requests` while requests load: the loads end first.

Without kvdock/connectors/vllm/resets.py vLLM raises: "waiting for remote KV transfer, which is not supported yet"."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from schedulers import Run, every_version
from whole_engines import HITS, NOTHING, PROMPTS, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
SCENARIOS = "reset_scenarios"


@every_version
def test_vllm_itself_cannot_reset_while_requests_load(run: Run) -> None:
    found = run("preempts_all", ends_loads=False)
    assert "waiting for remote KV transfer" in found["raised"]


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize(("overlap", "runner"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("windows", [[None], [None, 48]], ids=["1group", "2groups"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_reset_that_preempts_all_comes_after_the_loads_under_way(
    overlap: bool, runner: int, windows: list[int | None], policy: str, run: Run
) -> None:
    """One of the loads is that of a request that was aborted meanwhile."""
    found = run(
        "preempts_all", ends_loads=True, overlap=overlap, runner=runner, windows=windows, policy=policy
    )
    assert found["is_reset"] and found["held_then"] == 0
    before, after = found["loads"]
    assert before == 3 and after >= before + 2, "those that had loaded are looked up again"
    wrong = ("bad_reads", "wrong_tokens", "unfinished", "held", "remembered")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)


@every_version
def test_a_load_that_does_not_end_in_time_is_left_to_vllm(run: Run) -> None:
    found = run("never_ends")
    assert found["raised"] and found["states"] == ["WAITING_FOR_REMOTE_KVS"] * 2
    assert found["paused"] == "UNPAUSED"
    assert found["asked_s"] <= 12.0


def test_a_whole_engine_resets_while_requests_load(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix) as engine:
        engine.generate(PROMPTS)
        wanted, cached = engine.generate(PROMPTS)
        assert cached == HITS
        engine.flush()
        found = engine.do("reset_as_it_loads", prompts=PROMPTS)
        assert found["reset"]
        assert found["brought"] == 2 * sum(HITS), "once before the reset, once after it"
        assert tokens_of(found["runs"]) == tokens_of(wanted)
        engine.flush(connector=True)
        assert engine.generate(PROMPTS)[1] == NOTHING
