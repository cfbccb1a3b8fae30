"""Gather and scatter of packed parts: bit for bit, in every format, on every loop, whatever the values and the skip."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest
import torch
from bytes_helpers import FORMATS, GUARD, Paged, Shape, Slots, kv_of

from kvdock import _core
from kvdock.datapath.copy import CpuCopier, PartCopy, PartResult
from kvdock.datapath.errors import CopyError
from kvdock.shm.checksum import checksum

SHAPE = Shape(layers=2, blocks=7, tokens=16, heads=2, head_size=40)  # a tile spans runs, blocks and a half
IDS, INTO = [5, 0, 3, 6], [2, 6, 1, 4]
HOSTILE = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x807F)


@pytest.fixture(params=_core.tile_paths())
def tile_path(request: pytest.FixtureRequest) -> Iterator[str]:
    assert _core.use_tile_path(request.param)
    yield request.param
    _core.use_tile_path("")


def fill(paged: Paged, kind: str, seed: int) -> None:
    """Normal values with outliers, with or without values of hostile bits among them."""
    generator = torch.Generator().manual_seed(seed)
    for layer, kv in paged.planes():
        for block in range(paged.shape.blocks):
            view = paged.block(layer, kv, block)
            values = torch.randn(view.shape, generator=generator) * 2.0 ** (3 * layer - kv)
            values[..., 3] *= 100
            bits = values.to(torch.bfloat16).view(torch.int16).flatten()
            if kind == "hostile":
                source = random.Random(seed * 1000 + block)
                for value in HOSTILE:
                    bits[source.randrange(len(bits))] = value - (value >> 15 << 16)
            view.copy_(bits.view(torch.bfloat16).view(view.shape))


def shape_of(paged: Paged, blocks: int, units: int | None = None) -> _core.PackedShape:
    return paged.layout.packed_shape(blocks, units=units)


def gather(paged: Paged, shape: _core.PackedShape, slot: int, ids: list[int], threads: int = 2) -> PartResult:
    copier = CpuCopier(paged.layout, threads=threads, packing=shape)
    (result,) = copier.gather([PartCopy(slot, ids, length=shape.packed_bytes)]).result()
    copier.close()
    return result


def scatter(
    paged: Paged, shape: _core.PackedShape, slot: int, ids: list[int], expected: int, skip: int = 0, threads: int = 2
) -> PartResult:
    copier = CpuCopier(paged.layout, threads=threads, packing=shape)
    (result,) = copier.scatter([PartCopy(slot, ids, skip, expected, shape.packed_bytes)]).result()
    copier.close()
    return result


def unpacked(shape: _core.PackedShape, slot: bytes) -> bytes:
    part = bytearray(shape.raw_bytes)
    assert _core.unpack_part(shape, slot, part)
    return bytes(part)


@pytest.mark.parametrize("kind", ["normal", "hostile"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_part_comes_back_bit_for_bit_and_skipped_blocks_stay(name: str, kind: str, tile_path: str) -> None:
    paged = Paged(name, torch.bfloat16, SHAPE)
    fill(paged, kind, 1)
    shape, content = shape_of(paged, len(IDS), 1000), paged.reference(IDS)
    slots = Slots(1, shape.packed_bytes)
    found = gather(paged, shape, slots.address(0), IDS)
    assert found.ok and found.fits and found.checksum == checksum(slots.read(0))
    assert unpacked(shape, slots.read(0)) == content and slots.guards_intact(1)
    target = Paged(name, torch.bfloat16, SHAPE)
    for skip in range(len(INTO) + 1):
        target.fill_guard()
        assert scatter(target, shape, slots.address(0), INTO, found.checksum, skip).ok
        size = len(target.block_bytes(0, 0, 0))
        for (layer, kv, block), bytes_ in target.blocks_now().items():
            at = INTO.index(block) if block in INTO else -1
            start = ((layer * kv_of(name) + kv) * len(INTO) + at) * size
            assert bytes_ == (bytes([GUARD]) * size if at < skip else content[start : start + size]), (skip, block)


def test_formats_threads_and_loops_make_equal_bytes() -> None:
    """What the format says alone decides, so engines of other formats and processors share packed parts."""
    names = [name for name in FORMATS if kv_of(name) == 2 and "NH_BS" not in name]
    made = set()
    for path in _core.tile_paths():
        assert _core.use_tile_path(path)
        for name in names:
            paged = Paged(name, torch.bfloat16, SHAPE)
            fill(paged, "normal", 2)
            shape = shape_of(paged, len(IDS))
            for threads in (1, 3):
                slots = Slots(1, shape.packed_bytes)
                gather(paged, shape, slots.address(0), IDS, threads)
                made.add(slots.read(0))
    _core.use_tile_path("")
    assert len(made) == 1


def test_tiles_that_are_raw_come_back_and_too_few_units_make_the_part_raw() -> None:
    wide = Shape(layers=2, blocks=8, tokens=64, heads=4, head_size=64)
    paged = Paged("NL_X_TWO_NB_BS_NH_HS", torch.bfloat16, wide)
    fill(paged, "normal", 3)
    any_bits = paged.block(1, 0, 5).view(torch.int16)
    any_bits.random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(3))
    ids = [5, 1, 2]
    for threads in (1, 4):
        ample = shape_of(paged, len(ids), 5000)
        slots = Slots(1, ample.packed_bytes)
        assert gather(paged, ample, slots.address(0), ids, threads).fits
        (used,) = struct.unpack_from("<H", slots.read(0), 6)
        assert used >= 8 * 38, "each of the block's tiles is raw"
        shape = shape_of(paged, len(ids), used)
        found = gather(paged, shape, slots.address(0), ids, threads)
        assert found.fits and unpacked(shape, slots.read(0)[: shape.packed_bytes]) == paged.reference(ids)
        target = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, wide)
        target.fill_guard()
        assert scatter(target, shape, slots.address(0), ids, found.checksum, threads=threads).ok
        assert target.reference(ids) == paged.reference(ids)

        found = gather(paged, shape_of(paged, len(ids), used - 1), slots.address(0), ids, threads)
        assert not found.fits and found.raw is not None and bytes(found.raw) == paged.reference(ids)
        assert found.checksum == checksum(paged.reference(ids)) and slots.guards_intact(1)


def test_a_slot_that_is_damaged_is_refused_before_a_byte_is_unpacked() -> None:
    paged = Paged("NB_NL_TWO_BS_NH_HS", torch.bfloat16, SHAPE)
    fill(paged, "normal", 4)
    shape = shape_of(paged, len(IDS))
    slots = Slots(1, shape.packed_bytes)
    expected = gather(paged, shape, slots.address(0), IDS).checksum
    clean = slots.read(0)
    paged.fill_guard()
    before = paged.blocks_now()
    source = random.Random(5)
    for at in [0, 16, shape.packed_bytes - 1, *(source.randrange(shape.packed_bytes) for _ in range(30))]:
        slots.write(0, clean[:at] + bytes([clean[at] ^ 1 << source.randrange(8)]) + clean[at + 1 :])
        found = scatter(paged, shape, slots.address(0), IDS, expected)
        assert not found.ok and found.checksum == checksum(slots.read(0)) != expected
        assert paged.blocks_now() == before


def test_bytes_that_are_no_packed_part_are_not_ok_even_with_their_checksum() -> None:
    """And nothing outside the part's blocks is written, whatever they are."""
    paged = Paged("NL_X_NB_BS_HS", torch.bfloat16, Shape(layers=2, tokens=16, head_size=256))
    shape = shape_of(paged, 2, 40)
    source = random.Random(6)
    for trial in range(30):
        junk = source.randbytes(shape.packed_bytes)
        if trial % 2:
            junk = b"KVP1" + struct.pack("<HH", 2, 40) + junk[8:]  # a header as it should be, then units anywhere
        slots = Slots(1, shape.packed_bytes)
        slots.write(0, junk)
        paged.fill_guard()
        found = scatter(paged, shape, slots.address(0), [2, 4], checksum(junk))
        assert not found.ok
        guard = bytes([GUARD]) * len(paged.block_bytes(0, 0, 0))
        assert all(now == guard for (_, _, block), now in paged.blocks_now().items() if block not in (2, 4))


@pytest.mark.parametrize(("at", "found"), [(0, b"KVP2"), (4, struct.pack("<H", 2))], ids=["magic", "planes"])
def test_a_part_with_another_header_is_not_unpacked_even_with_its_checksum(at: int, found: bytes) -> None:
    paged = Paged("NB_NL_TWO_BS_NH_HS", torch.bfloat16, SHAPE)
    fill(paged, "normal", 4)
    shape = shape_of(paged, len(IDS))
    slots = Slots(1, shape.packed_bytes)
    gather(paged, shape, slots.address(0), IDS)
    clean = slots.read(0)[: shape.packed_bytes]
    assert clean[at : at + len(found)] != found
    damaged = clean[:at] + found + clean[at + len(found) :]
    slots.write(0, damaged)
    paged.fill_guard()
    before = paged.blocks_now()
    assert not scatter(paged, shape, slots.address(0), IDS, checksum(damaged)).ok
    assert paged.blocks_now() == before


def test_hostile_bytes_with_a_forged_checksum_reach_only_the_blocks_that_are_asked_for(tile_path: str) -> None:
    """Books, marks, numbers of units and places of units are anything; blocks are skipped in the midst of tiles."""
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, SHAPE)
    fill(paged, "normal", 8)
    shape = shape_of(paged, len(IDS))
    slots, source, unpacked_ones = Slots(1, shape.packed_bytes), random.Random(8), 0
    gather(paged, shape, slots.address(0), IDS)
    whole = slots.read(0)
    guard = bytes([GUARD]) * len(paged.block_bytes(0, 0, 0))
    for _ in range(15):
        slot = bytearray(whole)
        for _ in range(source.randrange(1, 300)):
            slot[source.randrange(16, len(slot))] = source.choice((0, 1, 32, 33, 255, source.randrange(256)))
        slots.write(0, bytes(slot))
        paged.fill_guard()
        skip = source.randrange(len(INTO) + 1)
        unpacked_ones += scatter(paged, shape, slots.address(0), INTO, checksum(bytes(slot)), skip).ok
        written = {block for (_, _, block), now in paged.blocks_now().items() if now != guard}
        assert written <= set(INTO[skip:]) and slots.guards_intact(1) and slots.read(0) == bytes(slot)
    assert unpacked_ones >= 2, "most of the damage is not refused"


def test_packed_and_raw_parts_may_be_copied_by_one_call() -> None:
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, SHAPE)
    fill(paged, "normal", 7)
    shape = shape_of(paged, 4)
    raw_bytes = paged.layout.part_bytes(4)
    slots = Slots(3, max(raw_bytes, shape.packed_bytes))
    lengths, lists = [shape.packed_bytes, raw_bytes, shape.packed_bytes], [[0, 1, 2, 3], [3, 4, 5, 6], [6, 5, 1, 0]]
    copier = CpuCopier(paged.layout, threads=2, packing=shape)
    places = [PartCopy(slots.address(i), ids, length=lengths[i]) for i, ids in enumerate(lists)]
    found = copier.gather(places).result()
    assert [result.checksum for result in found] == [checksum(slots.read(i)[: lengths[i]]) for i in range(3)]
    wanted = [paged.reference(ids) for ids in lists]
    assert slots.read(1)[:raw_bytes] == wanted[1]
    for i, ids in enumerate(lists):
        paged.fill_guard()
        part = PartCopy(slots.address(i), ids, 0, found[i].checksum, lengths[i])
        assert copier.scatter([part]).result()[0].ok and paged.reference(ids) == wanted[i]
    copier.close()


def test_a_part_of_another_shape_is_refused_before_any_byte_moves() -> None:
    paged = Paged("NL_X_NB_BS_HS", torch.bfloat16, Shape(tokens=16, head_size=256))
    other = Paged("NL_X_NB_BS_HS", torch.bfloat16, Shape(layers=2, tokens=16, head_size=256))
    slots = Slots(1, shape_of(paged, 4).packed_bytes)
    for shape, ids, message in (
        (shape_of(paged, 4), [1, 2], "part 0: bytes of plane 0: found 16384, wanted 32768"),
        (shape_of(other, 4), [1, 2, 3, 4], "planes of the packed shape: found 2, wanted 3"),
    ):
        with pytest.raises(CopyError, match=message):
            gather(paged, shape, slots.address(0), ids)
        with pytest.raises(CopyError, match=message):
            scatter(paged, shape, slots.address(0), ids, 1)
    assert slots.guards_intact(1)
