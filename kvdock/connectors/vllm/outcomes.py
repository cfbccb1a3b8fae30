"""What became of each of vLLM's requests. Those that ask for it hear it with their answer, and people read it at the
server; docs/vllm.md has the words.

Threads: vLLM's, one at a time (arrivals.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdock.connectors.request_outcomes import RequestOutcomes
from kvdock.connectors.vllm.hints import OWN, Asked, asked_by
from kvdock.protocol.outcomes import Outcome


class Outcomes(RequestOutcomes):
    """As RequestOutcomes, with what each request asks for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked: dict[str, Asked] = {}

    def asked(self, request: Any) -> Asked:
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = asked_by(request)
            self._of(request.request_id)  # every request that was looked at has an outcome
        return asked

    def forget(self, request_id: str) -> None:
        """vLLM did not take the request: it has no outcome."""
        self._asked.pop(request_id, None)
        self._stories.pop(request_id, None)

    def answer(self, request: Any) -> dict[str, Any] | None:
        """The request has ended: what its answer's `kv_transfer_params` are to say. None: nothing, because it did not
        ask, or because another connector may have something to say there: vLLM takes one answer alone."""
        asked = self._asked.pop(request.request_id, None)
        outcome = self.ended(request.request_id, request.num_prompt_tokens)
        params = getattr(request, "kv_transfer_params", None)
        if outcome is None or asked is None or not asked.report:
            return None
        if not isinstance(params, Mapping) or set(params) != {OWN}:
            return None
        return {OWN: _told(outcome)}


def _told(outcome: Outcome) -> dict[str, Any]:
    told: dict[str, Any] = {"found_tokens": outcome.found_tokens, "loaded_tokens": outcome.loaded_tokens}
    return told | ({"why": outcome.why} if outcome.why else {})
