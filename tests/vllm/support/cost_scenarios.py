"""A hit whose load takes longer than computing it, beside one whose load does not."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from sched_engine import SchedEngine
from sched_scenarios import prompt

from kvdock.connectors import cost

LONG, PROMPTS = 512, 5


def chosen(address: str, load_s: float, step_s: float, probe_s: float = 1000.0, **settings: Any) -> dict[str, Any]:
    """Prompts that are stored come one after the other; each load takes `load_s`, each step `step_s`. Says what of
    the last ones was loaded."""
    engine = SchedEngine(address, budget=256, step_s=step_s, weights_digest=os.urandom(8).hex(), **settings)
    half, copier = engine.scheduler.connector._scheduler, engine.worker._worker._connector._loaders[0]
    declined, lookups = list[str](), half._connector.lookups
    lookups._record = replace(lookups._record, declined=lambda request_id, why, tokens: declined.append(why))
    cost.PROBE_S, real = probe_s, cost.PROBE_S
    try:
        for number in range(PROMPTS):
            engine.complete(f"cold {number}", prompt(number, LONG + 1), 2)
        engine.forget_prefixes()
        loaded = []
        for number in range(PROMPTS):
            before = engine.loaded_tokens
            copier._thread.submit(time.sleep, load_s)  # the bus is busy
            engine.complete(f"warm {number}", prompt(number, LONG + 1), 2)
            loaded.append(engine.loaded_tokens - before)
        until_s = time.monotonic() + 5.0
        while (leased := len(half._session.client.leases().leases)) and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        cost.PROBE_S = real
    wrong = len(engine.bad_reads) + engine.wrong_tokens
    engine.close()
    return {
        "first": loaded[:3], "last": loaded[3:], "declined": declined, "wrong": wrong, "leased": leased,
    }
