"""What became of each request, under every engine: what kvdock had of it, what was loaded, what that took, and why not
more. The outcome goes to the server when the request ends, and people read it there (kvdock/protocol/outcomes.py).

Threads: the engine's, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvdock.connectors.prefill_speed import PrefillSpeed
from kvdock.protocol.outcomes import Outcome


@dataclass(slots=True)
class _Story:
    """`found_tokens`: from the request's first; `loaded_tokens`: of its last load, behind the `local_tokens` that the
    engine had then, or when it admitted the request for the first time. `why`: "" while nothing kept more from being
    loaded. `cached_tokens`: what the engine's own cache has now."""

    cached_tokens: int = 0
    is_admitted: bool = False
    found_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    began_s: float = 0.0
    load_s: float | None = None
    copy_s: float | None = None
    why: str = ""


class RequestOutcomes:
    """`tell` is given the outcome of each request that has ended. `speed`: of the engine's prefill. `clock`: seconds,
    monotonic."""

    def __init__(
        self, tell: Callable[[Outcome], None], speed: PrefillSpeed | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tell, self._speed, self._clock = tell, speed, clock
        self._stories: dict[str, _Story] = {}

    def looked_up(self, request_id: str, local_tokens: int) -> None:
        """The engine's own cache has the first `local_tokens` of the request."""
        self._of(request_id).cached_tokens = local_tokens

    def found(self, request_id: str, tokens: int) -> None:
        """The server has the first `tokens` tokens of the request."""
        story = self._of(request_id)
        story.found_tokens = max(story.found_tokens, tokens)

    def held_back(self, request_id: str, why: str) -> None:
        """Nothing, or less, is loaded: `why` is the last word."""
        self._of(request_id).why = why

    def declined(self, request_id: str, why: str, tokens: int) -> None:
        """The server has the first `tokens` tokens, and they are computed all the same."""
        self.found(request_id, tokens)
        self.held_back(request_id, f"declined_{why}")

    def admitted(self, request_id: str, tokens: int) -> None:
        """A load of `tokens` tokens begins. What an engine has of a request that it preempted may be the request's
        own."""
        story = self._of(request_id)
        if tokens or not story.is_admitted:
            story.local_tokens, story.loaded_tokens, story.loaded_bytes = story.cached_tokens, tokens, 0
            story.load_s = story.copy_s = None
        if tokens:
            story.why, story.began_s = "", self._clock()
        story.is_admitted = True

    def loading(self, request_id: str, size_bytes: int) -> None:
        """The load that has begun copies `size_bytes`, over all ranks."""
        self._of(request_id).loaded_bytes = size_bytes

    def loaded(self, request_id: str, copy_s: float | None) -> None:
        """All of its load has come. `copy_s`: what the copies took on the slowest rank, None where that is not
        known."""
        story = self._stories.get(request_id)
        if story is not None and story.loaded_tokens:  # else the request has ended
            story.load_s, story.copy_s = self._clock() - story.began_s, copy_s

    def failed(self, request_id: str, valid_tokens: int) -> None:
        """A load fell short: what lies behind `valid_tokens` did not come."""
        story = self._stories.get(request_id)
        if story is not None:
            story.loaded_tokens = max(0, min(story.loaded_tokens, valid_tokens - story.local_tokens))
            story.why = "load_failed"

    def ended(self, request_id: str, prompt_tokens: int) -> Outcome | None:
        """Tells what became of it, and returns that. None: nothing is known of it, or it was told before."""
        story = self._stories.pop(request_id, None)
        if story is None:
            return None
        speed = self._speed.tokens_per_s if self._speed is not None and self._speed.is_known else 0.0
        outcome = Outcome(
            request=request_id, prompt_tokens=prompt_tokens, local_tokens=story.local_tokens,
            found_tokens=story.found_tokens, loaded_tokens=story.loaded_tokens, why=story.why,
            loaded_bytes=story.loaded_bytes if story.loaded_tokens else 0, load_us=_microseconds(story.load_s),
            copy_us=_microseconds(story.copy_s), prefill_tokens_per_s=speed,
        )
        self._tell(outcome)
        return outcome

    def _of(self, request_id: str) -> _Story:
        story = self._stories.get(request_id)
        if story is None:
            story = self._stories[request_id] = _Story()
        return story


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, round(seconds * 1e6))
