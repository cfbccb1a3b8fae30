"""What became of each request: what kvdock had of it, what was loaded, and why not more. Requests that ask for it hear
it with their answer, and people read it at the server; docs/vllm.md has the words.

Threads: vLLM's scheduler thread calls everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.vllm.hints import OWN, Asked, asked_by
from kvdock.protocol.outcomes import Outcome


@dataclass
class _Outcome:
    """`found_tokens`: from the request's first; `loaded_tokens`: of its last load, behind the `local_tokens` that vLLM
    had then, or when it admitted the request for the first time. `why`: "" while nothing kept more from being loaded.
    `cached_tokens`: what vLLM's own cache has now."""

    asked: Asked
    cached_tokens: int = 0
    is_admitted: bool = False
    found_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    why: str = ""


class Outcomes:
    """`tell` is given the outcome of each request that has ended."""

    def __init__(self, tell: Callable[[Outcome], None]) -> None:
        self._tell = tell
        self._outcomes: dict[str, _Outcome] = {}

    def asked(self, request: Any) -> Asked:
        return self._of(request).asked

    def looked_up(self, request: Any, local_tokens: int) -> None:
        """vLLM's own cache has the first `local_tokens` of the request."""
        self._of(request).cached_tokens = local_tokens

    def found(self, request: Any, tokens: int) -> None:
        """The server has the first `tokens` tokens of the request."""
        outcome = self._of(request)
        outcome.found_tokens = max(outcome.found_tokens, tokens)

    def held_back(self, request: Any, why: str) -> None:
        """Nothing, or less, is loaded: `why` is the last word."""
        self._of(request).why = why

    def declined(self, request: Any, why: str, tokens: int) -> None:
        """The server has the first `tokens` tokens, and they are computed all the same."""
        self.found(request, tokens)
        self.held_back(request, f"declined_{why}")

    def admitted(self, request: Any, tokens: int) -> None:
        """A load of `tokens` tokens begins. What vLLM has of a request that it preempted may be the request's own."""
        outcome = self._of(request)
        if tokens or not outcome.is_admitted:
            outcome.local_tokens, outcome.loaded_tokens = outcome.cached_tokens, tokens
        if tokens:
            outcome.why = ""
        outcome.is_admitted = True

    def failed(self, request_id: str, valid_tokens: int) -> None:
        """A load fell short: what lies behind `valid_tokens` did not come."""
        if request_id in self._outcomes:  # else it has ended
            outcome = self._outcomes[request_id]
            outcome.loaded_tokens = max(0, min(outcome.loaded_tokens, valid_tokens - outcome.local_tokens))
            outcome.why = "load_failed"

    def ended(self, request: Any) -> dict[str, Any] | None:
        """What the answer's `kv_transfer_params` are to say. None: nothing, because the request did not ask, or because
        another connector may have something to say there: vLLM takes one answer alone."""
        outcome = self._outcomes.pop(request.request_id, None)
        if outcome is not None:
            self._tell(_told(request, outcome))
        params = getattr(request, "kv_transfer_params", None)
        if outcome is None or not outcome.asked.report or not isinstance(params, Mapping) or set(params) != {OWN}:
            return None
        told: dict[str, Any] = {"found_tokens": outcome.found_tokens, "loaded_tokens": outcome.loaded_tokens}
        return {OWN: told | ({"why": outcome.why} if outcome.why else {})}

    def _of(self, request: Any) -> _Outcome:
        outcome = self._outcomes.get(request.request_id)
        if outcome is None:
            outcome = self._outcomes[request.request_id] = _Outcome(asked_by(request))
        return outcome


def _told(request: Any, outcome: _Outcome) -> Outcome:
    return Outcome(
        request=request.request_id, prompt_tokens=request.num_prompt_tokens,
        local_tokens=outcome.local_tokens, found_tokens=outcome.found_tokens, loaded_tokens=outcome.loaded_tokens,
        why=outcome.why,
    )
