"""Holds requests back while more may be promised soon (lookups.py decides for what they wait, and how long).

When SGLang admits a request, it computes all pages that the linker has not promised, and a linker cannot answer
"later". So a request that waits is left in SGLang's queue, by two of SGLang's own plugin hooks (sglang.srt.plugins):

    SGLang has looked a request up and is about to admit it ──► `admit` answers: not now
    SGLang plans a batch while the request still waits ──► `next_batch` takes it out of the queue while it waits

Once the request waits no longer, SGLang finds it in the queue and looks it up again. SGLang admits other requests
meanwhile.

Invariant: all ranks hold the same requests. Rank 0 knows which requests wait. It reports them to the others whenever a
batch is planned while a request is held, and for each request that was looked up and was promised nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvdock.connectors.sglang.lookups import PageLookups
from kvdock.connectors.sglang.ranks import Ranks

IDLE_S = 0.001
"""How many seconds an engine that only waits sleeps between two rounds."""


class Holding:
    """`lookups`: rank 0's; None in other ranks. `planned`: called with the number of prompt tokens that a planned step
    computes.
    """

    def __init__(self, ranks: Ranks, lookups: PageLookups | None, planned: Callable[[int], None]) -> None:
        self._ranks, self._lookups, self.planned = ranks, lookups, planned
        self._looked_up: str | None = None
        self._held: frozenset[str] = frozenset()

    def looked_up(self, rid: str) -> None:
        """SGLang has looked a request up, and decides next whether it admits it."""
        self._looked_up = rid

    def starts(self, rid: str) -> bool:
        """Whether a request that SGLang would admit is held back from now on. None of its pages is promised."""
        was_looked_up, self._looked_up = self._looked_up == rid, None
        if not was_looked_up:
            return False
        waits = self._ranks.all_agree(self._lookups is None or self._lookups.waits(rid, anew=False))
        if waits:
            self._held |= {rid}
        return waits

    def held(self, queue: Iterable[str]) -> frozenset[str]:
        """The requests that are held back and still wait. `queue`: all requests that SGLang has not admitted."""
        if self._held:
            before, waiting, lookups = self._held, self._held.intersection(queue), self._lookups
            if lookups is not None:
                for ended in before - waiting:
                    lookups.drop(ended)
                waiting = frozenset(rid for rid in waiting if lookups.waits(rid, anew=True))
            self._held = self._ranks.share(waiting)
        return self._held


def admit(holding: Holding, original: Callable[..., Any], adder: Any, req: Any, *more: Any, **how: Any) -> Any:
    """The hook around PrefillAdder.add_one_req. When a request is held back, SGLang goes on to the next one. With
    recurrent states it ends the round instead, because the request has a slot for its state by now, and SGLang frees
    the slot only at the end of a round. A request for which SGLang has preempted others is not held back."""
    if req.host_hit_length > 0 or adder.preempt_list or not holding.starts(req.rid):
        return original(adder, req, *more, **how)
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER if adder.tree_cache.supports_mamba() else AddReqResult.CONTINUE


def next_batch(holding: Holding, original: Callable[..., Any], scheduler: Any, *more: Any, **how: Any) -> Any:
    """The hook around Scheduler._get_new_batch_prefill_raw."""
    queue = scheduler.waiting_queue
    held = holding.held(req.rid for req in queue)
    if held:
        scheduler.waiting_queue = [req for req in queue if req.rid not in held]
    try:
        batch, running = original(scheduler, *more, **how)
    finally:
        if held:
            scheduler.waiting_queue = put_back(queue, held, scheduler.waiting_queue)
    computes = batch is not None and batch.hicache_consumer_index < 0  # the time of a batch with loads does not count
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
