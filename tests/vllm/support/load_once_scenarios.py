"""Requests of one prefix that come together: how often it is loaded, and who waits for whom.

Engines are stepped by hand, and a clock that stands still says how long loads take."""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lockstep import LateLoading, into_lockstep
from sched_engine import SchedEngine
from sched_scenarios import figures, prompt
from vllm.v1.request import RequestStatus

LONG_STEPS = 1 << 20


class Once:
    """An engine that has stored prompt 1, and has dropped it from its own prefix cache. `load_steps`: how many steps
    each load takes, read as it begins. `now_s`: of the clock by which waits are bounded."""

    def __init__(self, address: str, *, salts: Sequence[str | None] = (None,), **settings: Any) -> None:
        shape = {"blocks": 400, "seqs": 16, "budget": 1024, "weights_digest": os.urandom(8).hex()}
        self.engine = engine = SchedEngine(address, **{**shape, **settings})
        self.now_s, self.load_steps, self.peak, self.outcomes = 5.0, 0, 0, list[str]()
        self.loadings: list[LateLoading] = []
        failures = into_lockstep(engine, random.Random(0), 0)
        assert not failures
        worker = engine.worker._worker._connector
        submit = worker.submit_load

        def submitted(*arguments: Any, **how: Any) -> LateLoading:
            loading = submit(*arguments, **how)
            loading.steps_left = self.load_steps
            self.loadings.append(loading)
            return loading

        worker.submit_load = submitted
        once = engine.half._connector.lookups.waits.loads
        if once is not None:
            once._clock, once._count = lambda: self.now_s, lambda how, seconds: self.outcomes.append(how)
        for salt in salts:
            engine.complete(f"cold {salt}", prompt(1, 150), cache_salt=salt)
        engine.forget_prefixes()

    def add(self, name: str, *, own: int = 0, priority: int = 0, salt: str | None = None, count: int = 150) -> Any:
        """A request for prompt 1, with that many tokens of its own behind it."""
        return self.engine.add(
            name, prompt(1, count) + prompt(1000 + own, own), priority=priority, cache_salt=salt
        )

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.peak = max(self.peak, self.engine.held_blocks)

    def until(self, holds: Callable[[], object], most: int = 400) -> None:
        for _ in range(most):
            if holds():
                return
            self.steps()
        raise AssertionError("it never came true")

    def states(self, *names: str) -> list[str]:
        return [self.engine.requests[name].status.name for name in names]

    def finish(self, **more: Any) -> dict[str, Any]:
        self.until(lambda: all(one.is_finished() for one in self.engine.requests.values()), 4000)
        self.engine.run()
        self.engine.close()
        return figures(self.engine, peak=self.peak, outcomes=dict(Counter(self.outcomes)), **more)


def together(
    address: str, requests: int = 8, own: int = 0, load_steps: int = 3, after: int = 0, **settings: Any
) -> dict[str, Any]:
    """`requests` that come in one step, or the first and, `after` steps later, the others."""
    made = Once(address, **settings)
    made.load_steps = load_steps
    for number in range(requests):
        made.add(f"r{number}", own=number + own if own else 0)
        made.steps(after if number == 0 else 0)
    return made.finish()


def loader_goes(address: str, how: str, **settings: Any) -> dict[str, Any]:
    """The load is under way for long. `how`: its request is "aborted", some of it is "damaged", or it is "slow"."""
    made = Once(address, **settings)
    made.load_steps = LONG_STEPS
    names = [f"r{number}" for number in range(4)]
    for name in names:
        made.add(name)
    made.until(lambda: made.loadings)
    made.steps(10)
    waiting, made.load_steps = made.states(*names), 1
    told: dict[str, Any] = {"waiting": waiting}
    if how == "aborted":
        made.engine.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
        made.steps(3)
        told["loading"] = made.states(*names[1:])
        made.loadings[0].steps_left = 0
    elif how == "damaged":
        damage(made.loadings[0], 2)
        made.loadings[0].steps_left = 0
    else:
        once = made.engine.half._connector.lookups.waits.loads
        bound_s = 4.0 * next(iter(once._loads.values())).takes_s + 0.02
        made.now_s += bound_s - 0.001
        made.steps(5)
        told["before"] = len(made.loadings)
        made.now_s += 0.002
        made.steps(5)
        told["after"] = len(made.loadings)
        made.loadings[0].steps_left = 0
    return made.finish(**told, loads=len(made.loadings))


def damage(loading: LateLoading, chunk: int) -> None:
    part = loading.plan.pieces[chunk].parts[0]
    address = loading.attachment.segments.address(part.segment, part.offset, part.length)
    ctypes.c_uint8.from_address(address).value ^= 1


def others_go_on(address: str, **settings: Any) -> dict[str, Any]:
    """While some wait for a load, others that have nothing to load come, and are computed to their ends."""
    made = Once(address, **settings)
    made.load_steps = LONG_STEPS
    names = [f"r{number}" for number in range(4)]
    for name in names:
        made.add(name, priority=1)
    made.until(lambda: made.loadings)
    others = [made.engine.add(f"other {at}", prompt(50 + at, 100), priority=2 * at) for at in range(2)]
    made.until(lambda: all(one.is_finished() for one in others), 20)
    waiting = made.states(*names)
    made.loadings[0].steps_left = 0
    return made.finish(waiting=waiting, loads=len(made.loadings))


def salted(address: str, **settings: Any) -> dict[str, Any]:
    """Two requests with each of two salts."""
    made = Once(address, salts=("one", "two"), **settings)
    made.load_steps = 5
    for number in range(4):
        made.add(f"r{number}", salt=("one", "two")[number % 2])
    return made.finish(loads=len(made.loadings))


def one_reads_no_cache(address: str) -> dict[str, Any]:
    """A request that is to read no prefix cache, as one that wants its prompt's log-probabilities, beside a load."""
    made = Once(address)
    made.load_steps = LONG_STEPS
    made.add("loads")
    made.until(lambda: made.loadings)
    request = made.add("computes")
    request.skip_reading_prefix_cache = True
    made.until(request.is_finished, 20)
    made.loadings[0].steps_left = 0
    return made.finish()


def longer(address: str, shared: int, windows: Sequence[int | None] = (None,), **settings: Any) -> dict[str, Any]:
    """A request that shares the first `shared` tokens of a load that is under way."""
    made = Once(address, windows=windows, **settings)
    made.load_steps = 4
    made.add("loads")
    made.until(lambda: made.loadings)
    made.add("follows", own=40, count=shared)
    made.steps(2)
    waiting = made.states("follows")
    return made.finish(waiting=waiting, loads=len(made.loadings))


def crowd(address: str, requests: int = 120, **settings: Any) -> dict[str, Any]:
    """Many requests over one prefix, few of which run at a time. `steps`: until the last has ended. `first`: until half
    of them have their first token."""
    made = Once(address, blocks=600, seqs=8, **settings)
    made.load_steps = 3
    for number in range(requests):
        made.add(f"r{number}", own=number % 7 + 1)
    began, half = made.engine.steps, 0
    while not all(one.is_finished() for one in made.engine.requests.values()):
        made.steps()
        begun = sum(one.num_output_tokens > 0 for one in made.engine.requests.values())
        half = half or (made.engine.steps - began if begun > requests // 2 else 0)
    return made.finish(steps=made.engine.steps - began, first=half)
