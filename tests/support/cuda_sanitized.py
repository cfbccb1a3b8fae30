"""A small set of every kind of copy, for compute-sanitizer: no torch, so that only our own kernels are looked at.

    compute-sanitizer --tool memcheck python tests/support/cuda_sanitized.py
"""

from __future__ import annotations

import ctypes
import random
from array import array
from dataclasses import replace

from kvdock import _core
from kvdock.datapath.cuda import CopyTuning
from kvdock.shm.checksum import checksum, ensure_keys

MIB = 1 << 20
BLOCKS = 64
COUNTS = (10, 1, 0, 30)
"""Blocks of each part of a call."""
SKIPS = array("q", [3, 1, 0, 29])


def planes_at(base: int) -> dict[str, list[tuple[int, int, int, int, int]]]:
    """Every variant of the kernels: planes alike or not, granules of 128 or of 16 bytes, one run or several."""
    return {
        "wide": [(base + p * BLOCKS * 2048, 2048, 2048, 1, 2048) for p in range(6)],
        "narrow": [(base + p * BLOCKS * 2064, 2064, 2064, 1, 2064) for p in range(6)],
        "mixed wide": [
            (base, 2048, 2048, 1, 2048), (base + BLOCKS * 2048, 512, 256, 2, 256),
            (base + 2 * MIB, 1024, 1024, 1, 1024),
        ],
        "mixed narrow": [
            (base, 2064, 2064, 1, 2064), (base + BLOCKS * 2064, 544, 272, 2, 272),
            (base + 2 * MIB, 1040, 1040, 1, 1040),
        ],
        "runs": [(base + p * BLOCKS * 4096, 4096, 256, 8, 512) for p in range(5)],
    }


def copy_all_ways(layout: _core.PagedLayout, slots_at: int, tuning: CopyTuning, *, host: bool) -> None:
    """Random slots into blocks, back, and again with skips: the three sums agree, and with the CPU's."""
    ids = random.sample(range(BLOCKS), BLOCKS)
    slots, use, starts, at = array("Q"), array("q"), array("q", [0]), slots_at
    for count in COUNTS:
        slots.append(at)
        at += -(-layout.block_bytes * count // 4096) * 4096 + 4096
        use.extend(ids[len(use) : len(use) + count])
        starts.append(len(use))
    copier = _core.CudaCopier(device=0, **tuning.for_core())
    blocks = copier.add_layout(layout, part_blocks=BLOCKS)
    loaded = copier.scatter(blocks, slots, use, starts, array("q", [0] * len(COUNTS))).checksums()
    stored = copier.gather(blocks, slots, use, starts).checksums()
    skipped = copier.scatter(blocks, slots, use, starts, SKIPS).checksums()
    copier.close()
    assert loaded == stored == skipped
    if host:
        data = [(ctypes.c_char * (layout.block_bytes * n)).from_address(a) for a, n in zip(slots, COUNTS, strict=True)]
        assert loaded == [checksum(memoryview(one).cast("B")) for one in data]


def pack_and_unpack(planes: list[tuple[int, int, int, int, int]], host_at: int, random_at: int) -> None:
    """Blocks with sharp exponents and random ones into packed slots and back, with skips; the sums agree with the
    CPU's, whatever fits."""
    layout = _core.PagedLayout(planes, num_blocks=BLOCKS, block_tokens=1)
    ids = array("q", random.sample(range(BLOCKS), BLOCKS))
    shape = _core.PackedShape([run * runs * BLOCKS // 2 for _, _, run, runs, _ in planes], marks=176, units=2000)
    copier = _core.CudaCopier(device=0, **CopyTuning(piece_bytes=MIB).for_core())
    packed = copier.add_layout(layout, part_blocks=BLOCKS // 2, packed=(176, 2000))
    plain = copier.add_layout(layout, part_blocks=BLOCKS)
    copier.scatter(plain, array("Q", [random_at]), ids, array("q", [0, BLOCKS]), array("q", [0])).checksums()
    step = -(-shape.packed_bytes // 4096) * 4096 + 4096
    slots, starts = array("Q", [host_at, host_at + step]), array("q", [0, BLOCKS // 2, BLOCKS])
    stored = copier.gather(packed, slots, ids, starts)
    loaded = copier.scatter(packed, slots, ids, starts, array("q", [0, 5]))
    found = stored.checksums(), loaded.checksums()
    data = [(ctypes.c_char * shape.packed_bytes).from_address(slot) for slot in slots]
    sums = [checksum(memoryview(one).cast("B")) for one in data]
    assert found == (sums, sums)
    part = bytearray(shape.raw_bytes)
    assert [_core.unpack_part(shape, memoryview(one).cast("B"), part) for one in data] == loaded.fit()
    ctypes.memmove(host_at, random.randbytes(2 * step), 2 * step)
    assert copier.scatter(packed, slots, ids, starts, array("q", [0, 5])).fit() == [False, False]
    copier.close()


def some_bf16(count: int) -> bytes:
    """Elements with exponents as KV has them, but a few groups of 64 with any."""
    words = array("H")
    for at in range(count):
        sharp = at // 64 % 700
        exponent = 127 - min(int(random.expovariate(0.7)), 20) if sharp else random.randrange(256)
        words.append(random.randrange(2) << 15 | exponent << 7 | random.randrange(128))
    return words.tobytes()


def main() -> None:
    ensure_keys(8 * MIB)
    host = _core.CudaBuffer(device=0, bytes=8 * MIB, host=True)
    blocks = _core.CudaBuffer(device=0, bytes=8 * MIB, host=False)
    on_device = _core.CudaBuffer(device=0, bytes=4 * MIB, host=False)
    ctypes.memmove(host.address, random.randbytes(8 * MIB), 8 * MIB)
    watch = _core.CudaStopwatch(device=0)
    watch.start()
    watch.copy(on_device.address, host.address, 4 * MIB, to_device=True)
    watch.stop_ms()
    staged = CopyTuning(piece_bytes=MIB, direct_load_bytes=0, direct_store_bytes=0)
    direct = replace(staged, direct_load_bytes=8 * MIB, direct_store_bytes=8 * MIB)
    for planes in planes_at(blocks.address).values():
        layout = _core.PagedLayout(planes, num_blocks=BLOCKS, block_tokens=1)
        for tuning in (staged, direct):
            copy_all_ways(layout, host.address, tuning, host=True)
            copy_all_ways(layout, on_device.address, tuning, host=False)
    random_at = host.address + 4 * MIB
    for some in (some_bf16(MIB // 2), random.randbytes(MIB)):
        ctypes.memmove(random_at, some, MIB)
        for name in ("wide", "narrow", "mixed narrow", "runs"):
            pack_and_unpack(planes_at(blocks.address)[name], host.address, random_at)
    print("all sums agree")


if __name__ == "__main__":
    main()
