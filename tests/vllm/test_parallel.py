"""Engines of several workers, and engines that draft: every worker gets its own bytes back, or none count.

What whole engines of several workers load is told in tests/whole/test_loads.py; the Schedulers of 0.24 and 0.33 run
any of them around fingerprinted KV (sched_ranks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true
from engines import Engine
from schedulers import VERSIONS, Run
from stories import several
from whole_engines import HITS, NOTHING, OTHERS, PROMPTS, tokens_of

pytestmark = pytest.mark.vllm
SCENARIOS = "sched_ranks"

ENGINES_START_SLOWLY = pytest.mark.timeout(600)

SHAPES: dict[str, dict[str, Any]] = {
    "tp2": {"shards": 2},
    "tp2-sync": {"shards": 2, "load_async": False},
    "tp2-mla": {"shards": 2, "latent": True},
    "tp2-windows": {"shards": 2, "windows": [None, 48]},
    "pp2": {"shards": 1, "stages": 2},
    "tp2-pp2": {"shards": 2, "stages": 2},
    "tp2-pp2-mla": {"shards": 2, "stages": 2, "latent": True},
}
RIGHT = {"bad_reads": 0, "wrong_tokens": 0, "unfinished": 0, "held": 0, "failed_stores": 0}


def of(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in wanted}


# ------------------------------------------------------------------ whole engines


@ENGINES_START_SLOWLY
def test_what_one_of_two_workers_cannot_load_is_computed_by_both(
    models: dict[str, Path], server: ServerProcess
) -> None:
    damaged = several(2, 1, "OneDamaged", KVDOCK_DAMAGED_RANK="1")
    with Engine(models["llama"], server.unix, **damaged) as engine:
        cold, _ = engine.generate(PROMPTS)
        engine.flush()
        again, _ = engine.generate(PROMPTS)
        assert tokens_of(again) == tokens_of(cold)
        assert comes_true(lambda: engine.log_text().count("checksum mismatch") >= len(PROMPTS))
        assert engine.log_text().count("checksum mismatch") == len(PROMPTS), "each load falls short in one worker alone"


@ENGINES_START_SLOWLY
@pytest.mark.any_tp
def test_stages_of_one_worker_read_what_stages_of_two_have_stored(
    models: dict[str, Path], server: ServerProcess
) -> None:
    two, one = ({**several(shards, 2), "extra": {"any_tensor_parallel": True}} for shards in (2, 1))
    with Engine(models["deep"], server.unix, **two) as engine:
        computed, at_hand = engine.generate(PROMPTS)
        assert at_hand == NOTHING
        engine.drain()
    with Engine(models["deep"], server.unix, **one) as engine:
        loaded, at_hand = engine.generate(PROMPTS)
        assert at_hand == HITS and tokens_of(loaded) == tokens_of(computed)


@ENGINES_START_SLOWLY
@pytest.mark.parametrize(("method", "model", "drafter"), [
    ("draft_model", "llama", "llama"), pytest.param("eagle", "llama", "eagle", marks=pytest.mark.sweep),
    ("eagle3", "llama", "eagle3"), ("mtp", "mimo", None),
])
def test_engines_that_draft_load_what_their_drafts_were_made_from(
    method: str, model: str, drafter: str | None, models: dict[str, Path], server: ServerProcess
) -> None:
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if drafter is not None:
        drafts["model"] = str(models[drafter])
    with Engine(models[model], server.unix, engine={"speculative_config": drafts}) as engine:
        cold = engine.do("generate", prompts=PROMPTS)
        engine.flush()
        again = engine.do("generate", prompts=PROMPTS)
        assert (cold["cached"], again["cached"]) == (NOTHING, HITS)
        assert tokens_of(again["runs"]) == tokens_of(cold["runs"])
        assert again["drafts"] == cold["drafts"] != []  # tokens alone would be right from any draft
        are_accepted = len(cold["drafts"]) < 18  # of 36 tokens, each step makes one and those that were accepted
        assert are_accepted == (method == "draft_model"), "it drafts for itself; the others have random weights"


@ENGINES_START_SLOWLY
def test_an_engine_that_drafts_from_the_prompt_shares_with_one_that_does_not_draft(
    models: dict[str, Path], server: ServerProcess
) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with (
        Engine(models["llama"], server.unix) as plain,
        Engine(models["llama"], server.unix, engine={"speculative_config": lookup}) as drafting,
    ):
        computed, at_hand = plain.generate(PROMPTS)
        assert at_hand == NOTHING
        plain.drain()
        loaded = drafting.do("generate", prompts=PROMPTS)
        assert loaded["cached"] == HITS and loaded["drafts"]
        assert tokens_of(loaded["runs"]) == tokens_of(computed)
        again = drafting.do("generate", prompts=PROMPTS)
        assert again == {**loaded, "brought": 0, "took_s": again["took_s"]}, "from its own cache"

        computed, at_hand = drafting.generate(OTHERS)
        assert at_hand == NOTHING
        drafting.drain()
        found, at_hand = plain.generate(OTHERS)
        assert at_hand == HITS and tokens_of(found) == tokens_of(computed)
        assert plain.generate(OTHERS) == (found, HITS)


# ------------------------------------------------------------------ schedulers


@pytest.mark.every_minor
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_worker_loads_its_own_part(shape: str, run: Run) -> None:
    workers = SHAPES[shape]["shards"] * SHAPES[shape].get("stages", 1)
    wanted = {**RIGHT, "loaded": 128, "readers": workers}
    found = run("warm", **SHAPES[shape])
    assert of(found, wanted) == wanted


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "tp2-mla", "tp2-windows", "tp2-pp2-mla"])
def test_several_workers_under_pressure_read_nothing_wrong(shape: str, run: Run) -> None:
    found = run("pressure", 0, 4, **SHAPES[shape])
    assert of(found, RIGHT) == RIGHT
    assert found["loaded"] > 0 and found["preempted"] > 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("ours", "theirs", "loaded"), [
    ("tp2", "tp2", 128), ("pp2", "tp2", 0), ("tp2", "tp2-pp2", 0), ("tp2-mla", "tp2-pp2-mla", 0),
    ("tp2-mla", "tp1-mla", 128), ("tp1-mla", "tp2-mla", 128),
])
def test_engines_share_what_all_their_workers_can_read(ours: str, theirs: str, loaded: int, run: Run) -> None:
    shapes = {**SHAPES, "tp1-mla": {"shards": 1, "latent": True}}
    found = run("shared", shapes[ours], shapes[theirs])
    assert of(found, RIGHT) == RIGHT and found["loaded"] == loaded


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "tp2-sync", "pp2"])
def test_a_load_counts_as_far_as_the_worker_that_got_least(shape: str, run: Run) -> None:
    found = run("one_damaged", 1, **SHAPES[shape])
    assert of(found, RIGHT) == RIGHT and found["loads"] == [128]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_one_worker_had_is_not_offered_again_when_another_had_less(run: Run) -> None:
    found = run("two_short", shards=2)
    assert of(found, RIGHT) == RIGHT and found["loads"] == [128]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "tp2-sync", "tp2-mla", "pp2"])
def test_a_worker_without_a_server_reports_its_loads_and_stores(shape: str, run: Run) -> None:
    found = run("one_gone", **SHAPES[shape])
    assert of(found, RIGHT) == RIGHT


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "pp2", "tp2-pp2-mla"])
def test_parts_of_other_workers_are_seen_to_be_wrong(shape: str, run: Run) -> None:
    """The negative control: what makes the other tests able to fail."""
    assert run("swapped", **SHAPES[shape])["bad_reads"] > 0
