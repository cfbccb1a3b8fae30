"""Gather and scatter, bitwise against a slow reference, for every format, element type and skip."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from bytes_helpers import DTYPES, FORMATS, GUARD, Paged, Shape, Slots, kv_of

from kvdock import _core
from kvdock.datapath.copy import CpuCopier, PartCopy, PartResult, results_of
from kvdock.datapath.errors import CopierClosed, CopyError, LayoutError
from kvdock.datapath.layout import FORMATS as NAMED_FORMATS, PagedLayout, paged_layout
from kvdock.shm.checksum import checksum, ensure_keys

IDS = [5, 0, 3, 6]


def gather_all(paged: Paged, slots: Slots, lists: list[list[int]], threads: int = 2) -> list[int]:
    copier = CpuCopier(paged.layout, threads=threads)
    try:
        parts = [PartCopy(slots.address(i), ids) for i, ids in enumerate(lists)]
        return [result.checksum for result in copier.gather(parts).result()]
    finally:
        copier.close()


def test_helpers_know_every_named_format() -> None:
    assert sorted(FORMATS) == sorted(NAMED_FORMATS)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_gather_then_scatter_is_bitwise_the_reference(name: str, dtype: torch.dtype) -> None:
    paged = Paged(name, dtype, Shape())
    paged.fill_random(1)
    wanted = paged.reference(IDS)
    assert paged.layout.part_bytes(len(IDS)) == len(wanted)
    slots = Slots(1, len(wanted))
    sums = gather_all(paged, slots, [IDS])
    assert slots.read(0) == wanted
    assert slots.guards_intact(1)
    assert sums == [checksum(wanted)]
    for skip in (0, 1, len(IDS) - 1, len(IDS)):
        check_scatter(name, dtype, slots.read(0), sums[0], slots.address(0), skip)


def check_scatter(name: str, dtype: torch.dtype, content: bytes, expected: int, slot: int, skip: int) -> None:
    """Into other block ids than the gather's; every block outside the written ones keeps its guard."""
    target = Paged(name, dtype, Shape())
    target.fill_guard()
    into = [2, 6, 1, 4]
    copier = CpuCopier(target.layout, threads=2)
    (result,) = copier.scatter([PartCopy(slot, into, skip, expected)]).result()
    copier.close()
    assert result.ok and result.checksum == expected
    size = len(target.block_bytes(0, 0, 0))
    for (layer, kv, block), found in target.blocks_now().items():
        position = into.index(block) if block in into else -1
        if position < skip:
            assert found == bytes([GUARD]) * size, (layer, kv, block)
        else:
            start = ((layer * kv_of(name) + kv) * len(into) + position) * size
            assert found == content[start : start + size], (layer, kv, block)


@pytest.mark.parametrize(
    "lists", [[[]], [[4]], [[1, 1, 1]], [[6, 5, 4, 3, 2, 1, 0]], [[], [2], [], [0, 6], [2, 2]], []]
)
def test_block_lists_may_be_empty_single_repeated_or_many(lists: list[list[int]]) -> None:
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, Shape(head_size=128))
    paged.fill_random(2)
    slots = Slots(len(lists), paged.layout.part_bytes(max((len(ids) for ids in lists), default=0)))
    sums = gather_all(paged, slots, lists)
    for index, ids in enumerate(lists):
        wanted = paged.reference(ids)
        assert slots.read(index)[: len(wanted)] == wanted
        assert sums[index] == checksum(wanted)
    assert slots.guards_intact(len(lists))


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_formats_with_one_token_order_share_their_slot_bytes(order: str) -> None:
    names = [n for n in FORMATS if kv_of(n) == 2 and ("NH_BS" in n) == (order == "HND")]
    everyone = [Paged(name, torch.float16, Shape()) for name in names]
    for paged in everyone:
        assert paged.layout.token_order == order
        paged.fill_random(3)  # the same logical values whatever the format
    slots = Slots(len(names), everyone[0].layout.part_bytes(len(IDS)))
    sums = [gather_all(paged, slots, [IDS])[0] for paged in everyone[:1]]
    for target in everyone[1:]:
        assert target.reference(IDS) == slots.read(0)
        before = target.blocks_now()
        target.fill_guard()
        copier = CpuCopier(target.layout, threads=1)
        assert copier.scatter([PartCopy(slots.address(0), IDS, 0, sums[0])]).result()[0].ok
        copier.close()
        after = target.blocks_now()
        assert all(after[at] == before[at] for at in after if at[2] in IDS)


def test_every_path_and_thread_count_moves_large_parts_alike(cpu_path: str) -> None:
    shape = Shape(layers=4, blocks=40, tokens=16, heads=4, head_size=136)  # 17408-byte runs: stripes straddle them
    paged = Paged("NL_X_TWO_NB_BS_NH_HS", torch.bfloat16, shape)
    paged.fill_random(4)
    lists = [list(range(39, -1, -1)), [7] * 3, [0]]
    slots = Slots(3, paged.layout.part_bytes(40))
    for threads in (1, 2, 5):
        sums = gather_all(paged, slots, lists, threads)
        assert sums == [checksum(paged.reference(ids)) for ids in lists]
        for index, ids in enumerate(lists):
            assert slots.read(index)[: paged.layout.part_bytes(len(ids))] == paged.reference(ids)


def test_sixteen_byte_runs_and_odd_addresses_work(cpu_path: str) -> None:
    storage = torch.zeros(8 * 6 * 48 + 64, dtype=torch.uint8)
    start = -storage.data_ptr() % 64 + 16  # 16-byte aligned and no more
    base = storage[start:].as_strided((8, 6, 16), (6 * 48, 48, 1))  # runs of 16, 48 apart
    paged = Paged("NL_X_NB_BS_HS", torch.uint8, Shape(layers=1, blocks=8, tokens=6, head_size=16), [base])
    assert paged.layout.planes[0][2:] == (16, 6, 48)
    paged.fill_random(5)
    slots = Slots(1, paged.layout.part_bytes(5))
    ids = [7, 0, 3, 3, 1]
    sums = gather_all(paged, slots, [ids])
    assert slots.read(0) == paged.reference(ids) and sums == [checksum(paged.reference(ids))]
    wanted = storage.clone()
    for plane_block in (7, 0, 3, 1):
        paged.block(0, 0, plane_block).zero_()
    copier = CpuCopier(paged.layout, threads=2)
    assert copier.scatter([PartCopy(slots.address(0), ids, 0, sums[0])]).result()[0].ok
    copier.close()
    assert torch.equal(storage, wanted)  # padding between the runs included


def test_strides_come_from_the_tensors_so_padded_views_work() -> None:
    wide = torch.zeros((7, 2, 4, 2, 32), dtype=torch.float16)
    blocks = wide[:, :, :, :, :24]  # heads 48 bytes long, 64 apart
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.float16, Shape(layers=1), [blocks])
    paged.fill_random(6)
    slots = Slots(1, paged.layout.part_bytes(4))
    gather_all(paged, slots, [IDS])
    assert slots.read(0) == paged.reference(IDS)


def test_layers_that_share_memory_are_stored_once() -> None:
    tensor = torch.zeros((7, 2, 4, 2, 24), dtype=torch.float16)
    alone = paged_layout("NL_X_NB_TWO_BS_NH_HS", [tensor], block_tokens=4)
    shared = paged_layout("NL_X_NB_TWO_BS_NH_HS", [tensor, tensor], block_tokens=4)
    assert shared.planes == alone.planes


def _misaligned() -> torch.Tensor:
    return torch.zeros(7 * 4 * 24 + 8, dtype=torch.float16)[4 : 4 + 7 * 4 * 24].view(7, 4, 24)


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("NL_X_NB_BS", [torch.zeros(7, 4, 24)], "format: found NL_X_NB_BS"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 2, 24)], "rank of tensor 0: found 4, wanted 3"),
        ("NL_X_NB_BS_HS", [], "list length: found 0"),
        ("NL_X_NB_BS_HS", torch.zeros(7, 4, 24), "nesting: found a tensor, wanted a list"),
        ("NB_NL_TWO_BS_NH_HS", [torch.zeros(1)], "nesting: found list, wanted a tensor"),
        ("TWO_X_NL_X_NBBS_NH_HS", [[torch.zeros(28, 2, 24)]], "list length: found 1, wanted K and V"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 5, 24)], "size of dimension 1: found 5, wanted 4"),
        ("NL_X_NBBS_ONE_HS", [torch.zeros(30, 1, 24)], "token slots: found 30, wanted a multiple of 4"),
        ("NL_X_NBBS_ONE_HS", [torch.zeros(28, 2, 24)], "size of dimension 1: found 2, wanted 1"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 24), torch.zeros(7, 4, 24).half()], "element size of tensor 1"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 24), torch.zeros(8, 4, 24)], "shape of tensor 1"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 24).double()], r"element size \(bytes\): found 8, wanted 1, 2 or 4"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 24, 4).transpose(1, 2)], "runs inside a block: found strides"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 48)[:, :, ::2]], "runs inside a block: found strides"),
        ("NL_X_NB_BS_HS", [_misaligned()], "plane 0: base address: found"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 25)[:, :, :24]], "plane 0: block stride|plane 0: run stride"),
        ("NL_X_NB_BS_HS", [torch.zeros(7, 4, 3).half()], "plane 0: block stride: found 24, wanted a multiple of 16"),
    ],
)
def test_a_layout_no_copy_can_follow_is_refused_with_its_values(name: str, tensors: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        paged_layout(name, tensors, block_tokens=4)
    assert caught.value.found is not None and caught.value.wanted is not None


@pytest.mark.parametrize(
    ("ids", "skip", "slot_shift", "message"),
    [
        ([0, 7], 0, 0, "part 1: block id: found 7, wanted 0..6"),
        ([0, -1], 0, 0, "part 1: block id: found -1, wanted 0..6"),
        ([0, 1], 3, 0, "part 1: skipped blocks: found 3, wanted at most the part's 2"),
        ([0, 1], -1, 0, "skipped blocks: found -1, wanted at least 0"),
        ([0, 1], 0, 8, "part 1: slot address: found .*, wanted a multiple of 16"),
        ([0, 1 << 70], 0, 0, "part 1: found .*, wanted 64-bit integers"),
    ],
)
def test_one_bad_argument_stops_the_whole_call_before_any_byte_moves(
    ids: list[int], skip: int, slot_shift: int, message: str
) -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, Shape(head_size=1024))
    paged.fill_guard()
    before = paged.blocks_now()
    slots = Slots(2, paged.layout.part_bytes(2))
    slots.write(0, bytes(paged.layout.part_bytes(2)))
    copier = CpuCopier(paged.layout, threads=2)
    parts = [PartCopy(slots.address(0), [2, 3], 0, 1), PartCopy(slots.address(1) + slot_shift, ids, skip, 1)]
    with pytest.raises(CopyError, match=message):
        copier.scatter(parts).result()
    copier.close()
    assert paged.blocks_now() == before


def test_address_zero_is_no_slot() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, Shape(head_size=64))
    copier = CpuCopier(paged.layout, threads=1)
    with pytest.raises(CopyError, match="part 0: slot address: found 0"):
        copier.gather([PartCopy(0, [1])]).result()
    copier.close()


def test_a_flipped_byte_in_the_slot_is_never_ok() -> None:
    paged = Paged("NB_NL_TWO_BS_NH_HS", torch.bfloat16, Shape())
    paged.fill_random(8)
    slots = Slots(1, paged.layout.part_bytes(4))
    (good,) = gather_all(paged, slots, [IDS])
    clean = slots.read(0)
    copier = CpuCopier(paged.layout, threads=2)
    for at, skip in ((0, 0), (len(clean) - 1, 0), (0, 1)):  # the last flip lies in a block that is only hashed
        slots.write(0, clean[:at] + bytes([clean[at] ^ 1]) + clean[at + 1 :])
        (result,) = copier.scatter([PartCopy(slots.address(0), IDS, skip, good)]).result()
        assert not result.ok and result.checksum != good
    copier.close()


def test_skipped_blocks_never_change_for_those_who_read_them_meanwhile() -> None:
    shape = Shape(layers=2, blocks=8, tokens=16, heads=4, head_size=64)
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, shape)
    paged.fill_guard()
    slots = Slots(1, paged.layout.part_bytes(8))
    slots.write(0, bytes(range(256)) * (paged.layout.part_bytes(8) // 256))
    expected = checksum(slots.read(0))
    skipped = [paged.block(layer, kv, b).view(torch.uint8).numpy() for layer, kv in paged.planes() for b in (3, 4, 5)]
    torn: list[int] = []
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            torn.extend(1 for view in skipped if not np.all(view == GUARD))

    reader = threading.Thread(target=read_on)
    reader.start()
    copier = CpuCopier(paged.layout, threads=2)
    part = PartCopy(slots.address(0), [3, 4, 5, 0, 1, 2, 6, 7], 3, expected)
    for _ in range(20):
        assert all(result.ok for result in copier.scatter([part] * 10).result())
    copier.close()
    stop.set()
    reader.join()
    assert not torn


def test_handles_end_in_order_and_carry_their_own_errors() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, Shape(head_size=64))
    paged.fill_random(9)
    slots = Slots(2, paged.layout.part_bytes(7))
    copier = CpuCopier(paged.layout, threads=1)
    bad = copier.gather([PartCopy(slots.address(0), [99])])
    good = copier.gather([PartCopy(slots.address(1), np.array([6, 2], dtype=np.int32))])
    assert good.wait(10.0) and good.done() and bad.done()
    with pytest.raises(CopyError, match="block id: found 99"):
        bad.result()
    assert good.result()[0].ok
    assert slots.read(1)[: paged.layout.part_bytes(2)] == paged.reference([6, 2])
    expected = good.result()[0].checksum
    assert not copier.gather([PartCopy(slots.address(1), [6, 1], checksum=expected)]).result()[0].ok
    copier.close()
    copier.close()
    with pytest.raises(CopierClosed):
        copier.gather([])


def test_a_scatter_without_its_checksum_and_a_gather_with_a_skip_are_refused() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.int8, Shape(head_size=64))
    copier = CpuCopier(paged.layout, threads=1)
    with pytest.raises(CopyError, match="part 0: checksum: found None"):
        copier.scatter([PartCopy(4096, [1])])
    with pytest.raises(CopyError, match="skip_blocks of a gather: found 1"):
        copier.gather([PartCopy(4096, [1], 1)])
    copier.close()


@pytest.mark.parametrize("bit", [0, 31, 32, 60])
def test_checksums_are_compared_in_all_their_bits(bit: int) -> None:
    expected = 0x0123456789ABCDEF
    part = PartCopy(4096, [1], checksum=expected)
    assert results_of([expected], [part]) == [PartResult(expected, True)]
    assert results_of([expected ^ 1 << bit], [part]) == [PartResult(expected ^ 1 << bit, False)]


@pytest.mark.parametrize(
    ("slots", "ids", "starts", "message"),
    [
        (array("Q", [4096]), array("i", [1]), array("q", [0, 1]), "block_ids: found a buffer"),
        (array("Q", [4096]), array("q", [1]), array("q", [0]), r"starts \(entries\): found 1, wanted 2"),
        (array("Q", [4096]), array("q", [1]), array("q", [0, 2]), r"starts \(range\): found 0..2, wanted 0..1"),
        (array("Q", [4096] * 2), array("q", [1]), array("q", [0, 2, 1]), r"starts \(order\): found 1, wanted at least"),
        (array("d", [4096.0]), array("q", [1]), array("q", [0, 1]), "slots: found a buffer"),
    ],
)
def test_buffers_of_the_wrong_shape_are_refused_by_the_core(slots: Any, ids: Any, starts: Any, message: str) -> None:
    layout: PagedLayout = Paged("NL_X_NB_BS_HS", torch.int8, Shape(head_size=64)).layout
    ensure_keys(1)
    with pytest.raises(CopyError, match=message):
        _core.gather(layout.core, slots, ids, starts, threads=1)
