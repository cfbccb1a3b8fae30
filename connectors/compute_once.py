"""How long a request waits for what another engine computes and stores, instead of computing it as well.

A lookup's answer says how far others, who are known to be alive, store the request's prefix. Waiting for them pays
while it takes less than computing: so the wait of a request is bounded by a share of what computing the missing tokens
would take here, at the speed of this engine's own steps. It ends earlier when for half of that time nothing more was
stored, or when nobody stores any more. A request that has given up computes, and does not wait again.

Threads: the engine's, alone. Nothing here blocks: who waits asks again in a later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvdock.protocol.schemas import BeingStored

ASK_S = 0.02
"""While a request waits, it is asked about again this long after the last time."""
STALL_SHARE = 0.5
"""How long a request waits while nothing more is stored, as a share of the time that it may wait at most."""
START_TOKENS_PER_S = 50_000.0
"""Until this engine's speed is known. A fast engine waits least."""
KEPT_SHARE = 0.9
"""What the older steps count for when a new one is added to the speed."""
LARGE_SHARE = 0.5
"""Steps that compute less of prompts than this share of the largest one are not counted: they take as long for less."""


class PrefillSpeed:
    """How many tokens of prompts this engine computes in a second. `clock`: seconds, monotonic. `ahead`: how many steps
    are under way when the engine plans another one. It plans the next one when the oldest of them has ended."""

    def __init__(self, clock: Callable[[], float], ahead: int = 0) -> None:
        self._clock = clock
        self._largest = 0
        self._tokens = self._seconds = 0.0
        self._planned_s, self._under_way = 0.0, deque([0], maxlen=ahead + 1)

    def step(self, tokens: int) -> None:
        """A step that computes `tokens` of prompts is planned, so the oldest one under way has ended."""
        now_s, ended = self._clock(), self._under_way[0] if len(self._under_way) == self._under_way.maxlen else 0
        if ended > self._largest / LARGE_SHARE:  # the first large one: smaller ones say little
            self._tokens = self._seconds = 0.0
        self._largest = max(self._largest, ended)
        if ended and ended >= LARGE_SHARE * self._largest:
            self._tokens = KEPT_SHARE * self._tokens + ended
            self._seconds = KEPT_SHARE * self._seconds + now_s - self._planned_s
        self._planned_s = now_s
        self._under_way.append(tokens)

    @property
    def is_known(self) -> bool:
        return self._seconds > 0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self.is_known else START_TOKENS_PER_S


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
    """`share`: of what computing the missing tokens would take, how long a request may wait. `count`: is told how a
    wait ended ("fulfilled", "withdrawn", "stalled", "expired") and how many seconds it took."""

    def __init__(
        self, share: float, speed: PrefillSpeed, clock: Callable[[], float], count: Callable[[str, float], None]
    ) -> None:
        self._share, self.speed, self._clock, self._count = share, speed, clock, count
        self._waits: dict[str, _Wait] = {}

    def is_waiting(self, request_id: str) -> bool:
        wait = self._waits.get(request_id)
        return wait is not None and not wait.has_ended

    def waits(self, request_id: str, stored: BeingStored | None, hit_tokens: int, local_tokens: int) -> bool:
        """Whether the request waits, now that its newest answer says `stored` and found `hit_tokens`."""
        now_s, wait = self._clock(), self._waits.get(request_id)
        if wait is None:
            if stored is None:
                return False
            longest_s = self._share * (stored.tokens - max(stored.committed, local_tokens)) / self.speed.tokens_per_s
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
