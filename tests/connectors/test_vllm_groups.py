"""vLLM's KV cache groups as kvdock's: block sizes that differ, pages that share memory, blocks that kernels divide."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from api_helpers import manifest

from kvdock.client.client import Client
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.session import EngineSession, Identity
from kvdock.connectors.vllm.groups import KVGroup, chunk_tokens, groups_of, layouts_of, step_tokens
from kvdock.connectors.vllm.scheduler import EngineView, VllmScheduler
from kvdock.connectors.vllm.setup import Settings
from kvdock.connectors.vllm.tables import BlockBudget
from kvdock.datapath.copy import CpuCopier, PartCopy
from kvdock.datapath.layout import PagedLayout
from kvdock.protocol.schemas import Group


class FullAttentionSpec(SimpleNamespace):
    """By its name, as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """By its name, as vLLM's."""


BLOCKS = 12
PAGE = 16 * 4 * 8 * 2 * 2
"""16 tokens of 4 heads of 8 fp16 elements, K and V: so vLLM gives a group of 2 heads blocks of 32 tokens."""


def config_of(*specs: SimpleNamespace) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{at}"]) for at, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)


FULL_16 = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
WINDOW_32 = SlidingWindowSpec(block_size=32, page_size_bytes=PAGE, sliding_window=48)


def test_groups_keep_their_own_block_sizes() -> None:
    groups = groups_of(config_of(FULL_16, WINDOW_32))
    assert [(group.window_tokens, group.block_tokens) for group in groups] == [(None, 16), (47, 32)]


@pytest.mark.parametrize(
    ("sizes", "wanted", "step", "chunk"),
    [((16, 32), 128, 32, 128), ((16, 24), 128, 48, 144), ((16,), 100, 16, 112), ((32, 48, 64), 1, 192, 192)],
)
def test_a_chunk_is_whole_blocks_of_every_group(sizes: Sequence[int], wanted: int, step: int, chunk: int) -> None:
    groups = [KVGroup(None, size, {"a": 128}, False) for size in sizes]
    assert (step_tokens(groups), chunk_tokens(groups, wanted)) == (step, chunk)


def shared_pages() -> tuple[torch.Tensor, list[PagedLayout]]:
    """One allocation, as vLLM's: both groups' layers lie over it, and the kernels of one want blocks of 16 tokens."""
    memory = torch.randint(256, (BLOCKS * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    half = memory.view(torch.float16)
    tensors = {"layer.0": half.view(BLOCKS, 2, 16, 4, 8), "layer.1": half.view(2 * BLOCKS, 2, 16, 2, 8)}
    return memory, layouts_of(groups_of(config_of(FULL_16, WINDOW_32)), tensors, BLOCKS, "order")


def test_a_page_is_a_managers_block_also_where_kernels_divide_it() -> None:
    _, layouts = shared_pages()
    assert [(layout.num_blocks, layout.block_tokens, layout.block_bytes) for layout in layouts] == [
        (BLOCKS, 16, PAGE), (BLOCKS, 32, PAGE)
    ]
    assert layouts[0].planes == layouts[1].planes


def test_copies_of_both_groups_move_whole_pages() -> None:
    """Chunks of 64 tokens: four blocks of one group, two of the other."""
    memory, layouts = shared_pages()
    pages = memory.view(BLOCKS, PAGE)
    for layout, source, target, skip in ((layouts[0], [7, 1, 3, 10], [0, 2, 4, 5], 2), (layouts[1], [9, 2], [6, 8], 1)):
        before = pages.clone()
        slot = torch.zeros(layout.part_bytes(len(source)) + 64, dtype=torch.uint8)
        address = -(-slot.data_ptr() // 64) * 64
        copier = CpuCopier(layout, threads=1)
        [stored] = copier.gather([PartCopy(slot=address, block_ids=source)]).result()
        [loaded] = copier.scatter(
            [PartCopy(slot=address, block_ids=target, skip_blocks=skip, checksum=stored.checksum)]
        ).result()
        copier.close()
        assert loaded.ok
        before[target[skip:]] = before[source[skip:]]
        assert torch.equal(pages, before)


def test_pages_of_other_sizes_over_one_memory_leave_the_rest_alone() -> None:
    """A group whose pages are shorter than the blocks' distance: the plane is the page, the step the distance."""
    memory = torch.zeros((BLOCKS, 2 * PAGE), dtype=torch.uint8)
    short = memory[:, :PAGE]
    [layout] = layouts_of(groups_of(config_of(FULL_16)), {"layer.0": short}, BLOCKS, "order")
    assert layout.planes == ((memory.data_ptr(), 2 * PAGE, PAGE, 1, PAGE),)


@pytest.mark.parametrize(
    ("shape", "strides", "said"),
    [
        ((2 * BLOCKS, PAGE // 2), (PAGE, 1), "has its blocks in 2 pieces apart"),
        ((BLOCKS, PAGE + 1), (2 * PAGE, 1), f"has {PAGE + 1} bytes a block"),
        ((BLOCKS - 1, PAGE), (PAGE, 1), "needs the block as the first axis"),
        ((BLOCKS, 2, PAGE // 2), (2 * PAGE, 1, 3), "are not contiguous"),
    ],
)
def test_pages_that_are_no_single_run_are_refused(shape: Sequence[int], strides: Sequence[int], said: str) -> None:
    memory = torch.zeros(4 * BLOCKS * PAGE, dtype=torch.uint8)
    tensor = memory.as_strided(shape, strides)
    with pytest.raises(NotSupportedError, match=said):
        layouts_of(groups_of(config_of(FULL_16)), {"layer.0": tensor}, BLOCKS, "order")


def test_the_block_budget_counts_the_blocks_of_each_group() -> None:
    groups = [KVGroup(None, 16, {"a": 128}, False), KVGroup(40, 32, {"b": 256}, False)]
    request = SimpleNamespace(request_id="r", num_prompt_tokens=160, max_tokens=0)
    need = (10 + 1) + (-(-(40 + 64 + 32) // 32) + 1)  # all of 160 tokens, and what a window and a step may hold
    for blocks, fits in ((need - 1, False), (need, True)):
        budget = BlockBudget(groups, blocks=blocks, longest_tokens=1024, step_tokens=64)
        budget.add(request)
        assert budget.fits(request) == fits


def test_the_block_budget_leaves_blocks_for_the_largest_request_that_does_not_load() -> None:
    small, large, third = (
        SimpleNamespace(request_id=name, num_prompt_tokens=16 * blocks, max_tokens=0)
        for name, blocks in (("small", 9), ("large", 29), ("third", 19))
    )  # 10, 30 and 20 blocks, as there is one more for the token to come
    groups = [KVGroup(None, 16, {"a": 128}, False)]
    for blocks, fits in ((39, False), (40, True)):
        budget = BlockBudget(groups, blocks=blocks, longest_tokens=1024, step_tokens=64)
        budget.add(small)
        budget.add(large)
        assert budget.fits(small) == fits and budget.fits(large) == fits
    budget.take(small)
    assert budget.fits(small) and budget.fits(large), "each counts once"
    budget.add(third)
    assert budget.fits(small) and not budget.fits(large), "the third could not be given its blocks beside both"
    budget.give_back("small")
    assert budget.fits(small) and not budget.fits(third)
    budget.remove("large")
    assert budget.fits(third)


def test_where_requests_have_priorities_blocks_are_left_for_the_longest_that_may_come() -> None:
    request = SimpleNamespace(request_id="r", num_prompt_tokens=160, max_tokens=0)
    for blocks, fits in ((11 + 65 - 1, False), (11 + 65, True)):
        budget = BlockBudget(
            [KVGroup(None, 16, {"a": 128}, False)], blocks=blocks, longest_tokens=1024, step_tokens=64, in_order=False
        )
        budget.add(request)
        assert budget.fits(request) == fits


def test_a_plan_of_nothing_names_the_blocks_of_each_group_that_were_to_be_filled() -> None:
    """The server went away between the promise and the blocks."""
    groups = (KVGroup(None, 16, {"a": 128}, False), KVGroup(40, 32, {"b": 256}, False))
    described = manifest(
        chunk_tokens=64, block_tokens=32,
        groups=(Group(part_bytes=512, block_tokens=16), Group(kind="window", window_tokens=40, part_bytes=512)),
    )
    session = EngineSession(Client("unix:/nobody/listens"), described, Identity("i", "m"))
    budget = BlockBudget(groups, blocks=100, longest_tokens=1024, step_tokens=64)
    side = VllmScheduler(session, EngineView(groups), budget, Settings())
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=[1] * 150, all_token_ids=[1] * 150, num_tokens=150, num_prompt_tokens=150,
        max_tokens=0,
    )
    side.arrived(request)
    assert side.lookup(request, 32) == (0, False)
    side.allocated(request, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [None, 21, 22, 23, 24]], 96)
    [order] = side.build(SimpleNamespace(
        preempted_req_ids=None, scheduled_new_reqs=[], num_scheduled_tokens={}, finished_req_ids=set(),
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
    )).loads
    assert [(piece.chunk, piece.group, piece.block_ids) for piece in order.plan.pieces] == [
        (0, 0, (3,)), (0, 0, (4,)), (1, 0, (5,)), (1, 0, (6,)), (1, 0, (7,)), (1, 0, (8,)),
        (0, 1, (21,)), (1, 1, (22,)), (1, 1, (23,)),
    ]
    side.close()
