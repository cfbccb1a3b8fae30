"""Scenarios around a real Scheduler: python sched_scenarios.py ADDRESS NAME [argument …]; prints figures as JSON.

Each raises, or leaves its figures to the test that ran it. Prompts depend on seeds alone.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from sched_engine import SchedEngine
from vllm.v1.request import RequestStatus

from kvdock.connectors.worker import WorkerHalf


def prompt(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(5, 900) for _ in range(count)]


def figures(engine: SchedEngine, **more: Any) -> dict[str, Any]:
    return {
        "bad_reads": len(engine.bad_reads),
        "unfinished": sum(not request.is_finished() for request in engine.requests.values()),
        "loaded": engine.loaded_tokens,
        "preempted": sum(request.num_preemptions for request in engine.requests.values()),
        **more,
    }


def warm(address: str, windows: str, load_async: str) -> dict[str, Any]:
    """Cold, then loaded after the engine's own prefix cache was dropped."""
    engine = SchedEngine(address, windows=json.loads(windows), load_async=json.loads(load_async))
    engine.add("cold", prompt(1, 150))
    engine.run()
    engine.forget_prefixes()
    engine.add("warm", prompt(1, 150))
    engine.run()
    engine.close()
    return figures(engine)


def pressure(address: str, windows: str, load_async: str, first: str, last: str) -> dict[str, Any]:
    """Random requests with shared prefixes in a pool too small for them: preemptions, evictions, both kinds of hits."""
    groups = json.loads(windows)
    total: dict[str, Any] = {}
    for seed in range(int(first), int(last)):
        source = random.Random(seed)
        engine = SchedEngine(
            address, windows=groups, load_async=json.loads(load_async), seqs=4, budget=64,
            blocks=source.choice((24, 32, 48)) * len(groups) // 2 + 1,
        )
        bases = [prompt(100 + at, 160) for at in range(3)]
        for number in range(14):
            head = source.choice(bases)[: source.randrange(20, 150)]
            engine.add(f"r{number}", head + prompt(1000 + number, 5), source.randrange(1, 20))
            for _ in range(source.randrange(1, 5)):
                engine.step()
        engine.run()
        engine.close()
        for name, value in figures(engine).items():
            total[name] = total.get(name, 0) + value
    return total


def abort(address: str) -> dict[str, Any]:
    """A request is aborted while it waits for its load; its blocks come back."""
    engine = SchedEngine(address)
    engine.add("cold", prompt(2, 150), 1)
    engine.run()
    engine.forget_prefixes()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    request = engine.add("warm", prompt(2, 150), 1)
    while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        engine.step()
    engine.scheduler.finish_requests("warm", RequestStatus.FINISHED_ABORTED)
    engine.run()
    held = free - engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.close()
    return figures(engine, held=held)


def load_error(address: str, load_async: str) -> dict[str, Any]:
    """One byte of every stored part is flipped: what does not hash is computed, and nothing wrong is read."""
    engine = SchedEngine(address, load_async=json.loads(load_async))
    engine.add("cold", prompt(3, 150), 2)
    engine.run()
    engine.forget_prefixes()
    real = WorkerHalf.load
    failed = []

    def damaged(self: WorkerHalf, attachment: Any, plan: Any) -> int:
        import ctypes

        part = plan.pieces[1].parts[0]
        address = attachment.segments.address(part.segment, part.offset, part.length)
        byte = ctypes.c_uint8.from_address(address + 5)
        byte.value ^= 1
        failed.append(plan.request_id)
        return real(self, attachment, plan)

    WorkerHalf.load = damaged  # type: ignore[method-assign]  # damages the pool under the real load
    try:
        engine.add("warm", prompt(3, 150), 2)
        engine.run()
    finally:
        WorkerHalf.load = real  # type: ignore[method-assign]  # as it was
    engine.close()
    return figures(engine, loads=len(failed))


def wrong_order(address: str) -> dict[str, Any]:
    """Negative control: a load that fills each block with what the one before should hold."""
    from kvdock.connectors.vllm.scheduler_side import SchedulerSide

    real = SchedulerSide.allocated

    def shifted(self: SchedulerSide, request: Any, table: Any, external: int) -> None:
        real(self, request, [[*column[1:], *column[:1]] for column in table] if external else table, external)

    SchedulerSide.allocated = shifted  # type: ignore[method-assign]  # the defect that the check must see
    try:
        return warm(address, "[null]", "true")
    finally:
        SchedulerSide.allocated = real  # type: ignore[method-assign]  # as it was


SCENARIOS = {made.__name__: made for made in (warm, pressure, abort, load_error, wrong_order)}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[2]](sys.argv[1], *sys.argv[3:])))
