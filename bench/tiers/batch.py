"""Parts in shared memory, for any tier: stored, loaded back, and compared."""

from __future__ import annotations

import os
import random
import secrets
import time

from kvdock._core import Mapping
from kvdock.shm import objects
from kvdock.shm.checksum import checksum
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import Deadline, Outcome, Tier, ToLoad, ToStore

MIB = 1 << 20
SIZES_MIB = (2, 4, 8, 16, 32)
LIMIT_S = 300.0


def pool_memory(size_bytes: int) -> Mapping:
    """As a server makes the memory of a pool, but without a name: how many pages it has in one piece decides how fast
    storage reads and writes it. Raises PoolTooSmall."""
    name = objects.segment_name(secrets.randbits(64), 0, secrets.randbits(64))
    fd = objects.create(name, size_bytes)
    try:
        objects.unlink(name)
        return Mapping(fd, size_bytes)
    finally:
        os.close(fd)


class Batch:
    """Parts of all sizes, `mib` in sum, in one piece of a pool's memory: once to store, once to load into."""

    def __init__(self, mib: int, seed: int) -> None:
        self._memory = pool_memory(2 * mib * MIB)
        view, draw = memoryview(self._memory), random.Random(seed)
        for begin in range(0, mib * MIB, MIB):
            view[begin : begin + MIB] = draw.randbytes(MIB)
        sizes: list[int] = []
        while (left := mib - sum(sizes)) > 0:
            sizes.append(min(SIZES_MIB[len(sizes) % len(SIZES_MIB)], left))
        self.source, self.target, begin = [], [], 0
        for size in sizes:
            end = begin + size * MIB
            self.source.append(view[begin:end])
            self.target.append(view[mib * MIB + begin : mib * MIB + end])
            begin = end
        self.sums = [checksum(part) for part in self.source]
        self.bytes = mib * MIB

    def round(self, tier: Tier, number: int) -> tuple[float, float]:
        """(store, load) in GB/s; the parts are deleted afterwards. AssertionError if anything differs."""
        names = [PartName(number.to_bytes(32, "big"), at.to_bytes(32, "big"), 0, 0) for at in range(len(self.source))]
        stores = [
            ToStore(Record(name, len(pages), total), pages)
            for name, pages, total in zip(names, self.source, self.sums, strict=True)
        ]
        loads = [ToLoad(name, len(pages), pages) for name, pages in zip(names, self.target, strict=True)]
        for pages in self.target:
            pages[:: len(pages) // 64] = bytes(len(pages[:: len(pages) // 64]))
        began = time.perf_counter()
        stored = tier.store(stores, Deadline(LIMIT_S))
        between = time.perf_counter()
        loaded = tier.load(loads, Deadline(LIMIT_S))
        ended = time.perf_counter()
        assert set(stored) == {Outcome.DONE} == {answer.outcome for answer in loaded}, "not all of it was moved"
        assert self.source == self.target, "other bytes came back"
        tier.delete(names, Deadline(LIMIT_S))
        return self.bytes / (between - began) / 1e9, self.bytes / (ended - between) / 1e9
