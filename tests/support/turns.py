"""How long work keeps the event loop without giving others a turn.

A turn's cost is processor time of its thread, which other processes of a busy machine do not disturb.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple


class Turns(NamedTuple):
    number: int
    longest_ms: float


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

    asyncio.run(story())
    return Turns(count, worst_s * 1000)
