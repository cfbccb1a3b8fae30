"""Work on the connector's own threads, where nobody waits for a failure: it is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger("kvdock.vllm")


def run(pool: ThreadPoolExecutor, work: Callable[..., None], *args: object) -> Future[None]:
    future = pool.submit(work, *args)
    future.add_done_callback(_log_failure)
    return future


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("kvdock: background call failed", exc_info=error)
