"""The connector with blocks on a GPU and a real server: memory registered in the background, copies by kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from api_helpers import ServerProcess, eventually, unique
from connector_helpers import BLOCK, PER_CHUNK, Rig, Spectator, tokens_of
from cuda_helpers import keep_busy, needs_gpu, new_stream, stream_of
from engine_helpers import config

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.session import Identity
from kvdock.connectors.worker import VERIFIED_BEFORE, Bands, Layers
from kvdock.datapath.cuda import CudaHandle
from kvdock.datapath.layout import paged_layout
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import manifest_of

pytestmark = needs_gpu
CHUNKS = 3
BLOCKS = CHUNKS * PER_CHUNK


class GpuRig(Rig):
    """A Rig whose blocks are on the GPU. Its hits count once its segments are registered."""

    def __init__(self, address: str, *, seed: int = 0) -> None:
        with torch.device("cuda"):
            kv = KVCache(config(num_blocks=128))
        super().__init__(address, kv=kv, device="cuda")
        self.fill(seed)
        torch.cuda.synchronize()
        eventually(lambda: (self.attachment.hold.pinned_through or 0) > 0)

    def hit(self, tokens: list[int], local: int = 0) -> str:
        """A request that hits all of `tokens`; it may take a heartbeat until the server knows what is registered."""
        found: list[str] = []

        def asked() -> bool:
            request = unique("r")
            if self.lookup(request, tokens, local) == len(tokens):
                found.append(request)
            else:
                self.connector.finished(request)
            return bool(found)

        eventually(asked)
        return found[0]


def stored(rig: Rig, seed: int) -> list[int]:
    """Tokens whose chunks are at the server."""
    tokens = tokens_of(seed, CHUNKS)

    def is_there() -> bool:
        rig.store(unique("s"), tokens, range(BLOCKS))
        hit = rig.lookup(request := unique("q"), tokens)
        rig.connector.finished(request)
        return hit == len(tokens)

    eventually(is_there)
    return tokens


@pytest.fixture
def writer(server: ServerProcess) -> Iterator[GpuRig]:
    rig = GpuRig(server.unix, seed=torch.seed() % 1000)
    with rig:
        yield rig


def test_what_one_gpu_engine_stored_another_loads_and_shared_blocks_keep_their_bytes(
    server: ServerProcess, writer: GpuRig
) -> None:
    tokens = stored(writer, 11)
    reader = GpuRig(server.unix, seed=1)
    with reader:
        for local_blocks in (0, 1, PER_CHUNK, BLOCKS - 1):
            reader.fill(local_blocks)
            before = reader.blocks(range(128))
            torch.cuda.synchronize()
            into = torch.randperm(128)[:BLOCKS].tolist()
            request = reader.hit(tokens, local_blocks * BLOCK)
            done = reader.load(request, into, local_blocks * BLOCK, len(tokens))
            assert done.valid_tokens == len(tokens)
            reader.connector.finished(request)
            now = reader.blocks(range(128))
            assert torch.equal(now[:, into[local_blocks:]], writer.blocks(range(local_blocks, BLOCKS)))
            others = [block for block in range(128) if block not in into[local_blocks:]]
            assert torch.equal(now[:, others], before[:, others])


def test_a_gpu_engine_and_a_cpu_engine_read_each_other(server: ServerProcess, writer: GpuRig) -> None:
    tokens = stored(writer, 12)
    with Rig(server.unix, seed=2) as cpu:
        assert cpu.lookup("r", tokens) == len(tokens)
        assert cpu.load("r", range(64, 64 + BLOCKS), 0, len(tokens)).valid_tokens == len(tokens)
        assert torch.equal(cpu.blocks(range(64, 64 + BLOCKS)), writer.blocks(range(BLOCKS)).cpu())
        others = stored(cpu, 13)
        request = writer.hit(others)
        assert writer.load(request, range(64, 64 + BLOCKS), 0, len(others)).valid_tokens == len(others)
        assert torch.equal(writer.blocks(range(64, 64 + BLOCKS)).cpu(), cpu.blocks(range(BLOCKS)))


def test_a_byte_that_was_damaged_is_seen_by_the_kernel_and_computed_again(
    server: ServerProcess, writer: GpuRig
) -> None:
    tokens = stored(writer, 14)
    with Client(server.unix) as client:
        spectator = Spectator(client, writer.connector.session.manifest)
        try:
            spectator.flip(spectator.slots(tokens)[1], 12345)
        finally:
            spectator.close()
    request = writer.hit(tokens)
    done = writer.load(request, range(64, 64 + BLOCKS), 0, len(tokens))
    assert done.valid_tokens == PER_CHUNK * BLOCK, "the first chunk is good, the second is not"


def test_a_store_comes_after_the_step_that_is_still_under_way_on_the_engines_stream(server: ServerProcess) -> None:
    with torch.device("cuda"):
        kv = KVCache(config(num_blocks=128))
    layout = paged_layout(kv.format, kv.tensors, block_tokens=kv.block_tokens)
    stream = new_stream()
    manifest = manifest_of(kv.config, layout, PER_CHUNK * BLOCK)
    settings = ConnectorSettings(server.unix, device="cuda")
    rig = GpuRig(server.unix, seed=3)
    rig.connector.close()
    rig.kv, rig.connector = kv, EngineConnector(
        settings, manifest, Identity(unique("i"), unique("m")), [layout], stream=stream_of(stream)
    )
    with rig:
        eventually(lambda: (rig.attachment.hold.pinned_through or 0) > 0)
        warm = stored(rig, 15)
        rig.connector.finished(rig.hit(warm))
        tokens = tokens_of(16, CHUNKS)
        torch.cuda.synchronize()
        keep_busy(stream, 800_000_000)
        with torch.cuda.stream(stream):
            rig.fill(99)
        rig.store("late", tokens, range(BLOCKS))
        torch.cuda.synchronize()
        written = rig.blocks(range(BLOCKS))
        request = rig.hit(tokens)
        assert rig.load(request, range(64, 64 + BLOCKS), 0, len(tokens)).valid_tokens == len(tokens)
        assert torch.equal(rig.blocks(range(64, 64 + BLOCKS)), written)


def test_a_load_that_need_not_wait_ends_while_the_engines_stream_is_at_work(
    server: ServerProcess, writer: GpuRig
) -> None:
    tokens, into, stream = stored(writer, 18), list(range(64, 64 + BLOCKS)), new_stream()
    worker = writer.connector.worker
    worker._stream = stream_of(stream)
    try:
        for waits in (False, True):
            request = writer.hit(tokens)
            begun = writer.connector.scheduler.lookups.begin_load(request, [[*into]], 0, len(tokens))
            assert begun is not None
            torch.cuda.synchronize()
            keep_busy(stream, 1_600_000_000)
            loading = worker.submit_load(*begun, waits=waits)
            assert loading.wait(5.0) and stream.query() == waits
            assert worker.finish_load(loading) == len(tokens)
            worker.end_load(loading)
            assert torch.equal(writer.blocks(into), writer.blocks(range(BLOCKS)))
            torch.cuda.synchronize()
    finally:
        worker._stream = None


def test_a_load_into_blocks_that_a_store_still_reads_comes_after_it_alone(
    server: ServerProcess, writer: GpuRig
) -> None:
    tokens, late, into = stored(writer, 21), tokens_of(22, CHUNKS), list(range(64, 64 + BLOCKS))
    (busy, aside, engines), worker = (new_stream(), new_stream(), new_stream()), writer.connector.worker
    worker._stream = stream_of(engines)
    try:
        before, request = writer.blocks(into), writer.hit(tokens)
        offer = writer.connector.scheduler.stores.begin_store("late", late, [into], len(late))
        assert offer is not None
        plan = writer.connector.scheduler.stores.reserve(offer, offer.batches[0])
        begun = writer.connector.scheduler.lookups.begin_load(request, [[*into]], 0, len(tokens))
        assert plan is not None and begun is not None
        torch.cuda.synchronize()
        keep_busy(busy, 800_000_000)
        keep_busy(engines, 3_200_000_000)
        storing = worker.submit_store(offer.attachment, plan, after=stream_of(busy))
        storing.order(stream_of(aside))
        loading = worker.submit_load(*begun, waits=False, after=stream_of(aside))
        assert not loading.wait(0.05) and not busy.query()
        assert worker.finish_load(loading) == len(tokens) and busy.query() and not engines.query()
        worker.end_load(loading)
        assert worker.finish_store(storing) == CHUNKS
        offer.attachment.release()
        torch.cuda.synchronize()
        assert torch.equal(writer.blocks(into), writer.blocks(range(BLOCKS)))
    finally:
        worker._stream = None
    elsewhere = list(range(96, 96 + BLOCKS))
    assert writer.load(writer.hit(late), elsewhere, 0, len(late)).valid_tokens == len(late)
    assert torch.equal(writer.blocks(elsewhere), before)


def test_a_load_by_layers_is_read_layer_by_layer_and_its_damage_is_found_at_its_end(
    server: ServerProcess, writer: GpuRig
) -> None:
    tokens, into, stream = stored(writer, 17), list(range(64, 64 + BLOCKS)), new_stream()
    layers = len(writer.kv.k)
    reader = GpuRig(server.unix, seed=4)
    with reader, Client(server.unix) as client:
        worker = reader.connector.worker
        for damaged in (False, True):
            reader.fill(5)
            torch.cuda.synchronize()
            request = reader.hit(tokens)
            if damaged:
                spectator = Spectator(client, writer.connector.session.manifest)
                spectator.flip(spectator.slots(tokens)[1], 12345)
                spectator.close()
            begun = reader.connector.scheduler.lookups.begin_load(request, [into], 0, len(tokens))
            assert begun is not None
            attachment, plan = begun
            bands = Bands([2 * (layer + 1) for layer in range(layers)], verified_after=1)
            loading = worker.submit_load(attachment, plan, bands=[bands])
            assert loading.verified(10.0) is not damaged
            assert loading.is_whole() is not damaged
            read = []
            (_, _, copied), = loading.copies
            assert isinstance(copied, CudaHandle)
            for layer in range(layers):
                copied.order(stream_of(stream), layer)
                with torch.cuda.stream(stream):
                    read += [reader.kv.k[layer][into].clone(), reader.kv.v[layer][into].clone()]
            valid = worker.finish_load(loading)
            worker.end_load(loading)
            worker.settle(attachment)
            attachment.release()
            stream.synchronize()
            assert valid == (PER_CHUNK * BLOCK if damaged else len(tokens))
            if not damaged:
                written = [one[list(range(BLOCKS))] for layer in range(layers)
                           for one in (writer.kv.k[layer], writer.kv.v[layer])]
                assert all(torch.equal(seen, wanted) for seen, wanted in zip(read, written, strict=True))
            reader.connector.finished(request)


def test_the_loads_of_one_forward_pass_are_read_layer_by_layer_from_one_copy(
    server: ServerProcess, writer: GpuRig
) -> None:
    layers, stream = len(writer.kv.k), new_stream()
    prompts, into = [stored(writer, seed) for seed in (31, 32)], [list(range(at, at + BLOCKS)) for at in (64, 96)]
    reader = GpuRig(server.unix, seed=6)
    with reader:
        worker, begun, requests = reader.connector.worker, [], []
        for tokens, blocks in zip(prompts, into, strict=True):
            requests.append(reader.hit(tokens))
            begun.append(reader.connector.scheduler.lookups.begin_load(requests[-1], [blocks], 0, len(tokens)))
        cut = Layers([{str(layer): 2 * layer + 1 for layer in range(layers)}], VERIFIED_BEFORE)
        torch.cuda.synchronize()
        loadings = worker.submit_together([one for one in begun if one is not None], cut.bands)
        cut.watch(loadings)
        assert len(loadings) == 2 and len(cut._watched) == 1, "one copy"
        read = []
        for layer in range(layers):
            cut.order(str(layer), stream_of(stream))
            with torch.cuda.stream(stream):
                read += [one[layer][blocks].clone() for one in (reader.kv.k, reader.kv.v) for blocks in into]
        assert [worker.finish_load(loading) for loading in loadings] == [*map(len, prompts)]
        assert cut.all_ordered and all((loading.took_s() or 0) > 0 for loading in loadings)
        stream.synchronize()
        written = [one[layer][list(range(BLOCKS))] for layer in range(layers) for one in (writer.kv.k, writer.kv.v)]
        assert all(torch.equal(seen, written[at // 2]) for at, seen in enumerate(read))
        for loading in loadings:
            worker.end_load(loading)
            worker.settle(loading.attachment)
            loading.attachment.release()
        for request in requests:
            reader.connector.finished(request)
