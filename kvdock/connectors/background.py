"""Calls that run in a background thread of the connector, so that the engine's thread does not wait for them.

The exception of a call is logged here, because the caller may never read the call's result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from kvdock.datapath.threads import Pool

log = logging.getLogger("kvdock.connector")


class Background:
    """A single thread. It starts with the first call, and runs calls in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._thread = Pool(1, name)
        self._last: Future[None] | None = None

    def run(self, work: Callable[..., None], *args: object) -> Future[None]:
        self._last = future = self._thread.submit(work, *args)
        future.add_done_callback(_log_failure)
        return future

    def is_idle(self) -> bool:
        """Whether all calls that were submitted have ended."""
        return self._last is None or self._last.done()

    def close(self) -> None:
        """Waits until all submitted calls have ended."""
        self._thread.shutdown(wait=True)


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("background call failed", exc_info=error)
