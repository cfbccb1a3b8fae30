"""The one orchestration of a connector's scheduler process, under every engine.

    engine thread      lookup ──────────────────► begin_load      store ──────────────► finished
    "kvdock-ask"       fetch, verify                              abort                 cancel
    "kvdock-store"                                                reserve, carry out

Questions and stores have a background thread each, so that the engine's thread never waits for the server and no
question waits for a copy. How plans get to the workers, and how an engine learns what became of its blocks, is left to
the engine's own connector: connectors/engine_connector.py, connectors/vllm/scheduler.py.

Invariants: each batch of an offer is carried out exactly once, with a plan or without one, whatever fails; a lookup
that found too little to load keeps no lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from kvdock.connectors.background import Background
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.interface import GroupBlocks, Hit, LookupResult, Miss, Pending
from kvdock.connectors.limits import LoadLimits
from kvdock.connectors.plans import LoadPlan, StoreBatch, StorePlan
from kvdock.connectors.scheduler import Fetch, SchedulerConnector, StoreOffer
from kvdock.connectors.session import Attachment

NO_LIMITS = LoadLimits()


class Driver:
    """`answered`: called in the background with the seconds that each lookup took. `verifies_all`: each answer is
    verified as soon as it is there, so that the next lookup can promise it. `statistics`: counts chunks, or None."""

    def __init__(
        self, scheduler: SchedulerConnector, *, answered: Callable[[float], None], limits: LoadLimits = NO_LIMITS,
        verifies_all: bool = False, statistics: ChunkStatistics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler, self.statistics, self._verifies_all = scheduler, statistics, verifies_all
        self._answered, self._limits, self._clock = answered, limits, clock
        self._declined: set[str] = set()
        self._asking, self._storing = Background("kvdock-ask"), Background("kvdock-store")
        self._question: Future[None] | None = None

    # ------------------------------------------------------------------ lookups and loads

    def lookup(self, request_id: str, tokens: Sequence[int], local_tokens: int) -> LookupResult:
        """As interface.py has it, within the limits. What was declined for being too short stays declined until
        `finished`."""
        if request_id in self._declined:
            return Miss()
        found = self.scheduler.lookup(request_id, self._limits.shortened(tokens, local_tokens), local_tokens)
        if isinstance(found, Fetch):
            self._question = self._asking.run(self._fetch, found, self._clock())
            return Pending()
        if isinstance(found, Hit) and found.tokens - local_tokens < self._limits.min_load_tokens:
            self._declined.add(request_id)
            found = Miss()
        if isinstance(found, Miss):  # perhaps because another request computed it meanwhile
            least = max(1, self._limits.min_load_tokens)
            self._cancel(self.scheduler.give_up_lease(request_id, local_tokens, min_load_tokens=least))
        if self.statistics is not None and not isinstance(found, Pending):
            self.statistics.looked_up(request_id, tokens, found.tokens if isinstance(found, Hit) else local_tokens)
        return found

    def is_verified(self, request_id: str) -> bool:
        """Whether a Hit may be promised that a worker must not fail to load. False: it is being verified in the
        background; look up again, for what turns out to be damaged is a Miss."""
        if self.scheduler.is_verified(request_id):
            return True
        if self.scheduler.starts_verifying(request_id):
            self._question = self._asking.run(self.scheduler.verify, request_id)
        return False

    def is_verifying(self, request_id: str) -> bool:
        """Whether what the request's lookup found is being verified now: nobody may load it meanwhile."""
        return self.scheduler.is_verifying(request_id)

    def wait_for_answer(self, timeout_s: float) -> None:
        """Waits for the last question, if there was one."""
        if self._question is not None:
            wait([self._question], timeout_s)

    def begin_load(
        self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int
    ) -> tuple[Attachment, LoadPlan] | None:
        """As SchedulerConnector has it. The caller releases the attachment."""
        begun = self.scheduler.begin_load(request_id, block_ids, local_tokens, hit_tokens)
        if self.statistics is not None and begun is not None:
            self.statistics.load_begun(request_id, local_tokens, hit_tokens)
        return begun

    def load_failed(self, request_id: str, valid_tokens: int) -> None:
        """Some rank has the tokens up to `valid_tokens` only."""
        self.scheduler.load_failed(request_id, valid_tokens)
        if self.statistics is not None:
            self.statistics.load_failed(request_id, valid_tokens)

    # ------------------------------------------------------------------ stores

    def store(
        self, offer: StoreOffer, carry_out: Callable[[StoreBatch, StorePlan | None], None],
        is_wanted: Callable[[StoreBatch], bool] = lambda batch: True,
    ) -> None:
        """Reserves each batch in the background, then carries it out there: without a plan when the server has it all
        or has no room, or when it is not wanted any more."""
        for batch in offer.batches:
            self._storing.run(self._store, offer, batch, carry_out, is_wanted)
        self._storing.run(offer.attachment.release)

    def _store(
        self, offer: StoreOffer, batch: StoreBatch, carry_out: Callable[[StoreBatch, StorePlan | None], None],
        is_wanted: Callable[[StoreBatch], bool],
    ) -> None:
        plan = None
        try:
            if is_wanted(batch):
                plan = self.scheduler.reserve(offer, batch)
        finally:
            carry_out(batch, plan)

    def abort(self, attachment: Attachment, plan: StorePlan) -> None:
        """Gives a plan back, in the background, that no worker was given."""
        self._asking.run(self.scheduler.session.abort, attachment, plan.reservation)

    # ------------------------------------------------------------------ ends

    def finished(self, request_id: str) -> None:
        """The request ended, was aborted or preempted."""
        self._declined.discard(request_id)
        if self.statistics is not None:
            self.statistics.finished(request_id)
        self._cancel(self.scheduler.finished(request_id))

    def ask(self, question: Callable[..., None], *args: object) -> None:
        """Runs another question to the server behind those that were asked."""
        self._asking.run(question, *args)

    def close(self) -> None:
        """Waits for what runs in the background."""
        for background in (self._asking, self._storing):
            background.close()
        if self.statistics is not None:
            self.statistics.log_summary()

    def _fetch(self, fetch: Fetch, asked_s: float) -> None:
        try:
            self.scheduler.fetch(fetch)
            if self._verifies_all and self.scheduler.starts_verifying(fetch.request_id):
                self.scheduler.verify(fetch.request_id)
        finally:
            self._answered(self._clock() - asked_s)

    def _cancel(self, unused: tuple[Attachment, str] | None) -> None:
        if unused is not None:
            self._asking.run(self.scheduler.cancel, *unused)
