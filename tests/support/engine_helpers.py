"""What the engine's tests share: engines on poisoned memory, and a small honest connector in memory.

MemoryConnector keeps whole chunks, group by group, by all tokens up to their end. It copies when it
reports, not when it is asked, and fills blocks to be loaded with NaN at once: an engine that reads
them early, or rewrites a block that is being stored, computes something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvdock.connectors.interface import (
    BlocksRead,
    GroupBlocks,
    Hit,
    LoadDone,
    LookupResult,
    Miss,
    Pending,
    Progress,
    StoreDone,
)
from kvdock.engine.config import EngineConfig, first_needed, preset
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.request import Completion, SamplingParams

TINY = preset("tiny")


def config(**changes: Any) -> EngineConfig:
    """The tiny preset with some fields changed."""
    return dataclasses.replace(TINY, **changes)


def prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(256) for _ in range(length)]


def sampling(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    """Greedy, all logits kept, never stopped by EOS."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, keep_logits=True)
    return dataclasses.replace(params, **changes)


def poison(kv: KVCache) -> None:
    """NaN everywhere: whoever reads KV that nobody wrote gets NaN logits."""
    for paged in kv.planes:
        paged.fill_(float("nan"))


def make_engine(
    settings: EngineConfig = TINY,
    connect: Callable[[KVCache], MemoryConnector] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    shuffle_seed: int = 0,
) -> Engine:
    """An engine on poisoned memory whose free blocks are in random order."""
    kv = KVCache(settings)
    poison(kv)
    engine = Engine(settings, connect(kv) if connect is not None else None, kv=kv, clock=clock)
    free = engine.scheduler.blocks.pool.free
    order = list(free)
    Random(shuffle_seed).shuffle(order)
    for block in order:
        free.move_to_end(block)
    return engine


def run(engine: Engine, max_steps: int = 5_000) -> dict[str, Completion]:
    """Steps until nothing is left, checking every block after every step."""
    done: dict[str, Completion] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return done
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
        engine.check_integrity()
    raise AssertionError(f"found {len(engine.requests)} requests unfinished after {max_steps} steps, wanted none")


def run_one(engine: Engine, tokens: Sequence[int], params: SamplingParams | None = None) -> Completion:
    request_id = engine.add_request(tokens, params if params is not None else sampling())
    return run(engine)[request_id]


def assert_same_bits(found: Completion, wanted: Completion) -> None:
    """Tokens and every logit equal, bit for bit."""
    assert found.output_tokens == wanted.output_tokens
    assert len(found.logits) == len(wanted.logits) > 0
    for position, (one, other) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        assert not one.isnan().any(), f"position {position} has NaN logits"
        assert torch.equal(one, other), f"position {position} differs by {(one - other).abs().max()}"


Key = tuple[int, tuple[int, ...]]
"""(group, all tokens up to the end of the chunk)."""
Pool = dict[Key, Tensor]


@dataclass
class Load:
    request_id: str
    tokens: list[int]
    blocks: tuple[tuple[int | None, ...], ...]
    local_tokens: int
    hit_tokens: int
    polls_left: int


@dataclass
class Store:
    request_id: str
    chunks: list[tuple[Key, list[int]]]
    blocks: BlocksRead
    polls_left: int


class MemoryConnector:
    """A real connector whose pool is a dict, to be shared between engines. Time is counted in polls."""

    def __init__(
        self,
        kv: KVCache,
        pool: Pool,
        *,
        chunk_tokens: int = 32,
        load_polls: int = 2,
        store_polls: int = 3,
        unknown_lookups: int = 0,
        fail_at: int | None = None,
        random: Random | None = None,
    ) -> None:
        """`fail_at`: tokens from which every load fails. `random`: vary delays, failures and unknown lookups by it."""
        self.kv, self.pool, self.chunk_tokens, self.random = kv, pool, chunk_tokens, random
        self.kinds = kv.config.model.groups
        self.load_polls, self.store_polls = load_polls, store_polls
        self.unknown_lookups, self.fail_at = unknown_lookups, fail_at
        self.asked: dict[str, tuple[int, list[int]]] = {}
        self.stored: dict[str, int] = {}
        self.ceilings: dict[str, int] = {}
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.all_loads: list[Load] = []
        self.forgotten: list[str] = []
        self.waits_s: list[float] = []
        self.closed = False

    def lookup(
        self, request_id: str, token_ids: Sequence[int], local_tokens: int, traceparent: str = ""
    ) -> LookupResult:
        asked = self.asked.get(request_id, (0, []))[0] + 1
        self.asked[request_id] = (asked, list(token_ids))
        if asked <= self._vary(self.unknown_lookups):
            return Pending()
        ceiling = min(len(token_ids), self.ceilings.get(request_id, len(token_ids)))
        hits = range(ceiling // self.chunk_tokens * self.chunk_tokens, local_tokens, -self.chunk_tokens)
        return next((Hit(hit) for hit in hits if self._serves(token_ids, hit)), Miss())

    def _serves(self, tokens: Sequence[int], hit: int) -> bool:
        """Whether every group has each chunk that it needs something of for this hit."""
        return all(
            (group, tuple(tokens[:end])) in self.pool
            for group, kind in enumerate(self.kinds)
            for end in range(self.chunk_tokens, hit + 1, self.chunk_tokens)
            if end > first_needed(kind, hit)
        )

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        assert all(local_tokens < hit_tokens == len(column) * self.kv.block_tokens for column in block_ids)
        load = Load(request_id, self.asked[request_id][1], tuple(tuple(column) for column in block_ids), local_tokens,
                    hit_tokens, self._vary(self.load_polls))
        self._fill(load, hit_tokens, None)
        self.loads.append(load)
        self.all_loads.append(load)

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        begin = self.stored.get(request_id, 0)
        end = computed_tokens // self.chunk_tokens * self.chunk_tokens
        if begin >= end:
            return ()
        self.stored[request_id] = end
        per_chunk = self.chunk_tokens // self.kv.block_tokens
        chunks: list[tuple[Key, list[int]]] = []
        reads: list[list[int]] = [[] for _ in block_ids]
        for stop in range(begin + self.chunk_tokens, end + 1, self.chunk_tokens):
            for group, column in enumerate(block_ids):
                last = stop // self.kv.block_tokens
                blocks = [block for block in column[last - per_chunk : last] if block is not None]
                if len(blocks) == per_chunk:
                    chunks.append(((group, tuple(token_ids[:stop])), blocks))
                    reads[group] += blocks
        read = tuple(tuple(blocks) for blocks in reads)
        self.stores.append(Store(request_id, chunks, read, self._vary(self.store_polls)))
        return read

    def poll(self, timeout_s: float = 0.0) -> Progress:
        self.waits_s.append(timeout_s)
        for load in self.loads:
            load.polls_left -= 1
        for store in self.stores:
            store.polls_left -= 1
        loads = [load for load in self.loads if load.polls_left < 0]
        stores = [store for store in self.stores if store.polls_left < 0]
        self.loads = [load for load in self.loads if load.polls_left >= 0]
        self.stores = [store for store in self.stores if store.polls_left >= 0]
        return Progress(tuple(self._load(load) for load in loads), tuple(self._store(store) for store in stores))

    def finished(self, request_id: str, *, comes_back: bool = False) -> None:
        self.forgotten.append(request_id)
        for known in (self.asked, self.stored, self.ceilings):
            known.pop(request_id, None)

    def close(self) -> None:
        while self.loads or self.stores:
            self.poll()
        self.closed = True

    def _load(self, load: Load) -> LoadDone:
        valid = load.hit_tokens if self.fail_at is None else min(load.hit_tokens, self.fail_at)
        if self.random is not None and self.random.random() < 0.3:
            valid = self.random.randrange(load.hit_tokens + 1)
        if valid < load.hit_tokens:
            self.ceilings[load.request_id] = valid
        self._fill(load, valid, self.pool)
        return LoadDone(load.request_id, valid)

    def _store(self, store: Store) -> StoreDone:
        for key, blocks in store.chunks:
            self.pool[key] = torch.stack([plane[blocks] for plane in self.kv.planes])
        return StoreDone(store.request_id, store.blocks)

    def _fill(self, load: Load, end: int, pool: Pool | None) -> None:
        """Writes tokens [local, end) of the load's blocks with what the pool holds; without one, NaN."""
        size, chunk = self.kv.block_tokens, self.chunk_tokens
        for group, column in enumerate(load.blocks):
            for index in range(load.local_tokens // size, end // size):
                block, at = column[index], index * size
                if block is None:
                    continue
                for number, plane in enumerate(self.kv.planes):
                    if pool is None:
                        plane[block] = torch.nan
                    else:
                        content = pool[group, tuple(load.tokens[: at // chunk * chunk + chunk])]
                        plane[block] = content[number, at % chunk // size]

    def _vary(self, value: int) -> int:
        return value if self.random is None else self.random.randrange(2 * value + 1)
