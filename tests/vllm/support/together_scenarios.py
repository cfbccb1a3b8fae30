"""Two engines around real Schedulers, in turns, that get the same prompt at the same moment."""

from __future__ import annotations

import os
import time
from typing import Any

from sched_engine import SchedEngine, kv_transfer_state
from sched_scenarios import prompt

STEP_S = 0.05
SHAPE: dict[str, Any] = {"blocks": 200, "budget": 128, "seqs": 4, "step_s": STEP_S}
TOKENS = 900


def same_prompt(address: str, share: float, load_async: bool = True, after_steps: int | None = None) -> dict[str, Any]:
    """`share`: the setting compute_once. `after_steps`: of the first engine, which then aborts the request.

    `computed`: by each engine, tokens of the prompt. `other`: in which of its steps that compute the second engine
    began a short request that came behind the prompt. `waits`: how those of the second engine ended."""
    weights = os.urandom(8).hex()
    pair = [
        SchedEngine(address, **SHAPE, weights_digest=weights, compute_once=share, load_async=load_async)
        for _ in range(2)
    ]
    for at, engine in enumerate(pair):
        engine.add("warm", prompt(100 + at, 600), 2)  # lets it know how fast it is
        while engine.scheduler.has_requests():
            step(engine)
    waits: list[str] = []
    once = pair[1].scheduler.connector._scheduler._connector.lookups.waits.once
    if once is not None:
        once._count = lambda how, _seconds: waits.append(how)
    computed, steps, other = [0, 0], [0, 0], -1
    for engine in pair:
        engine.add("same", prompt(7, TOKENS), 1)  # so that no step computes but the prompt
        lookups = engine.scheduler.connector._scheduler._connector.lookups
        lookups.wait_for_answer(5.0)  # the first engine is the first to ask
    pair[1].add("other", prompt(8, 100), 2)
    end_s = time.monotonic() + 30.0
    while any(engine.scheduler.has_requests() for engine in pair):
        assert time.monotonic() < end_s, "it takes for ever"
        for at, engine in enumerate(pair):
            if not engine.scheduler.has_requests():
                continue
            scheduled = step(engine).num_scheduled_tokens
            computed[at] += scheduled.get("same", 0)
            if "other" in scheduled and other < 0:
                other = steps[at]
            steps[at] += bool(scheduled)
            if at == 0 and steps[0] == after_steps and not engine.requests["same"].is_finished():
                abort(engine, "same")
    wrong = sum(len(engine.bad_reads) + engine.wrong_tokens for engine in pair)
    remembered = len(once._waits) if once is not None else 0
    for engine in pair:
        engine.close()
    return {
        "computed": computed, "other": other, "wrong": wrong, "loaded": pair[1].loaded_tokens,
        "waits": waits, "remembered": remembered,
    }


def step(engine: SchedEngine) -> Any:
    kv_transfer_state._KV_CONNECTOR_AGENT = engine.worker  # vLLM has one engine in a process
    return engine.step()


def abort(engine: SchedEngine, request_id: str) -> None:
    from vllm.v1.request import RequestStatus

    engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
