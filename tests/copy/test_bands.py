"""How a GPU's copier joins the small bands of a load (csrc/copy/bands.h)."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
import torch
from bytes_helpers import Paged, Shape, Slots

from kvdock import _core
from kvdock.datapath.errors import CopyError
from kvdock.shm.checksum import ensure_keys

MIB = 1 << 20


def layout_of(plane_bytes: list[int]) -> _core.PagedLayout:
    """Planes whose blocks have so many bytes. Nothing reads their memory."""
    planes = [((at + 1) << 32, size, size, 1, size) for at, size in enumerate(plane_bytes)]
    return _core.PagedLayout(planes, num_blocks=4, block_tokens=64)


def joined(layout: _core.PagedLayout, blocks: int, ends: list[int], least_bytes: int) -> list[tuple[int, int, int]]:
    return [(first, last, end) for first, last, end in _core.join_bands(layout, blocks, ends, least_bytes)]


def test_bands_are_joined_until_they_have_the_least_bytes_and_the_first_stays_alone() -> None:
    """K and V of 32 layers, 128 KiB each in a page: the shape of Llama 3 8B in pages of 64 tokens."""
    layout, ends = layout_of([128 << 10] * 64), [2 * (layer + 1) for layer in range(32)]
    batches = {tokens: len(joined(layout, tokens // 64, ends, 64 * MIB)) for tokens in (512, 2048, 8192, 32768, 131072)}
    assert batches == {512: 2, 2048: 5, 8192: 17, 32768: 32, 131072: 32}
    assert joined(layout, 32, ends, 64 * MIB) == [(0, 0, 2), (1, 8, 18), (9, 16, 34), (17, 24, 50), (25, 31, 64)]
    assert joined(layout, 32, ends, 0) == [(band, band, end) for band, end in enumerate(ends)]


def test_small_and_large_bands_are_cut_where_the_bytes_are_enough() -> None:
    layout = layout_of([16, 16, 4096, 16, 16, 8192, 16])
    ends = [1, 2, 3, 4, 5, 6, 7]
    assert joined(layout, 1, ends, 4096) == [(0, 0, 1), (1, 2, 3), (3, 5, 6), (6, 6, 7)], "the last one may be small"
    assert joined(layout, 1, ends, 4112) == [(0, 0, 1), (1, 2, 3), (3, 5, 6), (6, 6, 7)], "exactly the least is enough"
    assert joined(layout, 1, ends, 4113) == [(0, 0, 1), (1, 3, 4), (4, 5, 6), (6, 6, 7)]
    assert joined(layout, 2, ends, 4113) == [(0, 0, 1), (1, 2, 3), (3, 5, 6), (6, 6, 7)], "all blocks count"
    assert joined(layout, 1, ends, 1 << 40) == [(0, 0, 1), (1, 6, 7)]
    assert joined(layout, 0, ends, 1) == [(0, 0, 1), (1, 6, 7)], "without blocks there are no bytes"
    assert joined(layout, 1, [7], 4096) == [(0, 0, 7)]
    assert joined(layout, 1, [], 4096) == []


@pytest.mark.parametrize("ends, message", [
    ([0, 7], "end of a band (planes): found 0, wanted 1..7"),
    ([3, 3, 7], "end of a band (planes): found 3, wanted 4..7"),
    ([3, 2, 7], "end of a band (planes): found 2, wanted 4..7"),
    ([3, 8], "end of a band (planes): found 8, wanted 4..7"),
    ([3, 6], "end of the last band (planes): found 6, wanted 7"),
])
def test_ends_that_do_not_ascend_to_the_last_plane_are_refused(ends: list[int], message: str) -> None:
    with pytest.raises(CopyError) as error:
        joined(layout_of([16] * 7), 1, ends, 0)
    assert str(error.value) == message


@pytest.mark.parametrize("seed", range(20))
def test_joined_bands_one_after_the_other_are_bitwise_the_whole_copy(seed: int) -> None:
    drawn = random.Random(seed)
    shape = Shape(layers=drawn.randint(1, 9), blocks=12, head_size=8 * drawn.randint(1, 40))
    source = Paged("NL_X_TWO_NB_BS_NH_HS", torch.bfloat16, shape)
    source.fill_random(seed)
    planes, parts = source.layout.planes, ([3, 1, 2], [0], [7, 4])
    slots = Slots(len(parts), source.layout.part_bytes(3))
    ensure_keys(source.layout.part_bytes(3))
    starts, ids = array("q", [0, 3, 4, 6]), array("q", [block for part in parts for block in part])
    addresses = [slots.address(at) for at in range(len(parts))]
    _core.gather(source.layout.core, array("Q", addresses), ids, starts, threads=1)

    ends = sorted({*drawn.sample(range(1, len(planes) + 1), drawn.randint(1, len(planes))), len(planes)})
    least_bytes = drawn.randrange(2 * source.layout.part_bytes(len(ids)))
    batches = joined(source.layout.core, len(ids), ends, least_bytes)
    assert [first for first, _, _ in batches] == [0, *(last + 1 for _, last, _ in batches[:-1])]
    assert batches[-1][1:] == (len(ends) - 1, len(planes)) and all(end == ends[last] for _, last, end in batches)

    target = Paged("NL_X_TWO_NB_BS_NH_HS", torch.bfloat16, shape)
    target.fill_guard()
    before = target.blocks_now()
    for number, (begin, end) in enumerate(pairwise((0, *(end for _, _, end in batches)))):
        layout = _core.PagedLayout(target.layout.planes[begin:end], num_blocks=12, block_tokens=shape.tokens)
        skipped = sum(run * count for _, _, run, count, _ in planes[:begin])
        band = array("Q", [address + skipped * len(part) for address, part in zip(addresses, parts, strict=True)])
        _core.scatter(layout, band, ids, starts, array("q", [0, 0, 0]), threads=1)
        if 0 < number < len(batches) - 1:
            assert layout.block_bytes * len(ids) >= least_bytes
    wanted = source.blocks_now()
    assert target.blocks_now() == {at: wanted[at] if at[2] in ids else before[at] for at in before}


def test_pieces_become_small_only_where_a_copy_begins_or_ends() -> None:
    """Each piece costs seven calls of the driver. The last kernel of a load, and the first of a store, is short."""
    inside = _core.cuda_pieces(64 * MIB, 16 * MIB, is_load=True, shrinks=False)
    assert inside == [16 * MIB] * 4
    last = _core.cuda_pieces(64 * MIB, 16 * MIB, is_load=True, shrinks=True)
    assert last == [size * MIB for size in (16, 16, 16, 8, 4, 2, 1, 1)]
    assert _core.cuda_pieces(64 * MIB, 16 * MIB, is_load=False, shrinks=True) == last[::-1]
    for size in (1, 4096, 5 * MIB, 16 * MIB, 16 * MIB + 1, 33 * MIB + 7):
        for shrinks in (True, False):
            pieces = _core.cuda_pieces(size, 16 * MIB, is_load=True, shrinks=shrinks)
            assert sum(pieces) == -(-size // 4096) * 4096 and max(pieces) <= 16 * MIB
    assert _core.cuda_pieces(0, 16 * MIB, is_load=True, shrinks=True) == []
