"""vLLM takes back what a request had computed, with a word or without one, and the request ends before it has it again.

What it stores then must be its own KV: each scenario asks for the same prompt afterwards, and says what was loaded and
how much of that was wrong."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep import into_lockstep
from sched_engine import SchedEngine
from sched_scenarios import prompt
from vllm.v1.request import RequestStatus

from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.schemas import ReserveAnswer

STORED = 320


def engine_of(address: str, **settings: Any) -> SchedEngine:
    return SchedEngine(address, seqs=8, weights_digest=os.urandom(8).hex(), **settings)


def half_of(engine: SchedEngine) -> Any:
    return engine.half


def step_until(engine: SchedEngine, holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < end_s, "it never came true"
        engine.step()
        time.sleep(0.002)


def settle(engine: SchedEngine) -> None:
    step_until(engine, lambda: not half_of(engine)._stores)


def forget_all(engine: SchedEngine) -> None:
    """The server holds nothing any more, as after an eviction, and vLLM takes the blocks of all that runs."""
    session = half_of(engine)._session
    session.client.clear(ClearCache(namespace=session.attachment.namespace.hex()))
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)


def abort(engine: SchedEngine, *names: str) -> None:
    for name in names:
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    settle(engine)


def asked_again(engine: SchedEngine, tokens: list[int]) -> dict[str, int]:
    engine.run()
    engine.forget_prefixes()
    loaded = engine.loaded_tokens
    engine.complete("again", tokens, 2)
    found = {"loaded": engine.loaded_tokens - loaded, "wrong": len(engine.bad_reads) + engine.wrong_tokens}
    engine.close()
    return found


@contextmanager
def no_room(engine: SchedEngine) -> Iterator[None]:
    """What is offered meanwhile finds no room, and is offered once more when its request ends."""
    client, stores = half_of(engine)._session.client, half_of(engine)._stores
    reserve = client.reserve
    client.reserve = lambda body: ReserveAnswer(
        reservation=None, deadline_s=30.0, present=[], busy=[], chunks=[], limited_by="no_space"
    )
    try:
        yield
        end_s = time.monotonic() + 10.0
        while len(stores._reserved) < sum(not store.is_sent for store in stores._stores.values()):
            assert time.monotonic() < end_s, "an offer was never answered"
            time.sleep(0.002)
    finally:
        client.reserve = reserve


def given_to_another(address: str) -> dict[str, int]:
    """Its blocks were given to another request when it is aborted."""
    engine = engine_of(address, blocks=66, budget=500)
    with no_room(engine):
        engine.add("first", prompt(1, 499), 300)
        second = engine.add("second", prompt(2, 480), 300)
        step_until(engine, lambda: second.num_computed_tokens >= 480)
        settle(engine)
    forget_all(engine)
    engine.step()
    abort(engine, "second", "first")
    return asked_again(engine, prompt(2, 481))


def blocks_go_as_it_ends(address: str) -> dict[str, int]:
    """What it stores when it ends is in blocks that the next step gives to another request."""
    engine = engine_of(address, blocks=15, budget=256)
    with no_room(engine):
        engine.add("r", prompt(2, 193), 14)
        request = engine.requests["r"]
        step_until(engine, lambda: request.num_output_tokens >= 4)
        settle(engine)
    engine.add("next", prompt(3, 220), 2)  # waits for the blocks
    return asked_again(engine, prompt(2, 193))


def computed_in_part(address: str) -> dict[str, int]:
    """It is aborted when it has computed less than before, up to the middle of a chunk."""
    engine = engine_of(address, blocks=66, budget=120)
    with no_room(engine):
        request = engine.add("r", prompt(2, 480), 300)
        step_until(engine, lambda: request.num_computed_tokens >= 480)
        settle(engine)
        forget_all(engine)
        engine.poison()
        step_until(engine, lambda: 0 < request.num_computed_tokens < 480)
    abort(engine, "r")
    return asked_again(engine, prompt(2, 481))


def goes_on(address: str) -> dict[str, int]:
    """It is preempted and resumed in one step, and generates more."""
    engine = engine_of(address, blocks=66, budget=128)
    request = engine.add("r", prompt(1, 200), 300)
    step_until(engine, lambda: request.num_computed_tokens > 200)
    settle(engine)
    forget_all(engine)
    step_until(engine, lambda: request.num_computed_tokens >= 400)
    tokens = list(request.all_token_ids)[:401]
    engine.run()
    return asked_again(engine, tokens)


@contextmanager
def damaging(engine: SchedEngine) -> Iterator[list[str]]:
    """The fourth chunk of each load is damaged as it begins. Yields the requests whose loads were."""
    worker, damaged = engine.worker._worker, []
    submit = worker._submit

    def submit_damaged(order: Any, is_early: bool) -> Any:
        part, attachment = order.plan.pieces[3].parts[0], worker._connector.session.attachment
        address = attachment.segments.address(part.segment, part.offset, part.length)
        ctypes.c_uint8.from_address(address).value ^= 1
        damaged.append(order.plan.request_id)
        return submit(order, is_early)

    worker._submit = submit_damaged
    try:
        yield damaged
    finally:
        worker._submit = submit


def stored_before(address: str, **settings: Any) -> SchedEngine:
    """An engine that loads in the step that runs the request, and can load STORED tokens of prompt 1."""
    engine = engine_of(address, load_async=False, **settings)
    engine.complete("cold", prompt(1, STORED + 1), 2)
    engine.forget_prefixes()
    return engine


def damaged_and_no_room(address: str) -> dict[str, int]:
    """What it loads is damaged, and what it computes from that finds no room at first."""
    engine = stored_before(address, blocks=66, budget=64)
    with damaging(engine) as damaged:
        with no_room(engine):
            engine.add("r", prompt(1, 400), 2)
            step_until(engine, lambda: damaged)
            time.sleep(0.2)  # the server hears of the damage
        abort(engine, "r")
    return asked_again(engine, prompt(1, 400))


def shares_what_is_damaged(address: str) -> dict[str, int]:
    """Another request loads what is damaged; this one has the same blocks in the same step."""
    engine = stored_before(address, blocks=80, budget=400)
    with damaging(engine) as damaged:
        with no_room(engine):
            for number, name in enumerate(("loads", "shares")):
                engine.add(name, prompt(1, STORED) + prompt(5 + number, 90), 2)
            step_until(engine, lambda: damaged)
            time.sleep(0.2)  # the server hears of the damage
        abort(engine, "shares", "loads")
    return asked_again(engine, prompt(1, STORED) + prompt(6, 90))


def left_behind_in_a_step(address: str) -> dict[str, int]:
    """A step is under way that writes blocks which its request's window has left behind when the next one is planned:
    vLLM gives them to a request that loads."""
    engine = engine_of(address, windows=(None, 48), blocks=25, budget=200, overlap=True, late=True)
    into_lockstep(engine, random.Random(0), 0)
    engine.complete("cold", prompt(1, 65), 2)
    engine.forget_prefixes()
    loaded = engine.loaded_tokens
    half_of(engine)._offer = lambda *arguments, **how: None  # a store would make the load wait as well
    engine.add("runs", prompt(2, 137), 10)
    engine.complete("loads", prompt(1, 83), 2)
    found = {
        "loaded": engine.loaded_tokens - loaded, "wrong": len(engine.bad_reads) + engine.wrong_tokens,
        "after": engine.seen["loads_after"],
    }
    engine.close()
    return found
