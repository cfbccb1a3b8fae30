"""The clocks of a server, and the server clock: milliseconds, without the time in which the server was stopped or
suspended.

Invariant of the server clock: `now_ms` never falls, and never rises by more than one second between two calls, however
long the process slept in between. Deadlines and heartbeat ages use it, so a server that continues after
SIGSTOP does not consider every member late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

MAX_STEP_NS = 1_000_000_000


def boot_s() -> float:
    """The time since this machine was started. Nobody can set this clock, and shared memory is no older."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clocks(NamedTuple):
    """The clocks that a server reads. Tests pass clocks of their own."""

    perf_ns: Callable[[], int] = time.perf_counter_ns
    """Times calls, in nanoseconds."""
    wall_s: Callable[[], float] = time.time
    """Unix seconds: dates what people read."""
    now_s: Callable[[], float] = time.monotonic
    """Never goes back; for times of seconds and more."""
    boot_s: Callable[[], float] = boot_s
    """Nobody sets it, and the next server goes on with it: for times that are kept."""


def boottime_ns() -> int:
    """CLOCK_BOOTTIME: it also counts suspended time, and nobody can set it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class ServerClock:
    """The server clock. It adds up how far its source has moved between two readings. If that is more than a second, it
    adds one second: the server was stopped meanwhile. Thread-safe."""

    def __init__(self, source_ns: Callable[[], int] = boottime_ns, *, start_ms: int = 0) -> None:
        """`start_ms`: the last time on the clock of the server whose pool was adopted."""
        self._source_ns = source_ns
        self._lock = threading.Lock()
        self._last_ns = source_ns()  # guarded by _lock, as is _sum_ns
        self._sum_ns = start_ms * 1_000_000

    def now_ms(self) -> int:
        with self._lock:
            read_ns = self._source_ns()
            self._sum_ns += min(max(read_ns - self._last_ns, 0), MAX_STEP_NS)
            self._last_ns = read_ns
            return self._sum_ns // 1_000_000


def since_s(at_ms: int, now_ms: int) -> float | None:
    """Seconds from `at_ms` to `now_ms`; None for `at_ms` 0, which stands for a time that is not known. All ages of one
    view are taken at one moment: a chunk that was never used is not older by its last use than by its birth."""
    return max(0, now_ms - at_ms) / 1000 if at_ms else None
