"""What becomes of the requests of an engine that calls the verbs of interface.py, and how fast it computes prompts.

A step's time is that from the end of one poll to the last begin_store before the next: an engine polls before it
computes, and offers what it has computed.

Threads: the engine's, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvdock.connectors.interface import Hit, LoadDone, LookupResult
from kvdock.connectors.prefill_speed import PrefillSpeed
from kvdock.connectors.request_outcomes import RequestOutcomes
from kvdock.protocol.outcomes import Outcome


class EngineOutcomes(RequestOutcomes):
    """Each method but `step` is called with the verb that it is named for."""

    def __init__(self, tell: Callable[[Outcome], None], clock: Callable[[], float]) -> None:
        self._step_speed = PrefillSpeed(clock)
        super().__init__(tell, self._step_speed, clock)
        self._now_s = clock
        self._prompts: dict[str, int] = {}
        self._hits: dict[str, int] = {}
        """The tokens that are there if all of a load under way comes."""
        self._computed: dict[str, int] = {}
        """Tokens of running requests whose KV is there."""
        self._polled_s = self._offered_s = clock()
        self._step_tokens = 0

    def lookup(self, request_id: str, prompt_tokens: int, local_tokens: int, found: LookupResult) -> None:
        self._prompts.setdefault(request_id, prompt_tokens)
        self.looked_up(request_id, local_tokens)
        if isinstance(found, Hit):
            self.found(request_id, found.tokens)
        self._computed[request_id] = local_tokens

    def begin_load(self, request_id: str, local_tokens: int, hit_tokens: int) -> None:
        self.admitted(request_id, hit_tokens - local_tokens)
        self._hits[request_id] = hit_tokens

    def begin_store(self, request_id: str, computed_tokens: int) -> None:
        known = self._computed.get(request_id)
        if known is not None:
            self._step_tokens += max(0, computed_tokens - known)
            self._computed[request_id] = computed_tokens
            self._offered_s = self._now_s()

    def step(self, loads: Iterable[tuple[LoadDone, float | None]]) -> None:
        """A poll ends, with the loads that it returns and what the copies of each took."""
        if self._step_tokens:
            self._step_speed.ended(self._step_tokens, self._offered_s - self._polled_s)
            self._step_tokens = 0
        for done, copy_s in loads:
            wanted = self._hits.pop(done.request_id, None)
            if wanted is None:
                continue  # it has ended meanwhile
            if done.valid_tokens < wanted:
                self.failed(done.request_id, done.valid_tokens)
            else:
                self.loaded(done.request_id, copy_s)
            self._computed[done.request_id] = done.valid_tokens
        self._polled_s = self._now_s()

    def finished(self, request_id: str) -> None:
        """A preempted request has an outcome each time that it is preempted, and one at its end."""
        self._hits.pop(request_id, None)
        self._computed.pop(request_id, None)
        self.ended(request_id, self._prompts.pop(request_id, 0))
