"""How long lookups wait while the mover opens a disk with 1 TiB of parts and tells what it has, at a server of its own.

- longest_lookup_ms_beside_start: the longest lookup from when the server answers until TOLD_S after the disk is open.
  longest_lookup_ms_beside_disk: at the same server for SEEN_S after that. longest_lookup_ms_beside_nothing: for SEEN_S
  at a server without a disk.
- lookups_above_2_ms_beside_start, …_disk, …_nothing: how many of a thousand lookups took longer than 2 ms. If there are
  more of them beside the start than beside the disk, the start makes lookups wait.
- longest_exchange_ms, exchanges_above_2_ms: the same for two processes without kvdock. One sends a byte; the other
  works for EXCHANGE_WORK_S and sends the byte back. They show how long the machine makes any two processes wait.
- longest_lookup_work_ms_beside_…: the longest of what lookups took less the time in which client or server could run
  and waited for a processor, as the kernel counts it. Python collects no garbage of the client meanwhile: what this
  benchmark has imported is not the server's.
- longest_turn_ms_beside_…: the longest turn of the server's event loop meanwhile, by its processor time
  (bench/floods/turns.py): the server's part in that wait.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from bench.floods.turns import LongestTurn
from bench.serving import Engine, ServerProcess, chain
from kvdock.client.client import Client

OPENED_S, TOLD_S, SEEN_S = 180.0, 5.0, 10.0
"""How long the disk may take to open, how long the mover may take then to tell what it has (3 s for 524,000 chunks, see
bench/LOG.md, 2026-11-30), and how long the other parts last."""
EXCHANGE_WORK_S = 0.25e-3
LONG_S = 2e-3


class Waits:
    """How long the main threads of processes could run and waited for a processor."""

    def __init__(self, stack: ExitStack, *processes: int) -> None:
        self._files = [os.open(f"/proc/{process}/schedstat", os.O_RDONLY) for process in processes]
        for file in self._files:
            stack.callback(os.close, file)

    def so_far_s(self) -> float:
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e9


class Lookups:
    """Lookups of one prefix, one after the other, at a server of their own."""

    def __init__(self, stack: ExitStack, **settings: object) -> None:
        turns = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "turns"
        self._turns = LongestTurn(turns)
        server = stack.enter_context(ServerProcess(
            "measured", turns_file=str(turns), pool_bytes=16 << 20, missed_heartbeats=1000, **settings
        ))
        self.client = stack.enter_context(Client(server.unix))
        self._engine = stack.enter_context(closing(Engine(self.client, "start", 4096)))
        self._waits, self._keys = Waits(stack, server.pid, os.getpid()), chain(64, "start")
        self._engine.store(self._keys)

    def during(self, name: str, has_ended: Callable[[], bool]) -> dict[str, float]:
        took: list[float] = []
        longest_work_s = 0.0
        self._turns.forget()
        while not has_ended():
            for _ in range(100):
                before_s, began_s = self._waits.so_far_s(), time.monotonic()
                self._engine.look_up(self._keys)
                took.append(time.monotonic() - began_s)
                longest_work_s = max(longest_work_s, took[-1] - (self._waits.so_far_s() - before_s))
            self._engine.beat()
        return {
            f"longest_lookup_ms_beside_{name}": max(took) * 1e3,
            f"longest_lookup_work_ms_beside_{name}": longest_work_s * 1e3,
            f"longest_turn_ms_beside_{name}": self._turns.read().cpu_ms,
            f"lookups_above_2_ms_beside_{name}": above(took),
        }

    def opened(self) -> Callable[[], bool]:
        """Whether the disk was opened TOLD_S ago. Raises RuntimeError if it is not opened within OPENED_S."""
        began_s, open_s = time.monotonic(), 0.0

        def was_opened() -> bool:
            nonlocal open_s
            now_s = time.monotonic()
            if not open_s and any(tier.state == "open" for tier in self.client.status().tiers):
                open_s = now_s
            if not open_s and now_s > began_s + OPENED_S:
                raise RuntimeError("the disk was not opened")
            return bool(open_s) and now_s > open_s + TOLD_S

        return was_opened


def above(took: list[float]) -> float:
    return 1000 * sum(one > LONG_S for one in took) / len(took)


def after(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def exchanges() -> dict[str, float]:
    program = (
        "import os, sys, time\n"
        "while byte := os.read(0, 1):\n"
        "    until_s = time.monotonic() + float(sys.argv[1])\n"
        "    while time.monotonic() < until_s: pass\n"
        "    os.write(1, byte)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(EXCHANGE_WORK_S)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, bufsize=0)
    took: list[float] = []
    with other:
        assert other.stdin is not None and other.stdout is not None
        have_ended = after(SEEN_S)
        while not have_ended():
            began_s = time.monotonic()
            other.stdin.write(b"x")
            other.stdout.read(1)
            took.append(time.monotonic() - began_s)
    return {"longest_exchange_ms": max(took) * 1e3, "exchanges_above_2_ms": above(took)}


def measure(folder: Path) -> dict[str, float]:
    """`folder`: of a disk with 1 TiB of parts."""
    gc.disable()
    try:
        with ExitStack() as stack:
            lookups = Lookups(stack, disk_path=str(folder), disk_bytes=1 << 40)
            figures = lookups.during("start", lookups.opened())
            figures |= lookups.during("disk", after(SEEN_S))
        with ExitStack() as stack:
            figures |= Lookups(stack).during("nothing", after(SEEN_S))
        return figures | exchanges()
    finally:
        gc.enable()
