"""Copies on a GPU for layouts whose parts may be packed: calls with parts of both kinds, and parts that cannot be
packed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from bytes_helpers import GUARD, Paged
from cuda_helpers import WAYS, needs_gpu, new_stream, slots_in, stream_of
from cuda_pack import FORMATS, SHAPE, fill, fresh_source, packed, shape_of, unpacked

from kvdock import _core
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.cuda_packed import PackedCudaCopier
from kvdock.datapath.devices import Device
from kvdock.datapath.pack_rates import ON_GPU, kept_pack_rates, pack_rates
from kvdock.shm.checksum import checksum

pytestmark = needs_gpu

BLOCKS, UNITS = 4, 200


def opened(paged: Paged, shape: _core.PackedShape, tuning: CopyTuning) -> PackedCudaCopier:
    torch.cuda.synchronize()
    (copier,) = Device(cuda=0).open_copiers(
        [paged.layout], chunk_tokens=BLOCKS * paged.shape.tokens, threads=1, tuning=tuning, packing=[shape]
    )
    assert isinstance(copier, PackedCudaCopier)
    return copier


def lists_of(count: int) -> list[list[int]]:
    return [list(range(BLOCKS * number, BLOCKS * (number + 1))) for number in range(count)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_has_parts_of_both_kinds(name: str, way: str) -> None:
    paged = Paged(name, torch.bfloat16, SHAPE, device="cuda")
    fill(paged, "gaussian", fresh_source())
    of, raw_bytes = shape_of(paged.layout, BLOCKS, UNITS), paged.layout.part_bytes(BLOCKS)
    lists, kinds = lists_of(5), [True, False, True, True, False]
    wanted = [paged.reference(ids) for ids in lists]
    with slots_in("host", 5, raw_bytes) as slots:
        copier = opened(paged, of, WAYS[way])
        lengths = [of.packed_bytes if kind else raw_bytes for kind in kinds]
        handle = copier.gather([
            PartCopy(slots.address(at), ids, length=lengths[at]) for at, ids in enumerate(lists)
        ])
        assert handle.wait(60.0) and handle.done()
        stored = [slots.read(at)[: lengths[at]] for at in range(5)]
        found = handle.result()
        assert all(one.fits and one.ok for one in found)
        assert [one.checksum for one in found] == [checksum(data) for data in stored]
        assert [unpacked(of, data) if kind else data for data, kind in zip(stored, kinds, strict=True)] == wanted
        paged.fill_guard()
        torch.cuda.synchronize()
        planes = len(paged.layout.planes)
        loaded = copier.scatter([
            PartCopy(slots.address(at), ids, at % 3, found[at].checksum, lengths[at]) for at, ids in enumerate(lists)
        ], bands=(1, planes), verified_after=1)
        stream = new_stream()
        loaded.order(stream_of(stream), 1)
        verified = loaded.verified(None)
        assert verified is not None and all(one.ok for one in verified)
        assert all(one.ok for one in loaded.result()) and loaded.done() and loaded.took_s()
        for at, ids in enumerate(lists):
            for position, block in enumerate(ids):
                size = len(paged.block_bytes(0, 0, block))
                begin = position * size
                is_skipped = position < at % 3
                wanted_bytes = bytes([GUARD]) * size if is_skipped else wanted[at][begin : begin + size]
                assert paged.block_bytes(0, 0, block) == wanted_bytes
        copier.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_packed_is_given_raw(way: str) -> None:
    paged = Paged(FORMATS[0], torch.bfloat16, SHAPE, device="cuda")
    fill(paged, "gaussian", fresh_source())
    lists = lists_of(3)
    for layer, kv in paged.planes():
        for block in lists[1]:
            view = paged.block(layer, kv, block).view(torch.int16)
            view.copy_(torch.randint(-(1 << 15), 1 << 15, view.shape, dtype=torch.int16, device="cuda"))
    of = shape_of(paged.layout, BLOCKS, 8)
    with slots_in("host", 3, of.packed_bytes) as slots:
        copier = opened(paged, of, WAYS[way])
        parts = [PartCopy(slots.address(at), ids, length=of.packed_bytes) for at, ids in enumerate(lists)]
        found = copier.gather(parts).result()
        assert [one.fits for one in found] == [True, False, True]
        raw = found[1].raw
        assert raw is not None and bytes(raw) == paged.reference(lists[1]) and found[1].checksum == checksum(bytes(raw))
        fenced = copier.gather(parts)
        fenced.order(stream_of(new_stream()))  # from now on its blocks may be overwritten
        found = fenced.result()
        assert [(one.fits, one.raw) for one in found] == [(True, None), (False, None), (True, None)]
        assert slots.guards_intact(3)
        copier.close()


def test_a_slot_that_holds_no_packed_part_is_not_ok() -> None:
    paged = Paged(FORMATS[0], torch.bfloat16, SHAPE, device="cuda")
    fill(paged, "gaussian", fresh_source())
    of = shape_of(paged.layout, BLOCKS, UNITS)
    _, good = packed(of, paged.reference(range(BLOCKS)))
    bad = random.randbytes(of.packed_bytes)
    with slots_in("host", 2, of.packed_bytes) as slots:
        slots.write(0, good)
        slots.write(1, bad)
        copier = opened(paged, of, WAYS["staged"])
        found = copier.scatter([
            PartCopy(slots.address(at), ids, 0, checksum(data), of.packed_bytes)
            for at, (ids, data) in enumerate(zip(lists_of(2), (good, bad), strict=True))
        ]).result()
        assert [one.ok for one in found] == [True, False]
        copier.close()


def test_what_packing_costs_is_measured_and_kept(tmp_path: Path) -> None:
    found = pack_rates(0, tmp_path)
    assert found is not None and (found.by, found.least) == (torch.cuda.get_device_name(0), ON_GPU)
    print(found.describe())
    assert found.load_share > 0 and found.store_share > 0 and kept_pack_rates(tmp_path) == [found]
