"""Batching, chunking, the engine's own prefix cache, preemption, abort, sampling: none of them changes the tokens."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import pytest
import torch
from engine_helpers import assert_same_bits, config, make_engine, prompt, run, run_one, sampling

from kvdock.engine import tokenizer
from kvdock.engine.config import ConfigError
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.request import Completion, RequestError, SamplingParams, State, sample


def assert_same_tokens(found: Completion, wanted: Completion) -> None:
    """For runs whose chunks have different shapes: equal tokens, and logits that are equal up to rounding."""
    assert found.output_tokens == wanted.output_tokens
    for one, other in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunked_prefill_gives_the_tokens_of_one_piece(chunk: int) -> None:
    wanted = run_one(make_engine(config(prefill_chunk_tokens=300, max_step_tokens=400)), prompt(1, 230))
    found = run_one(make_engine(config(prefill_chunk_tokens=chunk, max_step_tokens=400)), prompt(1, 230))
    assert_same_tokens(found, wanted)


@pytest.mark.parametrize("length", [200, 193, 192])
def test_a_prefix_cache_hit_gives_the_bits_of_a_cold_run(length: int) -> None:
    """The hit ends at the end of a chunk, or within the last one, and is limited so that chunks have equal shapes."""
    engine = make_engine()
    cold = run_one(engine, prompt(1, length))
    warm = run_one(engine, prompt(1, length), sampling(max_local_hit_tokens=(length - 1) // 64 * 64))
    assert cold.metrics.local_hit_tokens == 0
    assert warm.metrics.local_hit_tokens == (length - 1) // 64 * 64 > 0
    assert warm.metrics.computed_prefill_tokens == length - warm.metrics.local_hit_tokens
    assert_same_bits(warm, cold)


def test_two_warm_runs_with_the_same_chunks_have_the_same_bits() -> None:
    engine = make_engine()
    run_one(engine, prompt(1, 250))
    first, second = (run_one(engine, prompt(1, 250)) for _ in range(2))
    assert first.metrics.local_hit_tokens == second.metrics.local_hit_tokens == 240
    assert_same_bits(first, second)


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    engine = make_engine()
    cold = run_one(engine, prompt(1, 128))
    warm = run_one(engine, prompt(1, 128))
    assert warm.metrics.local_hit_tokens == 112
    assert warm.metrics.computed_prefill_tokens == 16
    assert_same_tokens(warm, cold)


def test_no_local_hit_when_the_limit_is_zero() -> None:
    engine = make_engine(config(max_local_hit_tokens=0))
    cold, again = (run_one(engine, prompt(1, 200)) for _ in range(2))
    assert again.metrics.local_hit_tokens == 0
    assert_same_bits(again, cold)


def test_output_blocks_are_found_by_the_next_turn() -> None:
    engine = make_engine()
    first = run_one(engine, prompt(1, 100), sampling(30))
    turn = prompt(1, 100) + first.output_tokens + prompt(2, 20)
    second = run_one(engine, turn)
    assert second.metrics.local_hit_tokens == 128
    assert_same_tokens(second, run_one(make_engine(), turn))


def test_chunks_end_at_fixed_multiples_wherever_they_start() -> None:
    engine = make_engine()
    run_one(engine, prompt(1, 200))
    request = engine.requests[engine.add_request(prompt(1, 200), sampling(1, max_local_hit_tokens=48))]
    ends = []
    while engine.has_unfinished:
        engine.step()
        ends.append(request.computed)
    assert ends[:-1] == [64, 128, 192]
    assert request.metrics.computed_prefill_tokens == 152


def test_other_requests_do_not_change_a_single_bit() -> None:
    lengths = [5, 64, 150, 31, 200, 90, 17, 128, 250, 70]
    engine = make_engine(config(num_blocks=256, max_step_tokens=80))
    ids = {engine.add_request(prompt(seed, n), sampling(10 + seed)): seed for seed, n in enumerate(lengths)}
    together = run(engine)
    for request_id, seed in ids.items():
        alone = run_one(make_engine(), prompt(seed, lengths[seed]), sampling(10 + seed))
        assert_same_bits(together[request_id], alone)


def test_prefill_and_decode_share_a_step() -> None:
    engine = make_engine()
    first = engine.add_request(prompt(1, 10), sampling(40))
    engine.step()
    engine.add_request(prompt(2, 300), sampling(4))
    seen = [output.request_id for _ in range(4) for output in engine.step()]
    assert seen == [first] * 4, "a long prompt held up a decoding request"


def test_long_prompts_do_not_hold_up_a_later_request_that_decodes() -> None:
    engine = make_engine(config(max_step_tokens=128))
    run_one(engine, prompt(1, 600), sampling(1))
    engine.add_request(prompt(1, 600), sampling(1, max_local_hit_tokens=48))
    engine.add_request(prompt(2, 600), sampling(1))
    short = engine.add_request(prompt(3, 10), sampling(6))
    seen = [output.request_id for _ in range(6) for output in engine.step()]
    assert seen == [short] * 6


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    engine = make_engine(config(num_blocks=8))
    engine.add_request(prompt(1, 70), sampling(10))
    engine.step()
    large = engine.add_request(prompt(2, 80), sampling(2))
    small = engine.add_request(prompt(3, 5), sampling(20))
    for _ in range(5):
        engine.step()
    assert [engine.requests[name].state for name in (large, small)] == [State.WAITING] * 2
    assert list(run(engine))[-2:] == [large, small]


def test_no_more_requests_hold_blocks_than_allowed() -> None:
    engine = make_engine(config(max_running=2))
    ids = [engine.add_request(prompt(seed, 20), sampling(5)) for seed in range(5)]
    engine.step()
    assert [engine.requests[name].state for name in ids] == [State.RUNNING] * 2 + [State.WAITING] * 3
    assert run(engine).keys() == set(ids)


def test_preempted_requests_give_the_tokens_they_give_alone() -> None:
    prompts = [prompt(seed, 60 + 5 * seed) for seed in range(6)]
    engine = make_engine(config(num_blocks=20))
    ids = [engine.add_request(tokens, sampling(60)) for tokens in prompts]
    done = run(engine)
    assert done[ids[0]].metrics.preemptions == 0, "the earliest request was preempted"
    assert sum(completion.metrics.preemptions for completion in done.values()) > 0
    for request_id, tokens in zip(ids, prompts, strict=True):
        assert_same_tokens(done[request_id], run_one(make_engine(), tokens, sampling(60)))
    assert len(engine.scheduler.blocks.pool.free) == 20


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_abort_frees_the_blocks_whenever_it_comes(steps: int) -> None:
    engine = make_engine(config(max_running=1, prefill_chunk_tokens=64))
    victim = engine.add_request(prompt(1, 200), sampling(50))
    other = engine.add_request(prompt(2, 100), sampling())
    for _ in range(steps):
        engine.step()
    assert engine.abort(victim).finish_reason == "aborted"
    engine.check_integrity()
    assert_same_bits(run(engine)[other], run_one(make_engine(), prompt(2, 100)))
    assert len(engine.scheduler.blocks.pool.free) == engine.config.num_blocks
    with pytest.raises(RequestError, match="wanted an unfinished request"):
        engine.abort(victim)


def test_sampling_depends_on_the_seed_and_on_nothing_else() -> None:
    def params(seed: int) -> SamplingParams:
        return sampling(20, temperature=1.0, top_k=50, seed=seed)

    alone = run_one(make_engine(), prompt(1, 100), params(7))
    engine = make_engine()
    ids = [engine.add_request(prompt(1, 100), params(seed)) for seed in (3, 7, 8)]
    together = run(engine)
    assert together[ids[1]].output_tokens == alone.output_tokens
    assert len({tuple(completion.output_tokens) for completion in together.values()}) == 3
    assert alone.output_tokens != run_one(make_engine(), prompt(1, 100), sampling(20)).output_tokens


def test_top_k_excludes_all_others() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9])
    draw = torch.Generator().manual_seed(0)
    assert {sample(logits, SamplingParams(temperature=5.0, top_k=2), draw) for _ in range(60)} == {1, 3}
    assert {sample(logits, SamplingParams(temperature=5.0), draw) for _ in range(60)} == {0, 1, 2, 3}


def test_eos_stops_a_request_unless_it_is_ignored() -> None:
    drawn = sampling(900, temperature=5.0, seed=1)
    ignored = run_one(make_engine(), prompt(1, 20), drawn)
    assert (ignored.finish_reason, len(ignored.output_tokens)) == ("length", 900)
    where = ignored.output_tokens.index(tokenizer.EOS)
    stopped = run_one(make_engine(), prompt(1, 20), dataclasses.replace(drawn, ignore_eos=False))
    assert stopped.finish_reason == "stop"
    assert stopped.output_tokens == ignored.output_tokens[: where + 1]


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], sampling(), "prompt: found no tokens"),
        ([1, 258], sampling(), r"prompt: found token 258, wanted 0\.\.257"),
        ([1] * 2040, sampling(9), "prompt and max_tokens: found 2049 tokens, wanted at most 2048"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(tokens: list[int], params: SamplingParams, message: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(tokens, params)
    assert not engine.has_unfinished


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.add_request([1], request_id="a")
    with pytest.raises(RequestError, match="'a' in use"):
        engine.add_request([1], request_id="a")
    run(engine)
    engine.add_request([1], request_id="a")


def test_the_largest_request_that_is_accepted_finishes() -> None:
    engine = make_engine(config(num_blocks=8))
    assert len(run_one(engine, prompt(1, 100), sampling(28)).output_tokens) == 28


def test_kv_memory_of_another_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv: found .*num_blocks=7.*, wanted the KV memory of the same config"):
        Engine(config(), kv=KVCache(config(num_blocks=7)))


def test_time_to_first_token_is_read_from_the_clock_passed_in() -> None:
    now = iter(range(100))
    engine = make_engine(clock=lambda: float(next(now)))
    assert run_one(engine, prompt(1, 10)).metrics.time_to_first_token_s == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", math.nan), ("top_k", 0), ("max_local_hit_tokens", -1)],
)
def test_bad_sampling_is_refused_by_name(name: str, value: float) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"{name}: found {value}, wanted"):
        SamplingParams(**changes)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 4))])
def test_no_block_is_lost_under_random_use(seed: int) -> None:
    """Shared prefixes, few blocks, preemptions and aborts: integrity after each step, right tokens at the end."""
    random = Random(seed)
    engine = make_engine(config(num_blocks=20, max_running=6), shuffle_seed=seed)
    alone = make_engine(config(max_local_hit_tokens=0))
    wanted: dict[str, list[int]] = {}
    done: dict[str, Completion] = {}
    while len(wanted) < 14 or engine.has_unfinished:
        if len(wanted) < 14 and random.random() < 0.5:
            tokens, params = prompt(random.randrange(3), random.randrange(1, 120)), sampling(random.randrange(1, 80))
            wanted[engine.add_request(tokens, params)] = run_one(alone, tokens, params).output_tokens
        if random.random() < 0.02 and engine.has_unfinished:
            aborted = engine.abort(random.choice(list(engine.requests)))
            done[aborted.request_id] = aborted
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()
    assert done.keys() == wanted.keys()
    assert sum(completion.metrics.preemptions for completion in done.values()) > 0
    for request_id, completion in done.items():
        assert completion.output_tokens == wanted[request_id][: len(completion.output_tokens)]
        assert completion.finish_reason == "aborted" or len(completion.output_tokens) == len(wanted[request_id])
    assert len(engine.scheduler.blocks.pool.free) == engine.config.num_blocks


def test_text_goes_in_and_text_comes_out() -> None:
    engine = Engine(config())
    [completion] = engine.generate(["once upon a time"], SamplingParams(max_tokens=5))
    assert completion.prompt_tokens == tokenizer.encode("once upon a time")
    assert completion.text == tokenizer.decode(completion.output_tokens)
    engine.close()
