"""Loads long hits before SGLang admits their requests, so that the requests that run lose no step.

As SGLang has it, a load is part of a batch: the forward pass of all requests of the batch waits for it, and so do the
next tokens of those that run. So while others run, nothing of a long hit is promised at first. kvdock takes device
slots itself, loads into them, and puts the pages into SGLang's tree, where SGLang then finds them as it finds its own:

    SGLang would admit the request ──► slots are taken, and the copies begin; the request is held back (holding.py)
    SGLang plans its next batches  ──► have the copies ended on all ranks? Then the pages come into the tree
    SGLang looks the request up    ──► its prefix is on the device

Requests whose prefix begins with the same pages wait for the one load. A load that fails ends no request, because no
forward pass has read its pages: they are given back, and the request is looked up again.

Invariants:
- The slots belong to nobody else until the copies have ended. Then they are in the tree, where SGLang may evict them,
  or given back. What comes before them in the tree is locked meanwhile.
- A load begins only if SGLang would have the memory to admit its request. If the next step might lack memory, or
  nothing runs any more, the copies are waited for: so SGLang retracts no request for slots of kvdock's, and finds none
  missing when it is idle.
- All ranks do the same: what begins is agreed on, and when it ends, too.

Threads: SGLang's scheduler thread calls everything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.session import Attachment
from kvdock.connectors.sglang.loads import Loads, QueuedLoad, Ready
from kvdock.connectors.sglang.lookups import Answered, PageLookups
from kvdock.connectors.sglang.pools import FULL
from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.sglang.updates import Fresh

MOST_SHARE = 0.25
"""The most of the device's pool that early loads take at a time."""
MOST_TOLD = 1024
"""How many requests in the queue are remembered whose early load has ended."""


class Landed(NamedTuple):
    """The early load of a request that SGLang has not admitted. `answered`: its lookup; `tokens`: those that were
    loaded; `took_s` and `copy_s`: see QueuedLoad."""

    answered: Answered | None
    tokens: int
    took_s: float
    copy_s: float | None


@dataclass
class _Early:
    """`number`: its batch, of its own; `cache`: SGLang's tree; `lock`: the tree's lock of what comes before the
    pages; `answered`: on rank 0, the request's lookup; `has_ended`: the request has, before the load."""

    number: int
    load: QueuedLoad
    req: Any
    cache: Any
    lock: Any
    answered: Answered | None
    has_ended: bool = False


class EarlyLoads:
    """`plan_for(rid, pages)`: agrees with the other ranks on the plan of a load. `ready`: says when the GPU has
    computed the slots. `lookups`: rank 0's; None in other ranks. `least_tokens`: shorter hits are loaded with their
    batch; 0: all are."""

    def __init__(
        self, loads: Loads, ranks: Ranks, fresh: Fresh, lookups: PageLookups | None,
        plan_for: Callable[[str, int], tuple[Attachment, LoadPlan] | None], ready: Callable[[], Ready],
        least_tokens: int,
    ) -> None:
        self._loads, self._ranks, self._fresh, self._lookups = loads, ranks, fresh, lookups
        self._plan_for, self._ready = plan_for, ready
        are_alike = all(group.transfer == FULL for group in loads.pools.groups)
        self._least = least_tokens if are_alike and ranks.stages == ranks.nodes == 1 else 0
        self._is_busy = False
        self._pages: Sequence[str] = ()
        """Those that SGLang has looked up last."""
        self._wanted: dict[str, int] = {}
        """Rank 0: requests that are held back, with the number of pages to load."""
        self._follows: dict[str, str] = {}
        """Rank 0: requests that wait for another one's load, with the first page that they lack."""
        self._flying: deque[_Early] = deque()
        self._told: OrderedDict[str, Landed | None] = OrderedDict()
        """Requests whose early load has ended; None: it has failed, and there is no second one."""

    # ------------------------------------------------------------------ rank 0 decides

    def has_loaded(self, rid: str, pages: int) -> bool:
        """Whether the request lacks only `pages` pages that the server did not have when its early load was planned."""
        landed = self._told.get(rid)
        return landed is not None and landed.answered is not None and pages <= landed.answered.missing_pages

    def takes(self, req: Any, pages: Sequence[str], found: int) -> bool:
        """Whether the first `found` of `pages`, which the request lacks, are loaded early: then SGLang is promised
        nothing now. Or its first pages are being loaded for another request."""
        rid = "" if req is None else str(req.rid)
        self._wanted.pop(rid, None)
        self._follows.pop(rid, None)
        if not (found and self._is_busy and req is not None and self._fits_tree(req)) or rid in self._told:
            return False
        if any(pages[0] in early.load.pages for early in self._flying):
            self._follows[rid] = pages[0]
            return True
        size = self._loads.pools.page_tokens
        taken = found + sum(len(early.load.pages) for early in self._flying)
        if found * size < self._least or taken > MOST_SHARE * self._loads.pools.groups[0].layout.num_blocks:
            return False
        self._wanted[rid] = found
        return True

    def _fits_tree(self, req: Any) -> bool:
        """Whether the tree may take pages of the request before it was computed."""
        return req.session is None and not req.skip_radix_cache_insert and not self._loads.weights.is_stale

    def is_wanted(self, rid: str) -> bool:
        return rid in self._wanted

    def waits(self, rid: str) -> bool:
        """Whether the request waits for an early load, its own or another one's."""
        page = self._follows.get(rid)
        own = any(early.load.rid == rid and not early.has_ended for early in self._flying)
        return own or any(page in early.load.pages for early in self._flying)

    def forget(self, rid: str) -> None:
        """The request has ended. Another one may get its id."""
        for known in (self._wanted, self._follows, self._told):
            known.pop(rid, None)
        for early in self._flying:
            early.has_ended |= early.load.rid == rid

    def admitted(self, rid: str) -> Landed | None:
        """SGLang has admitted the request. Returns its early load, if it had one that was complete."""
        landed = self._told.get(rid)
        self.forget(rid)
        return landed

    # ------------------------------------------------------------------ all ranks

    def looked_up(self, pages: Sequence[str]) -> None:
        self._pages = pages

    def begin(self, adder: Any, req: Any) -> bool:
        """SGLang is about to admit the request, which is wanted on rank 0. Returns False if SGLang lacks the memory to
        do so. True: its load has begun, or it cannot begin, and the request is looked up again."""
        cache, rid = adder.tree_cache, str(req.rid)
        lock = cache.lock(req.last_node)
        wanted = self._wanted.pop(rid, 0)
        count = self._ranks.share(wanted if _has_memory(adder, req) else 0)
        slots = _slots(cache, count * self._loads.pools.page_tokens) if count else None
        started = self._plan_for(rid, count) if slots is not None else None
        if started is None:
            if slots is not None:
                cache.token_to_kv_pool_allocator.free(slots)
            cache.unlock(lock)
            if count:
                self._tell(rid, None)
            return count > 0
        load = QueuedLoad(rid, *started, {FULL: slots}, self._loads.weights.epoch, self._pages[:count], is_early=True)
        answered = self._lookups.admitted(rid) if self._lookups is not None else None
        number = self._loads.start_early(load, self._ready)
        self._flying.append(_Early(number, load, req, cache, lock, answered))
        return True

    def step(self, scheduler: Any, running: Any) -> None:
        """SGLang plans a batch beside the requests in `running`."""
        self._is_busy = self._least > 0 and not running.is_empty() and not scheduler.enable_priority_preemption
        must_end = bool(self._flying) and (running.is_empty() or _is_short(scheduler, running))
        while self._flying:
            if not self._ranks.all_agree(must_end or self._loads.has_ended(self._flying[0].number)):
                return
            self._land(self._flying.popleft())
            running.batch_is_full = False  # it may be so for the memory that SGLang has from now on

    def reset(self) -> None:
        """SGLang has dropped its tree and all slots, and the copies have ended."""
        self._flying.clear()
        for known in (self._wanted, self._follows, self._told):
            known.clear()

    def _land(self, early: _Early) -> None:
        load, cache = early.load, early.cache
        is_whole = self._loads.finish(early.number)
        if is_whole:
            self._insert(early)
        else:
            cache.token_to_kv_pool_allocator.free(load.indices[FULL])
        cache.unlock(early.lock)
        tokens = len(load.pages) * self._loads.pools.page_tokens
        if not early.has_ended:
            self._tell(load.rid, Landed(early.answered, tokens, load.took_s, load.copy_s) if is_whole else None)

    def _insert(self, early: _Early) -> None:
        """Puts the pages into the tree, behind those that it had. Slots of pages that it has got meanwhile are freed by
        the tree."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        req, cache = early.req, early.cache
        before, slots = cache.path_device_indices(early.lock.node), early.load.indices[FULL]
        end, has_pairs = len(before) + len(slots), cache.tree_core.is_eagle
        tokens = req.full_untruncated_fill_ids[: end + int(has_pairs)]
        key = RadixKey(tokens, req.extra_key, is_bigram=has_pairs, cache_salt=req.cache_salt)
        with self._fresh.inserting(req):
            cache.insert(InsertParams(
                key=key, value=torch.cat([before, slots.to(before.dtype)]), prev_prefix_len=len(before),
                inserted_len=len(before), priority=req.priority or 0,
            ))

    def _tell(self, rid: str, landed: Landed | None) -> None:
        self._told[rid] = landed
        if len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)


def _has_memory(adder: Any, req: Any) -> bool:
    """Whether SGLang has the memory to admit the request, whose prefix is locked."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    new = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
    lacks = len(req.full_untruncated_fill_ids) - req.prefix_len
    return bool(lacks + new + adder.page_size < adder.rem_total_tokens)


def _slots(cache: Any, tokens: int) -> Any:
    """Takes slots for this number of tokens, as SGLang does for a load. None: there are not enough."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = cache.token_to_kv_pool_allocator
    lacking = tokens - allocator.available_size()
    if lacking > 0:
        cache.evict(EvictParams(num_tokens=lacking))
    return allocator.alloc(tokens)


def _is_short(scheduler: Any, running: Any) -> bool:
    """Whether the next step of the requests that run might lack memory."""
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return bool(free < running.new_tokens_required_next_decode())
