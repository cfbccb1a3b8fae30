"""Threads that run what was asked for first before all that was asked for later, however it was cut into pieces.

A tier reads a few batches at a time. If the batches of several requests took turns, all of these would have to wait
until nearly all is read; in the order of the requests, the first one waits for its own alone.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


class InOrder:
    """Over `threads`, which may run other work as well. Thread-safe."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._waiting: list[tuple[float, int, Future[Any], Callable[[], Any]]] = []

    def submit(self, order: float, work: Callable[[], R]) -> Future[R]:
        """`work` goes before all work of a higher `order` that has not begun."""
        future: Future[R] = Future()
        with self._lock:
            heapq.heappush(self._waiting, (order, next(self._numbers), future, work))
        self._threads.submit(self._run_first)
        return future

    def cancel(self) -> None:
        """What has not begun, once the threads take no more."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, future, _ in waiting:
            future.cancel()

    def _run_first(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # it was cancelled
            _, _, future, work = heapq.heappop(self._waiting)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # it is whose who waits for the future
                future.set_exception(error)
