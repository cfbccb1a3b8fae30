"""Copies on a GPU among an engine's own work: order before and after, handles, readers beside loads, calibration."""

from __future__ import annotations

import gc
import json
import os
import select
import statistics
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from bytes_helpers import GUARD, Paged, Shape
from cuda_helpers import DIRECT, MIB, STAGED, WAYS, cuda_copier, keep_busy, needs_gpu, new_stream, slots_in, stream_of

from kvdock import _core
from kvdock.datapath import tuning as tunings
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.errors import CopyError
from kvdock.datapath.tuning import cached_tunings, tuned
from kvdock.shm.checksum import checksum

pytestmark = needs_gpu

SHAPE = Shape(layers=4, blocks=64, tokens=16, heads=4, head_size=128)
LONG_CYCLES = 400_000_000
"""About 0.2 s of a GPU's clock."""


def paged_kv() -> Paged:
    return Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, SHAPE, device="cuda")


def fill(paged: Paged, value: int) -> None:
    for tensor in paged.tensors:
        tensor.view(torch.uint8).fill_(value)


@pytest.mark.parametrize("way", WAYS)
def test_a_store_comes_after_what_was_on_the_stream_and_the_call_does_not_wait(way: str) -> None:
    paged, stream = paged_kv(), new_stream()
    size = paged.layout.part_bytes(8)
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        fill(paged, 1)
        torch.cuda.synchronize()
        keep_busy(stream, LONG_CYCLES)
        with torch.cuda.stream(stream):
            fill(paged, 2)
        handle = copier.gather([PartCopy(slots.address(0), range(8))], after=stream_of(stream))
        assert not handle.done() and not stream.query(), "the call returned while the stream was at work"
        assert not handle.wait(0.001)
        assert handle.result()[0].checksum == checksum(b"\2" * size) and slots.read(0) == b"\2" * size


@pytest.mark.parametrize("way", WAYS)
def test_a_store_does_not_wait_for_what_was_put_on_the_stream_since_it_was_noted(way: str) -> None:
    paged, stream, noted = paged_kv(), new_stream(), new_stream()
    size = paged.layout.part_bytes(8)
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        fill(paged, 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            fill(paged, 2)
        noted.wait_stream(stream)
        keep_busy(stream, 4 * LONG_CYCLES)
        handle = copier.gather([PartCopy(slots.address(0), range(8))], after=stream_of(noted))
        assert handle.wait(5.0) and not stream.query(), "the store has ended while the stream is at work"
        assert slots.read(0) == b"\2" * size


@pytest.mark.parametrize("way", WAYS)
def test_what_a_copy_took_leaves_out_what_came_before_it(way: str) -> None:
    paged, stream = paged_kv(), new_stream()
    size = paged.layout.part_bytes(64)
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        free = copier.gather([PartCopy(slots.address(0), range(64))])
        assert free.wait(5.0) and 0 < (free.took_s() or 0) < 0.1
        keep_busy(stream, 4 * LONG_CYCLES)
        began_s = time.perf_counter()
        handle = copier.gather([PartCopy(slots.address(0), range(64))], after=stream_of(stream))
        assert handle.took_s() is None and handle.wait(10.0)
        assert 0 < (handle.took_s() or 0) < 0.2 * (time.perf_counter() - began_s)


@pytest.mark.parametrize("way", WAYS)
def test_work_ordered_after_a_store_writes_after_it_has_read(way: str) -> None:
    paged, before, after = paged_kv(), new_stream(), new_stream()
    size = paged.layout.part_bytes(64)
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        for _ in range(5):
            fill(paged, 3)
            torch.cuda.synchronize()
            keep_busy(before, LONG_CYCLES // 20)
            handle = copier.gather([PartCopy(slots.address(0), range(64))], after=stream_of(before))
            handle.order(stream_of(after))
            with torch.cuda.stream(after):
                fill(paged, 9)
            after.synchronize()
            assert handle.result()[0].checksum == checksum(b"\3" * size)


@pytest.mark.parametrize("way", WAYS)
def test_work_ordered_after_a_load_reads_what_it_brought(way: str) -> None:
    paged, before, after = paged_kv(), new_stream(), new_stream()
    size = paged.layout.part_bytes(64)
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        slots.write(0, b"\7" * size)
        for _ in range(5):
            fill(paged, 3)
            torch.cuda.synchronize()
            keep_busy(before, LONG_CYCLES // 20)
            part = PartCopy(slots.address(0), torch.randperm(64), 0, checksum(b"\7" * size))
            handle = copier.scatter([part], after=stream_of(before))
            handle.order(stream_of(after))
            with torch.cuda.stream(after):
                seen = [bool_of_all(tensor, 7) for tensor in paged.tensors]
            after.synchronize()
            assert all(bool(one) for one in seen)
            assert handle.result()[0].ok


@pytest.mark.parametrize("way", WAYS)
def test_a_band_is_there_for_work_ordered_after_it_and_the_last_bands_need_not_be(way: str) -> None:
    paged, reader = paged_kv(), new_stream()
    size, other = paged.layout.part_bytes(40), paged.layout.part_bytes(24)
    planes = len(paged.layout.planes)
    bands = [2, 4, planes]
    with slots_in("host", 2, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        slots.write(0, b"\7" * size)
        slots.write(1, b"\7" * size)
        for _ in range(5):
            fill(paged, 3)
            torch.cuda.synchronize()
            ids = torch.randperm(64)
            parts = [
                PartCopy(slots.address(0), ids[:40], 0, checksum(b"\7" * size)),
                PartCopy(slots.address(1), ids[40:], 0, checksum(b"\7" * other)),
            ]
            handle = copier.scatter(parts, bands=bands)
            seen = []
            with torch.cuda.stream(reader):
                for band, end in enumerate(bands):
                    handle.order(stream_of(reader), band)
                    tensors = {plane // 2 for plane in range(end)}  # K and V of a layer lie in one tensor
                    seen += [bool_of_all(paged.tensors[layer], 7) for layer in tensors]
            reader.synchronize()
            assert all(bool(one) for one in seen)
            assert [result.ok for result in handle.result()] == [True, True]
        wrong = copier.scatter([PartCopy(slots.address(0), ids[:40], 0, 5)], bands=bands)
        assert [result.ok for result in wrong.result()] == [False]
        with pytest.raises(CopyError, match="band: found 3, wanted less than 3"):
            wrong.order(stream_of(reader), 3)
        for ends, message in (([2, 2, planes], "band"), ([2], "last band"), ([planes + 1], "band")):
            with pytest.raises(CopyError, match=message):
                copier.scatter(parts, bands=ends)


def test_a_load_is_verified_before_it_has_ended_and_work_ordered_after_it_finds_all_of_it() -> None:
    shape = Shape(layers=8, blocks=1024, tokens=16, heads=8, head_size=128)
    paged, reader = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, shape, device="cuda"), new_stream()
    planes, size = len(paged.layout.planes), paged.layout.part_bytes(256)
    unended = 0
    with slots_in("host", 4, size) as slots, cuda_copier(paged.layout, CopyTuning(hash_threads=4)) as copier:
        for index in range(4):
            slots.write(index, bytes([7 + index]) * size)
        sums = [checksum(slots.read(index)) for index in range(4)]
        for _ in range(8):
            fill(paged, 3)
            torch.cuda.synchronize()
            ids = torch.randperm(1024).view(4, 256)
            parts = [PartCopy(slots.address(index), ids[index], 0, sums[index]) for index in range(4)]
            handle = copier.scatter(parts, bands=[planes * 7 // 8, planes], verified_after=1)
            verified = handle.verified(10.0)
            unended += not handle.done()
            handle.order(stream_of(reader))
            with torch.cuda.stream(reader):
                seen = [
                    bool_of_all(tensor[chosen.cuda()], 7 + index)
                    for tensor in paged.tensors for index, chosen in enumerate(ids)
                ]
            reader.synchronize()
            assert all(bool(one) for one in seen)
            assert verified == handle.result() and [one.checksum for one in handle.result()] == sums
    assert unended > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verified_after", [1, 2, 3])
def test_damage_is_known_when_a_load_is_verified_wherever_it_lies(way: str, verified_after: int) -> None:
    paged = paged_kv()
    size, planes = paged.layout.part_bytes(20), len(paged.layout.planes)
    with slots_in("host", 3, size) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        for damaged_byte in (0, size // 2, size - 1):
            for index in range(3):
                slots.write(index, b"\7" * size)
            damage = bytearray(b"\7" * size)
            damage[damaged_byte] ^= 1
            slots.write(1, bytes(damage))
            ids = torch.randperm(60).view(3, 20)
            parts = [PartCopy(slots.address(index), ids[index], 0, checksum(b"\7" * size)) for index in range(3)]
            handle = copier.scatter(parts, bands=[2, 4, planes], verified_after=verified_after)
            verified = handle.verified(None)
            assert verified is not None and [one.ok for one in verified] == [True, False, True]
            assert handle.result() == verified and handle.verified(0.0) == verified


def test_a_load_that_ends_before_it_was_hashed_needs_no_hash() -> None:
    paged = paged_kv()
    size, planes = paged.layout.part_bytes(64), len(paged.layout.planes)
    tuning = CopyTuning(hash_threads=1, direct_load_bytes=1 << 40)
    with cuda_copier(paged.layout, tuning) as copier:
        for _ in range(50):
            # One thread is slower than PCIe: it would go on in slots that are unmapped by then, and crash.
            with slots_in("host", 1, size) as slots:
                slots.write(0, b"\7" * size)
                part = PartCopy(slots.address(0), range(64), 0, checksum(b"\7" * size))
                handles = [copier.scatter([part], bands=[1, planes], verified_after=1) for _ in range(8)]
                assert all(handle.result()[0].ok for handle in handles)
            assert all(handle.verified(0.0) == handle.result() for handle in handles)


def test_what_cannot_be_hashed_beforehand_is_refused() -> None:
    paged = paged_kv()
    size, planes = paged.layout.part_bytes(4), len(paged.layout.planes)
    for kind, bands, verified_after, message in (
        ("host", [1, planes], 3, "verified_after .bands.: found 3, wanted at most 2"),
        ("host", [], 1, "verified_after .bands.: found 1, wanted at most 0"),
        ("device", [1, planes], 1, "wanted host memory"),
    ):
        with slots_in(kind, 1, size) as slots, cuda_copier(paged.layout) as copier:
            part = PartCopy(slots.address(0), range(4), 0, 0)
            with pytest.raises(CopyError, match=message):
                copier.scatter([part], bands=bands, verified_after=verified_after)
    with pytest.raises(CopyError, match="hash threads: found 0"), cuda_copier(paged.layout, CopyTuning(hash_threads=0)):
        pass


def bool_of_all(tensor: torch.Tensor, value: int) -> torch.Tensor:
    return (tensor.view(torch.uint8) == value).all()


def test_the_legacy_stream_is_stream_zero() -> None:
    paged = paged_kv()
    size = paged.layout.part_bytes(4)
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout) as copier:
        keep_busy(torch.cuda.default_stream(), LONG_CYCLES // 10)
        fill(paged, 9)
        assert copier.gather([PartCopy(slots.address(0), [3, 1, 4, 5])], after=0).result()[0].ok
        assert slots.read(0) == b"\x09" * size


def test_ends_come_in_order_and_are_counted_by_a_descriptor_that_can_be_polled() -> None:
    paged, stream = paged_kv(), new_stream()
    with slots_in("host", 3, paged.layout.part_bytes(8)) as slots, cuda_copier(paged.layout) as copier:
        keep_busy(stream, LONG_CYCLES)
        parts = [PartCopy(slots.address(i), range(8)) for i in range(3)]
        poll = select.poll()
        poll.register(copier.fileno(), select.POLLIN)
        handles = [copier.gather([part], after=stream_of(stream)) for part in parts]
        assert poll.poll(0) == [] and not any(handle.done() for handle in handles)
        ended = 0
        while ended < 3:
            assert poll.poll(10_000), "it never ended"
            ended += int.from_bytes(os.read(copier.fileno(), 8), "little")
            assert [handle.done() for handle in handles][:ended] == [True] * ended
        assert poll.poll(0) == []


def test_waiting_costs_no_gil() -> None:
    """Another thread gets on with Python while one waits for a copy behind a long kernel."""
    paged, stream = paged_kv(), new_stream()
    with slots_in("host", 1, paged.layout.part_bytes(8)) as slots, cuda_copier(paged.layout) as copier:
        keep_busy(stream, LONG_CYCLES * 2)
        handle = copier.gather([PartCopy(slots.address(0), range(8))], after=stream_of(stream))
        waiter = threading.Thread(target=handle.wait, args=(None,))
        waiter.start()
        turns = 0
        while waiter.is_alive():
            turns += 1
            time.sleep(0.001)  # a turn that wants the GIL back
        assert turns > 20
        assert handle.done()


def test_readers_of_shared_blocks_see_nothing_of_the_loads_beside_them() -> None:
    """Attention over blocks that requests share goes on while loads skip those blocks: its output never changes."""
    torch.manual_seed(time.monotonic_ns())
    paged = paged_kv()
    for tensor in paged.tensors:
        tensor.normal_()
    shared, part = 24, 32  # blocks [0, shared) are read all the time
    size = paged.layout.part_bytes(part)
    reading = new_stream()
    query = torch.randn(1, SHAPE.heads, 16, SHAPE.head_size, dtype=torch.bfloat16, device="cuda")

    def attend() -> torch.Tensor:
        out = []
        for tensor in paged.tensors:
            kv = tensor[:shared].transpose(0, 1).reshape(2, shared * SHAPE.tokens, SHAPE.heads, SHAPE.head_size)
            k, v = (one.transpose(0, 1).unsqueeze(0) for one in kv)
            out.append(torch.nn.functional.scaled_dot_product_attention(query, k, v))
        return torch.stack(out)

    with torch.cuda.stream(reading):
        wanted = attend()
    reading.synchronize()
    raw = [tensor[:shared].clone() for tensor in paged.tensors]
    for tuning in (STAGED, DIRECT):
        with slots_in("host", 2, size) as slots, cuda_copier(paged.layout, tuning) as copier:
            for i in range(2):
                slots.write(i, torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes())
            sums = [checksum(slots.read(i)) for i in range(2)]
            different = torch.zeros((), dtype=torch.int64, device="cuda")
            handles = []
            for round_ in range(40):
                own = range(shared, shared + 20)
                for i, skip in enumerate((shared - round_ % 5, shared)):
                    table = [*range(skip), *own][:part]
                    handles.append(copier.scatter([PartCopy(slots.address(i), table, skip, sums[i])]))
                with torch.cuda.stream(reading):
                    different += (attend() != wanted).sum()
            assert all(result.ok for handle in handles for result in handle.result())
            reading.synchronize()
            assert int(different) == 0
            assert all(torch.equal(tensor[:shared], was) for tensor, was in zip(paged.tensors, raw, strict=True))


def test_an_engines_own_copy_to_the_host_does_not_wait_for_a_stores_end() -> None:
    """As it does behind a copy engine that the store keeps busy."""
    paged, stream = paged_kv(), new_stream()
    ids, size = range(64), paged.layout.part_bytes(64)
    for tensor in paged.tensors:
        tensor.copy_(torch.randn_like(tensor))
    wanted = checksum(paged.reference(ids))
    with torch.cuda.stream(stream):
        token, there = torch.full((64,), 7, device="cuda"), torch.zeros(64, dtype=torch.int64).pin_memory()
        there.copy_(token, non_blocking=True)  # a first one loads what it needs
    with slots_in("host", 1, size) as slots, cuda_copier(paged.layout, CopyTuning().for_stores()) as copier:
        parts = [PartCopy(slots.address(0), ids)] * ((1 << 30) // size)
        waited = []  # by the slowest, as a share of the store
        for _ in range(5):
            there.zero_()
            torch.cuda.synchronize()
            began, slowest_s, store = time.perf_counter(), 0.0, copier.gather(parts)
            while not store.done():
                asked = time.perf_counter()
                with torch.cuda.stream(stream):
                    there.copy_(token, non_blocking=True)
                stream.synchronize()
                slowest_s = max(slowest_s, time.perf_counter() - asked)
            waited.append(slowest_s / (time.perf_counter() - began))
            assert bool((there == 7).all()) and {result.checksum for result in store.result()} == {wanted}
        assert statistics.median(waited) < 0.5, "some waited for the store's end"


def test_loads_and_stores_at_once_keep_their_bytes() -> None:
    paged = paged_kv()
    size = paged.layout.part_bytes(16)
    with (
        slots_in("host", 8, size) as slots,
        cuda_copier(paged.layout) as loads,
        cuda_copier(paged.layout, CopyTuning(piece_bytes=MIB, buffers=3, direct_store_bytes=0)) as stores,
    ):
        fresh = [torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes() for _ in range(2)]
        for i in range(2):
            slots.write(i, fresh[i])
        sums = [checksum(one) for one in fresh]
        kept = [[*range(32, 48)], [*range(48, 64)]]
        for ids in kept:
            for tensor in paged.tensors:
                tensor[ids] = torch.randn_like(tensor[ids])
        torch.cuda.synchronize()
        wanted = [paged.reference(ids) for ids in kept]
        for _ in range(30):
            into = torch.randperm(32).view(2, 16)
            load = loads.scatter([PartCopy(slots.address(i), into[i], 0, sums[i]) for i in range(2)])
            store = stores.gather([PartCopy(slots.address(2 + i), kept[i]) for i in range(2)])
            assert all(result.ok for result in load.result())
            assert [result.checksum for result in store.result()] == [checksum(one) for one in wanted]
            assert [paged.reference(into[i].tolist()) for i in range(2)] == fresh


def test_a_calibration_is_made_once_kept_and_made_again_when_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = paged_kv().layout
    made = []
    calibrate = tunings.calibrate

    def counted(info: _core.CudaDevice, geometry: tunings.Geometry) -> tunings.Calibration:
        made.append(geometry)
        return calibrate(info, geometry)

    scratch: list[weakref.ref[_core.CudaBuffer]] = []

    class Watched(tunings._Bench):
        def __init__(self, device: int, geometry: tunings.Geometry) -> None:
            super().__init__(device, geometry)
            scratch.extend(weakref.ref(buffer) for buffer in (self._host, self._paged))

    monkeypatch.setattr(tunings, "calibrate", counted)
    monkeypatch.setattr(tunings, "_Bench", Watched)
    first = tuned(layout, 0, part_blocks=16, cache_dir=tmp_path)
    assert tuned(layout, 0, part_blocks=16, cache_dir=tmp_path) == first and len(made) == 1
    gc.collect()
    assert [buffer() for buffer in scratch] == [None, None], "its scratch is given back"
    (kept,) = cached_tunings(tmp_path)
    assert kept.tuning == first and kept.device == torch.cuda.get_device_name(0)
    assert 0.5 < kept.load_share < 1.2 and 0.5 < kept.store_share < 1.2
    assert 1e9 < kept.plain_load_bytes_per_s < 1e12
    (path,) = tmp_path.glob("copy-*.json")
    path.write_text(json.dumps({"format": 1, "half": "a file"}))
    tuned(layout, 0, part_blocks=16, cache_dir=tmp_path)
    assert len(made) == 2 and len(cached_tunings(tmp_path)) == 1
    tuned(layout, 0, part_blocks=32, cache_dir=tmp_path)
    assert len(made) == 3


def test_calibrating_leaves_the_engines_memory_alone(tmp_path: Path) -> None:
    paged = paged_kv()
    paged.fill_guard()
    tuned(paged.layout, 0, part_blocks=16, cache_dir=tmp_path)
    torch.cuda.synchronize()
    assert all(bool((tensor.view(torch.uint8) == GUARD).all()) for tensor in paged.tensors)
