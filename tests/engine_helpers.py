"""What the engine's tests share: engines on poisoned memory, and a small honest connector in memory.

MemoryConnector keeps whole chunks by the hash of all tokens up to their end. It copies when it
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

from kvdock.connectors.interface import LoadDone, Progress, StoreDone
from kvdock.engine.config import EngineConfig, preset
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
    for paged in (*kv.k, *kv.v):
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
    order = list(engine.scheduler.blocks.free)
    Random(shuffle_seed).shuffle(order)
    for block in order:
        engine.scheduler.blocks.free.move_to_end(block)
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


@dataclass
class Load:
    request_id: str
    keys: list[tuple[int, ...]]
    blocks: tuple[int, ...]
    local_tokens: int
    hit_tokens: int
    polls_left: int


@dataclass
class Store:
    request_id: str
    keys: list[tuple[int, ...]]
    blocks: tuple[int, ...]
    polls_left: int


class MemoryConnector:
    """A real connector whose pool is a dict, to be shared between engines. Time is counted in polls."""

    def __init__(
        self,
        kv: KVCache,
        pool: dict[tuple[int, ...], Tensor],
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
        self.load_polls, self.store_polls = load_polls, store_polls
        self.unknown_lookups, self.fail_at = unknown_lookups, fail_at
        self.asked: dict[str, tuple[int, list[int]]] = {}
        self.stored: dict[str, int] = {}
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.all_loads: list[Load] = []
        self.forgotten: list[str] = []
        self.waits_s: list[float] = []
        self.closed = False

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        asked = self.asked.get(request_id, (0, []))[0] + 1
        self.asked[request_id] = (asked, list(token_ids))
        if asked <= self._vary(self.unknown_lookups):
            return None
        hit = 0
        while hit + self.chunk_tokens <= len(token_ids) and tuple(token_ids[: hit + self.chunk_tokens]) in self.pool:
            hit += self.chunk_tokens
        return max(hit, local_tokens)

    def begin_load(self, request_id: str, block_ids: Sequence[int], local_tokens: int, hit_tokens: int) -> None:
        assert local_tokens < hit_tokens == len(block_ids) * self.kv.block_tokens
        tokens = self.asked[request_id][1]
        ends = range(self.chunk_tokens, hit_tokens + 1, self.chunk_tokens)
        load = Load(request_id, [tuple(tokens[:end]) for end in ends], tuple(block_ids), local_tokens, hit_tokens,
                    self._vary(self.load_polls))
        self._fill(load, local_tokens, torch.tensor(float("nan")))
        self.loads.append(load)
        self.all_loads.append(load)

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int], computed_tokens: int
    ) -> tuple[int, ...]:
        begin = self.stored.get(request_id, 0)
        end = computed_tokens // self.chunk_tokens * self.chunk_tokens
        if begin >= end:
            return ()
        self.stored[request_id] = end
        ends = range(begin + self.chunk_tokens, end + 1, self.chunk_tokens)
        blocks = tuple(block_ids[begin // self.kv.block_tokens : end // self.kv.block_tokens])
        keys = [tuple(token_ids[:end]) for end in ends]
        self.stores.append(Store(request_id, keys, blocks, self._vary(self.store_polls)))
        return blocks

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

    def finished(self, request_id: str) -> None:
        self.forgotten.append(request_id)
        self.asked.pop(request_id, None)
        self.stored.pop(request_id, None)

    def close(self) -> None:
        while self.loads or self.stores:
            self.poll()
        self.closed = True

    def _load(self, load: Load) -> LoadDone:
        valid = load.hit_tokens if self.fail_at is None else min(load.hit_tokens, self.fail_at)
        if self.random is not None and self.random.random() < 0.3:
            valid = self.random.randrange(load.hit_tokens + 1)
        if load.local_tokens < valid:
            self._fill(load, load.local_tokens, torch.cat([self.pool[key] for key in load.keys], dim=2), valid)
        return LoadDone(load.request_id, valid)

    def _store(self, store: Store) -> StoreDone:
        per_chunk = self.chunk_tokens // self.kv.block_tokens
        for index, key in enumerate(store.keys):
            blocks = list(store.blocks[index * per_chunk : (index + 1) * per_chunk])
            sides = [torch.stack([layer[blocks] for layer in side]) for side in (self.kv.k, self.kv.v)]
            self.pool[key] = torch.stack(sides)
        return StoreDone(store.request_id, store.blocks)

    def _fill(self, load: Load, begin: int, content: Tensor, end: int | None = None) -> None:
        """Writes tokens [begin, end) of the load's blocks: content (2, layers, blocks from token 0, …) or one value."""
        size = self.kv.block_tokens
        for index in range(begin // size, (load.hit_tokens if end is None else end) // size):
            for layer in range(len(self.kv.k)):
                for side, paged in enumerate((self.kv.k, self.kv.v)):
                    paged[layer][load.blocks[index]] = content[side, layer, index] if content.dim() else content

    def _vary(self, value: int) -> int:
        return value if self.random is None else self.random.randrange(2 * value + 1)
