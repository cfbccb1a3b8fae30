"""Slows down clients whose calls are refused again and again.

Invariant: a client whose calls are not refused never waits here.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from kvdock.api.turns import LONG_READ_BYTES

PAUSE_S: Final = 0.002
BURST: Final = 100
"""How many units a client has for nothing. A short call that is refused costs two: one when it is refused, and one when
the next one is read."""
MOST_OWED: Final = 500
"""For how many units a client waits at most: a second."""
CLIENTS_KEPT: Final = 4096
"""With as many clients, those that owe nothing are forgotten, at most once in FORGET_S."""
FORGET_S: Final = 1.0


class Pace:
    """A refused call costs its client little, and the server as much as another one. So a client pays one unit for each
    refused call, one for what is read next on the same connection, and one more for each LONG_READ_BYTES of that. It
    has BURST units for nothing; beyond these it waits `pause_s` for each, but for MOST_OWED units at most. Only
    connections whose latest call was refused wait: the same client's other calls are as fast as ever."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s = pause_s
        self.owing: dict[Hashable, float] = {}
        """By client, the time from which on it owes nothing."""
        self._forgot_s = 0.0

    def refused(self, client: Hashable, now_s: float) -> None:
        """A call of the client was refused."""
        self._spend(client, 1, now_s)

    def wait_s(self, client: Hashable, read_bytes: int, now_s: float) -> float:
        """How many seconds a read waits that comes after a refused call, and may be the rest of its body."""
        paid_s = self._spend(client, 1 + read_bytes // LONG_READ_BYTES, now_s)
        return max(0.0, paid_s - BURST * self._pause_s - now_s)

    def _spend(self, client: Hashable, units: int, now_s: float) -> float:
        if len(self.owing) >= CLIENTS_KEPT and now_s >= self._forgot_s + FORGET_S:
            self._forgot_s = now_s
            self.owing = {one: at_s for one, at_s in self.owing.items() if at_s > now_s}
        paid_s = max(now_s, self.owing.get(client, 0.0)) + units * self._pause_s
        self.owing[client] = paid_s = min(paid_s, now_s + (BURST + MOST_OWED) * self._pause_s)
        return paid_s
