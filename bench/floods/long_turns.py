"""What long turns of a server's event loop were made of: `python -m bench.floods --explain`.

A turn that takes more than ABOVE_S of processor time becomes a line of JSON in a file, with its time on the clock, how
often the system took the processor from its thread, and the collections of garbage in it. A second thread looks at the
loop's thread every EVERY_S, which makes turns longer: figures come from runs without it.
"""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

ABOVE_S = 0.002
EVERY_S = 0.0003
FRAMES = 4
"""How many of the innermost frames name a place."""


class LongTurn(msgspec.Struct):
    """`system_ms`: the part of `cpu_ms` that was spent in the kernel. `taken`: how often the system gave the processor
    to another thread meanwhile. `faults`: pages that were mapped. `collections`: generation, processor time in
    milliseconds and objects freed, of each. `seen`: how often the thread was found at each place."""

    at_s: float
    cpu_ms: float
    wall_ms: float
    system_ms: float
    taken: int
    faults: int
    collections: list[tuple[int, float, int]]
    seen: dict[str, int]


class LongTurns:
    """Notes the long turns of the calling thread, which runs the event loop."""

    def __init__(self, path: Path, above_s: float = ABOVE_S) -> None:
        self._file, self._above_s, self._thread = path.open("ab", buffering=0), above_s, threading.get_ident()
        self._before = resource.getrusage(resource.RUSAGE_THREAD)
        self._collections: list[tuple[int, float, int]] = []
        self._seen: list[list[tuple[Any, int]]] = []
        self._collection_s = 0.0
        self._switch_s = sys.getswitchinterval()
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._look, name="long turns", daemon=True)

    def begin(self) -> None:
        gc.callbacks.append(self._collected)
        sys.setswitchinterval(EVERY_S)  # else a thread that computes gives the interpreter away after 5 ms
        self._looking.start()

    def end(self) -> None:
        gc.callbacks.remove(self._collected)
        self._is_over.set()
        self._looking.join()
        sys.setswitchinterval(self._switch_s)
        self._file.close()

    def turned(self, cpu_s: float, wall_s: float) -> None:
        """A turn has ended, after so much processor time and time on the clock."""
        now, before = resource.getrusage(resource.RUSAGE_THREAD), self._before
        self._before = now
        seen, self._seen = self._seen, []
        collections, self._collections = self._collections, []
        if cpu_s <= self._above_s:
            return
        self._file.write(msgspec.json.encode(LongTurn(
            at_s=round(time.monotonic(), 3), cpu_ms=round(1000 * cpu_s, 2), wall_ms=round(1000 * wall_s, 2),
            system_ms=round(1000 * (now.ru_stime - before.ru_stime), 2), taken=now.ru_nivcsw - before.ru_nivcsw,
            faults=now.ru_minflt - before.ru_minflt, collections=collections,
            seen=dict(Counter(" < ".join(map(_place, frames)) for frames in seen).most_common(12)),
        )) + b"\n")

    def _collected(self, phase: str, about: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collection_s = time.thread_time()
            return
        took_ms = round(1000 * (time.thread_time() - self._collection_s), 3)
        self._collections.append((about["generation"], took_ms, about["collected"]))

    def _look(self) -> None:
        while not self._is_over.wait(EVERY_S):
            frame: FrameType | None = sys._current_frames().get(self._thread)
            frames = list[tuple[Any, int]]()
            while frame is not None and len(frames) < FRAMES:
                frames.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
            self._seen.append(frames)


@contextmanager
def long_turns(path: Path) -> Iterator[Callable[[float, float], None]]:
    """Gets what a turn took: processor time and time on the clock, in seconds."""
    turns = LongTurns(path)
    turns.begin()
    try:
        yield turns.turned
    finally:
        turns.end()


def _place(at: tuple[Any, int]) -> str:
    code, line = at
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{line} {code.co_name}"
