"""Engines of different tensor-parallel sizes store and load the heads of one model (kvdock/connectors/heads.py).

Each engine has its workers in one process, with memory as vLLM lays it out. What is loaded is compared with the whole
model's KV, of all heads, byte for byte.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from api_helpers import PATIENCE_S, ServerProcess, comes_true, unique

from kvdock.client.client import Client
from kvdock.connectors.heads import CannotShareSizes, HeadParts
from kvdock.connectors.interface import Hit, Pending
from kvdock.connectors.plans import LoadPlan, StorePlan
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import EngineSession, Identity
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.heads import divided, part_layouts, placed
from kvdock.connectors.vllm.identity import manifest_of
from kvdock.connectors.vllm.setup import RankPosition, place_of
from kvdock.connectors.worker import WorkerConnector
from kvdock.protocol.schemas import Manifest

pytestmark = pytest.mark.any_tp
BLOCKS, BLOCK, CHUNK, LAYERS, SIZE = 12, 8, 32, 3, 16
TOKENS = list(range(2 * CHUNK))
ORDERS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "heads first": lambda heads: (BLOCKS, heads, BLOCK, 2 * SIZE),
    "tokens first": lambda heads: (BLOCKS, BLOCK, heads, 2 * SIZE),
    "K and V apart": lambda heads: (BLOCKS, 2, BLOCK, heads, SIZE),
}
"""The shape of a layer's memory for so many heads, its axes in the order of memory."""
HEADS_AT = {"heads first": 1, "tokens first": 2, "K and V apart": 3}


def in_vllms_order(memory: torch.Tensor, order: str) -> torch.Tensor:
    """The view that vLLM passes to connectors, whose axes have a fixed order."""
    return memory.transpose(1, 2) if order == "tokens first" else memory


def vllm_config(heads: int, shards: int, stages: int) -> SimpleNamespace:
    model = SimpleNamespace(
        architecture="LlamaForCausalLM", model="org/model", revision=None, dtype=torch.bfloat16, quantization=None,
        seed=0, max_model_len=4096, original_max_model_len=4096, model_weights="", get_head_size=lambda: SIZE,
        get_total_num_kv_heads=lambda: heads, served_model_name="m",
        hf_config=SimpleNamespace(to_json_string=lambda use_diff: "{}", _commit_hash=None),
    )
    return SimpleNamespace(
        model_config=model, load_config=SimpleNamespace(load_format="auto", download_dir=None,
                                                        model_loader_extra_config={}),
        parallel_config=SimpleNamespace(tensor_parallel_size=shards, pipeline_parallel_size=stages, rank=0),
        speculative_config=None, compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


class Worker:
    """A worker's memory, with its heads of the model, in the layers of its stage. `whole`: a layer's KV of all
    heads."""

    def __init__(self, shard: int, shards: int, heads: int, order: str, layers: range = range(LAYERS)) -> None:
        self.order, self.layers, own = order, layers, max(1, heads // shards)
        self.heads = slice(shard * heads // shards, shard * heads // shards + own)
        self.memory = {f"layer.{at}": torch.full(ORDERS[order](own), -1.0, dtype=torch.bfloat16) for at in layers}
        self.tensors = {name: in_vllms_order(memory, order) for name, memory in self.memory.items()}

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This worker's heads of `whole`."""
        return whole[(slice(None),) * HEADS_AT[self.order] + (self.heads,)]


class Engine:
    """`shards` workers in each of `stages` stages, with a session of one instance, and the scheduler's side in the
    first."""

    def __init__(self, address: str, shards: int, stages: int, heads: int, order: str, salt: str) -> None:
        of_stage = LAYERS // stages
        self.workers = [
            Worker(shard, shards, heads, order, range(stage * of_stage, (stage + 1) * of_stage))
            for stage in range(stages) for shard in range(shards)
        ]
        config = vllm_config(heads, shards, stages)
        page_bytes = self.workers[0].memory["layer.0"][0].numel() * 2
        self.connectors: list[WorkerConnector] = []
        self.manifests: list[Manifest] = []
        instance = unique("instance")
        for rank, worker in enumerate(self.workers):
            config.parallel_config.rank = rank
            groups = [KVGroup(None, BLOCK, dict.fromkeys(worker.memory, page_bytes), latent=False)]
            place = place_of(config.parallel_config, groups)
            parts = divided(groups, worker.tensors, BLOCKS, heads=heads, place=place)
            place = placed(parts, place)
            manifest = manifest_of(
                config, "0.33.0", groups, worker.tensors, place, num_blocks=BLOCKS, chunk_tokens=CHUNK,
                weights_digest="w", hashing=("", salt), head_parts=parts,
            )
            session = EngineSession(
                Client(address, timeout_s=PATIENCE_S), manifest,
                Identity(instance, unique("member"), ranks=place.own_ranks, scheduler=rank == 0),
            )
            layouts = part_layouts(parts, groups, worker.tensors, BLOCKS, manifest.token_order)
            self.connectors.append(WorkerConnector(session, layouts))
            self.manifests.append(manifest)
            session.start()
        self.session = self.connectors[0].session
        self.scheduler = SchedulerConnector(self.session, readers=max(len(self.workers), manifest.writers))

    def store(self, whole: Sequence[torch.Tensor], block_ids: list[int]) -> None:
        """Fills all workers' memory with their heads of `whole`, and stores the blocks."""
        for worker in self.workers:
            for memory, layer in zip(worker.memory.values(), worker.layers, strict=True):
                memory.copy_(worker.of(whole[layer]))
        offer = self.scheduler.stores.begin_store("r", TOKENS, [block_ids], len(TOKENS))
        assert offer is not None
        stored: list[int] = []

        def everywhere(batch: Any, plan: StorePlan | None) -> None:
            assert plan is not None
            for connector in self.connectors:
                attachment = connector.session.attachment_to(offer.attachment.epoch)
                assert attachment is not None
                stored.append(connector.store(attachment, plan))
                attachment.release()

        self.scheduler.stores.store(offer, everywhere)
        assert comes_true(lambda: sum(stored) == len(TOKENS) // CHUNK)

    def load(self, block_ids: list[int], local_tokens: int = 0) -> list[int]:
        """How many tokens are valid on each worker."""
        assert comes_true(lambda: not isinstance(self._ask(local_tokens), Pending))
        found = self._ask(local_tokens)
        if not isinstance(found, Hit):
            return []
        begun = self.scheduler.lookups.begin_load("r", [block_ids], local_tokens, found.tokens)
        assert begun is not None
        valid = [self._load(connector, begun[1]) for connector in self.connectors]
        begun[0].release()
        return valid

    def _ask(self, local_tokens: int) -> Any:
        return self.scheduler.lookups.lookup("r", TOKENS, local_tokens)

    def _load(self, connector: WorkerConnector, plan: LoadPlan) -> int:
        attachment = connector.session.attachment
        assert attachment is not None
        valid = connector.load(attachment, plan)
        connector.settle(attachment)
        return valid

    def close(self) -> None:
        self.scheduler.close()
        for connector in self.connectors:
            connector.close()
            connector.session.close()
            connector.session.client.close()


@contextmanager
def engines(
    address: str, sizes: Sequence[int], heads: int, order: str, stages: int = 1
) -> Iterator[list[Engine]]:
    salt = unique("salt")
    with ExitStack() as ends:
        started = []
        for size in sizes:
            started.append(Engine(address, size, stages, heads, order, salt))
            ends.callback(started[-1].close)
        yield started


def model_kv(heads: int, order: str) -> list[torch.Tensor]:
    """Each layer's KV of all heads, fresh and random."""
    return [torch.randn(ORDERS[order](heads)).to(torch.bfloat16) for _ in range(LAYERS)]


PAIRS = [pair for pair in itertools.product((1, 2, 4, 8), repeat=2) if pair[0] != pair[1]]


@pytest.mark.sweep("order")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [8, 2], ids=["8 heads", "2 heads"])
@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_what_one_size_stores_another_loads_byte_for_byte(
    writers: int, readers: int, heads: int, order: str, server: ServerProcess
) -> None:
    check_bytes(server.unix, (writers, readers), heads, order)


@pytest.mark.parametrize("heads", [4, 2], ids=["4 heads", "2 heads"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (4, 2)])
def test_each_pipeline_stage_has_parts_of_its_own_layers(
    writers: int, readers: int, heads: int, server: ServerProcess
) -> None:
    check_bytes(server.unix, (writers, readers), heads, "heads first", stages=3)


def check_bytes(address: str, sizes: tuple[int, int], heads: int, order: str, stages: int = 1) -> None:
    """The first size stores, the second loads. The first chunk's first block is shared with other requests, so it is
    hashed and not written."""
    with engines(address, sizes, heads, order, stages) as (writer, reader):
        assert len({manifest for engine in (writer, reader) for manifest in engine.manifests}) == 1
        whole, source, target = model_kv(heads, order), [5, 2, 9, 0, 7, 1, 11, 4], [3, 8, 6, 10, 2, 0, 9, 5]
        writer.store(whole, source)
        assert reader.load(target, BLOCK) == [len(TOKENS)] * sizes[1] * stages
        for worker in reader.workers:
            for memory, layer in zip(worker.memory.values(), worker.layers, strict=True):
                wanted = torch.full_like(memory, -1.0)
                wanted[target[1:]] = worker.of(whole[layer])[source[1:]]
                assert torch.equal(memory.view(torch.int16), wanted.view(torch.int16))
        with Client(address) as client:
            assert not [one for one in client.leases().leases if one.session in sessions_of(reader)]


def sessions_of(engine: Engine) -> set[str]:
    attachment = engine.session.attachment
    assert attachment is not None
    return {attachment.session}


def test_one_damaged_part_is_a_miss_for_every_size(server: ServerProcess) -> None:
    with engines(server.unix, (2, 1, 4), 8, "heads first") as (writer, one, four):
        writer.store(model_kv(8, "heads first"), list(range(8)))
        attachment = one.session.attachment
        assert attachment is not None
        assert comes_true(lambda: not isinstance(one._ask(0), Pending))
        begun = one.scheduler.lookups.begin_load("r", [list(range(8))], 0, len(TOKENS))
        assert begun is not None
        part = begun[1].pieces[0].parts[5]
        address = attachment.segments.address(part.segment, part.offset, part.length)
        ctypes.c_uint8.from_address(address + 3).value ^= 1
        assert one._load(one.connectors[0], begun[1]) == 0
        begun[0].release()
        assert four.load(list(range(8))) == [], "the first worker has reported it"


@pytest.mark.parametrize(("heads", "workers", "parts", "own"), [
    (8, 1, 8, [range(8)]), (8, 2, 8, [range(4), range(4, 8)]), (32, 4, 8, [range(at, at + 2) for at in (0, 2, 4, 6)]),
    (40, 8, 8, [range(at, at + 1) for at in range(8)]), (2, 4, 2, [[0], [2], [1], [3]]),
    (1, 2, 1, [[0], [1]]), (6, 2, 2, [[0], [1]]),
])
def test_parts_are_the_same_for_every_size(heads: int, workers: int, parts: int, own: list[Any]) -> None:
    """Rank r reads part r mod parts: with 2 heads on 4 workers, the first two have the first head."""
    found = [parts_of(heads, workers, rank) for rank in range(workers)]
    assert {(one.parts, one.heads) for one, _ in found} == {(parts, heads // parts)}
    assert [list(place.own_ranks) for _, place in found] == [list(one) for one in own]


def parts_of(heads: int, workers: int, rank: int, **more: Any) -> tuple[HeadParts, RankPosition]:
    """`more`: the layer's tensor, its pages' bytes, the pipeline's stages, or what its group is."""
    tensor = more.pop("tensor", Worker(rank, workers, heads, "heads first").tensors["layer.0"])
    page_bytes, stages = more.pop("page_bytes", tensor[0].numel() * 2), more.pop("stages", 1)
    groups = [KVGroup(None, BLOCK, {"layer.0": page_bytes}, **{"latent": False, **more})]
    parallel = SimpleNamespace(tensor_parallel_size=workers, pipeline_parallel_size=stages, rank=rank)
    place = place_of(parallel, groups)
    parts = divided(groups, {"layer.0": tensor}, BLOCKS, heads=heads, place=place)
    return parts, placed(parts, place)


@pytest.mark.parametrize(("heads", "workers", "more", "why"), [
    (6, 3, {}, "the tensor-parallel size is 3, and a divisor of 2 is wanted"),
    (32, 16, {}, "the tensor-parallel size is 16, and a divisor of 8 is wanted"),
    (16, 16, {}, "the tensor-parallel size is 16, and a divisor of 8 is wanted"),
    (8, 1, {"tensor": torch.zeros(BLOCKS, BLOCK, 8, 4, dtype=torch.bfloat16).transpose(1, 2)},
     "layer layer.0 has 8 bytes a head, and a multiple of 16 is wanted"),
    (8, 1, {"state": "mamba"}, "layer layer.0 keeps a recurrent state, not heads"),
    (8, 1, {"page_bytes": 8192}, "layer layer.0 has 4096 bytes in pages of 8192: full ones are wanted"),
])
def test_an_engine_that_cannot_share_sizes_says_why(heads: int, workers: int, more: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotShareSizes, match=f"^{why}$"):
        parts_of(heads, workers, 0, **more)
