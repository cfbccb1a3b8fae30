"""Loads by layer around a real Scheduler, whose side of them is the same without a GPU. Without one the worker waits
for such a load before the step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from chaos import Chaos
from sched_engine import SchedEngine
from sched_scenarios import figures, prompt

from kvdock.connectors.vllm import connector
from kvdock.connectors.vllm.worker_side import LoadLost


@contextmanager
def by_layer() -> Iterator[None]:
    real = connector.loads_by_layer
    connector.loads_by_layer = lambda config, settings: True  # type: ignore[assignment]  # as on an eager GPU engine
    try:
        yield
    finally:
        connector.loads_by_layer = real


def alone_and_together(address: str, **settings: Any) -> dict[str, Any]:
    """A request that is alone in the engine loads in the step that runs it; two at a time load in the background."""
    with by_layer():
        engine = SchedEngine(address, **settings)
        for name in ("cold", "alone"):
            engine.add(name, prompt(4, 150))
            engine.run()
            engine.forget_prefixes()
        alone = dict(engine.seen)
        for name in ("one", "two"):
            engine.add(name, prompt(4, 150))
        engine.run()
        engine.close()
    return figures(engine, alone=alone)


def damaged(address: str, **settings: Any) -> dict[str, Any]:
    """A byte is flipped as such a load begins. `ended`: the engine did, with these words."""
    with by_layer():
        engine = SchedEngine(address, **settings)
        engine.add("cold", prompt(5, 150))
        engine.run()
        engine.forget_prefixes()
        chaos, worker = Chaos(engine, random.Random(0), 0.0), engine.worker._worker
        submit = worker._submit

        def endangered(order: Any) -> Any:
            chaos._flip(worker._session.attachment, order.plan.pieces[1].parts[0])
            return submit(order)

        worker._submit = endangered
        ended = ""
        try:
            engine.add("alone", prompt(5, 150))
            engine.run()
        except LoadLost as error:
            ended = str(error)
        engine.close()
    return figures(engine, ended=ended)


def undone(address: str, **settings: Any) -> dict[str, Any]:
    """A step reads damage and completes chunks from it. It is undone; what it had offered must not be found later."""
    with by_layer():
        engine = SchedEngine(address, **settings)
        engine.add("cold", prompt(6, 70))
        engine.run()
        engine.forget_prefixes()
        chaos, worker = Chaos(engine, random.Random(0), 0.0), engine.worker._worker
        scheduler, submit = engine.scheduler.connector._scheduler, worker._submit

        def endangered(order: Any) -> Any:
            chaos._flip(worker._session.attachment, order.plan.pieces[1].parts[0])
            worker._submit = submit  # once
            return submit(order)

        def at_once(work: Any, *arguments: Any) -> Future[Any]:
            """A store reads its blocks before the step that computes them again, as a GPU's streams have it."""
            future: Future[Any] = Future()
            future.set_result(work(*arguments))
            return future

        worker._submit, worker._storing.submit = endangered, at_once
        engine.add("alone", prompt(6, 150))
        while not engine.seen["sync_loads"]:
            engine.step()
            scheduler._reserving.submit(int).result()  # what the step offered has its slots before the next is built
        engine.run()
        engine.forget_prefixes()
        engine.add("again", prompt(6, 150))
        engine.run()
        engine.close()
    return figures(engine)


SCENARIOS = {made.__name__: made for made in (alone_and_together, damaged, undone)}
