"""How a server ends when it is asked nicely: nothing new is given out, and what is under way may end.

SIGTERM begins it. While it lasts, `/readyz` says so, lookups and reservations without a grant of their own and new
sessions are refused with `not_ready`, and everything else is answered: commits, releases, heartbeats. It has ended
when no lease or reservation waits for anybody's word, or when `drain_s` is over. Members that die meanwhile count as
ever: the keeper goes on.

Invariant: the pool is kept only after a drain that no SIGINT cut short, and only if it was ready.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdock.api.service import CacheService


class Drain:
    """`begin` and `cut_short` only set flags: signal handlers call them."""

    def __init__(self, service: CacheService, now_s: Callable[[], float]) -> None:
        self._service = service
        self._now_s = now_s
        self._until_s: float | None = None
        self._remove = False

    @property
    def begun(self) -> bool:
        return self._until_s is not None

    @property
    def remaining_s(self) -> float:
        """Of `drain_s`; 0 before it began and after it has ended."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - self._now_s())

    @property
    def keeps_pool(self) -> bool:
        service = self._service
        return self.begun and not self._remove and service.settings.on_exit == "keep" and service.pool.ready

    def begin(self) -> None:
        self._service.draining = True
        self._until_s = self._now_s() + self._service.settings.drain_s

    def cut_short(self, *, remove_pool: bool) -> None:
        self._remove = self._remove or remove_pool
        if self._until_s is not None:
            self._until_s = self._now_s()

    def ended(self) -> bool:
        if not self.begun:
            return False
        held = any(view.leases or view.reservations for view in self._service.table.sessions())
        return not held or self.remaining_s == 0
