"""vLLM resets its prefix cache and preempts what runs, while requests load.

Engines are stepped by hand. Prompts differ, so that nobody waits for another one's load."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from lockstep import LateLoading, into_lockstep
from sched_engine import SchedEngine, set_current_vllm_config
from sched_scenarios import figures, prompt
from vllm.v1.request import RequestStatus

from kvdock.connectors.vllm import resets

LOADS = ("load 1", "load 2", "aborted")


def loading(address: str, load_steps: int, **settings: Any) -> SchedEngine:
    """Two requests load, so does one that was aborted, and one runs."""
    engine = SchedEngine(address, blocks=200, weights_digest=os.urandom(8).hex(), **settings)
    into_lockstep(engine, random.Random(0), 0)
    worker = engine.worker._worker._connector
    submit = worker.submit_load

    def submitted(*arguments: Any, **how: Any) -> LateLoading:
        made = submit(*arguments, **how)
        made.steps_left = load_steps
        return made

    worker.submit_load = submitted
    for seed in range(3):
        engine.add(f"cold {seed}", prompt(seed, 150), 1)
    engine.run()
    engine.forget_prefixes()
    engine.add("runs", prompt(9, 60), 200)
    engine.step()
    for seed, name in enumerate(LOADS):
        engine.add(name, prompt(seed, 150))
    for _ in range(200):
        engine.step()
        if all(engine.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS for name in LOADS):
            break
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    return engine


def step_of(engine: SchedEngine) -> Callable[[], bool]:
    """What a core does: the oldest step under way ends, or the workers are asked."""

    def step() -> bool:
        assert engine.before_step is not None
        engine.before_step()
        if engine._under_way:
            engine._learn()
            return bool(engine._under_way)
        planned = engine.scheduler.schedule()
        assert planned.total_num_scheduled_tokens == 0, "nothing is computed meanwhile"
        with set_current_vllm_config(engine.config):
            told = engine._as_runner_2(planned) if engine._runner == 2 else engine._as_runner_1(planned)
        engine.scheduler.update_from_output(planned, told)
        return False

    return step


def preempts_all(address: str, ends_loads: bool, load_steps: int = 60, **settings: Any) -> dict[str, Any]:
    engine = loading(address, load_steps, **settings)
    before = engine.seen["async_loads"]
    if ends_loads:
        resets.end_loads(engine.scheduler, step_of(engine))
    try:
        is_reset = bool(engine.scheduler.reset_prefix_cache(reset_running_requests=True))
    except RuntimeError as error:
        engine.close()
        return {"raised": str(error)}
    held = engine.held_blocks
    engine.poison()
    while any(not one.is_finished() for one in engine.requests.values()):
        engine.step()
    engine.run()
    engine.close()
    return figures(engine, is_reset=is_reset, held_then=held, loads=[before, engine.seen["async_loads"]])


def never_ends(address: str) -> dict[str, Any]:
    """A load that is not over when the time is: vLLM is left to say that it cannot."""
    engine, now_s = loading(address, 1 << 20), [0.0]

    def clock() -> float:
        now_s[0] += 1.0
        return now_s[0]

    resets.end_loads(engine.scheduler, step_of(engine), clock)
    states = [engine.requests[name].status.name for name in LOADS[:2]]
    paused = engine.scheduler.pause_state.name
    try:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        return {"raised": True, "states": states, "paused": paused, "asked_s": now_s[0]}
    finally:
        engine.close()
    return {"raised": False}
