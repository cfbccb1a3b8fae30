"""The turns of a server's event loop, measured in its own process as processor time of the loop's thread.

A turn is all that the loop does between two waits for something to happen. Time in which the thread does not run,
because the machine is busy, does not count. libuv, on which uvloop's loops run, calls back before each wait: its
functions are in uvloop's extension. The longest turn is in a file that both processes map.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from pathlib import Path

import uvloop.loop

_PREPARE = 9
"""UV_PREPARE of libuv's enumeration uv_handle_type."""
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SECONDS = 8
"""Bytes of the file: one number."""


class LongestTurn:
    """What the other process measures. Makes the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SECONDS))
        self._seconds = _mapped(path)

    def forget(self) -> None:
        self._seconds[0] = 0.0

    @property
    def ms(self) -> float:
        """Since it was last forgotten."""
        return 1000 * self._seconds[0]


def _mapped(path: Path) -> memoryview[float]:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _SECONDS)).cast("d")


def measure_turns(path: Path) -> asyncio.Task[None]:
    """Measures the turns of the running loop, as long as the task runs."""
    return asyncio.create_task(_measure(_mapped(path)))


async def _measure(longest: memoryview[float]) -> None:
    before_s = time.thread_time()

    def turned(_: int) -> None:
        nonlocal before_s
        now_s = time.thread_time()
        took_s, before_s = now_s - before_s, now_s
        if took_s > longest[0]:
            longest[0] = took_s

    libuv, loop = ctypes.CDLL(uvloop.loop.__file__), asyncio.get_running_loop()
    handle = ctypes.create_string_buffer(libuv.uv_handle_size(_PREPARE))
    libuv.uv_prepare_init(ctypes.c_void_p(_address_of(loop)), handle)
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
