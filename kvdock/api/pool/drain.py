"""Draining: there are no new grants, and calls, leases and reservations in progress may finish.

While the server drains, `/readyz` says so; lookups and reservations that do not have their grant yet get none, and
their answers say `draining`; everything else is answered: commits, releases, heartbeats.

An operator drains a server that stays up, until an operator ends the drain. SIGTERM begins the drain with which the
server ends: new sessions are refused with `not_ready`, too. That one has ended when no lease or reservation is open and
the calls that were running when it began are answered, or when `drain_s` is over. The keeper still notices members that
die meanwhile.

Handing over (kvdock/api/pool/handover.py) is a drain that leaves leases to the next server. It waits only for
reservations, because the next server would abort those.

Invariant: a server that ends keeps its pool only after a drain without SIGINT, and only if the pool is ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from kvdock.api.pool.pool import Pool
from kvdock.api.settings import Settings


class Drain:
    """`begin`, `hand_over` and `remove_pool` only set flags: signal handlers call them. `is_asked_for`: an operator has
    drained the server; the next server of the pool is not drained."""

    def __init__(self, settings: Settings, pool: Pool, now_s: Callable[[], float]) -> None:
        self._pool = pool
        self._drain_s = settings.drain_s
        self._keep_wanted = settings.on_exit == "keep"
        self._now_s = now_s
        self.is_asked_for = False
        self._until_s: float | None = None
        self._running: list[asyncio.Task[Any]] = []
        self._remove = False
        self._handing_over = False

    @property
    def begun(self) -> bool:
        """The server is about to end."""
        return self._until_s is not None

    @property
    def refuses_new(self) -> bool:
        """Whether nothing new is given out, until the server ends or an operator has ended the drain."""
        return self.begun or self.is_asked_for

    @property
    def is_takeover(self) -> bool:
        return self._handing_over

    @property
    def keeps_pool(self) -> bool:
        wanted = self._handing_over or self._keep_wanted
        return self.begun and not self._remove and wanted and self._pool.ready

    def begin(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """`running`: calls that are not answered yet. Later ones are short: uvicorn's grace period covers them."""
        self._running = list(running)
        self._until_s = self._now_s() + self._drain_s

    def hand_over(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """As `begin`, but the next server takes the leases over. May be called after `begin`."""
        self._handing_over = True
        if not self.begun:
            self.begin(running)

    def remove_pool(self) -> None:
        """Removes the pool at the end, even with `on_exit=keep`."""
        self._remove = True

    def ended(self) -> bool:
        """Whether the drain with which the server ends is over; False before it has begun."""
        if self._until_s is None:
            return False
        if self._now_s() >= self._until_s:
            return True
        held = any(
            view.reservations or (view.leases and not self._handing_over)
            for view in self._pool.table.sessions()
        )
        return not held and all(call.done() for call in self._running)
