"""The set-up for measuring GPU copies: registered segments of a real pool, paged blocks as torch tensors, and
clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvdock import _core
from kvdock.api.pool.segments import SegmentPool
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CudaCopier, CudaHandle
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.datapath.segments import AttachedSegments, CudaRegister, Registration
from kvdock.datapath.tuning import Geometry
from kvdock.shm.checksum import checksum
from kvdock.shm.segment import SegmentInfo

GIB: Final = 1 << 30
POISON: Final = 0xA5
_GAP_BYTES: Final = 4096
"""The gap between slots, so that no two slots can be copied as one piece."""


@dataclass(frozen=True)
class Shape(Geometry):
    """A geometry with a name; a block of a plane is one run."""

    name: str


SHAPES: Final = (
    Shape(160, 1 << 10, 1, 16, "1k"),
    Shape(160, 2 << 10, 1, 16, "2k"),
    Shape(160, 4 << 10, 1, 16, "4k"),
    Shape(64, 32 << 10, 1, 16, "32k"),
    Shape(61, 18 << 10, 1, 16, "mla_18k"),
    Shape(61, 72 << 10, 1, 4, "mla_72k"),
)
"""Shapes with 256 tokens a part: 16 blocks of 16 tokens, or 4 blocks of 64."""


class ThreeSegments:
    """Three registered segments of 1 GiB in one GPU's process: two hold slots, one serves plain copies."""

    def __init__(self, pool_id: int, infos: Sequence[SegmentInfo], device: int) -> None:
        self._attached = AttachedSegments(pool_id)
        self._registrations: list[Registration] = []
        self._infos = list(infos)
        register = CudaRegister(device)
        for info in infos:
            self._attached.attach(info)
            mapping = self._attached.mapping(info.id)
            self._registrations.append(register(mapping.address, mapping.bytes))

    @property
    def plain_at(self) -> int:
        last = self._infos[-1]
        return self._attached.address(last.id, last.data_offset, last.data_bytes)

    @property
    def plain_bytes(self) -> int:
        return self._infos[-1].data_bytes

    def slots(self, part_bytes: int, count: int, source: np.random.Generator) -> list[int]:
        """Addresses of `count` slots that do not touch, in a random order."""
        step = -(-part_bytes // 4096) * 4096 + _GAP_BYTES
        places = [
            (info, info.data_offset + at) for info in self._infos[:-1]
            for at in range(0, info.data_bytes - part_bytes + 1, step)
        ]
        chosen = [places[int(i)] for i in source.permutation(len(places))[:count]]
        return [self._attached.address(info.id, offset, part_bytes) for info, offset in chosen]

    def bytes_at(self, address: int, size: int) -> Any:
        """A uint8 view of registered memory."""
        for info in self._infos:
            base = self._attached.mapping(info.id).address
            if base <= address < base + info.bytes:
                view = np.frombuffer(memoryview(self._attached.mapping(info.id)), dtype=np.uint8)
                return view[address - base : address - base + size]
        raise ValueError(f"address: found {address}, wanted registered memory")

    def close(self) -> None:
        for registration in self._registrations:
            registration.close()
        self._attached.close()


@contextmanager
def segments() -> Iterator[tuple[int, list[SegmentInfo]]]:
    """A pool of three prefaulted segments, removed at the end."""
    pool = SegmentPool(int(np.random.default_rng().integers(1 << 62)), limit_bytes=3 * GIB, prefault_threads=8)
    try:
        infos = [pool.grow() for _ in range(3)]
        while pool.prefaulted_bytes() < pool.allocated_bytes:
            time.sleep(0.001)
        yield pool.pool_id, infos
    finally:
        pool.close()


class Case:
    """Parts of one shape, `total_bytes` in all: their blocks on a GPU and their slots, both in a shuffled order."""

    def __init__(self, shape: Shape, memory: ThreeSegments, total_bytes: int, device: int, seed: int) -> None:
        source = np.random.default_rng(seed)
        self.shape, self._memory, self._source = shape, memory, source
        self.parts = total_bytes // shape.part_bytes
        self.bytes = self.parts * shape.part_bytes
        blocks = self.parts * shape.part_blocks
        size = (shape.planes, blocks, 16, shape.run_bytes // 16)
        self.paged = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        self.layout: PagedLayout = paged_layout("NL_X_NB_BS_HS", list(self.paged), block_tokens=16)
        self.ids = torch.from_numpy(source.permutation(blocks)).view(self.parts, shape.part_blocks)
        self.slots = memory.slots(shape.part_bytes, self.parts, source)

    def copies(self, sums: Sequence[int | None]) -> list[PartCopy]:
        ids = self.ids.tolist()
        return [PartCopy(self.slots[i], ids[i], 0, sums[i]) for i in range(self.parts)]

    def fill_slots(self) -> list[int]:
        """Fills every slot with fresh random bytes; returns their checksums, by the CPU."""
        sums = []
        for slot in self.slots:
            view = self._memory.bytes_at(slot, self.shape.part_bytes)
            view[:] = np.frombuffer(self._source.bytes(len(view)), dtype=np.uint8)
            sums.append(checksum(memoryview(view)))
        return sums

    def verify(self, copier: CudaCopier) -> list[int]:
        """Scatters into poison, then gathers fresh blocks into poison, and compares. Returns the slots' checksums."""
        sums = self.fill_slots()
        self.paged.fill_(POISON)
        torch.cuda.synchronize()
        copier.scatter(self.copies(sums)).result()
        self.compare("scatter", sums)
        self.paged.random_(0, 256)
        self.poison_slots()
        torch.cuda.synchronize()
        sums = [result.checksum for result in copier.gather(self.copies([None] * self.parts)).result()]
        self.compare("gather", sums)
        return sums

    def poison_slots(self) -> None:
        for slot in self.slots:
            self._memory.bytes_at(slot, self.shape.part_bytes)[:] = POISON

    def compare(self, what: str, sums: Sequence[int] | None = None) -> None:
        """Raises AssertionError unless blocks and slots hold the same bytes, with the checksums `sums`."""
        device = self.paged.device
        torch.cuda.synchronize(device)
        for i, slot in enumerate(self.slots):
            view = self._memory.bytes_at(slot, self.shape.part_bytes)
            in_blocks = self.paged[:, self.ids[i].to(device)].reshape(-1)
            if not torch.equal(in_blocks, torch.from_numpy(view).to(device)):
                raise AssertionError(f"{what} of {self.shape.name} moved wrong bytes in part {i}")
            if sums is not None and sums[i] != checksum(memoryview(view)):
                raise AssertionError(f"{what} of {self.shape.name}: checksum of part {i} differs")


class Clock:
    """Times, with the GPU's clock, work that is ordered on a stream of its own."""

    def __init__(self, device: int) -> None:
        self._watch = _core.CudaStopwatch(device=device)
        self.stream = self._watch.stream

    def ms(self, work: Callable[[], object]) -> float:
        self._watch.start()
        work()
        return self._watch.stop_ms()

    def load_ms(self, copier: CudaCopier, parts: Sequence[PartCopy]) -> float:
        return self._copy_ms(copier.scatter, parts)

    def store_ms(self, copier: CudaCopier, parts: Sequence[PartCopy]) -> float:
        return self._copy_ms(copier.gather, parts)

    def _copy_ms(self, call: Callable[..., CudaHandle], parts: Sequence[PartCopy]) -> float:
        """Raises RuntimeError when a part has another checksum than expected: a copy that failed is not a fast one."""
        self._watch.start()
        handle = call(parts, after=self.stream)
        handle.order(self.stream)
        took_ms = self._watch.stop_ms()
        if not all(result.ok for result in handle.result()):
            raise RuntimeError("a timed copy has wrong checksums")
        return took_ms

    def plain(self, to: int, from_: int, size: int, *, to_device: bool) -> None:
        """Puts one plain copy on the stream."""
        self._watch.copy(to, from_, size, to_device=to_device)


def in_turns(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Pairs of `first` and `second`, which take turns in running first; one round to warm up is dropped."""
    pairs = []
    for index in range(rounds + 1):
        if index % 2:
            second_ms, first_ms = second(), first()
        else:
            first_ms, second_ms = first(), second()
        pairs.append((first_ms, second_ms))
    return pairs[1:]


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(first / second for first, second in pairs)
