"""How long work keeps the event loop without giving others a turn.

A turn's cost is processor time of its thread, in which the waiting for a busy machine's cores does not count. Caches
and clocks are shared all the same: with others at work the same turn takes twice the time. So a cost is divided by what
a yardstick of much the same work takes more than on a quiet machine, before and after it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

QUIET_MS = 1.9
"""The yardstick's processor time on a quiet machine, of two cores, on which the tests' bounds were chosen."""
TRIES = 10
KEYS = [secrets.token_bytes(32) for _ in range(8192)]


class Turns(NamedTuple):
    """`longest_ms`: as on a quiet machine."""

    number: int
    longest_ms: float


def slowness() -> float:
    """How many times longer this machine takes now than a quiet one; at least 1."""
    return max(1.0, min(yardstick_ms(), yardstick_ms()) / QUIET_MS)


def yardstick_ms() -> float:
    """What a lookup does in Python: objects made, found by keys, and keys joined. The first one also gets memory."""
    began_s = time.thread_time()
    known = {key: [number] for number, key in enumerate(KEYS)}
    found = [known[key][0] for key in KEYS]
    joined = b"".join(KEYS)
    took_ms = (time.thread_time() - began_s) * 1000
    assert len(found) * 32 == len(joined)
    return took_ms


def turns_of(work: Callable[[], Coroutine[Any, Any, Any]]) -> Turns:
    """How often other tasks had a turn while `work` ran, and the processor time of its longest turn."""
    worst_s, count = 0.0, 0

    async def story() -> None:
        nonlocal worst_s, count
        task = asyncio.create_task(work())
        while not task.done():
            before_s = time.thread_time()
            await asyncio.sleep(0)
            worst_s, count = max(worst_s, time.thread_time() - before_s), count + 1
        await task

    before = slowness()
    asyncio.run(story())
    return Turns(count, worst_s * 1000 / ((before + slowness()) / 2))


def quickest(measured: Callable[[], Turns], wanted_ms: float) -> Turns:
    """The measurement with the shortest longest turn, of up to TRIES; the first below `wanted_ms` ends them. A busy
    machine makes single turns longer, so only a turn that is too long in each measurement is the code's own."""
    found = [measured()]
    while found[-1].longest_ms >= wanted_ms and len(found) < TRIES:
        found.append(measured())
    return min(found, key=lambda turns: turns.longest_ms)
