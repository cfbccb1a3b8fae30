"""Loads that are reported before they have ended, and loads in the step that runs their request, which fail too late
to be taken back. Around a real Scheduler, stepped by hand: a load that is verified has copied nothing (lockstep.py)."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import Future
from typing import Any

from chaos import Chaos
from lockstep import into_lockstep
from sched_engine import SchedEngine
from sched_scenarios import count_verified, figures, prompt
from vllm.v1.request import RequestStatus

from kvdock.connectors.vllm.worker import LoadLostError


def stored(address: str, tokens: list[int], **settings: Any) -> SchedEngine:
    """An engine that has stored `tokens`, and has none of them at hand."""
    engine = SchedEngine(address, **settings)
    engine.complete("cold", tokens)
    engine.forget_prefixes()
    return engine


def lost(engine: SchedEngine, *request: Any) -> str:
    """Runs a request and closes the engine. The words with which the engine ended; "": it did not."""
    try:
        engine.complete(*request)
    except LoadLostError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def verified(address: str, by_layer: bool, asks: bool = True, orders: bool = True, **settings: Any) -> dict[str, Any]:
    """Cold, then loaded: the request runs before its load has copied anything. `asks`: vLLM asks for each layer.
    `orders`: the step is ordered after the load. `ended`: the engine did, with these words."""
    engine = stored(address, prompt(4, 150), **settings)
    into_lockstep(engine, random.Random(0), 0, verified=True)
    count_verified(engine)
    worker, engine.asks_for_layers = engine.worker._worker, asks
    worker._traits = dataclasses.replace(worker._traits, loads_by_layer=by_layer)
    if not orders:
        worker._order_reported = lambda alone, stream: None
    ended = lost(engine, "warm", prompt(4, 150))
    return figures(engine, ended=ended)


def beside(address: str, left: bool = False, **settings: Any) -> dict[str, Any]:
    """A request loads while another one is computed, which is aborted as soon as the load began if `left`; and then the
    same alone. `beside`: what was reported before it had ended at first. `bands`: of each load, whether it was cut into
    them, for the CPU to hash ahead."""
    engine, bands = stored(address, prompt(7, 150), **settings), []
    into_lockstep(engine, random.Random(0), 0, verified=True, hasty=False)
    count_verified(engine)
    half = engine.worker._worker._connector
    submit = half.submit_load

    def noted(attachment: Any, plan: Any, of_load: Any, **how: Any) -> Any:
        bands.append(of_load is not None)
        return submit(attachment, plan, of_load, **how)

    half.submit_load = noted
    engine.add("other", prompt(8, 40), 40)
    for _ in range(4):
        engine.step()
    engine.add("warm", prompt(7, 150), 2)
    while left and not bands:
        engine.step()
    if left:
        engine.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    engine.run()
    beside = engine.seen["reported_verified"]
    engine.forget_prefixes()
    engine.complete("alone", prompt(7, 150), 2)
    engine.close()
    return figures(engine, beside=beside, bands=bands)


def aborted(address: str, **settings: Any) -> dict[str, Any]:
    """A request is aborted when its load was reported, and nobody else comes. `running`: loads that have not ended."""
    engine = stored(address, prompt(9, 150), **settings)
    into_lockstep(engine, random.Random(0), 0, verified=True)
    count_verified(engine)
    engine.add("warm", prompt(9, 150))
    while not engine.seen["reported_verified"]:
        engine.step()
    engine.scheduler.finish_requests("warm", RequestStatus.FINISHED_ABORTED)
    engine.run()
    running = len(engine.worker._worker._running)
    engine.close()
    return figures(engine, running=running)


def changed(address: str, **settings: Any) -> dict[str, Any]:
    """A byte is flipped between a load's report and its copy, and what is computed from it is stored as soon as the
    connector lets it be. Then another engine asks, twice. `ended`: the first one did, with these words."""
    engine = stored(address, prompt(5, 70), **settings)
    chaos, worker = Chaos(engine, random.Random(0), 0.0), engine.worker._worker
    into_lockstep(engine, random.Random(0), 0, verified=True)
    report, submit = worker._report_verified, worker._connector.submit_load

    def late(*arguments: Any, **how: Any) -> Any:
        loading = submit(*arguments, **how)
        loading.steps_left = 16  # until what was computed from it could have been stored
        return loading

    def endangered() -> None:
        report()
        for load in worker._running:
            if load.reported and not engine.seen["flipped"]:
                chaos._flip(worker._connector.session.attachment, load.order.plan.pieces[1].parts[0])
                engine.seen["flipped"] += 1

    worker._report_verified, worker._connector.submit_load = endangered, late
    ended = lost(engine, "alone", prompt(5, 150), 20)
    other = SchedEngine(address, **settings)
    for name in ("other", "third"):  # what lies behind the damaged chunk is found once it is back
        other.complete(name, prompt(5, 150))
        other.forget_prefixes()
    other.close()
    return {**figures(other), **engine.seen, "ended": ended, "read": len(engine.bad_reads)}


def damaged(address: str, **settings: Any) -> dict[str, Any]:
    """A byte is flipped as a load begins in the step that runs its request. `ended`: the engine did, in these words."""
    engine = stored(address, prompt(5, 150), load_async=False, **settings)
    flip_as_it_begins(engine)
    ended = lost(engine, "alone", prompt(5, 150))
    return figures(engine, ended=ended)


def undone(address: str, **settings: Any) -> dict[str, Any]:
    """A step reads damage and completes chunks from it. It is undone; what it had offered must not be found later."""
    engine = stored(address, prompt(6, 70), load_async=False, **settings)
    flip_as_it_begins(engine)

    def at_once(work: Any, store: Any, *arguments: Any) -> Future[Any]:
        """A store reads its blocks before the step that computes them again, as a GPU's streams have it."""
        future: Future[Any] = Future()
        future.set_result(work(store, *arguments))
        store.copies.wait(None)
        return future

    engine.worker._worker._stores._storing.run = at_once
    engine.add("alone", prompt(6, 150))
    while not engine.seen["sync_loads"]:
        engine.step()
        # What the step offered has its slots before the next one is built.
        engine.scheduler.connector._scheduler._connector.stores._storing.run(int).result()
    engine.run()
    for name in ("again", "and again", "once more"):  # each stores what the one before could not, or too late
        before = engine.loaded_tokens
        engine.forget_prefixes()
        engine.complete(name, prompt(6, 150))
    engine.close()
    return figures(engine, loaded_at_last=engine.loaded_tokens - before)


def flip_as_it_begins(engine: SchedEngine) -> None:
    """Damages a byte of the next load as it begins."""
    chaos, worker = Chaos(engine, random.Random(0), 0.0), engine.worker._worker
    submit = worker._submit

    def endangered(order: Any, is_early: bool) -> Any:
        chaos._flip(worker._connector.session.attachment, order.plan.pieces[1].parts[0])
        worker._submit = submit
        return submit(order, is_early)

    worker._submit = endangered
