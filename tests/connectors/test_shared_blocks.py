"""Blocks that requests share through the engine's own prefix cache are never written by a load.

First with the connector's halves alone: many loads at once, over one KV memory, all told that some front of
their blocks is shared. Those blocks hold a guard pattern that no stored byte equals; watchers look at it all
the time. Then in the engine, where a runner reads the shared front while others load what follows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
from api_helpers import ServerProcess
from connector_helpers import BLOCK, CHUNK, PER_CHUNK, Rig, engine_over, tokens_of
from engine_helpers import assert_same_bits, config, make_engine, prompt, run_one, sampling
from torch import Tensor

from kvdock.connectors.engine_connector import EngineConnector
from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.session import Attachment
from kvdock.connectors.worker import Loading, WorkerConnector
from kvdock.engine.blocks import held
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.request import Completion, State

CHUNKS = 6
BLOCKS = CHUNKS * PER_CHUNK
LOADERS = 4
ROUNDS = 60


def guard(kv: KVCache, block: int) -> list[Tensor]:
    """A pattern of the block's own number; NaN payloads: what is stored has none."""
    pattern = 0x7FC00000 + 4096 * (block + 1)
    return [torch.full(paged[block].shape, pattern + index, dtype=torch.int32).view(torch.float32)
            for index, paged in enumerate((*kv.k, *kv.v))]


def lay_guard(kv: KVCache, block: int) -> None:
    for paged, pattern in zip((*kv.k, *kv.v), guard(kv, block), strict=True):
        paged[block] = pattern


def words(kv: KVCache, blocks: range) -> list[Tensor]:
    """The raw 32-bit words of some neighbouring blocks, as views: looking at them sees the memory now."""
    return [paged[blocks.start : blocks.stop].view(torch.int32) for paged in (*kv.k, *kv.v)]


class Watcher(threading.Thread):
    """Compares the guarded blocks with the pattern until told to stop."""

    def __init__(self, kv: KVCache, blocks: range) -> None:
        super().__init__(name="watcher")
        self.views = words(kv, blocks)
        self.wanted = [view.clone() for view in self.views]
        self.looks = 0
        self.written = False
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            self.look()

    def look(self) -> None:
        self.looks += 1
        self.written |= not all(torch.equal(view, wanted) for view, wanted in zip(self.views, self.wanted, strict=True))


def loads(rig: Rig, own: range, tokens: list[int], stored: Tensor, seed: int) -> int:
    """Many loads into `own` blocks behind a shared front of changing length; returns how many."""
    random = Random(seed)
    for number in range(ROUNDS):
        shared = random.randrange(BLOCKS)  # blocks [0, shared) are everybody's, and guarded
        request = f"{seed}-{number}"
        table = [*range(shared), *own[shared:]]
        for block in own:
            lay_guard(rig.kv, block)
        hit = rig.lookup(request, tokens, shared * BLOCK)
        assert hit == len(tokens)
        assert rig.load(request, table, shared * BLOCK, hit).valid_tokens == hit
        assert torch.equal(rig.blocks(own[shared:]), stored[:, shared:]), "wrong bytes behind the skip"
        for block in own[:shared]:
            assert all(
                torch.equal(paged[block].view(torch.int32), pattern.view(torch.int32))
                for paged, pattern in zip((*rig.kv.k, *rig.kv.v), guard(rig.kv, block), strict=True)
            )
        rig.connector.finished(request)
    return ROUNDS


def in_thread(work: Callable[[], int], done: list[int], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # handed to the test's own thread
            errors.append(error)

    return threading.Thread(target=run)


def test_overlapping_loads_never_write_the_blocks_that_others_read(server: ServerProcess) -> None:
    tokens = tokens_of(1, CHUNKS)
    kv = KVCache(config(num_blocks=BLOCKS * (LOADERS + 1)))
    with Rig(server.unix, seed=7) as writer:
        writer.store("s", tokens, range(BLOCKS))
        stored = writer.blocks(range(BLOCKS))
    for block in range(BLOCKS):
        lay_guard(kv, block)
    watchers = [Watcher(kv, range(BLOCKS)) for _ in range(2)]
    rigs = [Rig(server.unix, kv=kv) for _ in range(LOADERS)]
    done: list[int] = []
    errors: list[BaseException] = []
    threads = []
    for number, rig in enumerate(rigs):
        own = range(BLOCKS * (number + 1), BLOCKS * (number + 2))
        threads.append(in_thread(partial(loads, rig, own, tokens, stored, number), done, errors))
    for thread in (*watchers, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    for watcher in watchers:
        watcher.enough.set()
        watcher.join()
        watcher.look()
    for rig in rigs:
        rig.close()
    assert errors == []
    assert done == [ROUNDS] * LOADERS
    assert all(watcher.looks > 100 for watcher in watchers)
    assert not any(watcher.written for watcher in watchers), "a shared block was written"


@pytest.mark.parametrize("shared", [1, 2, 3, 5, 7])
def test_two_loads_at_once_with_a_skip_in_the_same_chunk_write_only_their_own_blocks(
    server: ServerProcess, shared: int
) -> None:
    """One connector, two requests that share the front and follow it with the same stored prefix."""
    tokens = tokens_of(2, 2)
    with Rig(server.unix, seed=8) as rig:
        rig.store("s", tokens, range(8))
        for block in range(64, 128):
            lay_guard(rig.kv, block)
        watcher = Watcher(rig.kv, range(64, 64 + shared))
        tables = {"one": range(80, 88), "two": range(96, 104)}
        for request in tables:
            assert rig.lookup(request, tokens, shared * BLOCK) == 2 * CHUNK
        for request, own in tables.items():
            table = [*range(64, 64 + shared), *own[shared:]]
            rig.connector.begin_load(request, [table], shared * BLOCK, 2 * CHUNK)
        for request, own in tables.items():
            assert rig.wait_load(request).valid_tokens == 2 * CHUNK
            assert torch.equal(rig.blocks(own[shared:]), rig.blocks(range(shared, 8)))
        watcher.look()
        assert not watcher.written


# ---------------------------------------------------------------------- in the engine

FRONT = prompt(50, 100)
"""96 of its tokens are whole blocks: a local hit that ends in the middle of a chunk."""


def joiners() -> list[list[int]]:
    return [FRONT + prompt(60 + number, 70 + 13 * number) for number in range(8)]


class Stillness:
    """Remembers the content of every full block below `computed` of a running request: it never changes again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: dict[tuple[str, int, int], list[Tensor]] = {}
        self.looks = 0

    def look(self) -> None:
        paged = [*self.engine.kv.k, *self.engine.kv.v]
        for request in self.engine.scheduler.running:
            for index in range(request.computed // BLOCK):
                block = request.table[0][index]
                assert block is not None
                now = [one[block] for one in paged]
                before = self.seen.setdefault((request.id, index, block), [one.clone() for one in now])
                self.looks += 1
                assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True)), (
                    f"block {block} of running {request.id} changed"
                )


def test_requests_that_share_a_local_prefix_and_load_what_follows_run_as_if_alone(server: ServerProcess) -> None:
    with_kvdock = config(num_blocks=300, max_running=12)
    writer = engine_over(server.unix, with_kvdock, label="A")
    for tokens in joiners():
        run_one(writer, tokens, sampling(1))
    assert writer.drain(20.0)
    writer.close()

    engine = engine_over(server.unix, with_kvdock, label="B")
    stillness = Stillness(engine)
    runner = engine.add_request(FRONT[:97], sampling(150), "runner")
    while engine.requests[runner].computed < 97:
        engine.step()
    done: dict[str, Completion] = {}
    for number, tokens in enumerate(joiners()):
        engine.add_request(tokens, sampling(8), f"joiner-{number}")
    while engine.has_unfinished:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()
        stillness.look()
    assert engine.drain(20.0)
    assert isinstance(engine.connector, EngineConnector)
    engine.close()

    assert stillness.looks > 1000
    alone = make_engine(config(num_blocks=600))
    for number, tokens in enumerate(joiners()):
        found = done[f"joiner-{number}"]
        assert found.metrics.local_hit_tokens == 96
        assert found.metrics.loaded_tokens == len(tokens) // CHUNK * CHUNK - 96 > 0
        run_one(alone, tokens, sampling(1))
        assert_same_bits(found, run_one(alone, tokens, sampling(8, max_local_hit_tokens=len(tokens) // CHUNK * CHUNK)))
    assert_same_bits(done["runner"], run_one(make_engine(), FRONT[:97], sampling(150)))


def test_a_request_is_not_loaded_into_the_blocks_of_one_that_is_still_loading(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twins that wait for the same chunks at the same time get blocks of their own."""
    begin, two_load = WorkerConnector.submit_load, threading.Event()

    def late(half: WorkerConnector, attachment: Attachment, plan: LoadPlan) -> Loading:
        two_load.wait(10.0)
        return begin(half, attachment, plan)

    monkeypatch.setattr(WorkerConnector, "submit_load", late)
    tokens = prompt(70, 300)
    writer = engine_over(server.unix)
    run_one(writer, tokens, sampling(1))
    assert writer.drain(20.0)
    writer.close()
    engine = engine_over(server.unix, config(num_blocks=300))
    ids = [engine.add_request(tokens, sampling(6)) for _ in range(6)]
    done: dict[str, Completion] = {}
    together = 0
    while engine.has_unfinished:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()
        loading = [r for r in engine.requests.values() if r.state is State.LOADING]
        taken = [block for request in loading for block in held(request.table)]
        assert len(taken) == len(set(taken))
        together = max(together, len(loading))
        if together > 1:
            two_load.set()
    engine.close()
    assert together > 1, "wanted loads at the same time"
    alone = run_one(make_engine(), tokens, sampling(6))
    assert [done[request].output_tokens for request in ids] == [alone.output_tokens] * 6
