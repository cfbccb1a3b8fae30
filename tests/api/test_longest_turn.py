"""What `bench.floods` measures of turns, against callbacks of known length."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import uvloop

from bench.floods import turns
from bench.floods.long_turns import LongTurn, long_turns
from bench.floods.turns import Longest, LongestTurn, measure_turns

LONG_S, WAITED_S = 0.003, 0.3


def burn() -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < LONG_S:
        pass


def burn_and_be_stopped() -> None:
    """Beside another process on the same processor, until the system has given it a turn."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        while resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw == before:
            burn()
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, all_cores)


def longest_with(
    path: Path, work: Callable[[], None], explain: Callable[[float, float], None] | None = None
) -> Longest:
    """What is found in a loop that runs `work` once, and waits before and after it."""
    longest = LongestTurn(path)

    async def story() -> Longest:
        measuring = measure_turns(path, explain)
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


def test_processor_time_of_the_wait_is_no_part_of_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system counts interrupts for the thread that waits: it seems to take LONG_S more in each wait."""
    waits, taken_s = itertools.count(), time.thread_time
    monkeypatch.setattr(turns, "time", SimpleNamespace(
        thread_time=lambda: taken_s() + LONG_S * next(waits), monotonic_ns=time.monotonic_ns
    ))
    found = longest_with(tmp_path / "turns", lambda: None)
    assert 0 < found.cpu_ms <= found.wall_ms < 1000 * WAITED_S


def test_a_turn_that_the_system_stopped_is_not_among_those_that_it_did_not(tmp_path: Path) -> None:
    found = longest_with(tmp_path / "turns", burn_and_be_stopped)
    assert found.unstopped_ms < 1000 * LONG_S <= found.cpu_ms


def test_a_long_turn_says_what_ran(tmp_path: Path) -> None:
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    def collect() -> None:
        Circle()
        gc.collect()
        burn()

    noted = tmp_path / "noted"
    with long_turns(noted) as turned:
        longest_with(tmp_path / "turns", collect, turned)
    (turn,) = [msgspec.json.decode(line, type=LongTurn) for line in noted.read_bytes().splitlines()]
    assert turn.cpu_ms >= 1000 * LONG_S and turn.wall_ms > 0
    assert [(generation, freed >= 1) for generation, _, freed in turn.collections] == [(2, True)]
    assert any(" burn" in place for place in turn.seen)
