"""Threads of kvdock in an engine's process, which may call CUDA at any time.

While a thread of the engine captures a CUDA graph, as vLLM and SGLang do when they start, the driver refuses many calls
of other threads, such as registering or allocating memory or waiting for an event, and such a call makes the capture
fail. In a thread that is in the relaxed capture mode, the driver allows these calls. The native core switches to this
mode for each of its calls; threads that are made here are always in it, so they may call torch.cuda too.

Invariant: no other module of kvdock starts a thread in an engine's process (tests/house/test_capture.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvdock import _core

P = ParamSpec("P")
T = TypeVar("T")


def new_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A daemon thread that is not started yet. It is in the relaxed mode if this process has used a GPU through the
    native core before the thread starts."""
    return threading.Thread(target=_relaxed, args=(run,), name=name, daemon=True)


class Pool(ThreadPoolExecutor):
    """A thread pool whose calls run in the relaxed mode if this process has used a GPU through the native core
    before."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        return super().submit(_relaxed, work, *args, **named)


def _relaxed(work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
    _core.cuda_relax_thread()
    return work(*args, **named)
