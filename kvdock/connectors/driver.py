"""The one orchestration of a connector's scheduler process, under every engine.

    engine thread      lookup ──────────────────► begin_load      store ──────────────► finished
    "kvdock-ask"       fetch
    "kvdock-verify"    verify
    "kvdock-settle"                                                                     cancel
    "kvdock-store"                                                reserve, carry out    hint
                                                                  abort

Lookups have a background thread of their own, so that none of them waits for a copy, a hash or another call. The
engine's thread waits for an answer as long as its patience allows (kvdock/connectors/waits.py), or not at all. How
plans get to the workers, and how an engine learns what became of its blocks, is left to the engine's own connector:
kvdock/connectors/engine_connector.py, kvdock/connectors/vllm/scheduler.py.

Invariants: each batch of an offer is carried out exactly once, with a plan or without one, whatever fails; a lookup
that found too little to load keeps no lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

from kvdock.connectors.background import Background
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import UNLIMITED, LoadLimits, LoadOrCompute
from kvdock.connectors.interface import GroupBlocks, Hit, LookupResult, Miss, Pending
from kvdock.connectors.load_once import LoadOnce
from kvdock.connectors.plans import LoadPlan, StoreBatch, StorePlan
from kvdock.connectors.requests import Fetch, StoreOffer, Wish, tell_wishes
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment, tell
from kvdock.connectors.waits import ASK_S, AwaitTiers, ComputeOnce, Patience, Question
from kvdock.protocol.outcomes import Outcome

NO_LIMITS = LoadLimits()
FRESH_S = 0.05
"""An older answer that was not all is asked for once more: other requests, and other engines, store meanwhile."""


class Wait(Protocol):
    """How long requests wait for what may come (kvdock/connectors/waits.py,
    kvdock/connectors/waits.py)."""

    def is_waiting(self, request_id: str) -> bool: ...

    def waits(self, request_id: str, said: Any, hit_tokens: int, local_tokens: int, asked_s: float) -> bool:
        """`asked_s`: when the question was sent whose answer is the newest."""

    def is_over(self, request_id: str) -> bool: ...

    def forget(self, request_id: str) -> None: ...


class Driver:
    """`answered`: called in the background with the seconds that each lookup took. `verifies_all`: each answer is
    verified as soon as it is there, so that the next lookup can promise it. `statistics`: counts chunks, or None.
    `patience`: how long a lookup waits for its answer; None: it is Pending until the answer is there. `once`: how long
    a request waits for what another engine computes, `tiers`: for what lower tiers have; None: it does not. `cost`:
    says which hits are computed instead; None: none is. `loads`: how long a request waits for what another one loads
    (load_ended says when it has come); None: it does not. `declined`: called for each request whose hit is not loaded,
    with the reason and the tokens of the hit."""

    def __init__(
        self, scheduler: SchedulerConnector, *, answered: Callable[[float], None], limits: LoadLimits = NO_LIMITS,
        verifies_all: bool = False, statistics: ChunkStatistics | None = None, patience: Patience | None = None,
        once: ComputeOnce | None = None, tiers: AwaitTiers | None = None, cost: LoadOrCompute | None = None,
        declined: Callable[[str, str, int], None] = lambda request_id, why, tokens: None,
        loads: LoadOnce | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler, self.statistics, self.patience = scheduler, statistics, patience
        self._waits: list[tuple[Wait, Callable[[str], Any]]] = []
        """With what the newest answer says to each."""
        if once is not None:
            self._waits.append((once, scheduler.being_stored))
        if tiers is not None:
            self._waits.append((tiers, scheduler.pending))
        self._verifies_all, self._cost, self._tell_declined, self._loads = verifies_all, cost, declined, loads
        self._answered, self._limits, self._clock = answered, limits, clock
        self._declined: set[str] = set()
        self._worth: set[str] = set()
        """Requests whose hit is to be loaded. `cost` is asked once for each: a load that it wants to see is made."""
        self._asking, self._verifying = Background("kvdock-ask"), Background("kvdock-verify")
        self._storing, self._settling = Background("kvdock-store"), Background("kvdock-settle")
        self._questions: dict[str, Question] = {}
        """By request, the last one that was sent."""
        self._checks: dict[str, Future[None]] = {}
        """By request, its verification under way."""
        self._awaited: Future[None] | None = None
        self.late = 0
        """How many lookups were a miss because the server was late."""

    # ------------------------------------------------------------------ lookups and loads

    def expect(self, request_id: str, tokens: Sequence[int]) -> None:
        """A lookup of the request is to come, with whatever local tokens it has then: asks now."""
        found = self.scheduler.lookup(request_id, self._limits.shortened(tokens, 0), 0)
        if isinstance(found, Fetch):
            self._send(found)

    def lookup(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> LookupResult:
        """As interface.py has it, within the limits. A request whose hit was declined is not asked about until
        `finished`."""
        if request_id in self._declined:
            return Miss()
        if self._waits_for_load(request_id, tokens, local_tokens) or self._rests(request_id):
            return Pending()
        wanted = self._limits.shortened(tokens, local_tokens)
        found = self._found(request_id, wanted, local_tokens)
        said = self._newest_words(request_id)
        if any(word is None and one.is_waiting(request_id) for (one, _), word in zip(self._waits, said, strict=True)):
            found = self._ask(request_id, wanted, local_tokens)  # as new as the answer that says so
        if isinstance(found, Pending):
            return Miss() if self._is_late(request_id) else found
        hit_tokens, question = found.tokens if isinstance(found, Hit) else 0, self._questions.get(request_id)
        asked_s = question.asked_s if question is not None else self._clock()
        waiting = [
            one.waits(request_id, word, hit_tokens, local_tokens, asked_s)
            for (one, _), word in zip(self._waits, said, strict=True)
        ]
        if any(waiting):
            return Pending()
        least = max(1, self._limits.min_load_tokens)
        if isinstance(found, Hit) and (why := self._why_not(request_id, found.tokens - local_tokens)):
            if question is None or question.answered.done():  # else more may be found
                self._declined.add(request_id)
                self._tell_declined(request_id, why, found.tokens)
            found, least = Miss(), UNLIMITED
        if isinstance(found, Miss):  # perhaps because another request computed it meanwhile
            self._cancel(self.scheduler.give_up_lease(request_id, local_tokens, min_load_tokens=least))
        if self.statistics is not None:
            self.statistics.looked_up(request_id, tokens, found.tokens if isinstance(found, Hit) else local_tokens)
        return found

    def still_waits(self, request_id: str, local_tokens: int) -> bool:
        """Whether a lookup of the request would be Pending, because the load that it waits for is under way."""
        return self._loads is not None and self._loads.still_waits(request_id, local_tokens)

    def _waits_for_load(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> bool:
        """Whether the request waits for what another one loads. It needs no answer for that, and may have none."""
        if self._loads is None:
            return False
        least = max(1, self._limits.min_load_tokens)
        keys_of = partial(self.scheduler.keys_of, request_id, tokens)
        if self._loads.waits(request_id, keys_of, local_tokens, least):
            return True
        if self._loads.takes_back(request_id):
            self._drop_question(request_id)
        return False

    def _why_not(self, request_id: str, tokens: int) -> str:
        """Why a hit of `tokens` is not loaded: "short" (there are too few), "dear" (to load them takes longer than to
        compute them), or "" (it is loaded)."""
        if tokens < self._limits.min_load_tokens:
            return "short"
        if self._cost is None or request_id in self._worth:
            return ""
        if self._cost.is_dearer(tokens):
            return "dear"
        self._worth.add(request_id)
        return ""

    def _newest_words(self, request_id: str) -> list[Any]:
        """What the newest answer says, for each kind of wait."""
        if not self._waits or self.scheduler.session.attachment is None:
            return [None] * len(self._waits)
        if (question := self._questions.get(request_id)) is not None:
            question.was_seen = question.answered.done()
        return [word(request_id) for _, word in self._waits]

    def _rests(self, request_id: str) -> bool:
        """Whether the request waits for what may come and nothing new is known. It is asked about again in time."""
        question = self._questions.get(request_id)
        waiting = [one.is_waiting(request_id) and not one.is_over(request_id) for one, _ in self._waits]
        if question is None or not any(waiting):
            return False
        if question.answered.done():
            if not question.was_seen:
                return False
            if self._clock() - question.asked_s >= ASK_S:
                again = self.scheduler.asks_again(request_id)
                if again is None:
                    return False
                self._send(again)
                awaited = self._questions[request_id].answered
                return self.patience is None or not self.patience.spend(awaited)  # a later step may be far away
        return True

    def step(self, is_idle: bool) -> None:
        """The engine has planned a step; `is_idle`: one that computes nothing."""
        if self.patience is not None:
            self.patience.step(is_idle)
        if self._loads is not None:
            self._loads.step()

    def drop_lookup(self, request_id: str) -> None:
        """As SchedulerConnector has it. What the request has loaded, if anything, the engine's own cache has now."""
        self._drop_question(request_id)
        if self._loads is not None:
            self._loads.admitted(request_id)

    def _drop_question(self, request_id: str) -> None:
        self._forget_question(request_id)
        self._cancel(self.scheduler.drop_lookup(request_id))

    def _forget_question(self, request_id: str) -> None:
        self._questions.pop(request_id, None)
        self._checks.pop(request_id, None)

    def _found(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> LookupResult:
        found, patience = self._ask(request_id, tokens, local_tokens), self.patience
        if patience is None:
            return found
        self._ask_again(request_id, local_tokens, patience)
        for _ in range(2):  # an early question may have been another one: then this one is asked after its answer
            question = self._questions.get(request_id)
            if question is None or not patience.wait(question):
                break
            found = self._ask(request_id, tokens, local_tokens)
            if not isinstance(found, Pending):
                break
        check = self._checks.pop(request_id, None) if isinstance(found, Hit) else None
        if check is not None and patience.spend(check):  # one step waits for it: hashes may take many
            found = self._ask(request_id, tokens, local_tokens)
        return found

    def _ask_again(self, request_id: str, local_tokens: int, patience: Patience) -> None:
        """If the answer is old and was not all."""
        question = self._questions.get(request_id)
        if question is None or not question.answered.done() or patience.is_open:
            return
        if self._clock() - question.asked_s > FRESH_S:
            again = self.scheduler.asks_again(request_id, local_tokens)
            if again is not None:
                self._send(again)

    def _is_late(self, request_id: str) -> bool:
        """Whether nobody waits for the request's answer. A server that is late must not hold up what may have nothing
        to load; one that only has much to answer will be asked in the next step."""
        question = self._questions.get(request_id)
        if self.patience is None or not self.patience.is_open or question is None:
            return False
        self.late += not question.was_late
        question.was_late = True
        return True

    def _ask(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> LookupResult:
        found = self.scheduler.lookup(request_id, tokens, local_tokens)
        if not isinstance(found, Fetch):
            return found
        self._send(found)
        return Pending()

    def _send(self, fetch: Fetch) -> None:
        asked_s = self._clock()
        answered = self._asking.run(self._fetch, fetch, asked_s)
        self._awaited, self._questions[fetch.request_id] = answered, Question(answered, asked_s)

    def is_verified(self, request_id: str) -> bool:
        """Whether a Hit may be promised that a worker must not fail to load. False: it is being verified in the
        background, or was found to be damaged; look up again, for then it is a Miss."""
        if self.scheduler.is_verified(request_id):
            return True
        self._verify(request_id)
        return False

    def _verify(self, request_id: str) -> None:
        if self.scheduler.starts_verifying(request_id):
            self._awaited = self._checks[request_id] = self._verifying.run(self.scheduler.verify, request_id)

    def is_verifying(self, request_id: str) -> bool:
        """Whether what the request's lookup found is being verified now: nobody may load it meanwhile."""
        return self.scheduler.is_verifying(request_id)

    def wait_for_answer(self, timeout_s: float) -> None:
        """Waits for the last question or verification, if there was one."""
        end_s, awaited = self._clock() + timeout_s, None
        while awaited is not self._awaited:  # an answer may have begun to be verified
            awaited = self._awaited
            if awaited is not None:
                wait([awaited], max(0.0, end_s - self._clock()))

    def begin_load(
        self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int, *, is_shared: bool = False
    ) -> tuple[Attachment, LoadPlan] | None:
        """As SchedulerConnector has it. The caller releases the attachment. `is_shared`: the engine's own cache has
        from now on what is loaded."""
        self._forget_question(request_id)
        begun = self.scheduler.begin_load(request_id, block_ids, local_tokens, hit_tokens)
        if self.statistics is not None and begun is not None:
            self.statistics.load_begun(request_id, local_tokens, hit_tokens)
        if self._loads is not None and begun is not None and not is_shared:
            known = self.scheduler.known_keys(request_id)
            self._loads.begins(request_id, known[1] if known is not None else (), local_tokens, hit_tokens)
        return begun

    def load_ended(self, request_id: str, valid_tokens: int | None = None, *, is_shared: bool = False) -> None:
        """In the engine's thread: a load has brought all that it was to bring, or the tokens up to `valid_tokens`.
        `is_shared`: the engine's own cache has it before the next lookup; else drop_lookup says when."""
        if self._loads is not None:
            self._loads.ended(request_id, valid_tokens)
            if is_shared:
                self._loads.shared(request_id)

    def load_failed(self, request_id: str, valid_tokens: int) -> None:
        """Some rank has the tokens up to `valid_tokens` only."""
        self.scheduler.load_failed(request_id, valid_tokens)
        if self.statistics is not None:
            self.statistics.load_failed(request_id, valid_tokens)

    # ------------------------------------------------------------------ stores

    def store(
        self, offer: StoreOffer, carry_out: Callable[[StoreBatch, StorePlan | None], None],
        is_wanted: Callable[[StoreBatch], bool] = lambda batch: True,
    ) -> Future[None]:
        """Reserves each batch in the background, then carries it out there: without a plan when the server has it all
        or has no room, or when it is not wanted any more. The future ends with the last."""
        for batch in offer.batches:
            self._storing.run(self._store, offer, batch, carry_out, is_wanted)
        return self._storing.run(offer.attachment.release)

    def _store(
        self, offer: StoreOffer, batch: StoreBatch, carry_out: Callable[[StoreBatch, StorePlan | None], None],
        is_wanted: Callable[[StoreBatch], bool],
    ) -> None:
        plan = None
        try:
            if is_wanted(batch):
                plan = self.scheduler.stores.reserve(offer, batch)
            else:
                self.scheduler.stores.withdraw(offer.attachment, offer.request_id, offer.request)
        finally:
            carry_out(batch, plan)

    def abort(self, attachment: Attachment, plan: StorePlan) -> None:
        """Gives a plan back, in the background, that no worker was given: before the same chunks are reserved anew."""
        self._storing.run(self.scheduler.session.abort, attachment, plan.reservation)

    # ------------------------------------------------------------------ ends

    def hint(self, request_id: str, wishes: Sequence[Wish]) -> None:
        """Tells the server what is wished for a request's chunks, after the stores that have begun. Before `finished`,
        which forgets them."""
        known = self.scheduler.known_keys(request_id) if wishes else None
        if known is not None:
            self._storing.run(tell_wishes, self.scheduler.session, *known, wishes)

    def ended(self, outcome: Outcome) -> None:
        """A request has ended: the next heartbeat tells people at the server what became of it."""
        self.scheduler.session.outcomes.add(outcome)

    def finished(self, request_id: str) -> None:
        """The request ended, was aborted or preempted."""
        self._declined.discard(request_id)
        self._worth.discard(request_id)
        self._forget_question(request_id)
        for one, _ in self._waits:
            if isinstance(one, AwaitTiers) and one.is_waiting(request_id):
                self._stop_waiting(request_id)
            one.forget(request_id)
        if self._loads is not None:
            self._loads.forget(request_id)
        owed = self.scheduler.stores.owes(request_id)
        if owed is not None:  # after the reservations of what was offered
            self._storing.run(self.scheduler.stores.withdraw, owed.attachment, request_id, owed)
        if self.statistics is not None:
            self.statistics.finished(request_id)
        self._cancel(self.scheduler.finished(request_id))

    def _stop_waiting(self, request_id: str) -> None:
        """Tells the server, which may be loading for the request."""
        session = self.scheduler.session
        if (attachment := session.attachment) is not None:
            self._settling.run(
                tell, session, attachment, session.client.withdraw, attachment.session, [request_id]
            )

    def run(self, call: Callable[..., None], *args: object) -> None:
        """Runs another call to the server in the background."""
        self._settling.run(call, *args)

    def close(self) -> None:
        """Waits for what runs in the background."""
        for background in (self._asking, self._verifying, self._storing, self._settling):  # each feeds later ones
            background.close()
        if self.statistics is not None:
            self.statistics.log_summary()

    def _fetch(self, fetch: Fetch, asked_s: float) -> None:
        began_s = self._clock()
        try:
            unwanted = self.scheduler.fetch(fetch)
        finally:
            ended_s = self._clock()
            if self.patience is not None and self.scheduler.session.attachment is fetch.attachment:
                self.patience.answered(ended_s - began_s)
            self._answered(ended_s - asked_s)
        self._cancel(unwanted)
        if self._verifies_all and all(word(fetch.request_id) is None for _, word in self._waits):
            self._verify(fetch.request_id)

    def _cancel(self, unused: tuple[Attachment, str] | None) -> None:
        if unused is not None:
            self._settling.run(self.scheduler.cancel, *unused)
