"""Long hits that are loaded before SGLang admits their requests, in whole engines on the CPU."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true, eventually
from engine_fixtures import Spare
from engines import TP2, Engine, odd
from stories import IN_TURN, with_figures
from whole_engines import HITS, OTHERS, PROMPTS, comes_back, prompts_of, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUNS = PROMPTS[0][:40]
"""It has no whole page, so nothing is looked up for it."""


def told(folder: Path, *more: dict[str, Any]) -> dict[str, Any]:
    """What an engine is told that loads hits of 256 tokens and more early, and exports its figures to `folder`."""
    said = {"extra": {"early_load_tokens": 256}, **with_figures(folder)}
    for one in more:
        for what, names in one.items():
            said[what] = {**said.get(what, {}), **names} if isinstance(names, dict) else names
    return said


def early_loads(engine: Engine) -> float:
    return engine.figures().get("kvdock_loads_early_total", 0)


@pytest.mark.parametrize("ranks", [{}, TP2], ids=["one rank", "two ranks"])
def test_beside_a_request_that_runs_a_long_hit_is_loaded_before_its_request_is_admitted(
    ranks: dict[str, Any], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """A short one is loaded with its batch. What the device has of a prefix stays there meanwhile."""
    with Engine(models["llama"], server.unix, **told(tmp_path, ranks)) as engine:
        engine.generate(PROMPTS)
        engine.drain()
        local, cached = engine.generate(PROMPTS, beside=RUNS)
        assert cached == HITS and early_loads(engine) == 0
        for count, before in ((2, [RUNS]), (4, [RUNS]), (6, [PROMPTS[2][:200]])):
            engine.flush()
            engine.generate(before)
            loaded, cached = engine.generate(PROMPTS, beside=RUNS)
            assert (tokens_of(loaded), cached) == (tokens_of(local), HITS)
            assert early_loads(engine) == count


def test_requests_with_equal_prefixes_wait_for_one_load(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    prompts = [PROMPTS[2] + end for end in ([5, 6, 7], [8, 9])]
    late = told(tmp_path, odd("LateLinker", tmp_path))
    with Engine(models["llama"], server.unix, **late) as engine, Client(server.unix) as client:
        local, _ = engine.generate(prompts)
        engine.drain()
        engine.flush()
        loaded, cached = engine.generate(prompts, beside=RUNS, at_once=True)
        assert (tokens_of(loaded), cached) == (tokens_of(local), [512, 512])
        figures = engine.figures()
        assert (figures["kvdock_loads_early_total"], figures["kvdock_load_tokens_total"]) == (1, 512)
        assert comes_true(lambda: client.status().hits.loaded_tokens == 512)
        assert client.status().hits.local_tokens == 512 + 512, "of the first two requests, and of these"


def test_requests_that_run_go_on_while_a_long_hit_is_loaded(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    with Engine(models["llama"], server.unix, **told(tmp_path, odd("LateUntilStepsLinker", tmp_path))) as engine:
        local, _ = engine.generate(PROMPTS[2:])
        engine.drain()
        engine.flush()
        (tmp_path / "late").unlink(missing_ok=True)  # of stores, which no step need wait for
        loaded, cached = engine.generate(PROMPTS[2:], beside=RUNS)
        assert (tokens_of(loaded), cached) == (tokens_of(local), [512])
        assert early_loads(engine) == 1 and not (tmp_path / "late").exists()


@pytest.mark.parametrize("how", [{}, IN_TURN], ids=["overlap", "no overlap"])
def test_slots_of_a_request_that_is_aborted_meanwhile_are_given_back(
    how: dict[str, Any], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang counts all slots whenever nothing runs, and ends if one is missing."""
    with Engine(models["llama"], server.unix, **told(tmp_path, odd("LateLinker", tmp_path), how)) as engine:
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        engine.flush()
        found = engine.do("generate", prompts=PROMPTS[2:], beside=RUNS, abort_s=0.2)
        assert found["why"] != ["length"]
        loaded, cached = comes_back(engine)
        assert (tokens_of(loaded), cached) == (tokens_of(local), HITS)


def test_an_early_load_that_fails_ends_no_request(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    with Engine(models["llama"], server.unix, **told(tmp_path, odd("DamagedEarlyLinker", tmp_path))) as engine:
        local, _ = engine.generate(PROMPTS)
        engine.drain()
        engine.flush()
        (tmp_path / "damage").touch()
        loaded, (cached,) = engine.generate(PROMPTS[2:], beside=RUNS)
        assert tokens_of(loaded) == tokens_of(local[2:]) and cached < 512
        assert not (tmp_path / "damage").exists() and early_loads(engine) == 0
        engine.drain()
        loaded, cached = comes_back(engine)
        assert (tokens_of(loaded), cached) == (tokens_of(local), HITS)


def test_early_loads_under_memory_pressure_give_the_same_tokens(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """The pool holds three of the prompts, and an early load may take a quarter of it."""
    four = [prompts_of(seed)[2] for seed in (100, 200, 300, 400)]
    small = {"engine": {"max_total_tokens": 2048, "max_running_requests": 3, "chunked_prefill_size": 128}}
    with Engine(models["llama"], server.unix, **told(tmp_path, small)) as engine:
        alone, _ = engine.generate(four, new=24)
        for _ in range(3):
            engine.drain()
            engine.flush()
            together, cached = engine.generate(four, new=24, at_once=True, beside=RUNS)
            assert (tokens_of(together), cached) == (tokens_of(alone), [512] * 4)
        assert early_loads(engine) > 0


def test_the_memory_of_an_early_load_keeps_nobody_waiting_once_it_has_ended(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """SGLang admits nobody any more when it has refused a request for want of memory, until a request ends. The one
    that runs may take all but 1056 tokens of the pool."""
    with Engine(models["llama"], server.unix, **told(tmp_path, odd("LateLinker", tmp_path))) as engine:
        local, _ = engine.generate(PROMPTS[2:])
        engine.drain()
        engine.flush()
        found = engine.do("generate", prompts=[PROMPTS[2], OTHERS[2]], at_once=True, beside=RUNS, beside_new=3000)
        assert tokens_of(found["runs"][:1]) == tokens_of(local) and found["cached"] == [512, 0]
        assert early_loads(engine) == 1 and found["beside_why"] == "abort", "it still ran"


def test_pages_that_another_request_has_computed_meanwhile_stay(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """That one loads nothing. The slots of what was loaded twice are given back."""
    (tmp_path / "steps").write_text("60")
    with Engine(models["llama"], server.unix, **told(tmp_path, odd("LateUntilStepsLinker", tmp_path))) as engine:
        two = [PROMPTS[2], PROMPTS[2] + [5, 6]]
        local, _ = engine.generate(two)
        engine.drain()
        engine.flush()
        alone = [None, {"kvdock": {"load": False}}]
        loaded, cached = engine.generate(two, beside=RUNS, beside_new=1000, at_once=True, custom_params=alone)
        assert (tokens_of(loaded), cached) == (tokens_of(local), [512, 0]) and early_loads(engine) == 1
        loaded, cached = comes_back(engine)
        assert cached[2] == 512 and tokens_of(loaded[2:]) == tokens_of(local[:1])


@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "not flushed"])
def test_what_is_loaded_early_while_weights_change_is_computed(
    flush: bool, models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    with (
        Engine(models["llama"], server.unix, **told(tmp_path, odd("LateLinker", tmp_path))) as engine,
        Engine(models["llama-b"], None) as bare,
    ):
        engine.generate(PROMPTS[2:])
        engine.drain()
        engine.flush()
        found = engine.do("generate", prompts=PROMPTS[2:], beside=RUNS, renew=[0.2, str(models["llama-b"]), flush])
        assert found["cached"] == [0] and tokens_of(found["runs"]) == tokens_of(bare.generate(PROMPTS[2:])[0])
        assert early_loads(engine) == 0
        engine.flush()
        assert tokens_of(engine.generate(PROMPTS[2:])[0]) == tokens_of(bare.generate(PROMPTS[2:])[0])


def test_an_early_load_needs_no_server(models: dict[str, Path], spare: Spare, tmp_path: Path) -> None:
    """It is killed between the plan and the copies."""
    held = told(tmp_path, odd("HeldEarlyLinker", tmp_path))
    with spare.take() as dying, Engine(models["llama"], dying.unix, **held) as engine:
        local, _ = engine.generate(PROMPTS[2:])
        engine.drain()
        engine.flush()
        engine.tell("generate", prompts=PROMPTS[2:], beside=RUNS)
        eventually((tmp_path / "begun").exists)
        dying.stop(signal.SIGKILL)
        (tmp_path / "go").touch()
        found = engine.done(engine.answer())
        assert (tokens_of(found["runs"]), found["cached"]) == (tokens_of(local), [512])
        engine.flush()
        computed, cached = engine.generate(PROMPTS[2:])
        assert (tokens_of(computed), cached) == (tokens_of(local), [0])


def test_a_request_that_is_aborted_meanwhile_leaves_no_lease_and_its_id_to_another(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Another request has it then."""
    late = told(tmp_path, odd("LateLinker", tmp_path))
    with Engine(models["llama"], server.unix, **late) as engine, Client(server.unix) as client:
        engine.generate(PROMPTS[2:])
        local, _ = engine.generate(OTHERS[2:])
        engine.drain()
        engine.flush()
        found = engine.do("generate", prompts=PROMPTS[2:], beside=RUNS, abort_s=0.2, rid="again")
        assert found["why"] != ["length"]
        assert comes_true(lambda: not client.status().leases)
        loaded, cached = engine.generate(OTHERS[2:], beside=RUNS, rid="again")
        assert (tokens_of(loaded), cached) == (tokens_of(local), [512])


def test_an_early_load_beside_what_others_compute_once(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """The server has the beginning of the prompt. The engine computes the rest, and waits for nobody."""
    once = {"extra": {"compute_once": 10.0}}
    with Engine(models["llama"], server.unix, **told(tmp_path, once)) as engine:
        longer = PROMPTS[2] + prompts_of(7)[1]
        alone, _ = engine.generate([longer], custom_params={"kvdock": {"store": False}})
        engine.flush()
        engine.generate(PROMPTS[2:])
        engine.drain()
        engine.flush()
        loaded, cached = engine.generate([longer], beside=RUNS)
        assert (tokens_of(loaded), cached) == (tokens_of(alone), [512]) and early_loads(engine) == 1
        assert not engine.figures().get("kvdock_wait_seconds_count")


def test_the_drafts_kv_is_loaded_early_with_the_targets(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """The draft model is the target once more, and without its KV its drafts would be wrong."""
    drafts = {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(models["llama"]),
        "speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
    }
    with Engine(models["llama"], server.unix, **told(tmp_path, {"engine": drafts})) as engine:
        engine.generate(PROMPTS[2:])
        engine.drain()
        local = engine.do("generate", prompts=PROMPTS[2:], new=40, beside=RUNS)
        engine.flush()
        found = engine.do("generate", prompts=PROMPTS[2:], new=40, beside=RUNS)
        assert (tokens_of(found["runs"]), found["cached"]) == (tokens_of(local["runs"]), [512])
        assert early_loads(engine) == 1 and found["verified"] == local["verified"]
