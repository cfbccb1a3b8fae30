"""The engine with a connector: loads that succeed, fail or come late, stores in progress, preemption and abort.

The connector is real and runs in this process (engine_helpers.MemoryConnector); blocks that are being
loaded are NaN until the load is done, and a store reads its blocks only when it ends.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
from engine_helpers import (
    MemoryConnector,
    Pool,
    assert_same_bits,
    config,
    make_engine,
    prompt,
    run,
    run_one,
    sampling,
)

from kvdock.engine.blocks import held
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.engine.request import Completion, RequestError, State


def connected(pool: Pool, settings: EngineConfig | None = None, **options: Any) -> tuple[Engine, MemoryConnector]:
    """An engine and its connector; `options` are those of MemoryConnector."""
    settings = settings if settings is not None else config()
    engine = make_engine(settings, lambda kv: MemoryConnector(kv, pool, **options))
    assert isinstance(engine.connector, MemoryConnector)
    return engine, engine.connector


def filled_pool(*prompts: list[int], max_tokens: int = 12) -> Pool:
    """The connector's memory after an engine has served these prompts."""
    pool: Pool = {}
    engine, _ = connected(pool)
    for tokens in prompts:
        run_one(engine, tokens, sampling(max_tokens))
    assert engine.drain(10.0)
    engine.close()
    return pool


def cold(tokens: list[int], max_tokens: int = 12) -> Completion:
    return run_one(make_engine(), tokens, sampling(max_tokens))


@pytest.mark.parametrize("length", [200, 193, 150])
def test_kv_loaded_by_another_engine_gives_the_bits_of_a_cold_run(length: int) -> None:
    """Stores and prefill both have chunks of 64 tokens, so shapes are equal, and bits too."""
    tokens = prompt(1, length)
    pool: Pool = {}
    first, _ = connected(pool, chunk_tokens=64)
    run_one(first, tokens)
    assert first.drain(10.0)
    second, _ = connected(pool, chunk_tokens=64)
    found = run_one(second, tokens)
    assert found.metrics.loaded_tokens == length // 64 * 64
    assert found.metrics.computed_prefill_tokens == length % 64
    assert_same_bits(found, cold(tokens))


def test_a_load_and_a_local_hit_of_the_same_length_give_the_same_bits() -> None:
    tokens = prompt(1, 210)
    engine, _ = connected(filled_pool(tokens))
    loaded = run_one(engine, tokens)
    local = run_one(engine, tokens, sampling(max_local_hit_tokens=loaded.metrics.loaded_tokens))
    assert local.metrics.local_hit_tokens == loaded.metrics.loaded_tokens == 192
    assert_same_bits(local, loaded)


def test_a_full_hit_computes_the_last_token_only() -> None:
    tokens = prompt(1, 192)
    engine, _ = connected(filled_pool(tokens))
    found = run_one(engine, tokens)
    assert (found.metrics.loaded_tokens, found.metrics.computed_prefill_tokens) == (192, 1)
    assert found.output_tokens == cold(tokens).output_tokens


def test_only_fresh_blocks_are_loaded_when_the_front_is_shared_with_a_running_request() -> None:
    """The connector fills a load's blocks with NaN: if one were shared, the other request's tokens would change."""
    front = prompt(1, 96)
    longer = front + prompt(2, 100)
    engine, connector = connected(filled_pool(longer))
    runner = engine.add_request(front + prompt(3, 30), sampling(60))
    for _ in range(8):
        engine.step()
    joiner = engine.add_request(longer, sampling())
    done = run(engine)
    [load] = [load for load in connector.all_loads if load.request_id == joiner]
    assert (load.local_tokens, load.hit_tokens) == (96, 192)
    assert done[joiner].output_tokens == cold(longer).output_tokens
    assert done[runner].output_tokens == cold(front + prompt(3, 30), 60).output_tokens


def test_others_run_while_a_request_loads() -> None:
    tokens = prompt(1, 200)
    engine, _ = connected(filled_pool(tokens), load_polls=10)
    other = engine.add_request(prompt(9, 20), sampling(30))
    engine.step()
    loader = engine.add_request(tokens, sampling())
    during = 0
    while engine.requests[loader].state in (State.WAITING, State.LOADING):
        during += sum(output.request_id == other for output in engine.step())
        engine.check_integrity()
    assert during >= 9
    done = run(engine)
    assert_same_bits(done[other], cold(prompt(9, 20), 30))
    assert done[loader].output_tokens == cold(tokens).output_tokens


def test_a_step_waits_for_the_connector_only_when_nothing_can_be_computed() -> None:
    tokens = prompt(1, 200)
    engine, connector = connected(filled_pool(tokens), load_polls=6)
    other = engine.add_request(prompt(9, 20), sampling(3))
    engine.add_request(tokens, sampling())
    while other in engine.requests:
        engine.step()
    assert connector.waits_s == [0.0] * 3
    assert connector.loads, "the load ended too early to see anything"
    engine.step()
    assert connector.waits_s[3:] == [0.0, engine.config.idle_wait_s]
    run(engine)


def test_loading_blocks_are_not_offered_to_the_prefix_cache() -> None:
    tokens = prompt(1, 200)
    engine, _ = connected(filled_pool(tokens), load_polls=6)
    twins = [engine.add_request(tokens, sampling()) for _ in range(2)]
    engine.step()
    assert [engine.requests[twin].state for twin in twins] == [State.LOADING] * 2
    assert not engine.scheduler.blocks.pool.cached
    done = run(engine)
    assert all(done[twin].output_tokens == cold(tokens).output_tokens for twin in twins)
    assert all(done[twin].metrics.local_hit_tokens == 0 for twin in twins)


@pytest.mark.parametrize("fail_at", [0, 32, 100, 191])
def test_what_a_failed_load_left_out_is_computed(fail_at: int) -> None:
    tokens = prompt(1, 200)
    engine, connector = connected(filled_pool(tokens), fail_at=fail_at)
    found = run_one(engine, tokens)
    assert len(connector.all_loads) == 1
    assert found.metrics.loaded_tokens == fail_at // 16 * 16
    assert found.metrics.computed_prefill_tokens == 200 - fail_at // 16 * 16
    assert found.output_tokens == cold(tokens).output_tokens
    assert not any(logits.isnan().any() for logits in found.logits)


def test_a_failed_load_falls_back_to_the_local_hit_not_before_it() -> None:
    front = prompt(1, 96)
    tokens = front + prompt(2, 100)
    engine, _ = connected(filled_pool(tokens), fail_at=0)
    run_one(engine, front + prompt(3, 5))
    found = run_one(engine, tokens)
    assert (found.metrics.local_hit_tokens, found.metrics.loaded_tokens) == (96, 0)
    assert found.output_tokens == cold(tokens).output_tokens


def test_an_answer_that_comes_late_delays_only_its_own_request() -> None:
    tokens = prompt(1, 200)
    engine, connector = connected(filled_pool(tokens), unknown_lookups=5)
    first = engine.add_request(tokens, sampling())
    engine.step()
    connector.unknown_lookups = 0
    second = engine.add_request(prompt(2, 20), sampling())
    connector.asked[second] = (9, [])
    engine.step()
    assert engine.requests[second].state is State.RUNNING
    assert run(engine)[first].metrics.loaded_tokens == 192


def test_blocks_being_stored_outlive_their_request() -> None:
    engine, connector = connected({}, config(num_blocks=12), store_polls=40)
    tokens = prompt(1, 100)
    run_one(engine, tokens, sampling(4))
    stored = {block for store in connector.stores for block in held(store.blocks)}
    assert len(stored) == 6
    assert not stored & engine.scheduler.blocks.pool.free.keys()
    run_one(engine, prompt(2, 80), sampling(4))  # takes all other blocks and writes none of the held ones
    assert engine.drain(10.0)
    engine.check_integrity()
    assert len(engine.scheduler.blocks.pool.free) == 12
    other, _ = connected(connector.pool)
    found = run_one(other, tokens)
    assert found.metrics.loaded_tokens == 96
    assert found.output_tokens == cold(tokens).output_tokens


def test_a_request_waits_for_blocks_that_a_store_holds() -> None:
    engine, _ = connected({}, config(num_blocks=8), store_polls=12)
    run_one(engine, prompt(1, 100), sampling(4))
    assert len(engine.scheduler.blocks.pool.free) < 7
    assert run_one(engine, prompt(2, 100)).output_tokens == cold(prompt(2, 100)).output_tokens


def test_an_aborted_load_keeps_its_blocks_and_its_id_until_it_reports() -> None:
    tokens = prompt(1, 200)
    engine, connector = connected(filled_pool(tokens), load_polls=5)
    victim = engine.add_request(tokens, sampling())
    engine.step()
    taken = set(held(connector.loads[0].blocks))
    engine.abort(victim)
    engine.check_integrity()
    assert not taken & engine.scheduler.blocks.pool.free.keys()
    assert connector.forgotten == [victim]
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(tokens, request_id=victim)
    assert not engine.has_unfinished
    assert engine.drain(10.0)
    engine.check_integrity()
    assert len(engine.scheduler.blocks.pool.free) == engine.config.num_blocks
    assert engine.add_request(tokens, sampling(), victim) == victim
    assert run(engine)[victim].output_tokens == cold(tokens).output_tokens


def test_a_preempted_request_is_loaded_back_with_its_output() -> None:
    engine, connector = connected({}, config(num_blocks=16, max_local_hit_tokens=0), load_polls=1, store_polls=0)
    prompts = [prompt(seed, 90) for seed in range(2)]
    ids = [engine.add_request(tokens, sampling(60)) for tokens in prompts]
    done = run(engine)
    assert done[ids[1]].metrics.preemptions == 1
    [load] = connector.all_loads
    assert load.request_id == ids[1]
    assert load.hit_tokens > 90, "outputs were not looked up"
    for request_id, tokens in zip(ids, prompts, strict=True):
        assert done[request_id].output_tokens == cold(tokens, 60).output_tokens
    assert connector.forgotten == [ids[1], *ids]


def test_drain_says_when_it_gave_up() -> None:
    now = iter(range(1000))
    engine = make_engine(config(), lambda kv: MemoryConnector(kv, {}, store_polls=50), lambda: float(next(now)))
    run_one(engine, prompt(1, 100))
    assert not engine.drain(5.0)
    assert engine.drain(500.0)


def test_close_aborts_and_closes_the_connector() -> None:
    engine, connector = connected(filled_pool(prompt(1, 200)), load_polls=5)
    engine.add_request(prompt(1, 200))
    engine.step()
    engine.add_request(prompt(2, 20))
    engine.close()
    assert connector.closed
    assert not engine.has_unfinished


@pytest.mark.sweep("seed")
@pytest.mark.parametrize(
    ("model", "num_blocks"), [("tiny", 22), ("tiny-mla", 22), ("tiny-hybrid2", 44), ("tiny-hybrid3", 60)]
)
@pytest.mark.parametrize("seed", range(3))
def test_random_delays_failures_preemptions_and_aborts_never_change_tokens(
    seed: int, model: str, num_blocks: int
) -> None:
    random = Random(seed)
    pool: Pool = {}
    settings = preset(model)
    engine, connector = connected(
        pool, dataclasses.replace(settings, num_blocks=num_blocks, max_running=6), random=Random(seed + 100),
        unknown_lookups=1, load_polls=3, store_polls=4,
    )
    alone = make_engine(dataclasses.replace(settings, max_local_hit_tokens=0))
    wanted: dict[str, list[int]] = {}
    done: dict[str, Completion] = {}
    while len(wanted) < 25 or engine.has_unfinished:
        if len(wanted) < 25 and random.random() < 0.3:
            tokens, params = prompt(random.randrange(4), random.randrange(20, 150)), sampling(random.randrange(1, 70))
            wanted[engine.add_request(tokens, params)] = run_one(alone, tokens, params).output_tokens
        alive = [request.id for request in engine.requests.values() if request.state is not State.FINISHED]
        if random.random() < 0.02 and alive:
            aborted = engine.abort(random.choice(alive))
            done[aborted.request_id] = aborted
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()
    assert engine.drain(10.0)
    assert done.keys() == wanted.keys()
    assert connector.all_loads
    assert sum(completion.metrics.preemptions for completion in done.values()) > 0
    for request_id, completion in done.items():
        assert completion.output_tokens == wanted[request_id][: len(completion.output_tokens)]
        assert completion.finish_reason == "aborted" or len(completion.output_tokens) == len(wanted[request_id])
    assert len(engine.scheduler.blocks.pool.free) == engine.config.num_blocks
