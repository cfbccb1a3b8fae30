"""How a server ends when it is asked nicely: nothing new is given out, and what is under way may end.

SIGTERM begins it. While it lasts, `/readyz` says so, lookups and reservations without a grant of their own and new
sessions are refused with `not_ready`, and everything else is answered: commits, releases, heartbeats. It has ended
when no lease or reservation waits for anybody's word and the calls that were running when it began are answered, or
when `drain_s` is over. Members that die meanwhile count as ever: the keeper goes on.

Invariant: the pool is kept only after a drain without SIGINT, and only if it was ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from kvdock.api.service import CacheService


class Drain:
    """`begin` and `remove_pool` only take notes: signal handlers call them."""

    def __init__(self, service: CacheService, now_s: Callable[[], float]) -> None:
        self._service = service
        self._now_s = now_s
        self._until_s: float | None = None
        self._running: list[asyncio.Task[Any]] = []
        self._remove = False

    @property
    def begun(self) -> bool:
        return self._until_s is not None

    @property
    def keeps_pool(self) -> bool:
        service = self._service
        return self.begun and not self._remove and service.settings.on_exit == "keep" and service.pool.ready

    def begin(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """`running`: calls that are not answered yet. Those that come later are short, and have their own grace."""
        self._running = list(running)
        self._service.draining = True
        self._until_s = self._now_s() + self._service.settings.drain_s

    def remove_pool(self) -> None:
        """Whatever `on_exit` says."""
        self._remove = True

    def ended(self) -> bool:
        """False before it began."""
        if self._until_s is None:
            return False
        if self._now_s() >= self._until_s:
            return True
        held = any(view.leases or view.reservations for view in self._service.table.sessions())
        return not held and all(call.done() for call in self._running)
