"""Holds requests back while more may be promised soon (lookups.py decides for what they wait, and how long).

When SGLang admits a request, it computes all pages that the linker has not promised, and a linker cannot answer
"later". So a request that waits is left in SGLang's queue, by two of SGLang's own plugin hooks (sglang.srt.plugins):

    SGLang has looked a request up and is about to admit it ──► `admit` answers: not now
    SGLang plans a batch while the request still waits ──► `next_batch` takes it out of the queue while it waits

Once the request waits no longer, SGLang finds it in the queue and looks it up again. SGLang admits other requests
meanwhile.

Invariant: all ranks hold the same requests. Rank 0 knows which requests wait. It reports them to the others whenever
a batch is planned while a request is held, and for each request that was looked up and was promised nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvdock.connectors.sglang.early import EarlyLoads
from kvdock.connectors.sglang.lookups import PageLookups
from kvdock.connectors.sglang.ranks import Ranks

GOES, WAITS, LOADS_EARLY = range(3)
"""What becomes of a request that SGLang would admit: it is admitted, waits, or is loaded before (early.py)."""
IDLE_S = 0.001
"""How many seconds an engine that only waits sleeps between two rounds."""


class Holding:
    """`lookups`: rank 0's; None in other ranks. `planned`: called with the number of prompt tokens that a planned step
    computes, or 0 if the step does not show how fast the engine computes prompts. `shows_speed`: whether a request of
    the step does. `early`: loads before admissions; None: there are none.
    """

    def __init__(
        self, ranks: Ranks, lookups: PageLookups | None, planned: Callable[[int], None],
        shows_speed: Callable[[Any], bool] = lambda req: True, early: EarlyLoads | None = None,
    ) -> None:
        self._ranks, self._lookups, self.planned, self.shows_speed = ranks, lookups, planned, shows_speed
        self.early = early
        self.arrives = False
        """Whether SGLang looks up a request that has arrived, and does not try to admit it."""
        self._looked_up: str | None = None
        self._held: frozenset[str] = frozenset()

    def looked_up(self, rid: str) -> None:
        """SGLang has looked a request up, and decides next whether it admits it."""
        self._looked_up = rid

    def starts(self, rid: str) -> int:
        """Whether a request that SGLang would admit, and of which no page is promised, is held back: GOES, WAITS or
        LOADS_EARLY."""
        was_looked_up, self._looked_up = self._looked_up == rid, None
        if not was_looked_up:
            return GOES
        if self._ranks.nodes > 1:  # a node that has found its part waits for one that has not
            return self._ranks.most(WAITS if self._lookups is not None and self._waits(rid, anew=False) else GOES)
        how = LOADS_EARLY
        if self._lookups is not None and not (self.early is not None and self.early.is_wanted(rid)):
            how = WAITS if self._waits(rid, anew=False) else GOES
        return self._ranks.least([how])[0]

    def hold(self, rid: str) -> None:
        """The request is held back from now on."""
        self._held |= {rid}

    def _waits(self, rid: str, *, anew: bool) -> bool:
        assert self._lookups is not None
        if self.early is not None and self.early.waits(rid):
            return True
        return self._lookups.waits(rid, anew)

    def held(self, queue: Iterable[str]) -> frozenset[str]:
        """The requests that are held back and still wait. `queue`: all requests that SGLang has not admitted."""
        if self._held:
            before, waiting = self._held, self._held.intersection(queue)
            for ended in before - waiting:
                self._forget(ended)
            if self._lookups is not None:
                waiting = frozenset(rid for rid in waiting if self._waits(rid, anew=True))
            self._held = self._ranks.of_any_node(waiting)
        return self._held

    def _forget(self, rid: str) -> None:
        """The request has ended in the queue, of which SGLang does not tell a linker."""
        if self.early is not None:
            self.early.forget(rid)
        if self._lookups is not None:
            self._lookups.drop(rid)


def arrive(holding: Holding, scheduler: Any, req: Any) -> None:
    """A request has come into SGLang's queue: looks it up as SGLang does before it admits it. All ranks do, because
    that changes SGLang's tree. Requests of sessions are left out: parts of their KV are in no tree."""
    queue = scheduler.waiting_queue
    if not queue or queue[-1] is not req or req.session is not None or req.is_retracted or req.to_finish is not None:
        return
    holding.arrives = True
    try:
        req.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
    finally:
        holding.arrives = False


def admit(holding: Holding, original: Callable[..., Any], adder: Any, req: Any, *more: Any, **how: Any) -> Any:
    """The hook around PrefillAdder.add_one_req. When a request is held back, SGLang goes on to the next one. With
    recurrent states it ends the round instead, because the request has a slot for its state by now, and SGLang frees
    the slot only at the end of a round. A request for which SGLang has preempted others is not held back."""
    found = GOES if req.host_hit_length > 0 or adder.preempt_list else holding.starts(req.rid)
    if found == GOES:
        return original(adder, req, *more, **how)
    from sglang.srt.managers.schedule_policy import AddReqResult

    if found == LOADS_EARLY and holding.early is not None and not holding.early.begin(adder, req):
        return AddReqResult.NO_TOKEN
    holding.hold(req.rid)
    return AddReqResult.OTHER if adder.tree_cache.supports_mamba() else AddReqResult.CONTINUE


def next_batch(holding: Holding, original: Callable[..., Any], scheduler: Any, *more: Any, **how: Any) -> Any:
    """The hook around Scheduler._get_new_batch_prefill_raw."""
    queue = scheduler.waiting_queue
    if holding.early is not None:
        holding.early.step(scheduler, how["running_batch"])
    held = holding.held(req.rid for req in queue)
    if held:
        scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    try:
        batch, running = original(scheduler, *more, **how)
    finally:
        if held:
            scheduler.waiting_queue = put_back(queue, held, scheduler.waiting_queue)
    computes = batch is not None and batch.hicache_consumer_index < 0  # the time of a batch with loads does not count
    if computes:
        decode = {id(req) for req in getattr(batch, "decoding_reqs", None) or ()}
        computes = any(holding.shows_speed(req) for req in batch.reqs if id(req) not in decode)
    holding.planned(batch.extend_num_tokens if computes else 0)
    if held and batch is None and running.is_empty() and not scheduler.require_mlp_sync:  # nothing to compute
        time.sleep(IDLE_S)  # releases the GIL to the threads that ask and hash
    return batch, running


def put_back(queue: list[Any], held: Collection[str], left: list[Any]) -> list[Any]:
    """Returns the queue after SGLang has used it without `held`: the requests in `left`, which SGLang has left in it,
    and those in `held` at their old places. Requests that SGLang has added come last."""
    stayed = {id(req) for req in left}
    old = {id(req) for req in queue}
    return [req for req in queue if req.rid in held or id(req) in stayed] + [req for req in left if id(req) not in old]
