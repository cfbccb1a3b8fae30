"""How long a request waits for what another engine computes and stores, instead of computing it as well.

A lookup's answer says how far others, who are known to be alive, store the request's prefix. Waiting for them pays
while it takes less than computing: so the wait of a request is bounded by a share of what computing the missing tokens
would take here, at the speed of this engine's own steps. It ends earlier when for half of that time nothing more was
stored, or when nobody stores any more. A request that has given up computes, and does not wait again.

Threads: the engine's, one at a time. Nothing here blocks: who waits asks again in a later step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvdock.connectors.prefill_speed import PrefillSpeed
from kvdock.protocol.awaited import BeingStored

ASK_S = 0.02
"""While a request waits, it is asked about again this long after the last time."""
STALL_SHARE = 0.5
"""How long a request waits while nothing more is stored, as a share of the time that it may wait at most."""



@dataclass
class _Wait:
    began_s: float
    longest_s: float
    tokens: int
    """What is awaited, counted from token 0."""
    committed: int
    progress_s: float
    """When more was stored than before."""
    has_ended: bool = False


class ComputeOnce:
    """A request may wait for `share` times what it would take to compute the missing tokens. When a wait ends, `count`
    is called with its outcome ("fulfilled", "withdrawn", "stalled", "expired") and its seconds."""

    def __init__(
        self, share: float, speed: PrefillSpeed, clock: Callable[[], float], count: Callable[[str, float], None]
    ) -> None:
        self._share, self._speed, self._clock, self._count = share, speed, clock, count
        self._waits: dict[str, _Wait] = {}

    def is_waiting(self, request_id: str) -> bool:
        wait = self._waits.get(request_id)
        return wait is not None and not wait.has_ended

    def waits(
        self, request_id: str, stored: BeingStored | None, hit_tokens: int, local_tokens: int, asked_s: float
    ) -> bool:
        """Whether the request waits, now that its newest answer says `stored` and found `hit_tokens`. Its time begins
        now, whenever it was asked about."""
        now_s, wait = self._clock(), self._waits.get(request_id)
        if wait is None:
            if stored is None:
                return False
            longest_s = self._share * (stored.tokens - max(stored.committed, local_tokens)) / self._speed.tokens_per_s
            if longest_s < 2 * ASK_S:
                return False  # it would be over before the second answer
            self._waits[request_id] = _Wait(now_s, longest_s, stored.tokens, stored.committed, now_s)
            return True
        if wait.has_ended:
            return False
        if stored is None:
            self._end(wait, "fulfilled" if hit_tokens >= wait.tokens else "withdrawn")
            return False
        if stored.committed > wait.committed:
            wait.committed, wait.progress_s = stored.committed, now_s
        wait.tokens = max(wait.tokens, stored.tokens)
        return not self.is_over(request_id)

    def is_over(self, request_id: str) -> bool:
        """Whether the request has waited too long: its wait ends."""
        wait = self._waits[request_id]
        now_s = self._clock()
        if now_s - wait.began_s > wait.longest_s:
            self._end(wait, "expired")
        elif now_s - wait.progress_s > STALL_SHARE * wait.longest_s:
            self._end(wait, "stalled")
        return wait.has_ended

    def _end(self, wait: _Wait, how: str) -> None:
        wait.has_ended = True
        self._count(how, self._clock() - wait.began_s)

    def forget(self, request_id: str) -> None:
        """The request ended, was aborted or preempted."""
        self._waits.pop(request_id, None)
