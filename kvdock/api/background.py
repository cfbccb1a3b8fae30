"""The server's background work: what fails is logged with its cause, is a finding, and begins again.

Invariant: no exception ends such work without a word. The keeper alone is not here: without it the server would never
notice a death, so its failure ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 30.0
HEALTHY_S = 60.0
"""Work that has gone on for this long is as good as new: if it fails then, it begins again soon."""
log = logging.getLogger("kvdock.api")


class Background:
    """`report` is called with each failure's sentence, in the thread of the work."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._begun: list[asyncio.Task[None]] = []
        self._once: set[asyncio.Task[None]] = set()

    def begin(self, name: str, run: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Runs `run()` in a task, again after each failure, until it returns or `end`."""
        self._begun.append(asyncio.create_task(self._go_on(name, run)))

    def once(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Runs it in a task, and not again if it fails."""
        task = asyncio.create_task(self._try(name, work))
        self._once.add(task)
        task.add_done_callback(self._once.discard)
        return task

    def thread(self, name: str, run: Callable[[], None], ending: threading.Event) -> threading.Thread:
        """A thread, not yet started, that calls `run`, again after each failure, until it returns or `ending` is set.
        """
        def go_on() -> None:
            failures = _Failures(name, self._report)
            while not ending.is_set():
                failures.begin()
                try:
                    run()
                    break
                except Exception as error:  # whatever it was: the work must go on
                    ending.wait(failures.failed(error))

        return threading.Thread(target=go_on, name=name, daemon=True)

    async def end(self) -> None:
        """Cancels what has begun, the newest first, and waits for it."""
        while self._begun:
            task = self._begun.pop()
            task.cancel()
            await asyncio.wait([task])

    async def _go_on(self, name: str, run: Callable[[], Coroutine[Any, Any, object]]) -> None:
        failures = _Failures(name, self._report)
        while True:
            failures.begin()
            try:
                await run()
                return
            except Exception as error:  # whatever it was: the work must go on
                await asyncio.sleep(failures.failed(error))

    async def _try(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Exception as error:  # whatever it was: the server goes on without
            _Failures(name, self._report).failed(error, again=False)


class _Failures:
    """Those of one piece of work. The same cause is logged once, until the work was healthy again."""

    def __init__(self, name: str, report: Callable[[str], None]) -> None:
        self._name, self._report = name, report
        self._retry_s, self._began_s, self._last = FIRST_RETRY_S, 0.0, ""

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def failed(self, error: Exception, *, again: bool = True) -> float:
        """After how many seconds the work is to begin again."""
        if time.monotonic() - self._began_s > HEALTHY_S:
            self._retry_s, self._last = FIRST_RETRY_S, ""
        retry_s, self._retry_s = self._retry_s, min(2 * self._retry_s, LONGEST_RETRY_S)
        cause = f"{type(error).__name__}: {error}"
        if cause != self._last:
            self._last = cause
            how = "it begins again" if again else "the server goes on without"
            log.error("%s failed (%s): %s", self._name, cause, how, exc_info=error)
        self._report(f"{self._name}, {cause}")
        return retry_s
