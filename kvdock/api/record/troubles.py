"""What went wrong last: engines that died, damaged chunks, engines that took whole chunks for damaged ones, a pool that
was not taken over, and background work of the server that failed. When, and whose. Kept with the pool until somebody
acknowledges them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from kvdock.api.clock import boot_s
from kvdock.protocol.reports import TroubleKind

MOST_TROUBLES = 64
"""So many of each kind are kept."""


class Trouble(NamedTuple):
    """`at`: Unix seconds, for people; `at_boot_s`: the same moment by a clock that nobody sets. `who`: the engine's
    label or session; or the pool, and why it was left out; or what failed, and why."""

    kind: TroubleKind
    at: float
    tenant: str
    who: str
    at_boot_s: float


class Troubles:
    """`wall_s`: Unix seconds. `boot_s`: the time since this machine was started. Safe to use from several threads."""

    def __init__(self, wall_s: Callable[[], float], boot_s: Callable[[], float] = boot_s) -> None:
        self._known: dict[TroubleKind, deque[Trouble]] = {}
        self._has_changed = False
        self._wall_s, self._boot_s, self._lock = wall_s, boot_s, threading.RLock()

    def acknowledge(self) -> int:
        """An operator has seen all that happened so far. Returns how many those were."""
        with self._lock:
            count = sum(map(len, self._known.values()))
            self._known.clear()
            self._has_changed = True
        return count

    def add(self, kind: TroubleKind, tenant: str, who: str) -> None:
        with self._lock:
            self._of(kind).append(Trouble(kind, self._wall_s(), tenant, who, self._boot_s()))
            self._has_changed = True

    def _of(self, kind: TroubleKind) -> deque[Trouble]:
        return self._known.setdefault(kind, deque(maxlen=MOST_TROUBLES))

    def add_once(self, kind: TroubleKind, tenant: str, who: str) -> None:
        """In place of those of that kind and engine, which may come often."""
        with self._lock:
            known = self._of(kind)
            for one in [one for one in known if (one.tenant, one.who) == (tenant, who)]:
                known.remove(one)
            self.add(kind, tenant, who)

    def within(self, kind: TroubleKind, seconds: float) -> list[Trouble]:
        """Those of a kind that happened in the last `seconds` and are not acknowledged, oldest first."""
        since_s = self._boot_s() - seconds
        with self._lock:
            return [one for one in self._known.get(kind, ()) if one.at_boot_s > since_s]

    # ---------------------------------------------------------------- kept with the pool

    @property
    def has_changed(self) -> bool:
        """Whether there are others than those last kept."""
        return self._has_changed

    def kept(self) -> Iterator[bytes]:
        with self._lock:
            self._has_changed = False
            found = [one for known in self._known.values() for one in known]
        yield msgspec.json.encode(found)

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with those of an earlier server. Raises msgspec.MsgspecError."""
        with self._lock:
            for one in reversed(msgspec.json.decode(kept, type=list[Trouble])):
                if len(self._of(one.kind)) < MOST_TROUBLES:
                    self._of(one.kind).appendleft(one)
