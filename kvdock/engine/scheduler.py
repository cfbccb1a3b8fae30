"""Decides which requests compute what in the next step, and which blocks each holds.

A request's tokens, by the source of their KV, as half-open ranges of [0, len(tokens)):

    [0, local)       blocks of the engine's prefix cache: shared, held, never written
    [local, hit)     fresh blocks that the connector fills: not used before the LoadDone
    [hit, len)       fresh blocks that the model fills, chunk by chunk

Invariants: `computed` moves only over valid KV; a block's hash is registered only below `computed`; the blocks of a
LOADING request are neither read, written, freed nor registered; blocks that a store reads are held until the StoreDone,
even if the request has ended; the earliest request that holds blocks is never preempted for a later one, so one request
always makes progress.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

from kvdock.connectors.interface import BlocksRead, Connector, Hit as ConnectorHit, LoadDone, Pending, StoreDone
from kvdock.engine.blocks import BlockManager, Hit, held
from kvdock.engine.config import EngineConfig
from kvdock.engine.request import Request, State


@dataclass(frozen=True)
class Work:
    """Compute tokens [start, end) of a request in this step."""

    request: Request
    start: int
    end: int


class Scheduler:
    def __init__(self, config: EngineConfig, connector: Connector) -> None:
        self.config = config
        self.block_tokens = config.block_tokens
        self.blocks = BlockManager(
            config.model.groups, config.num_blocks, config.block_tokens, step_tokens=config.prefill_chunk_tokens
        )
        self.connector = connector
        # Both lists are in order of arrival.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.storing: Counter[BlocksRead] = Counter()

    # ------------------------------------------------------------------ what the engine calls

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda r: r.arrival.order)

    def schedule(self) -> list[Work]:
        """The next step's work within the token budget: decoding requests, then prefills, then waiting requests."""
        # In order of arrival, so that a request preempts only requests that come later in this loop.
        ready = [r for r in list(self.running) if r.state is State.RUNNING and self._make_room(r)]
        budget = self.config.max_step_tokens
        works: list[Work] = []
        for request in sorted(ready, key=lambda r: not r.is_decoding):
            budget -= self._plan(request, budget, works)
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.config.max_running:
                break
            # No request overtakes one that waits for blocks. A request that waits for an answer may be overtaken.
            if not self._admit(request):
                break
            if request.state is State.RUNNING:
                budget -= self._plan(request, budget, works)
        return works

    def advance(self, work: Work) -> None:
        """Records that the step has computed `work`, so its KV is valid."""
        request = work.request
        assert request.computed == work.start, f"computed: found {request.computed}, wanted {work.start}"
        if not request.is_decoding:
            request.metrics.computed_prefill_tokens += work.end - work.start
        request.computed = work.end
        self._register(request)

    def offer(self, request: Request) -> None:
        """Offers the KV to the connector and holds the blocks that it reads; then releases blocks that windows have
        left."""
        read = self.connector.begin_store(request.id, request.tokens, request.table, request.computed)
        if read:
            self.blocks.pool.touch(held(read))
            self.storing[read] += 1
        self.blocks.leave_behind(request.table, request.computed)

    def store_done(self, done: StoreDone) -> None:
        read = done.block_ids
        assert self.storing[read] > 0, f"StoreDone: found blocks {read}, wanted ones being stored"
        self.storing[read] -= 1
        self.storing += Counter()  # drops the zeros
        self.blocks.pool.release(held(read))

    def load_done(self, done: LoadDone) -> Request | None:
        """Ends the load of a request. Returns the request if it was aborted meanwhile; then its blocks are free."""
        request = self.loading.pop(done.request_id)
        if request.state is State.FINISHED:
            self._give_up_blocks(request)
            return request
        valid = max(done.valid_tokens // self.block_tokens * self.block_tokens, request.local)
        if self.blocks.holds(request.table, valid):
            request.metrics.loaded_tokens += valid - request.local
            # The logits of the last token are needed, so it is computed even if all KV is present.
            self._start(request, min(valid, len(request.tokens) - 1))
        else:
            # The shorter prefix needs blocks of windows that the longer one did not need.
            self._wait_again(request)
        return None

    def finish(self, request: Request) -> None:
        """Ends the request; if it is LOADING it keeps its blocks until the LoadDone."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self._give_up_blocks(request)
        request.state = State.FINISHED
        self.connector.finished(request.id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless lists, states and blocks agree."""
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=lambda r: r.arrival.order), "a queue is out of order"
        for request in self.waiting:
            assert request.state is State.WAITING, f"{request.id}: found {request.state} in the waiting queue"
            assert not request.table and request.computed == 0, f"{request.id}: found blocks while waiting"
        for request in self.running:
            assert request.state is State.RUNNING, f"{request.id}: found {request.state} in the running queue"
            assert request.computed < len(request.tokens), f"{request.id}: found nothing left to compute"
        holding = [*self.running, *self.loading.values()]
        assert len(holding) <= self.config.max_running, f"found {len(holding)} requests with blocks"
        for request in holding:
            assert request.registered * self.block_tokens <= max(request.computed, request.local), (
                f"{request.id}: found {request.registered} blocks registered, computed {request.computed} tokens"
            )
            assert self.blocks.pages(request.computed) <= len(request.table[0]), f"{request.id}: found KV outside"
        tables = [(request.table, request.computed) for request in self.running]
        tables += [(r.table, len(r.table[0]) * self.block_tokens) for r in self.loading.values()]
        self.blocks.check_integrity(tables, [held(read) for read in self.storing.elements()])

    # ------------------------------------------------------------------ helpers

    def _next_end(self, request: Request, computed: int) -> int:
        """The end of the chunk after `computed`: at fixed multiples, so that its shape does not depend on other
        requests."""
        chunk = self.config.prefill_chunk_tokens
        return min(len(request.tokens), (computed // chunk + 1) * chunk)

    def _plan(self, request: Request, budget: int, works: list[Work]) -> int:
        """Adds the request's next chunk if all of it fits in the budget; returns the number of its tokens, or 0."""
        end = self._next_end(request, request.computed)
        if end - request.computed > budget:
            return 0
        works.append(Work(request, request.computed, end))
        return end - request.computed

    def _admit(self, request: Request) -> bool:
        """Makes a waiting request RUNNING or LOADING if it can. False: there are not enough blocks."""
        local_hit = self._local_hit(request)
        if not self.blocks.fits(local_hit, len(request.tokens)):
            return False
        local = local_hit.length * self.block_tokens
        found = self.connector.lookup(request.id, request.tokens, local, request.arrival.traceparent)
        if isinstance(found, Pending):
            return True
        self.waiting.remove(request)
        loads, hit = (True, found.tokens) if isinstance(found, ConnectorHit) else (False, local)
        # After a full hit the last token is computed in a block that the hit covers.
        end = hit if loads else self._next_end(request, local)
        request.take_table(self.blocks.admit(local_hit, hit, end), local, local_hit.length)
        if loads:
            request.state = State.LOADING
            self.loading[request.id] = request
            self.connector.begin_load(request.id, request.table, local, hit)
        else:
            self._start(request, local)
        return True

    def _local_hit(self, request: Request) -> Hit:
        """The blocks to use from the engine's prefix cache: never that of the last token, which is written again."""
        limits = [request.sampling.max_local_hit_tokens, self.config.max_local_hit_tokens, len(request.tokens) - 1]
        usable = min(limit for limit in limits if limit is not None) // self.block_tokens
        return self.blocks.match(request.block_hashes(self.block_tokens, usable))

    def _start(self, request: Request, computed: int) -> None:
        request.state = State.RUNNING
        request.computed = computed
        request.metrics.local_hit_tokens += request.local
        self._register(request)
        bisect.insort(self.running, request, key=lambda r: r.arrival.order)

    def _make_room(self, request: Request) -> bool:
        """Grows the table to the next chunk's end; may preempt the latest arrivals. False: not in this step."""
        end = self._next_end(request, request.computed)
        while (lacking := self.blocks.lacking(request.table, end)) > 0:
            if lacking <= self._returning():
                return False
            victim = self.running[-1]
            if victim is request and self.loading:
                return False  # a loading request cannot be preempted before it runs, which will be soon
            self._preempt(victim)
            if victim is request:
                return False
        self.blocks.grow(request.table, end)
        return True

    def _returning(self) -> int:
        """The number of blocks that only stores hold: waiting for them is cheaper than preempting a request."""
        stored = Counter(block for read in self.storing.elements() for block in held(read))
        return sum(self.blocks.pool.references[block] == count for block, count in stored.items())

    def _preempt(self, request: Request) -> None:
        """Takes the blocks from a request. All its tokens, including the output, will be looked up again, and computed
        if they are not found."""
        self.running.remove(request)
        request.metrics.preemptions += 1
        self.connector.finished(request.id, comes_back=True)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        """Returns the request to WAITING, without blocks."""
        self._give_up_blocks(request)
        request.state = State.WAITING
        self.add(request)

    def _give_up_blocks(self, request: Request) -> None:
        self.blocks.release(request.table)
        request.take_table([], 0, 0)

    def _register(self, request: Request) -> None:
        """Offers the full blocks below `computed` to the prefix cache."""
        full = request.computed // self.block_tokens
        self.blocks.register(request.table, request.block_hashes(self.block_tokens, full), request.registered)
        request.registered = max(full, request.registered)
