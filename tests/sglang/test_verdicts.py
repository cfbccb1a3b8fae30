"""The verdict on a load, which SGLang asks for where it processes the result of the load's batch, in whole engines on
the CPU: what is launched before it, and what becomes of requests and pages after a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true
from engines import PP2, TP2, TP2_PP2, Engine, odd
from stories import with_figures
from whole_engines import HITS, NOTHING, OTHERS, PROMPTS, comes_back, prompts_of, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

IN_TURN = {"engine": {"disable_overlap_schedule": True}}


def has_failed(found: dict[str, Any]) -> bool:
    """Whether one request has ended by a load that failed, without any output."""
    (why,), (run,) = found["why"], found["runs"]
    return (why == "abort" or "External KV cache load failed" in why) and not run


def told(linker: str, folder: Path, how: dict[str, Any]) -> dict[str, Any]:
    """The settings of an engine that runs the odd linker of that name, with those in `how` besides."""
    said = odd(linker, folder)
    return {**said, **how, "environ": {**said["environ"], **how.get("environ", {})}}


def warmed(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """What `prompts` give after a local hit. They are stored and trusted, and the device has them no more."""
    engine.generate(prompts)
    local, _ = engine.generate(prompts)
    engine.drain()
    engine.flush()
    engine.generate(prompts)
    engine.flush()
    runs: list[Any] = local
    return runs


@pytest.mark.parametrize("ranks", [{}, TP2], ids=["one rank", "two ranks"])
def test_the_next_step_is_launched_before_the_verdict_which_still_counts(
    ranks: dict[str, Any], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """With two ranks, one alone finds the damage."""
    with Engine(models["llama"], server.unix, **told("LateVerdictLinker", tmp_path, ranks)) as engine:
        local = warmed(engine, PROMPTS)
        (tmp_path / "hold").touch()
        assert comes_back(engine) == (local, HITS)
        assert not (tmp_path / "late").exists(), "the step after a load waited for its verdict"
        engine.flush()
        (tmp_path / "damage").touch()
        failed = engine.do("generate", prompts=PROMPTS[:1])
        assert has_failed(failed)
        assert not (tmp_path / "late").exists()
        (tmp_path / "hold").unlink()
        found = engine.do("generate", prompts=PROMPTS)
        assert found["why"] == ["length"] * 3 and tokens_of(found["runs"]) == tokens_of(local)
        engine.drain()
        assert comes_back(engine) == (local, HITS)


def test_without_the_hook_the_verdict_comes_before_the_next_step(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    how = {"plugin_of_others": "process_results_without_kvdock"}
    with Engine(models["llama"], server.unix, **told("LateVerdictLinker", tmp_path, how)) as engine:
        local = warmed(engine, PROMPTS[2:])
        (tmp_path / "hold").touch()
        assert comes_back(engine, PROMPTS[2:]) == (local, HITS[2:])
        assert (tmp_path / "late").exists()
        assert "kvdock's hooks do not reach Scheduler.process_batch_result" in engine.log_text()


@pytest.mark.parametrize("loop", [{}, IN_TURN, PP2], ids=["overlap", "in turn", "two stages"])
def test_a_prompt_of_several_chunks_ends_with_its_load(
    loop: dict[str, Any], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Its first chunk comes into SGLang's tree before its last one is computed, and what is damaged must not."""
    stored = PROMPTS[2][:450]
    first, second = (PROMPTS[2] + prompts_of(seed)[2] for seed in (7, 8))
    with (
        Engine(models["llama"], server.unix, **told("DamagedLinker", tmp_path, loop)) as engine,
        Client(server.unix) as client,
    ):
        alone, cached = engine.generate([first, second], cache_salt="alone")
        assert cached == [0, 512]
        warmed(engine, [stored])
        loaded, cached = engine.generate([first])
        assert (tokens_of(loaded), cached) == (tokens_of(alone[:1]), [448])
        engine.flush()
        (tmp_path / "damage").touch()
        known = client.status().counters["mismatches"]
        assert has_failed(engine.do("generate", prompts=[second[:450] + second[530:]]))
        assert comes_true(lambda: client.status().counters["mismatches"] > known), "the server is told after the tokens"
        found, cached = engine.generate([second])
        assert (tokens_of(found), cached) == (tokens_of(alone[1:]), [384]), "the damaged page is nowhere any more"


@pytest.mark.parametrize("damaged", ["0", "1"], ids=["the first stage", "the last stage"])
def test_all_stages_end_a_request_whose_load_has_failed_on_one(
    damaged: str, models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Ranks 0 and 1 are the first of each stage, and 2 and 3 the second."""
    with Engine(models["llama"], server.unix, **told("DamagedLinker", tmp_path, TP2_PP2)) as engine:
        local = warmed(engine, PROMPTS)
        (tmp_path / "damage").write_text(damaged)
        assert has_failed(engine.do("generate", prompts=PROMPTS[2:]))
        assert not (tmp_path / "damage").exists()
        found = engine.do("generate", prompts=PROMPTS)
        assert found["why"] == ["length"] * 3 and tokens_of(found["runs"]) == tokens_of(local)
        engine.drain()
        assert comes_back(engine) == (local, HITS)


def test_a_stage_that_cannot_load_is_promised_nothing_and_never_gives_tokens(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """If the first stage does not know that in time, the load fails on all stages."""
    with Engine(models["llama"], server.unix, **told("ApartLinker", tmp_path, PP2)) as engine:
        local = warmed(engine, PROMPTS)
        (tmp_path / "apart").touch()
        engine.generate(OTHERS[:1], new=1)  # the stage's next step says so
        found = engine.do("generate", prompts=PROMPTS)
        assert found["cached"] == NOTHING and tokens_of(found["runs"]) == tokens_of(local)
        engine.drain()
        (tmp_path / "apart").unlink()
        assert comes_true(lambda: comes_back(engine) == (local, HITS))
        engine.flush()
        (tmp_path / "lost").touch()
        assert has_failed(engine.do("generate", prompts=PROMPTS[:1]))
        (tmp_path / "lost").unlink()
        assert tokens_of(engine.generate(PROMPTS)[0]) == tokens_of(local)
        engine.drain()
        assert comes_back(engine) == (local, HITS)


def test_what_a_later_stage_could_not_store_is_not_taken_for_stored(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang offers it again when it is used again, and no other engine finds it before."""
    figures = with_figures(tmp_path / "figures")
    (tmp_path / "figures").mkdir()
    how = {
        "engine": {**PP2["engine"], **figures["engine"]}, "environ": {**PP2["environ"], **figures["environ"]},
    }
    with Engine(models["llama"], server.unix, **told("StageStoresNothing", tmp_path, how)) as engine:
        (tmp_path / "lost").touch()
        assert engine.generate(PROMPTS)[1] == NOTHING
        engine.drain()
        assert comes_true(lambda: engine.figures().get("kvdock_stores_failed_total", 0) >= len(PROMPTS))
        assert engine.figures().get("kvdock_store_tokens_total", 0) == 0
        (tmp_path / "lost").unlink()
        local = engine.generate(PROMPTS)
        assert local[1] == HITS
        engine.drain()
        assert comes_back(engine) == local


def test_a_request_that_is_retracted_before_a_bad_verdict_is_computed(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang retracts it in the step after its load, so it has no output yet. The other one runs all the time."""
    how = {"plugin_of_others": "retract_in_each_step"}
    both = [prompts_of(5)[0][:40], PROMPTS[2]]
    with Engine(models["llama"], server.unix, **told("DamagedLinker", tmp_path, how)) as engine:
        alone, _ = engine.generate(both, new=24)
        warmed(engine, both[1:])
        (tmp_path / "damage").touch()
        found = engine.do("generate", prompts=both, new=24, at_once=True)
        assert not (tmp_path / "damage").exists()
        assert found["why"] == ["length"] * 2 and tokens_of(found["runs"]) == tokens_of(alone)
        engine.flush()


@pytest.mark.parametrize("ranks", [{}, PP2], ids=["one rank", "two stages"])
def test_aborted_requests_leave_no_page_and_no_lease(
    ranks: dict[str, Any], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """They are aborted in the queue, with a load in progress, between two chunks, and in a step after a load."""
    small = {**ranks, "engine": {"max_total_tokens": 2048, **ranks.get("engine", {})}}
    many = [prompt for seed in (11, 12, 13) for prompt in prompts_of(seed)]
    long = [prompt + prompts_of(14 + at)[2] for at, prompt in enumerate(many)]
    with Engine(models["llama"], server.unix, **told("LateVerdictLinker", tmp_path, small)) as engine:
        local = warmed(engine, many[:3])
        for prompts in (many, long, many):
            engine.generate(many)
            engine.drain()
            engine.flush()
            assert set(engine.do("abort", prompts=prompts)["why"]) <= {"abort"}
            engine.flush()
        assert comes_back(engine, many[:3])[0] == local
        engine.drain()
        with Client(server.unix) as client:
            status = client.status()
            assert (status.leases, status.reservations) == (0, 0)
