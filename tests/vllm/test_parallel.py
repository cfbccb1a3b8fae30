"""Engines of several workers, and engines that draft: every worker gets its own bytes back, or none count.

Whole engines on the CPU (vLLM 0.32) run two tensor-parallel workers, three pipeline stages, or two stages of two; the
Schedulers of 0.24 and 0.33 run any of these around fingerprinted KV (sched_ranks.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true
from engines import Engine
from schedulers import VERSIONS, Schedulers
from whole_engines import tokens_of

pytestmark = pytest.mark.vllm

ENGINES_START_SLOWLY = pytest.mark.timeout(600)
HITS = [128, 320]
"""Whole chunks of the prompts below, of 64 tokens. No more of their blocks are full, which have 16 tokens or 32."""
PROMPTS, OTHERS = (
    [[random.Random(seed).randrange(5, 590) for _ in range(n)] for seed, n in enumerate((140, 333), first)]
    for first in (0, 50)
)

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


def several(shards: int, stages: int, connector: str = "Several", **environ: str) -> dict[str, Any]:
    """What Engine is told for an engine of several workers."""
    return {
        "engine": {
            "tensor_parallel_size": shards, "pipeline_parallel_size": stages, "distributed_executor_backend": "mp",
        },
        "connector": [connector, "odd_connectors"],
        "environ": environ,
    }


# ------------------------------------------------------------------ whole engines


@ENGINES_START_SLOWLY
@pytest.mark.parametrize(
    ("model", "shards", "stages"), [
        ("llama", 2, 1), ("mla", 2, 1), pytest.param("llama", 1, 3, marks=pytest.mark.sweep), ("deep", 2, 2),
    ]
)
def test_all_workers_load_the_bits_of_local_hits(
    model: str, shards: int, stages: int, models: dict[str, Path], server: ServerProcess
) -> None:
    keeps = {"keeps_prefixes": model == "mla"}  # else vLLM has no prefix cache for it on a CPU, and nothing is loaded
    with Engine(models[model], server.unix, **several(shards, stages), **keeps) as first:
        assert first.generate(PROMPTS)[1] == [0, 0]
        local, at_hand = first.generate(PROMPTS)
        assert at_hand == HITS
        assert first.do("reset")["reset"]
        again, loaded = first.generate(PROMPTS)
        assert loaded == HITS and again == local
        assert first.close() == 0
    if model == "mla":  # an engine with one worker reads the same part
        with Engine(models[model], server.unix, **keeps) as alone:
            assert alone.generate(PROMPTS)[1] == HITS
    elif stages == 1:
        with Engine(models[model], server.unix, extra={"load_async": False}, **several(shards, stages)) as second:
            other, loaded = second.generate(PROMPTS)
            assert loaded == HITS and other == local


@ENGINES_START_SLOWLY
def test_what_one_of_two_workers_cannot_load_is_computed_by_both(
    models: dict[str, Path], server: ServerProcess
) -> None:
    damaged = several(2, 1, "OneDamaged", KVDOCK_DAMAGED_RANK="1")
    with Engine(models["llama"], server.unix, **damaged) as engine:
        cold, _ = engine.generate(PROMPTS)
        assert engine.do("reset")["reset"]
        again, _ = engine.generate(PROMPTS)
        assert tokens_of(again) == tokens_of(cold)
        assert comes_true(lambda: engine.log_text().count("checksum mismatch") >= len(PROMPTS))
        assert engine.log_text().count("checksum mismatch") == len(PROMPTS), "each load falls short in one worker alone"


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
        assert engine.do("reset")["reset"]
        again = engine.do("generate", prompts=PROMPTS)
        assert (cold["cached"], again["cached"]) == ([0, 0], HITS)
        assert tokens_of(again["runs"]) == tokens_of(cold["runs"])
        assert again["drafts"] == cold["drafts"] != []  # tokens alone would be right from any draft
        are_accepted = len(cold["drafts"]) < 12  # of 24 tokens, each step makes one and those that were accepted
        assert are_accepted == (method == "draft_model"), "it drafts for itself; the others have random weights"
        assert engine.close() == 0


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
        assert at_hand == [0, 0]
        plain.do("drain")
        loaded = drafting.do("generate", prompts=PROMPTS)
        assert loaded["cached"] == HITS and loaded["drafts"]
        assert tokens_of(loaded["runs"]) == tokens_of(computed)
        assert drafting.do("generate", prompts=PROMPTS) == {**loaded, "brought": 0}  # from its own cache

        computed, at_hand = drafting.generate(OTHERS)
        assert at_hand == [0, 0]
        drafting.do("drain")
        found, at_hand = plain.generate(OTHERS)
        assert at_hand == HITS and tokens_of(found) == tokens_of(computed)
        assert plain.generate(OTHERS) == (found, HITS)
        assert (plain.close(), drafting.close()) == (0, 0)


# ------------------------------------------------------------------ schedulers


@pytest.mark.every_minor
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_worker_loads_its_own_part(
    shape: str, version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    workers = SHAPES[shape]["shards"] * SHAPES[shape].get("stages", 1)
    wanted = {**RIGHT, "loaded": 128, "readers": workers}
    found = schedulers.run(version, "warm", server.unix, module="sched_ranks", **SHAPES[shape])
    assert of(found, wanted) == wanted


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "tp2-mla", "tp2-windows", "tp2-pp2-mla"])
def test_several_workers_under_pressure_read_nothing_wrong(
    shape: str, version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    found = schedulers.run(version, "pressure", server.unix, 0, 4, module="sched_ranks", **SHAPES[shape])
    assert of(found, RIGHT) == RIGHT
    assert found["loaded"] > 0 and found["preempted"] > 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("ours", "theirs", "loaded"), [
    ("tp2", "tp2", 128), ("pp2", "tp2", 0), ("tp2", "tp2-pp2", 0), ("tp2-mla", "tp2-pp2-mla", 0),
    ("tp2-mla", "tp1-mla", 128), ("tp1-mla", "tp2-mla", 128),
])
def test_engines_share_what_all_their_workers_can_read(
    ours: str, theirs: str, loaded: int, version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    shapes = {**SHAPES, "tp1-mla": {"shards": 1, "latent": True}}
    found = schedulers.run(version, "shared", server.unix, shapes[ours], shapes[theirs], module="sched_ranks")
    assert of(found, RIGHT) == RIGHT and found["loaded"] == loaded


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "tp2-sync", "pp2"])
def test_a_load_counts_as_far_as_the_worker_that_got_least(
    shape: str, version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    found = schedulers.run(version, "one_damaged", server.unix, 1, module="sched_ranks", **SHAPES[shape])
    assert of(found, RIGHT) == RIGHT and found["loads"] == [128]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_one_worker_had_is_not_offered_again_when_another_had_less(
    version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    found = schedulers.run(version, "two_short", server.unix, module="sched_ranks", shards=2)
    assert of(found, RIGHT) == RIGHT and found["loads"] == [128]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "tp2-sync", "tp2-mla", "pp2"])
def test_a_worker_without_a_server_reports_its_loads_and_stores(
    shape: str, version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    found = schedulers.run(version, "one_gone", server.unix, module="sched_ranks", **SHAPES[shape])
    assert of(found, RIGHT) == RIGHT


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", ["tp2", "pp2", "tp2-pp2-mla"])
def test_parts_of_other_workers_are_seen_to_be_wrong(
    shape: str, version: str, schedulers: Schedulers, server: ServerProcess
) -> None:
    """The negative control: what makes the other tests able to fail."""
    assert schedulers.run(version, "swapped", server.unix, module="sched_ranks", **SHAPES[shape])["bad_reads"] > 0
