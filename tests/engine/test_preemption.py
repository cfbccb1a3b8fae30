"""Preemption: what was computed is loaded from the connector, and no request is preempted needlessly.

Preempted runs have the same tokens as runs with enough blocks. Logits are not compared, because the shapes of what is
computed again differ (tests/engine/test_same_tokens.py compares bits under equal shapes).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from api_helpers import ServerProcess
from connector_helpers import engine_over
from engine_helpers import MemoryConnector, Pool, make_engine, prompt, run, run_one, sampling

from kvdock.client.client import Client
from kvdock.connectors.interface import Pending
from kvdock.engine.blocks import held
from kvdock.engine.config import EngineConfig, FullAttention, SlidingWindow, preset
from kvdock.engine.engine import Engine
from kvdock.engine.request import Completion, State
from kvdock.protocol.hits import PromptRun

HYBRIDS = ["tiny-hybrid2", "tiny-hybrid3"]


def with_room(tokens: list[int], max_tokens: int, model: str = "tiny") -> list[int]:
    return run_one(make_engine(preset(model)), tokens, sampling(max_tokens)).output_tokens


def connected(pool: Pool, model: str = "tiny", *, changes: dict[str, Any] | None = None, **options: Any) -> tuple[
    Engine, MemoryConnector
]:
    settings = dataclasses.replace(preset(model), **(changes or {}))
    engine = make_engine(settings, lambda kv: MemoryConnector(kv, pool, **options))
    assert isinstance(engine.connector, MemoryConnector)
    return engine, engine.connector


def without_cache(model: str, num_blocks: int) -> EngineConfig:
    return dataclasses.replace(preset(model), num_blocks=num_blocks, max_local_hit_tokens=0)


def until_preempted(engine: Engine, request_id: str) -> dict[str, Completion]:
    """Steps until the request has been preempted; returns the requests that ended meanwhile."""
    request = engine.requests[request_id]
    done: dict[str, Completion] = {}
    while request.metrics.preemptions == 0:
        assert request.state is not State.FINISHED, "it was never preempted"
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()
    return done


@pytest.mark.parametrize("model", ["tiny", "tiny-mha", "tiny-mla"])
def test_of_two_requests_that_saturate_seven_blocks_the_preempted_one_reloads(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Ten blocks of 16 tokens, three of them held by another request; chunks of 16 tokens; no local prefix cache."""
    first, second = prompt(1, 20), prompt(2, 49)
    engine = engine_over(server.unix, without_cache(model, 10), chunk_tokens=16, salt=f"minimal-{model}")
    blocks = engine.scheduler.blocks
    theirs, count = blocks.pool.allocate(3), blocks.check_integrity
    monkeypatch.setattr(blocks, "check_integrity", lambda tables, others: count(tables, [*others, theirs]))
    for name, tokens in (("first", first), ("second", second)):
        while engine.connector.lookup(name, tokens, 0) == Pending():  # so that both start in one step
            engine.connector.poll(0.05)
    engine.add_request(first, sampling(28), "first")
    engine.add_request(second, sampling(30), "second")
    request = engine.requests["second"]
    done = until_preempted(engine, "second")
    assert engine.drain(20.0), "what it has stored can be found when it comes back"
    assert len(request.tokens) == 65
    assert (request.computed, request.table, request.registered) == (0, [], 0)
    done |= run(engine)
    metrics = done["second"].metrics
    assert metrics.loaded_tokens == 64, "48 of 65 at the least"
    assert metrics.computed_prefill_tokens == 49, "the prompt, once: what no chunk held is one step of decoding"
    assert (metrics.preemptions, done["first"].metrics.preemptions) == (1, 0)
    assert done["first"].output_tokens == with_room(first, 28, model)
    assert done["second"].output_tokens == with_room(second, 30, model)
    assert engine.drain(20.0)
    engine.close()
    with Client(server.unix) as client:
        views = [view.outcome for view in client.requests(request="second").requests if view.outcome is not None]
    assert views[0].runs == [
        PromptRun(tokens=48, origin="computed", why="never_stored"), PromptRun(tokens=1, origin="computed", why="tail")
    ], "its own chunks, which it loads when it comes back, are no hit"
    assert (views[0].prompt_tokens, views[0].loaded_tokens, views[0].reloaded_tokens) == (49, 0, 64)


@pytest.mark.parametrize(("model", "num_blocks"), [("tiny", 15), ("tiny-hybrid2", 28), ("tiny-hybrid3", 36)])
def test_a_preempted_request_is_looked_up_with_its_output_and_computes_the_rest(model: str, num_blocks: int) -> None:
    changes = {"num_blocks": num_blocks, "max_local_hit_tokens": 0}
    engine, connector = connected({}, model, changes=changes, load_polls=1, store_polls=0)
    prompts = [prompt(seed, 90) for seed in range(2)]
    ids = [engine.add_request(tokens, sampling(90)) for tokens in prompts]
    until_preempted(engine, ids[1])
    tokens = list(engine.requests[ids[1]].tokens)
    done = run(engine)
    [load] = connector.all_loads
    assert load.request_id == ids[1]
    assert load.tokens == tokens and len(tokens) > 90
    assert done[ids[1]].metrics.loaded_tokens == load.hit_tokens
    wanted_prefill = 90 + len(tokens) - load.hit_tokens
    assert done[ids[1]].metrics.computed_prefill_tokens in (wanted_prefill, wanted_prefill - 1)
    for request_id, one in zip(ids, prompts, strict=True):
        assert done[request_id].output_tokens == with_room(one, 90, model)


@pytest.mark.parametrize("window", [None, 24, 33, 48])
def test_a_preempted_request_that_hits_all_of_its_tokens_computes_the_last_one(window: int | None) -> None:
    """Preempted on purpose at a chunk's end, before the next output is known. The last token attends to one token more
    than the next one does: with a window of 33 that token is in another block."""
    groups = (FullAttention(), FullAttention() if window is None else SlidingWindow(window))
    changes = {"max_local_hit_tokens": 0, "model": dataclasses.replace(preset("tiny-hybrid2").model, groups=groups)}
    engine, connector = connected({}, changes=changes, load_polls=1, store_polls=0)
    tokens = prompt(1, 90)
    whole = run_one(make_engine(engine.config), tokens, sampling(40)).output_tokens
    engine.add_request(tokens, sampling(40), "r")
    request = engine.requests["r"]
    while len(request.tokens) < 97:
        engine.step()
    request.tokens.pop()  # 96 tokens, all computed, and stored when the store has ended
    request.logits.pop()
    request.computed = 95
    assert engine.drain(10.0)
    engine.scheduler._preempt(request)
    found = run(engine)["r"]
    [load] = connector.all_loads
    assert load.hit_tokens == len(load.tokens) == 96
    assert found.output_tokens == whole


def test_stores_that_hold_the_blocks_are_awaited_before_somebody_is_preempted() -> None:
    """Blocks that only stores still read will be free soon, so no request is preempted for them."""
    engine, connector = connected({}, changes={"num_blocks": 12}, store_polls=30)
    run_one(engine, prompt(1, 100), sampling(2))
    assert len(connector.stores) > 0 and len(engine.scheduler.blocks.pool.free) == 6
    reading = {block for store in connector.stores for block in held(store.blocks)}
    one, two = prompt(2, 30), prompt(3, 30)
    ids = [engine.add_request(tokens, sampling(40)) for tokens in (one, two)]
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()
        tables = {block for request in engine.scheduler.running for block in held(request.table)}
        assert not tables & reading or not connector.stores or connector.stores[0].request_id != "request-0"
    assert [done[request].metrics.preemptions for request in ids] == [0, 0]
    assert [done[request].output_tokens for request in ids] == [with_room(one, 40), with_room(two, 40)]


def test_a_request_short_of_blocks_waits_for_one_that_loads_instead_of_preempting_itself() -> None:
    pool: Pool = {}
    writer, _ = connected(pool)
    long = prompt(5, 150)
    run_one(writer, long, sampling(1))
    assert writer.drain(10.0)
    engine, _ = connected(pool, changes={"num_blocks": 14}, load_polls=60, store_polls=0)
    runner = engine.add_request(prompt(6, 60), sampling(60))
    engine.step()
    loader = engine.add_request(long, sampling(30))
    engine.step()
    request = engine.requests[runner]
    assert engine.requests[loader].state is State.LOADING
    waited = 0
    while engine.requests[loader].state is State.LOADING:
        before = request.computed
        engine.step()
        engine.check_integrity()
        waited += request.computed == before
        assert request.metrics.preemptions == 0
    assert waited > 5, "wanted a load that holds the blocks for long"
    done = run(engine)
    assert done[runner].metrics.preemptions == 0 and done[loader].metrics.preemptions == 1
    assert done[runner].output_tokens == with_room(prompt(6, 60), 60)
    assert done[loader].output_tokens == with_room(long, 30)


@pytest.mark.parametrize("model", ["tiny", *HYBRIDS])
def test_a_request_preempted_in_the_middle_of_its_prompt_goes_on_from_what_it_stored(model: str) -> None:
    groups = len(preset(model).model.groups)
    changes = {"num_blocks": 22 * groups, "max_local_hit_tokens": 0}
    engine, connector = connected({}, model, changes=changes, load_polls=1, store_polls=0)
    early, late = prompt(1, 60), prompt(2, 200)
    engine.add_request(early, sampling(30), "early")
    for _ in range(2):
        engine.step()
    engine.add_request(late, sampling(5), "late")
    request = engine.requests["late"]
    while request.computed < 128:
        engine.step()
    assert engine.drain(10.0)
    engine.scheduler._preempt(request)
    engine.check_integrity()
    done = run(engine)
    assert [load.hit_tokens for load in connector.all_loads] == [128]
    assert done["late"].metrics.computed_prefill_tokens == 200
    assert done["late"].output_tokens == with_room(late, 5, model)
    assert done["early"].output_tokens == with_room(early, 30, model)


@pytest.mark.parametrize(("model", "hits"), [("tiny", [192]), ("tiny-hybrid2", [192, 96]), ("tiny-hybrid3", [192, 96])])
def test_exactly_what_failed_and_what_follows_is_computed_again(model: str, hits: list[int]) -> None:
    """With windows the shorter prefix needs other blocks: it is looked up again, and what failed is not found."""
    pool: Pool = {}
    tokens = prompt(1, 200)
    writer, _ = connected(pool, model)
    run_one(writer, tokens, sampling(1))
    assert writer.drain(10.0)
    engine, connector = connected(pool, model, fail_at=100)
    found = run_one(engine, tokens)
    assert [load.hit_tokens for load in connector.all_loads] == hits
    assert (found.metrics.loaded_tokens, found.metrics.computed_prefill_tokens) == (96, 104)
    assert found.output_tokens == with_room(tokens, 12, model)
    assert len(engine.scheduler.blocks.pool.free) == engine.config.num_blocks - sum(
        len(held(store.blocks)) for store in connector.stores
    )
