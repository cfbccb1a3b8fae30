"""How long a request waits for chunks that a lower tier is loading into the pool, instead of computing them.

A lookup says how long its request may wait and how fast this engine computes; nothing is loaded that would come later
than it is computed. Its answer says what is expected, and by when. The request waits until all of it is there, until
nothing comes any more, or until the time that its lookup named is over; then it takes what there is.

Threads: the engine's, one at a time. Nothing here blocks: who waits asks again in a later step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvdock.connectors.prefill_speed import PrefillSpeed
from kvdock.protocol.awaited import PendingTokens

LEAST_S = 0.01
"""What is computed sooner is not waited for."""


class WaitTerms(NamedTuple):
    """What a lookup says: as its body has them."""

    wait_s: float
    tokens_per_s: float


NO_WAIT = WaitTerms(0.0, 0.0)


@dataclass
class _Wait:
    """`server_until_s`: before that, the server says that nothing comes only when it knows so."""

    began_s: float
    until_s: float
    server_until_s: float
    tokens: int
    has_ended: bool = False


class AwaitTiers:
    """`most_s`: the longest wait. `speed`: of this engine; None: it is not known. When a wait ends,
    `count` is called with its outcome ("fulfilled", "shortened", "expired") and its seconds."""

    def __init__(
        self, most_s: float, speed: PrefillSpeed | None, clock: Callable[[], float],
        count: Callable[[str, float], None] = lambda how, seconds: None,
    ) -> None:
        self._most_s, self._speed, self._clock, self._count = most_s, speed, clock, count
        self._waits: dict[str, _Wait] = {}

    def terms(self, missing_tokens: int) -> WaitTerms:
        """What a lookup says whose request lacks `missing_tokens` at most."""
        tokens_per_s = self._speed.tokens_per_s if self._speed is not None else 0.0
        wait_s = min(self._most_s, missing_tokens / tokens_per_s) if tokens_per_s > 0 else self._most_s
        return WaitTerms(wait_s, tokens_per_s) if wait_s >= LEAST_S else NO_WAIT

    def is_waiting(self, request_id: str) -> bool:
        wait = self._waits.get(request_id)
        return wait is not None and not wait.has_ended

    def waits(
        self, request_id: str, said: PendingTokens | None, hit_tokens: int, local_tokens: int, asked_s: float
    ) -> bool:
        """Whether the request waits, now that its newest answer says `said` and found `hit_tokens`. Its time begins
        now; that at the server began with the question, sent at `asked_s`."""
        wait = self._waits.get(request_id)
        if wait is None:
            if said is None or said.tokens <= max(hit_tokens, local_tokens):
                return False
            terms = self.terms(said.tokens - max(hit_tokens, local_tokens))
            if terms is NO_WAIT:
                return False
            now_s = self._clock()
            self._waits[request_id] = _Wait(now_s, now_s + terms.wait_s, asked_s + terms.wait_s, said.tokens)
            return True
        if wait.has_ended:
            return False
        if said is None:
            is_over = self._clock() > wait.server_until_s
            self._end(wait, "fulfilled" if hit_tokens >= wait.tokens else "expired" if is_over else "shortened")
            return False
        wait.tokens = said.tokens
        return not self.is_over(request_id)

    def is_over(self, request_id: str) -> bool:
        """Whether the request has waited too long: its wait ends."""
        wait = self._waits[request_id]
        if not wait.has_ended and self._clock() > wait.until_s:
            self._end(wait, "expired")
        return wait.has_ended

    def _end(self, wait: _Wait, how: str) -> None:
        wait.has_ended = True
        self._count(how, self._clock() - wait.began_s)

    def forget(self, request_id: str) -> None:
        """The request ended, was aborted or preempted."""
        self._waits.pop(request_id, None)
