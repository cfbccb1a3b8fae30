"""Engines of several workers, and engines that draft: every worker gets its own bytes back, or none count.

Whole engines on the CPU (vLLM 0.32) run two tensor-parallel workers or three pipeline stages; the Schedulers of 0.24
and 0.33 run any of these around fingerprinted KV (sched_ranks.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import HERE, Engine
from schedulers import VERSIONS, Schedulers

pytestmark = pytest.mark.vllm

ENGINES_START_SLOWLY = pytest.mark.timeout(600)
HITS = [128, 320]
"""Whole chunks of the prompts below: 64 tokens a chunk."""
PROMPTS = [[random.Random(seed).randrange(5, 590) for _ in range(n)] for seed, n in enumerate((150, 333))]

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


def several(kind: str, workers: int, connector: str = "Several", **environ: str) -> dict[str, Any]:
    """What Engine is told for an engine of several workers."""
    return {
        "engine": {f"{kind}_parallel_size": workers, "distributed_executor_backend": "mp"},
        "connector": [connector, "odd_connectors"],
        "environ": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **environ},
    }


# ------------------------------------------------------------------ whole engines


@ENGINES_START_SLOWLY
@pytest.mark.parametrize(
    ("model", "kind", "workers"), [("llama", "tensor", 2), ("mla", "tensor", 2), ("llama", "pipeline", 3)]
)
def test_all_workers_load_the_bits_of_local_hits(
    model: str, kind: str, workers: int, models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(models[model], server.unix, **several(kind, workers)) as first:
        assert first.generate(PROMPTS)[1] == [0, 0]
        local, at_hand = first.generate(PROMPTS)
        assert at_hand == HITS
        assert first.do("reset")["reset"]
        again, loaded = first.generate(PROMPTS)
        assert loaded == HITS and again == local
        assert first.close() == 0
    if model == "mla":  # an engine with one worker reads the same part
        with Engine(models[model], server.unix) as alone:
            assert alone.generate(PROMPTS)[1] == HITS
    elif kind == "tensor":
        with Engine(models[model], server.unix, extra={"load_async": False}, **several(kind, workers)) as second:
            other, loaded = second.generate(PROMPTS)
            assert loaded == HITS and other == local


@ENGINES_START_SLOWLY
def test_what_one_of_two_workers_cannot_load_is_computed_by_both(
    models: dict[str, Path], server: ServerProcess
) -> None:
    damaged = several("tensor", 2, "OneDamaged", KVDOCK_DAMAGED_RANK="1")
    with Engine(models["llama"], server.unix, **damaged) as engine:
        cold, _ = engine.generate(PROMPTS)
        assert engine.do("reset")["reset"]
        again, _ = engine.generate(PROMPTS)
        assert [[token for token, _ in run] for run in again] == [[token for token, _ in run] for run in cold]
        assert engine.log_text().count("checksum mismatch") == len(PROMPTS), "each load falls short in one worker alone"


@ENGINES_START_SLOWLY
@pytest.mark.parametrize(("method", "model"), [("draft_model", "llama"), ("eagle", "eagle")])
def test_engines_that_draft_generate_the_same_from_what_they_load(
    method: str, model: str, models: dict[str, Path], server: ServerProcess
) -> None:
    drafts = {"method": method, "model": str(models[model]), "num_speculative_tokens": 3}
    how = {"speculative_config": drafts, "disable_log_stats": False}
    with Engine(models["llama"], server.unix, engine=how) as engine:
        cold, _ = engine.generate(PROMPTS)
        before = accepted(engine)
        assert engine.do("reset")["reset"]
        again, loaded = engine.generate(PROMPTS)
        assert loaded == HITS
        assert [[token for token, _ in run] for run in again] == [[token for token, _ in run] for run in cold]
        if method == "draft_model":  # the model drafts for itself: with its KV it is right as often as before
            assert accepted(engine) - before == before > 0


def accepted(engine: Engine) -> float:
    """How many drafted tokens were accepted so far."""
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(float(line.split()[-1]) for line in engine.do("metrics")["text"].splitlines() if line.startswith(name))


# ------------------------------------------------------------------ schedulers


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
