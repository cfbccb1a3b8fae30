"""What `bench.floods` measures of turns, against callbacks of known length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from bench.floods.turns import Longest, LongestTurn, measure_turns

LONG_S, WAITED_S = 0.003, 0.3


def burn() -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < LONG_S:
        pass


def longest_with(path: Path, work: Callable[[], None]) -> Longest:
    """What is found in a loop that runs `work` once, and waits before and after it."""
    longest = LongestTurn(path)

    async def story() -> Longest:
        measuring = measure_turns(path)
        await asyncio.sleep(0.01)
        longest.forget()
        asyncio.get_running_loop().call_soon(work)
        await asyncio.sleep(WAITED_S)
        found = longest.read()
        measuring.cancel()
        await asyncio.wait([measuring])
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(story())


def test_a_callback_that_burns_shows_in_both(tmp_path: Path) -> None:
    found = longest_with(tmp_path / "turns", burn)
    assert found.cpu_ms >= 1000 * LONG_S and found.wall_ms >= 1000 * LONG_S


def test_one_that_sleeps_shows_on_the_clock_alone_and_waiting_in_neither(tmp_path: Path) -> None:
    found = longest_with(tmp_path / "turns", lambda: time.sleep(10 * LONG_S))
    assert found.wall_ms >= 10_000 * LONG_S > 2 * found.cpu_ms
    assert found.wall_ms < 1000 * WAITED_S, "the loop has waited for as long, and that is no turn"
