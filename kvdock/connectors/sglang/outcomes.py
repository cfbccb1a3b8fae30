"""The outcome of each of SGLang's requests: how its prompt was divided when it was first admitted, reported at its end.

    SGLang admits a request (the hook around its admission) ──► `admitted`
    its load has ended                                      ──► `load_ended`
    SGLang gives back its KV, or it ends in the queue       ──► `released`, `aborted`

SGLang gives back the KV of a request that it retracts, too: such a request comes back, and its outcome is reported at
its end. A lookup names the tail of a prompt, so an outcome has the position of that tail. It has the name of the
request's last question (lookups.py), under which the server knows its answers.

SGLang's thread calls every method, on rank 0 alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvdock.connectors.cost import PrefillSpeed
from kvdock.connectors.outcomes import RequestOutcomes
from kvdock.connectors.sglang.early import Landed
from kvdock.connectors.sglang.lookups import PageLookups
from kvdock.protocol.outcomes import Outcome

MOST_RUNNING = 16_384
"""Requests that were admitted and have not ended. SGLang does not report every end, such as that of a session's turn
whose KV the session keeps: the oldest request is forgotten then."""
HEALTH_CHECK = "HEALTH_CHECK"
"""The ids of the requests by which SGLang tests its own health begin with this."""
LEAST_PROMPT = 64
"""If a step computes fewer tokens of a request, it decodes or computes the end of its prompt."""


@dataclass(frozen=True)
class _Admitted:
    """`name`: that of the request's last question, or its own id if it was not looked up. `asked_from`: the position in
    the prompt of the first token that the question names."""

    name: str
    asked_from: int
    prompt_tokens: int


class PageOutcomes:
    """`report`: called with the outcome of each request that has ended. `speed`: the engine's prefill speed. `clock`:
    seconds, monotonic."""

    def __init__(
        self, report: Callable[[Outcome], None], speed: PrefillSpeed, lookups: PageLookups, clock: Callable[[], float]
    ) -> None:
        self._report, self._lookups = report, lookups
        self._outcomes = RequestOutcomes(self._named, speed, clock)
        self._admitted: OrderedDict[str, _Admitted] = OrderedDict()

    def admitted(self, req: Any, device_tokens: int, why: str = "", early: Landed | None = None) -> None:
        """SGLang has admitted `req`, its Req. `device_tokens`: how many of its tokens the device had before. `why`: why
        it was not looked up, as in Outcome. `early`: what was loaded of it before, which counts as loaded now."""
        rid, asked = str(req.rid), self._lookups.admitted(str(req.rid))
        if early is not None and early.answered is not None:
            asked, device_tokens = early.answered, max(0, device_tokens - early.tokens)
        loaded = int(req.prefix_len) - device_tokens
        if rid not in self._admitted:
            if req.retraction_count or rid.startswith(HEALTH_CHECK):
                return  # its outcome was reported when it was given up; health checks are nobody's requests
            prompt = len(req.origin_input_ids)
            if asked is None:
                self._admitted[rid] = _Admitted(rid, 0, prompt)
            else:
                self._admitted[rid] = _Admitted(asked.name, max(0, device_tokens - asked.local_tokens), prompt)
            if len(self._admitted) > MOST_RUNNING:
                self._outcomes.forget(self._admitted.popitem(last=False)[0])
        self._outcomes.looked_up(rid, min(device_tokens, self._admitted[rid].prompt_tokens))
        if asked is not None:
            self._outcomes.found(rid, self._admitted[rid].asked_from + asked.found_tokens if asked.found_tokens else 0)
            self._outcomes.held_back(rid, asked.why)
        elif why:
            self._outcomes.held_back(rid, why)
        self._outcomes.admitted(rid, loaded)
        if asked is not None and loaded:
            self._outcomes.loading(rid, asked.load_bytes)
        if early is not None:
            self._outcomes.loaded(rid, early.copy_s, early.took_s)

    def load_ended(self, rid: str, ok: bool, took_s: float, copy_s: float | None) -> None:
        """`ok` False: SGLang aborts the request. `took_s`: the seconds from the start of its batch's loads to their
        end. `copy_s`: those of the copies of its own load; None: not known."""
        if ok:
            self._outcomes.loaded(rid, copy_s, took_s)
        else:
            self._outcomes.failed(rid, 0)

    def shows_speed(self, req: Any) -> bool:
        """Whether a step that computes a part of the request's prompt shows how fast the engine computes prompts."""
        tokens = int(req.extend_len)
        return tokens >= LEAST_PROMPT and self._outcomes.shows_speed(str(req.rid), tokens)

    def released(self, req: Any) -> None:
        """SGLang gives back the KV of `req`: it has ended, or is retracted."""
        if req.finished() or req.to_finish is not None:
            self._ended(str(req.rid), has_run=len(req.output_ids) > 0)

    def aborted(self, rid: str) -> None:
        """The request has ended in the queue, or during the computation of its prompt."""
        self._ended(rid, has_run=True)

    def _ended(self, rid: str, *, has_run: bool) -> None:
        known = self._admitted.get(rid)
        if known is not None:
            self._outcomes.ended(rid, known.prompt_tokens, has_run=has_run)
            del self._admitted[rid]

    def _named(self, outcome: Outcome) -> None:
        known = self._admitted[outcome.request]
        self._report(msgspec.structs.replace(outcome, request=known.name, asked_from=known.asked_from))
