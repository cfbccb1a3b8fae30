"""Packing in the gather and unpacking in the scatter, bitwise against the codec of the CPU: every format and kind of
plane, skips, pool units, parts that do not fit, and slots whose bytes are anything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from bytes_helpers import GUARD, Paged, Shape, Slots, kv_of
from cuda_helpers import DIRECT, MIB, STAGED, WAYS, needs_gpu, new_stream, slots_in, stream_of
from cuda_pack import (
    FORMATS,
    KINDS,
    MARKS,
    ODD,
    SHAPE,
    TILE,
    fill,
    fresh_source,
    packed,
    shape_of,
    unpacked,
)

from kvdock import _core
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning, CudaCopier
from kvdock.datapath.errors import CopyError
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.shm.checksum import checksum

pytestmark = needs_gpu

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["wide", "narrow"])
def test_both_codecs_read_what_the_other_packed(name: str, kind: str, shape: Shape) -> None:
    source = fresh_source()
    paged = Paged(name, torch.bfloat16, shape, device="cuda")
    fill(paged, kind, source)
    lists = [source.permutation(shape.blocks)[:11].tolist() for _ in range(3)]
    wanted = [paged.reference(ids) for ids in lists]
    tiles = len(paged.layout.planes) * (len(wanted[0]) // len(paged.layout.planes) // TILE)
    units = 40 * tiles if kind == "anything" else 3 * tiles
    of = shape_of(paged.layout, 11, units)
    for place, way in (("host", "staged"), ("host", "direct"), ("device", "staged")):
        opened = packing(paged.layout, 11, units, tuning=WAYS[way])
        with slots_in(place, 3, of.packed_bytes) as slots, opened as copier:
            handle = copier.gather([PartCopy(slots.address(i), ids) for i, ids in enumerate(lists)])
            found, fit = handle.result(), handle.fit()
            for i, part in enumerate(wanted):
                used, slot = packed(of, part)
                assert fit[i] == (used >= 0), (place, i, used)
                if not fit[i]:
                    continue
                assert unpacked(of, slots.read(i)) == part, (place, i)
                assert found[i].checksum == checksum(slots.read(i)), (place, i)
                if used == 0:  # else units may be taken in another order
                    assert slots.read(i) == slot, (place, i)
            assert slots.guards_intact(3)
            check_scatter(name, shape, slots, place, wanted, of)


def check_scatter(
    name: str, shape: Shape, slots: Slots, place: str, parts: list[bytes], of: _core.PackedShape
) -> None:
    """Parts packed by the CPU, into other blocks, with every kind of skip and of bands; the rest keeps its guard
    bytes."""
    for i, part in enumerate(parts):
        used, slot = packed(of, part)
        if used < 0:
            return
        slots.write(i, slot)
    sums = [checksum(slots.read(i)) for i in range(2)]
    into = [list(range(1, 12)), list(range(23, 12, -1))]
    for way, skips, bands in itertools.product(WAYS, ((0, 0), (1, 5), (10, 11)), ("none", "two", "one a plane")):
        target = Paged(name, torch.bfloat16, shape, device="cuda")
        target.fill_guard()
        planes = len(target.layout.planes)
        ends = {"none": (), "two": (planes // 3 or 1, planes), "one a plane": range(1, planes + 1)}[bands]
        with packing(target.layout, 11, of.units, tuning=WAYS[way]) as copier:
            handle = copier.scatter(
                [PartCopy(slots.address(i), into[i], skips[i], sums[i]) for i in range(2)], bands=sorted(set(ends)),
                verified_after=int(bands == "two" and place == "host"),
            )
            verified = handle.verified(None)
            assert verified is not None and [one.ok for one in verified] == [True, True] == handle.fit()
            assert [result.ok for result in handle.result()] == [True, True] == handle.fit()
        size = len(target.block_bytes(0, 0, 0))
        for (layer, kv, block), found in target.blocks_now().items():
            wanted = bytes([GUARD]) * size
            for which in range(2):
                if block in into[which] and (position := into[which].index(block)) >= skips[which]:
                    start = ((layer * kv_of(name) + kv) * 11 + position) * size
                    wanted = parts[which][start : start + size]
            assert found == wanted, (way, skips, layer, kv, block)


@contextmanager
def packing(
    layout: PagedLayout, blocks: int, units: int, marks: int = MARKS, tuning: CopyTuning = STAGED
) -> Iterator[CudaCopier]:
    torch.cuda.synchronize()
    how = shape_of(layout, blocks, units, marks)
    copier = CudaCopier(layout, device=0, part_blocks=blocks, tuning=tuning, packing=how)
    try:
        yield copier
    finally:
        copier.close()


@pytest.mark.parametrize("marks", [16, 144, 496])
def test_every_reserve_is_packed_alike(marks: int) -> None:
    source = fresh_source()
    paged = Paged(FORMATS[0], torch.bfloat16, SHAPE, device="cuda")
    fill(paged, "gaussian", source)
    part = paged.reference(range(24))
    tiles = len(part) // TILE
    of = shape_of(paged.layout, 24, 40 * tiles, marks)
    with slots_in("host", 1, of.packed_bytes) as slots, packing(paged.layout, 24, 40 * tiles, marks) as copier:
        handle = copier.gather([PartCopy(slots.address(0), range(24))])
        assert handle.fit() == [True]
        assert unpacked(of, slots.read(0)) == part
        assert handle.result()[0].checksum == checksum(slots.read(0))
        paged.fill_guard()
        torch.cuda.synchronize()
        handle = copier.scatter([PartCopy(slots.address(0), range(24), 0, handle.result()[0].checksum)])
        assert handle.result()[0].ok and handle.fit() == [True]
        assert paged.reference(range(24)) == part


def test_a_large_call_is_cut_and_each_part_is_right() -> None:
    """More stripes than a batch may have, and neighbouring parts with different books."""
    source = fresh_source()
    blocks, each, layers = 1024, 64, 8
    tensors = [torch.empty((blocks, 2, 16, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    layout = paged_layout("NL_X_NB_TWO_BS_NH_HS", tensors, block_tokens=16)
    for layer, tensor in enumerate(tensors):
        tensor.normal_(std=2.0 ** (layer - 4))
        tensor.mul_(torch.exp2(torch.randn(128, device="cuda")).to(torch.bfloat16))
    units = 1024
    of = shape_of(layout, each, units)
    ids = source.permutation(blocks).reshape(-1, each)
    with slots_in("host", len(ids), of.packed_bytes) as slots, packing(layout, each, units) as copier:
        handle = copier.gather([PartCopy(slots.address(i), one) for i, one in enumerate(ids)])
        assert all(handle.fit())
        sums = [one.checksum for one in handle.result()]
        assert sums == [checksum(slots.read(i)) for i in range(len(ids))]
        kept = [tensor.clone() for tensor in tensors]
        raw = unpacked(of, slots.read(3))
        rows = torch.stack([tensor[torch.from_numpy(ids[3]).cuda()] for tensor in tensors])
        assert raw == rows.transpose(1, 2).contiguous().view(torch.uint8).cpu().numpy().tobytes()
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(GUARD)
        torch.cuda.synchronize()
        handle = copier.scatter([PartCopy(slots.address(i), one, 0, sums[i]) for i, one in enumerate(ids)])
        assert all(one.ok for one in handle.result()) and all(handle.fit())
        for before, after in zip(kept, tensors, strict=True):
            assert torch.equal(before.view(torch.int16), after.view(torch.int16))


def test_whatever_a_slot_holds_nothing_outside_of_the_parts_blocks_is_written() -> None:
    """Random bytes, and packed parts with random changes: each is unpacked as the CPU does, or refused as there."""
    source = fresh_source()
    paged = Paged(FORMATS[0], torch.bfloat16, SHAPE, device="cuda")
    fill(paged, "far ones", source)
    units = 400
    of = shape_of(paged.layout, 11, units)
    _, clean = packed(of, paged.reference(range(11)))
    slots_of = [random.randbytes(of.packed_bytes)]
    for _ in range(30):
        bad = bytearray(clean)
        for _ in range(int(source.integers(1, 2000))):
            bad[int(source.integers(0 if source.random() < 0.2 else 4, len(bad)))] = int(source.integers(256))
        slots_of.append(bytes(bad))
    number = bytearray(clean)
    number[16 + 24 * len(paged.layout.planes) :] = bytes(len(clean) - 16 - 24 * len(paged.layout.planes))
    slots_of.append(bytes(number))  # all zeros after the books
    with slots_in("host", 1, of.packed_bytes) as slots, packing(paged.layout, 11, units) as copier:
        for bad_slot, bands in itertools.product(slots_of, ((), (1, 2, len(paged.layout.planes)))):
            slots.write(0, bad_slot)
            paged.fill_guard()
            torch.cuda.synchronize()
            handle = copier.scatter([PartCopy(slots.address(0), range(3, 14), 0, 1)], bands=bands)
            assert handle.result()[0].checksum == checksum(bad_slot)
            wanted = unpacked(of, bad_slot)
            assert handle.fit() == [wanted is not None]
            if wanted is not None:
                assert paged.reference(range(3, 14)) == wanted
            for block in (0, 1, 2, *range(14, 24)):
                assert set(paged.block_bytes(0, 0, block)) == set(paged.block_bytes(1, 1, block)) == {GUARD}
        assert slots.guards_intact(1)


def test_parts_that_do_not_fit_leave_their_neighbours_alone() -> None:
    source = fresh_source()
    paged = Paged(FORMATS[0], torch.bfloat16, SHAPE, device="cuda")
    fill(paged, "gaussian", source)
    for layer, kv in paged.planes():
        for block in range(8, 16):
            view = paged.block(layer, kv, block).view(torch.int16)
            view.copy_(torch.randint(-(1 << 15), 1 << 15, view.shape, dtype=torch.int16, device="cuda"))
    of = shape_of(paged.layout, 8, 40)
    lists = [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    with slots_in("host", 3, of.packed_bytes) as slots, packing(paged.layout, 8, 40) as copier:
        for bad in (1, 0, 2, 1, 0):  # a part leaves nothing behind for the next one in its place
            lists.sort(key=lambda ids: ids[0] == 8)
            lists.insert(bad, lists.pop())
            handle = copier.gather([PartCopy(slots.address(i), ids) for i, ids in enumerate(lists)])
            assert handle.fit() == [i != bad for i in range(3)]
            for i in {0, 1, 2} - {bad}:
                assert unpacked(of, slots.read(i)) == paged.reference(lists[i])
                assert handle.result()[i].checksum == checksum(slots.read(i))
        assert slots.guards_intact(3)


@pytest.mark.parametrize("room_mib", [1, 2, 64])
@pytest.mark.parametrize("way", ["staged", "direct"])
def test_bands_are_there_one_after_the_other(way: str, room_mib: int) -> None:
    """What is ordered after a band reads its planes; parts pass through staging in shares of one plane, of several, or
    whole, and a load is verified before its last bands have been copied."""
    source = fresh_source()
    blocks, each, layers = 96, 24, 6
    tensors = [torch.empty((blocks, 2, 16, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    layout = paged_layout("NL_X_NB_TWO_BS_NH_HS", tensors, block_tokens=16)
    for layer, tensor in enumerate(tensors):
        tensor.normal_(std=2.0 ** (2 * layer - 4))
    ids = source.permutation(blocks).reshape(-1, each)
    kept = [tensor.clone() for tensor in tensors]
    tuning = DIRECT if way == "direct" else CopyTuning(
        piece_bytes=room_mib * MIB, buffers=3, direct_load_bytes=0, least_band_bytes=0
    )
    of = shape_of(layout, each, 1024)
    with slots_in("host", len(ids), of.packed_bytes) as slots, packing(layout, each, 1024, tuning=tuning) as copier:
        stored = copier.gather([PartCopy(slots.address(i), one) for i, one in enumerate(ids)])
        sums = [one.checksum for one in stored.result()]
        assert all(stored.fit()) and sums == [checksum(slots.read(i)) for i in range(len(ids))]
        for ends, verified_after in (((1, 5, 12), 1), ((1, 2, 3, 4, 11, 12), 0), ((8, 9, 12), 2), ((7, 12), 2)):
            for tensor in tensors:
                tensor.view(torch.uint8).fill_(GUARD)
            torch.cuda.synchronize()
            copies = [PartCopy(slots.address(i), one, 0, sums[i]) for i, one in enumerate(ids)]
            handle = copier.scatter(copies, bands=ends, verified_after=verified_after)
            stream, begin = new_stream(), 0
            for band, end in enumerate(ends):
                handle.order(stream_of(stream), band)
                with torch.cuda.stream(stream):
                    seen = [tensors[plane // 2][:, plane % 2].clone() for plane in range(begin, end)]
                stream.synchronize()
                for plane, found in zip(range(begin, end), seen, strict=True):
                    assert torch.equal(found.view(torch.int16), kept[plane // 2][:, plane % 2].view(torch.int16))
                begin = end
            with pytest.raises(CopyError, match="band"):
                handle.order(stream_of(stream), len(ends))
            verified = handle.verified(None)
            assert verified is not None and all(one.ok for one in verified) and all(handle.fit())
            assert all(one.ok for one in handle.result()) and all(handle.fit())
        slots.write(1, bytes(of.packed_bytes))
        bad = copier.scatter(copies, bands=(1, 12), verified_after=1).verified(None)
        assert bad is not None and [one.ok for one in bad] == [True, False, True, True]


def test_arguments_that_do_not_fit_packed_parts_are_refused() -> None:
    paged = Paged(FORMATS[0], torch.bfloat16, SHAPE, device="cuda")
    with slots_in("host", 1, paged.layout.part_bytes(11)) as slots, packing(paged.layout, 11, 8) as copier:
        with pytest.raises(CopyError, match="part 0: blocks"):
            copier.gather([PartCopy(slots.address(0), range(10))])
        with pytest.raises(CopyError, match="before packing"):
            copier.beside(paged.layout, part_blocks=11, packing=shape_of(paged.layout, 10, 8))
        plain = copier.beside(paged.layout, part_blocks=11)
        assert plain.gather([PartCopy(slots.address(0), range(11))]).fit() == [True]
