"""In the scheduler's process: answers lookups, plans loads and stores, and keeps blocks from being overwritten.

A lookup is pure: it asks the server in the background and answers None until it knows. An admission begins a load.
Each step offers the chunks that its end completes; their slots are reserved in the background, and the plan goes
to the workers with a later step. vLLM frees blocks when it likes, so a store whose blocks are given out anew is dropped
when it has not gone to the workers yet, and fenced when it has: the workers end it before that step writes.

Invariants: `_stores` has every store that may still read its blocks; a plan leaves with the step that is being
built or never; loads that vLLM cannot preempt leave room for the largest other request (room.py).

Threads: vLLM's scheduler thread calls everything; `_lock` guards what the background hands over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.plans import LoadPiece, LoadPlan, StorePlan
from kvdock.connectors.scheduler import Fetch, StoreBatch, StoreOffer
from kvdock.connectors.session import Attachment
from kvdock.connectors.vllm.announcer import Announcer
from kvdock.connectors.vllm.background import run
from kvdock.connectors.vllm.checked import CheckedScheduler
from kvdock.connectors.vllm.clearing import Clearing
from kvdock.connectors.vllm.figures import Figures
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.identity import depends_on_more_than_tokens
from kvdock.connectors.vllm.orders import IDLE_WAIT_S, NOWHERE, Life, LoadOrder, Orders, Report, StoreOrder
from kvdock.connectors.vllm.room import Room
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.keys import HashedChain
from kvdock.protocol.schemas import Abort

log = logging.getLogger("kvdock.vllm")

Table = list[list[int | None]]


@dataclass
class _Tracked:
    """A request from its first lookup to its end. `table`: per group its blocks, None where it has none."""

    request: Any
    local_tokens: int = 0
    is_async: bool = False
    """As LoadOrder has it: of the load that it was last promised."""
    check: Future[None] | None = None
    """Of what it was promised, before it is loaded in the step that runs it."""
    is_new: bool = True
    """It was not in any step since it was given its blocks."""
    table: Table | None = None
    is_old: bool = False
    """The cache was reset since it was looked up: what it computes may rest on what was there before."""


@dataclass
class _Store:
    blocks: frozenset[int]
    sent: bool = False
    dropped: bool = False
    ranks_left: int = 1


class SchedulerSide:
    """`half` is attached; `ranks`: how many workers report on each store; `fails_closed`: this vLLM has no way back
    from any load that fails; `announcer`: of an engine that publishes KV cache events; `hash_tokens`: vLLM makes a hash
    of so many tokens, and keys come from its hashes."""

    def __init__(
        self, half: CheckedScheduler, groups: Sequence[KVGroup], room: Room, *, ranks: int, load_async: bool,
        fails_closed: bool, announcer: Announcer | None = None, hash_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._half, self._groups, self._room, self._announcer = half, groups, room, announcer
        self._ranks, self._load_async, self._fails_closed = ranks, load_async, fails_closed
        if announcer is not None:
            half.witness = announcer.witness
        if hash_tokens is not None:
            half.chain_of = lambda request_id, namespace, chunk_tokens: HashedChain(
                namespace, chunk_tokens, self._tracked[request_id].request.block_hashes, hash_tokens
            )
        self.figures, self._clock = Figures(), clock
        self._clearing = Clearing(half.session)
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._stores: dict[int, _Store] = {}
        self._last_store = 0
        self._fresh: set[int] = set()  # blocks given out since the last build
        self._asking = ThreadPoolExecutor(1, "kvdock-ask")
        self._question: Future[None] | None = None
        self._lives: dict[int, Life] = {}  # of the workers
        self._reserving = ThreadPoolExecutor(1, "kvdock-reserve")
        self._lock = threading.Lock()
        self._reserved: list[tuple[int, Attachment, StorePlan | None]] = []

    # ------------------------------------------------------------------ lookups and loads

    def lookup(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond `local_tokens`, loaded in the background?); None: ask again."""
        if depends_on_more_than_tokens(request) or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        tracked.request, tracked.local_tokens, tracked.is_old = request, local_tokens, False
        if not self._clearing.is_over:
            self._clear_again()
            return 0, False
        # The last token is always computed: vLLM wants its logits.
        usable = (request.num_tokens - 1) // self._half.chunk_tokens * self._half.chunk_tokens
        if usable <= local_tokens:
            return 0, False
        found = self._half.lookup(request.request_id, request.all_token_ids[:usable], local_tokens)
        if isinstance(found, Fetch):
            if self._announcer is not None:
                self._announcer.know(request, found.keys)
            self._question = run(self._asking, self._fetch, found, self._clock())
            return None, False
        if found is None:
            return None, False
        if found == local_tokens:
            self._cancel(self._half.give_up_lease(request.request_id, local_tokens))
            return 0, False
        tracked.is_async = self._load_async and self._room.fits(request)
        if (self._fails_closed or not tracked.is_async) and not self._is_attached_everywhere():
            return 0, False  # vLLM has no way back from such a load: it had better not fail
        if tracked.check is not None and not tracked.check.done():
            return None, False
        if not tracked.is_async and not self._half.is_whole(request.request_id):
            self._question = tracked.check = run(self._asking, self._half.check, request.request_id)
            return None, False
        return found - local_tokens, tracked.is_async

    def _is_attached_everywhere(self) -> bool:
        """Every worker has said that it is attached to what this side is."""
        attachment = self._half.session.attachment
        return (
            attachment is not None and len(self._lives) == self._ranks
            and set(self._lives.values()) == {Life.of(attachment)}
        )

    def arrived(self, request: Any) -> None:
        self._room.add(request)

    def allocated(self, request: Any, table: Table, external_tokens: int) -> None:
        """The request has its blocks: a load begins when it was promised external tokens."""
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        tracked.request, tracked.table, tracked.is_new = request, table, True
        for column, group in zip(table, self._groups, strict=True):
            first = tracked.local_tokens // group.block_tokens
            self._fresh.update(block for block in column[first:] if block is not None)
        if external_tokens == 0:
            return
        hit = tracked.local_tokens + external_tokens
        if tracked.is_async:
            self._room.take(request)
        columns = self._whole_blocks(table, hit)
        begun = self._half.begin_load(request.request_id, columns, tracked.local_tokens, hit)
        if begun is None:  # the server went away since it was promised: the workers report a failed load
            plan = self._hopeless(request.request_id, columns, tracked.local_tokens, hit)
            self._loads.append(LoadOrder(NOWHERE, plan, tracked.is_async))
            return
        attachment, plan = begun
        self._loads.append(LoadOrder(Life.of(attachment), plan, tracked.is_async))
        attachment.release()  # this process copies nothing

    def _hopeless(self, request_id: str, columns: Table, local_tokens: int, hit_tokens: int) -> LoadPlan:
        """A plan that names the blocks to be filled and nothing to fill them with."""
        chunk, sizes = self._half.chunk_tokens, [group.block_tokens for group in self._groups]
        pieces = tuple(
            LoadPiece(at * size // chunk, group, (), (block,), 0)
            for group, (size, column) in enumerate(zip(sizes, columns, strict=True))
            for at, block in enumerate(column) if at * size >= local_tokens and block is not None
        )
        return LoadPlan(request_id, "", local_tokens, hit_tokens, chunk, pieces)

    # ------------------------------------------------------------------ each step

    def build(self, output: Any) -> Orders:
        """Drains what is planned and takes note of what vLLM has scheduled."""
        self.figures.state("attached", int(self._half.session.attachment is not None))
        for request_id in output.preempted_req_ids or ():
            self._forget(request_id)
        self._note_tables(output)
        fences = self._guard()
        stores = self._send()
        for request_id, count in output.num_scheduled_tokens.items():
            self._room.give_back(request_id)
            self._offer(request_id, count)
        loads, self._loads = tuple(self._loads), []
        self._fresh.clear()
        scheduled = list(output.num_scheduled_tokens)
        is_idle, alone = not scheduled, scheduled[0] if len(scheduled) == 1 else None
        if is_idle and self._question is not None:
            wait([self._question], IDLE_WAIT_S)  # nothing is computed: the loop had better wait than spin
        return Orders(loads, tuple(stores), tuple(fences), is_idle, alone, frozenset(output.finished_req_ids))

    def _note_tables(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._set_table(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._set_table(request_id, ids)
            elif ids is not None:
                tracked = self._tracked.get(request_id)
                for group, more in enumerate(ids):
                    self._fresh.update(more)
                    if tracked is not None and tracked.table is not None:
                        tracked.table[group].extend(_or_none(more))

    def _set_table(self, request_id: str, ids: Sequence[Sequence[int]]) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.table = [_or_none(column) for column in ids]

    def _guard(self) -> list[int]:
        """Drops or fences the stores that read a block which this step, or a load, may overwrite."""
        fences = []
        for number, store in self._stores.items():
            if not store.blocks.isdisjoint(self._fresh):
                if store.sent:
                    fences.append(number)
                store.dropped = True
        return fences

    def _send(self) -> list[StoreOrder]:
        with self._lock:
            reserved, self._reserved = self._reserved, []
        orders = []
        for number, attachment, plan in reserved:
            store = self._stores[number]
            if plan is None or store.dropped:
                del self._stores[number]
                self.figures.add("stores_dropped", int(store.dropped))
                if plan is not None:
                    run(self._asking, self._abort, attachment, plan)
            else:
                store.sent = True
                orders.append(StoreOrder(number, Life.of(attachment), plan))
        return orders

    def _offer(self, request_id: str, count: int) -> None:
        """Chunks that are complete when this step has computed `count` tokens of the request."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.table is None or tracked.is_old or depends_on_more_than_tokens(tracked.request):
            return
        request = tracked.request
        before = request.num_computed_tokens
        computed = min(before + count, request.num_tokens)  # what lies behind are drafts
        for column, group in zip(tracked.table, self._groups, strict=True):
            if group.window_tokens is not None:  # vLLM has let these go
                gone = min(max(0, before - group.window_tokens) // group.block_tokens, len(column))
                column[:gone] = [None] * gone
        is_new, tracked.is_new = tracked.is_new, False
        chunk = self._half.chunk_tokens
        if is_new and computed // chunk <= tracked.local_tokens // chunk:
            return  # all of it was a local hit: it is offered again once the first token is out
        columns = self._whole_blocks(tracked.table, computed)
        offer = self._half.begin_store(request_id, request.all_token_ids, columns, computed)
        if offer is None:
            return
        if self._announcer is not None:
            self._announcer.know(request, self._half.keys_of(request_id, computed))
        numbered = []
        for batch in offer.batches:
            self._last_store += 1
            blocks = frozenset(block for chunk in batch.block_ids for part in chunk for block in part)
            self._stores[self._last_store] = _Store(blocks, ranks_left=self._ranks)
            numbered.append((self._last_store, batch))
        run(self._reserving, self._reserve, offer, numbered)

    def _whole_blocks(self, table: Table, tokens: int) -> Table:
        """What of `table` holds nothing but the first `tokens` tokens."""
        return [column[: tokens // group.block_tokens] for column, group in zip(table, self._groups, strict=True)]

    # ------------------------------------------------------------------ ends

    def take(self, report: Report) -> None:
        self._lives.update(report.lives)
        if report.valid_tokens:  # steps that read what did not come are computed again: what they left is not stored
            for store in self._stores.values():
                store.dropped |= not store.sent
        for request_id, valid in report.valid_tokens.items():
            self._half.load_failed(request_id, valid)
            self.figures.add("load_failures", 1)
        for number, ranks in report.stores.items():
            store = self._stores[number]
            store.ranks_left -= ranks
            if store.ranks_left <= 0:
                del self._stores[number]
                self._clearing.store_ended(number)
        self._clear_again()

    def finished(self, request_id: str) -> None:
        self._forget(request_id)
        self._tracked.pop(request_id, None)
        self._room.remove(request_id)

    def reset(self) -> bool:
        """What the server holds for engines like this one is not found any more. False: it did not clear it (yet).

        Waits for the server, as long as the client does: somebody asked for it."""
        for request_id, tracked in self._tracked.items():
            self._forget(request_id)
            tracked.is_old = True
        for store in self._stores.values():
            store.dropped = True
        cleared = self._clearing.ask(number for number, store in self._stores.items() if store.sent)
        run(self._asking, self._clearing.tell_of_others)
        return cleared

    def _clear_again(self) -> None:
        if self._clearing.starts_again():
            run(self._asking, self._clearing.again)

    @property
    def busy(self) -> bool:
        """Stores are under way: the engine must go on stepping for them to get to the workers."""
        return bool(self._stores)

    def close(self) -> None:
        for pool in (self._asking, self._reserving):
            pool.shutdown(wait=True)
        self._half.session.close()
        self._half.client.close()

    def _forget(self, request_id: str) -> None:
        self._cancel(self._half.finished(request_id))
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.table, tracked.local_tokens = None, 0

    # ------------------------------------------------------------------ background

    def _fetch(self, fetch: Fetch, asked_s: float) -> None:
        self._half.fetch(fetch)
        self.figures.add("lookup_seconds", self._clock() - asked_s)

    def _reserve(self, offer: StoreOffer, numbered: Sequence[tuple[int, StoreBatch]]) -> None:
        try:
            for number, batch in numbered:
                plan = None
                try:
                    if not self._stores[number].dropped:
                        plan = self._half.reserve(offer, batch)
                finally:
                    with self._lock:
                        self._reserved.append((number, offer.attachment, plan))
        finally:
            offer.attachment.release()

    def _abort(self, attachment: Attachment, plan: StorePlan) -> None:
        if self._half.session.attachment is not attachment:
            return
        try:
            self._half.client.abort(plan.reservation, Abort(session=attachment.session, member=attachment.member))
        except (ServerUnavailable, ApiError) as error:
            self._half.session.lost(attachment, error)

    def _cancel(self, unused: tuple[Attachment, str] | None) -> None:
        if unused is not None:
            run(self._asking, self._half.cancel, *unused)


def _or_none(blocks: Sequence[int]) -> list[int | None]:
    """vLLM writes 0 for the null block."""
    return [block or None for block in blocks]
