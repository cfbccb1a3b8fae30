"""Decides who computes what in the next step, and who holds which blocks meanwhile.

A request's tokens, by who provides their KV, as half-open ranges of [0, len(tokens)):

    [0, local)       blocks of the engine's prefix cache: shared, held, never written
    [local, hit)     fresh blocks the connector fills: ours only after its LoadDone
    [hit, len)       fresh blocks the model fills, chunk by chunk

Invariants: `computed` moves only over valid KV; a block's hash is registered only below `computed`;
the blocks of a LOADING request are neither read, written, freed nor registered; the earliest
request that holds blocks is never preempted for a later one, so somebody always gets on.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdock.connectors.interface import Connector, LoadDone
from kvdock.engine.block_manager import BlockManager
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
        self.blocks = BlockManager(config.num_blocks)
        self.connector = connector
        # Each in order of arrival.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}

    # ------------------------------------------------------------------ the verbs

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    def schedule(self) -> list[Work]:
        """The next step's work, within the token budget: who decodes, who prefills already, newcomers."""
        budget = self.config.max_step_tokens
        works: list[Work] = []
        # Decoding needs few tokens but may need a block; prefilling got all its blocks on admission.
        for request in sorted(self.running, key=lambda r: not r.is_decoding):
            # Another request may have preempted this one a moment ago.
            if request.state is State.RUNNING and self._fits(request, budget) and self._make_room(request):
                works.append(Work(request, request.computed, self._next_end(request)))
                budget -= works[-1].end - works[-1].start
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.config.max_running:
                break
            # Nobody overtakes a request that waits for blocks; one that waits for an answer may be overtaken.
            if not self._admit(request):
                break
            if request.state is State.RUNNING and self._fits(request, budget):
                works.append(Work(request, request.computed, self._next_end(request)))
                budget -= works[-1].end - works[-1].start
        return works

    def advance(self, work: Work) -> None:
        """The step computed `work`: its KV is valid now."""
        request = work.request
        assert request.computed == work.start, f"computed: found {request.computed}, wanted {work.start}"
        if not request.is_decoding:
            request.metrics.computed_prefill_tokens += work.end - work.start
        request.computed = work.end
        self._register(request)

    def load_done(self, done: LoadDone) -> Request | None:
        """Ends a LOADING request's wait. Returns the request if it was aborted meanwhile: its blocks are free now."""
        request = self.loading.pop(done.request_id)
        if request.state is State.FINISHED:
            self._give_up_blocks(request)
            return request
        valid = max(done.valid_tokens // self.block_tokens * self.block_tokens, request.local)
        request.metrics.loaded_tokens += valid - request.local
        # The logits of the last token are wanted, so it is computed even when all its KV is there.
        self._start(request, min(valid, len(request.tokens) - 1))
        return None

    def finish(self, request: Request) -> None:
        """Takes the request out, for whatever reason; a LOADING one keeps its blocks until its LoadDone."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self._give_up_blocks(request)
        request.state = State.FINISHED
        self.connector.finished(request.id)

    def check_integrity(self, storing: Iterable[Sequence[int]]) -> None:
        """AssertionError unless lists, states and blocks agree; `storing` is every list of blocks being stored."""
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=lambda r: r.arrival), "a queue is out of order"
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
            assert self._pages(request.computed) <= len(request.table), f"{request.id}: found KV outside the table"
        self.blocks.check_integrity([*(request.table for request in holding), *storing])

    # ------------------------------------------------------------------ steps of the verbs

    def _next_end(self, request: Request) -> int:
        """Where the next chunk ends: at fixed multiples, so that a request's shapes are its own."""
        chunk = self.config.prefill_chunk_tokens
        return min(len(request.tokens), (request.computed // chunk + 1) * chunk)

    def _fits(self, request: Request, budget: int) -> bool:
        """A chunk is computed whole or not in this step."""
        return self._next_end(request) - request.computed <= budget

    def _admit(self, request: Request) -> bool:
        """Tries to take a waiting request in, RUNNING or LOADING. False: there are not enough blocks."""
        local_blocks = self._local_hit(request)
        local = len(local_blocks) * self.block_tokens
        missing = self._pages(len(request.tokens)) - len(local_blocks)
        if missing > self.blocks.room_beside(local_blocks):
            return False
        hit = self.connector.lookup(request.id, request.tokens, local)
        if hit is None:
            return True
        self.waiting.remove(request)
        # Hold the local hits first: the allocation must not take them for free blocks.
        self.blocks.touch(local_blocks)
        request.table = local_blocks + self.blocks.allocate(missing)
        request.local, request.registered = local, len(local_blocks)
        request.metrics.local_hit_tokens += local
        if hit > local:
            request.state = State.LOADING
            self.loading[request.id] = request
            self.connector.begin_load(request.id, request.table[: self._pages(hit)], local, hit)
        else:
            self._start(request, local)
        return True

    def _local_hit(self, request: Request) -> list[int]:
        """Blocks of the own prefix cache to use: never the last token's, which will be written again."""
        limits = [request.sampling.max_local_hit_tokens, self.config.max_local_hit_tokens, len(request.tokens) - 1]
        usable = min(limit for limit in limits if limit is not None) // self.block_tokens
        return self.blocks.match(request.block_hashes(self.block_tokens, usable))

    def _start(self, request: Request, computed: int) -> None:
        request.state = State.RUNNING
        request.computed = computed
        self._register(request)
        bisect.insort(self.running, request, key=lambda r: r.arrival)

    def _make_room(self, request: Request) -> bool:
        """Grows the table to the next chunk's end, preempting the latest arrivals. False: it preempted itself."""
        missing = self._pages(self._next_end(request)) - len(request.table)
        while missing > len(self.blocks.free):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if missing > 0:
            request.table += self.blocks.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to WAITING without blocks: all its tokens, outputs too, will be looked up and computed again."""
        self.running.remove(request)
        self._give_up_blocks(request)
        request.state = State.WAITING
        request.metrics.preemptions += 1
        self.connector.finished(request.id)
        self.add(request)

    def _give_up_blocks(self, request: Request) -> None:
        self.blocks.release(request.table)
        request.table, request.computed = [], 0

    def _register(self, request: Request) -> None:
        """Offers the full blocks below `computed` to the prefix cache."""
        full = request.computed // self.block_tokens
        hashes = request.block_hashes(self.block_tokens, full)
        for index in range(request.registered, full):
            self.blocks.register(request.table[index], hashes[index])
        request.registered = full

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
