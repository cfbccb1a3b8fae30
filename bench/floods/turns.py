"""The turns of a server's event loop, measured in its own process: as processor time of the loop's thread, and as time
on the clock.

A turn is all that the loop does between two waits for something to happen. Processor time leaves out what a busy
machine took from the thread, and what the thread slept; the clock counts both, but not the wait for something to
happen. The system counts interrupts while the thread waits as its processor time, too: so of no turn more is counted
than its time on the clock. A thread that the system stopped meanwhile, for another one, finds less in its caches when
it goes on, and what others do at the same moment costs it time, too: so the longest turn of those that were not stopped
is counted apart.

libuv, on which uvloop's loops run, calls back before each wait and knows how long it has waited: its functions
are in uvloop's extension. The longest turns are in a file that both processes map.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import uvloop.loop

_PREPARE = 9
"""UV_PREPARE of libuv's enumeration uv_handle_type."""
_MEASURE_WAITS = 1
"""UV_METRICS_IDLE_TIME of uv_loop_option."""
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CPU, _WALL, _UNSTOPPED = range(3)
_BYTES = 24
"""The file has a number of seconds for each."""


class Longest(NamedTuple):
    """The longest turn in processor time, the longest on the clock, and the longest in processor time of those that
    were not stopped. They may be three turns."""

    cpu_ms: float = 0.0
    wall_ms: float = 0.0
    unstopped_ms: float = 0.0

    def or_longer(self, other: Longest) -> Longest:
        return Longest(*map(max, zip(self, other, strict=True)))


class LongestTurn:
    """What the other process measures. Makes the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        self._seconds = _mapped(path)

    def forget(self) -> None:
        for which in (_CPU, _WALL, _UNSTOPPED):
            self._seconds[which] = 0.0

    def read(self) -> Longest:
        """Since they were last forgotten."""
        return Longest(*(1000 * seconds for seconds in self._seconds))


def _mapped(path: Path) -> memoryview[float]:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("d")


def measure_turns(path: Path, explain: Callable[[float, float], None] | None = None) -> asyncio.Task[None]:
    """Measures the turns of the running loop, as long as the task runs. `explain`: called after each with its processor
    time and its time on the clock, in seconds."""
    return asyncio.create_task(_measure(_mapped(path), explain))


async def _measure(longest: memoryview[float], explain: Callable[[float, float], None] | None) -> None:
    libuv, loop = ctypes.CDLL(uvloop.loop.__file__), asyncio.get_running_loop()
    address = ctypes.c_void_p(_address_of(loop))
    waited_ns = libuv.uv_metrics_idle_time
    waited_ns.restype = ctypes.c_uint64
    libuv.uv_loop_configure(address, _MEASURE_WAITS)

    def worked_s() -> float:
        waited: int = waited_ns(address)
        return (time.monotonic_ns() - waited) / 1e9

    def stops() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw

    before_cpu_s, before_wall_s, before_stops = time.thread_time(), worked_s(), stops()

    def turned(_: int) -> None:
        nonlocal before_cpu_s, before_wall_s, before_stops
        cpu_s, wall_s, stopped = time.thread_time(), worked_s(), stops()
        on_clock_s = wall_s - before_wall_s
        worked_cpu_s = min(cpu_s - before_cpu_s, on_clock_s)
        longest[_CPU] = max(longest[_CPU], worked_cpu_s)
        longest[_WALL] = max(longest[_WALL], on_clock_s)
        if stopped == before_stops:
            longest[_UNSTOPPED] = max(longest[_UNSTOPPED], worked_cpu_s)
        if explain is not None:
            explain(worked_cpu_s, on_clock_s)
        before_cpu_s, before_wall_s, before_stops = cpu_s, wall_s, stopped

    handle = ctypes.create_string_buffer(libuv.uv_handle_size(_PREPARE))
    libuv.uv_prepare_init(address, handle)
    callback = _CALLBACK(turned)
    libuv.uv_prepare_start(handle, callback)
    try:
        await loop.create_future()
    finally:
        libuv.uv_close(handle, None)  # the loop cannot be closed while it has a handle that uvloop does not know
        await asyncio.sleep(0)


def _address_of(loop: asyncio.AbstractEventLoop) -> int:
    """The address of libuv's loop."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found: int = address(uvloop.loop.libuv_get_loop_t_ptr(loop), None)  # type: ignore[attr-defined]  # no stub has it
    return found
