"""Signals to processes under test. A stopped process does nothing more once send() has returned."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol


class Process(Protocol):
    @property
    def pid(self) -> int: ...


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    """Stopped within the block."""
    send(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            send(process.pid, signal.SIGCONT)


def send(pid: int, what: signal.Signals) -> None:
    """A SIGSTOP reaches the threads of a process one after the other, so send() waits for all of them."""
    os.kill(pid, what)
    until_s = time.monotonic() + 10.0
    while what is signal.SIGSTOP and not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        assert time.monotonic() < until_s, f"process {pid} does not stop"
        time.sleep(0.001)  # no event says when a thread has stopped


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(") ")[2].startswith("T")
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
