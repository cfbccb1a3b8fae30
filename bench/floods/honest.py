"""What an honest engine sees: how long its lookups take beside a flood."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.floods.kinds import Flood
from bench.serving import Engine
from kvdock.protocol.errors import KvdockError
from kvdock.protocol.wire_types import KEY_BYTES

KEYS = 16
PAUSE_S = 0.004
_fork = get_context("fork")


@dataclass(frozen=True)
class Latencies:
    took_s: list[float]
    """Seconds of each lookup, in rising order."""
    unstopped_s: list[float]
    """The same without the time in which the engine or the server's loop could go on, but had no processor."""
    errors: int

    @property
    def p99_ms(self) -> float:
        return _p99_ms(self.took_s)

    @property
    def p99_unstopped_ms(self) -> float:
        return _p99_ms(self.unstopped_s)

    @property
    def max_ms(self) -> float:
        return 1000 * self.took_s[-1]

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(
            sorted(self.took_s + other.took_s), sorted(self.unstopped_s + other.unstopped_s), self.errors + other.errors
        )


def _p99_ms(rising_s: list[float]) -> float:
    return 1000 * rising_s[int(len(rising_s) * 0.99)]


def honest(engine: Engine, keys: bytes, seconds: float, server_pid: int) -> Latencies:
    """Makes lookups of resident keys, each with the release of the lease before it."""
    took_s, unstopped_s, errors, beaten_s = list[float](), list[float](), 0, 0.0
    until_s = time.monotonic() + seconds
    with _stops(threading.get_native_id(), server_pid) as stopped_s:
        while time.monotonic() < until_s:
            if time.monotonic() - beaten_s > 1.0:
                engine.beat()
                beaten_s = time.monotonic()
            stopped_before_s, began_s = stopped_s(), time.perf_counter()
            try:
                errors += engine.look_up(keys) != len(keys) // KEY_BYTES
            except KvdockError:
                errors += 1
            took_s.append(time.perf_counter() - began_s)
            unstopped_s.append(max(0.0, took_s[-1] - (stopped_s() - stopped_before_s)))
            time.sleep(PAUSE_S)  # an engine computes between two of its lookups
    return Latencies(sorted(took_s), sorted(unstopped_s), errors)


@contextmanager
def _stops(*threads: int) -> Iterator[Callable[[], float]]:
    """Gets how many seconds the threads have waited for a processor so far, all of them together. A server's loop runs
    in the thread whose number is that of its process."""
    with ExitStack() as opened:
        files = [opened.enter_context(Path(f"/proc/{thread}/schedstat").open("rb")).fileno() for thread in threads]
        yield lambda: sum(int(os.pread(file, 64, 0).split()[1]) for file in files) / 1e9


@contextmanager
def flooding(flood: Flood, seconds: float) -> Iterator[None]:
    """A process that floods as long as the block runs, `seconds` at most. It is forked, as what the flood sends may be
    long."""
    ours, theirs = _fork.Pipe()
    process = _fork.Process(target=_begin, args=(flood, seconds, theirs), daemon=True)
    process.start()
    try:
        ours.recv()
        yield
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


def _begin(flood: Flood, seconds: float, link: Connection) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends it, even if the process that began it has ended
    link.send("begins")
    flood()


def most_memory_mib(pid: int) -> float:
    """The peak memory of the process, without the memory that it shares with engines now: pool and table."""
    words = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(words["VmHWM"].split()[0]) - int(words["RssShmem"].split()[0])) / 1024


def forget_most_memory(pid: int) -> None:
    """Makes the memory of now the peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
