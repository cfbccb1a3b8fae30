"""VllmWorker on the CPU with a real server: what a store may hold up, and what it may not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
import torch
from api_helpers import ServerProcess, eventually, unique
from connector_helpers import BLOCK, CHUNK, PER_CHUNK, Spectator, continued, stopped, tokens_of
from engine_helpers import config

from kvdock.client.client import Client
from kvdock.connectors.interface import Hit, Pending
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import EngineSession, Identity
from kvdock.connectors.vllm.setup import EngineTraits, Settings
from kvdock.connectors.vllm.steps import LoadOrder, Orders, Report, StoreOrder
from kvdock.connectors.vllm.worker import VllmWorker, WorkerKV
from kvdock.datapath.copy import CpuCopier
from kvdock.datapath.layout import paged_layout
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import manifest_of
from kvdock.shm.checksum import checksum

CHUNKS = 3
BLOCKS = CHUNKS * PER_CHUNK
TOKENS, OTHERS = tokens_of(1, CHUNKS), tokens_of(2, CHUNKS)
TIMEOUT_S = 20.0
TRAITS = EngineTraits(
    takes_failed_requests=True, undoes_steps=False, loads_by_layer=False, reports_early=False, hash_threads=1
)


class Worker:
    """A worker, and a scheduler process's half that reserves for it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.kv = KVCache(config(num_blocks=64))
        for paged in (*self.kv.k, *self.kv.v):
            paged.copy_(torch.randn(paged.shape))
        self.layout = paged_layout(self.kv.format, self.kv.tensors, block_tokens=BLOCK)
        self.manifest = msgspec.structs.replace(
            manifest_of(self.kv.config, self.layout, CHUNK), cache_salt=unique("salt")
        )
        instance = unique("instance")
        member = Identity(instance, unique("member"), ranks=(), scheduler=True)
        self.session = EngineSession(Client(address), self.manifest, member)
        self.session.start()
        self.scheduler = SchedulerConnector(self.session)
        self.half = VllmWorker(
            Settings(address=address, timeout_s=TIMEOUT_S), self.manifest,
            Identity(instance, unique("member"), ranks=(0,)), WorkerKV([self.layout], [{"layer": 0}], "cpu"), TRAITS,
        )

    def order(self, name: str, tokens: list[int], first_block: int) -> StoreOrder:
        """A store of all chunks of `tokens`, whose slots are reserved."""
        blocks = list(range(first_block, first_block + BLOCKS))
        offer = self.scheduler.stores.begin_store(name, tokens, [blocks], len(tokens))
        assert offer is not None
        plan = self.scheduler.stores.reserve(offer, offer.batches[0])
        assert plan is not None
        offer.attachment.release()
        return StoreOrder(offer.batches[0].store_id, offer.attachment.epoch, plan)

    def load(self, name: str, tokens: list[int], first_block: int, after: tuple[str, ...]) -> LoadOrder:
        """A load of all of `tokens`, which are stored."""
        lookups = self.scheduler.lookups
        assert lookups.lookup(name, tokens, 0) == Pending()
        lookups.wait_for_answer(TIMEOUT_S)
        assert lookups.lookup(name, tokens, 0) == Hit(len(tokens))
        begun = lookups.begin_load(name, [list(range(first_block, first_block + BLOCKS))], 0, len(tokens))
        assert begun is not None
        begun[0].release()
        return LoadOrder(begun[0].epoch, begun[1], is_async=False, waits=False, after=after)

    def overwrite(self, order: StoreOrder) -> None:
        for piece in order.plan.pieces:
            for paged in (*self.kv.k, *self.kv.v):
                paged[list(piece.block_ids)] = 0

    def expect_stored(self, tokens: list[int]) -> None:
        """What the blocks held before anybody wrote zeros is there."""
        with Client(self.address) as client, Spectator(client, self.manifest) as spectator:
            parts = spectator.slots(tokens)
            assert len(parts) == CHUNKS
            for part in parts:
                with memoryview(spectator.segments.mapping(part.segment)) as view:
                    found = bytes(view[part.offset : part.offset + part.length])
                assert checksum(found) == part.checksum_value and any(found)

    def is_told(self) -> bool:
        """Whether all stores were reported."""
        self.half.report()
        return not self.half._stores

    def close(self) -> None:
        self.half.close()
        self.scheduler.close()
        self.session.close()
        self.session.client.close()


@pytest.fixture
def worker(server: ServerProcess) -> Iterator[Worker]:
    made = Worker(server.unix)
    yield made
    made.close()


@pytest.mark.parametrize("waits", [
    lambda half, order: half.fence(Orders(fences=(order.store_id,)), None), lambda half, order: half.wait_idle(),
], ids=["a step", "KV memory goes"])
def test_what_writes_or_ends_blocks_waits_for_a_stores_copies(worker: Worker, waits: Callable[..., None]) -> None:
    order, may_copy = worker.order("r", TOKENS, 1), threading.Event()
    copier = worker.half._connector._storers[0]
    assert isinstance(copier, CpuCopier)
    copier._thread.submit(may_copy.wait)  # it is at work for somebody else
    worker.half.start(Orders(stores=(order,)))
    threading.Timer(0.3, may_copy.set).start()
    waits(worker.half, order)
    assert may_copy.is_set()
    worker.overwrite(order)
    eventually(worker.is_told)
    worker.expect_stored(TOKENS)


def test_a_load_waits_for_the_copies_of_a_store_that_reads_its_blocks(worker: Worker) -> None:
    worker.half.start(Orders(stores=(worker.order("first", TOKENS, 1),)))
    eventually(worker.is_told)
    second, may_copy = worker.order("second", OTHERS, 1 + BLOCKS), threading.Event()
    load = worker.load("r", TOKENS, 1 + BLOCKS, after=(second.store_id,))
    copier = worker.half._connector._storers[0]
    assert isinstance(copier, CpuCopier)
    copier._thread.submit(may_copy.wait)  # it is at work for somebody else
    threading.Timer(0.3, may_copy.set).start()
    worker.half.start(Orders(stores=(second,), loads=(load,)))
    assert may_copy.is_set()
    eventually(worker.is_told)
    worker.expect_stored(OTHERS)
    for paged in (*worker.kv.k, *worker.kv.v):
        assert torch.equal(paged[1 : 1 + BLOCKS], paged[1 + BLOCKS : 1 + 2 * BLOCKS])


def test_a_step_does_not_wait_until_the_server_knows_of_a_store_or_of_the_one_before(
    worker: Worker, server: ServerProcess
) -> None:
    first, second = worker.order("first", TOKENS, 1), worker.order("second", OTHERS, 1 + BLOCKS)
    stopped(server)
    try:
        began_s = time.monotonic()
        worker.half.start(Orders(stores=(first,)))
        worker.half.fence(Orders(fences=(first.store_id,)), None)
        worker.half.start(Orders(stores=(second,)))
        worker.half.fence(Orders(fences=(second.store_id,)), None)
        assert time.monotonic() - began_s < TIMEOUT_S / 2, "the server answers nobody"
        worker.overwrite(first)
        worker.overwrite(second)
        assert not worker.half.report().stores, "a store is over when the server knows"
    finally:
        continued(server)
    eventually(worker.is_told)
    worker.expect_stored(TOKENS)
    worker.expect_stored(OTHERS)


@pytest.mark.weights
@pytest.mark.parametrize("is_told", [True, False], ids=["by the scheduler's side", "by the model alone"])
def test_a_load_that_is_under_way_when_the_weights_change_fails(worker: Worker, is_told: bool) -> None:
    worker.half.start(Orders(stores=(worker.order("first", TOKENS, 1),)))
    eventually(worker.is_told)
    worker.half.report()
    load = replace(worker.load("r", TOKENS, 1 + BLOCKS, after=()), is_async=True)
    may_copy = threading.Event()
    copier = worker.half._connector._loaders[0]
    assert isinstance(copier, CpuCopier)
    copier._thread.submit(may_copy.wait)  # it is at work for somebody else
    worker.half.start(Orders(loads=(load,)))
    if not is_told:
        worker.half.weights_written()
    worker.half.start(Orders(weights=int(is_told)))
    may_copy.set()
    reports: list[Report] = []

    def has_ended() -> bool:
        loaded = worker.half.ended()
        reports.append(worker.half.report())
        return loaded == {"r"}

    eventually(has_ended)
    assert reports[-1].valid_tokens == {"r": 0}
    assert worker.half.failed_blocks() == set(range(1 + BLOCKS, 1 + 2 * BLOCKS))
    assert reports[0].wrote_weights == (set() if is_told else {0})


@pytest.mark.weights
def test_an_unheard_change_refuses_loads_until_the_schedulers_side_knows_of_it(worker: Worker) -> None:
    worker.half.start(Orders(stores=(worker.order("first", TOKENS, 1),)))
    eventually(worker.is_told)
    worker.half.weights_written()
    load = replace(worker.load("r", TOKENS, 1 + BLOCKS, after=()), is_async=True)
    worker.half.start(Orders(loads=(load,)))
    assert worker.half.ended() == {"r"}
    report = worker.half.report()
    assert (report.valid_tokens, report.wrote_weights) == ({"r": 0}, {0})
    worker.half.start(Orders(weights=1))
    assert not worker.half.report().wrote_weights
