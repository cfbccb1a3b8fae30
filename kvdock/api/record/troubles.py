"""What went wrong last: engines that died, damaged chunks, engines that took whole chunks for damaged ones, a pool that
was not taken over, and background work of the server that failed. When, and whose."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvdock.protocol.verdict import TroubleKind

MOST_TROUBLES = 64
"""So many of each kind are kept."""


class Trouble(NamedTuple):
    """`at`: Unix seconds. `who`: the engine's label or session; or the pool, and why it was left out; or what failed,
    and why."""

    kind: TroubleKind
    at: float
    tenant: str
    who: str


class Troubles:
    """`wall_s`: Unix seconds. Safe to use from several threads."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._known: dict[TroubleKind, deque[Trouble]] = {}
        self._wall_s, self._lock = wall_s, threading.RLock()

    def acknowledge(self) -> int:
        """An operator has seen all that happened so far. Returns how many those were."""
        with self._lock:
            count = sum(map(len, self._known.values()))
            self._known.clear()
        return count

    def add(self, kind: TroubleKind, tenant: str, who: str) -> None:
        with self._lock:
            self._known.setdefault(kind, deque(maxlen=MOST_TROUBLES)).append(Trouble(kind, self._wall_s(), tenant, who))

    def add_once(self, kind: TroubleKind, tenant: str, who: str) -> None:
        """In place of those of that kind and engine, which may come often."""
        with self._lock:
            known = self._known.setdefault(kind, deque(maxlen=MOST_TROUBLES))
            for one in [one for one in known if (one.tenant, one.who) == (tenant, who)]:
                known.remove(one)
            self.add(kind, tenant, who)

    def since(self, kind: TroubleKind, at: float) -> list[Trouble]:
        """Those of a kind that happened after `at` and are not acknowledged, oldest first."""
        with self._lock:
            return [one for one in self._known.get(kind, ()) if one.at > at]
