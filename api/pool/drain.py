"""How a server ends when it is asked nicely: nothing new is given out, and what is under way may end.

SIGTERM begins it. While it lasts, `/readyz` says so, lookups and reservations without a grant of their own and new
sessions are refused with `not_ready`, and everything else is answered: commits, releases, heartbeats. It has ended
when no lease or reservation waits for anybody's word and the calls that were running when it began are answered, or
when `drain_s` is over. Members that die meanwhile count as ever: the keeper goes on.

Handing over (handover.py) is a drain that leaves leases to the next server and waits for reservations alone: those
would be aborted there.

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
        self._handing_over = False

    @property
    def begun(self) -> bool:
        return self._until_s is not None

    @property
    def keeps_pool(self) -> bool:
        service = self._service
        wanted = self._handing_over or service.settings.on_exit == "keep"
        return self.begun and not self._remove and wanted and service.pool.ready

    def begin(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """`running`: calls that are not answered yet. Those that come later are short, and have their own grace."""
        self._running = list(running)
        self._service.draining = True
        self._until_s = self._now_s() + self._service.settings.drain_s

    def hand_over(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """As `begin`; also when that was done before."""
        self._handing_over = True
        if not self.begun:
            self.begin(running)

    def remove_pool(self) -> None:
        """Whatever `on_exit` says."""
        self._remove = True

    def ended(self) -> bool:
        """False before it began."""
        if self._until_s is None:
            return False
        if self._now_s() >= self._until_s:
            return True
        held = any(
            view.reservations or (view.leases and not self._handing_over)
            for view in self._service.table.sessions()
        )
        return not held and all(call.done() for call in self._running)
