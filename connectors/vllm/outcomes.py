"""What became of each request: what kvdock had of it, what was loaded, and why not more. Requests that ask for it hear
it with their answer; docs/vllm.md has the words.

Threads: vLLM's scheduler thread calls everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.vllm.hints import OWN, Asked, asked_by


@dataclass
class _Outcome:
    """`found_tokens`: from the request's first; `loaded_tokens`: of its last load, behind the `local_tokens` that vLLM
    had then. `why`: "" while nothing kept more from being loaded."""

    asked: Asked
    found_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    why: str = ""


class Outcomes:
    def __init__(self) -> None:
        self._outcomes: dict[str, _Outcome] = {}

    def asked(self, request: Any) -> Asked:
        return self._of(request).asked

    def found(self, request: Any, tokens: int) -> None:
        """The server has a prefix of so many tokens."""
        outcome = self._of(request)
        outcome.found_tokens = max(outcome.found_tokens, tokens)

    def held_back(self, request: Any, why: str) -> None:
        """Nothing, or less, is loaded: `why` is the last word."""
        self._of(request).why = why

    def declined(self, request: Any, why: str, tokens: int) -> None:
        """A prefix of so many tokens is computed."""
        self.found(request, tokens)
        self.held_back(request, f"declined_{why}")

    def loads(self, request: Any, local_tokens: int, tokens: int) -> None:
        """So many tokens are being loaded."""
        outcome = self._of(request)
        outcome.local_tokens, outcome.loaded_tokens, outcome.why = local_tokens, tokens, ""

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
