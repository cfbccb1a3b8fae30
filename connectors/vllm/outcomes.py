"""What became of each request: what kvdock had of it, what was loaded, and why not more. Requests that ask for it hear it
with their answer; docs/vllm.md has the words.

Threads: vLLM's scheduler thread calls everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.vllm.hints import OWN, Asked, asked_by


@dataclass
class _Outcome:
    """Tokens of the request, from its first. `why`: "" while nothing kept more from being loaded."""

    asked: Asked
    found_tokens: int = 0
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

    def loads(self, request_id: str, tokens: int) -> None:
        """So many tokens are being loaded."""
        self._outcomes[request_id].loaded_tokens += tokens

    def failed(self, request_id: str, tokens: int) -> None:
        """Of what was being loaded so many tokens did not come."""
        if request_id in self._outcomes:  # else it has ended
            outcome = self._outcomes[request_id]
            outcome.loaded_tokens, outcome.why = outcome.loaded_tokens - tokens, "load_failed"

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
