"""How a GPU's copy of raw and packed parts is divided and reported: copiers on the CPU stand in for a GPU's."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from bytes_helpers import Paged, Shape, Slots

from kvdock.datapath.copy import CopyHandle, CpuCopier, DescribedParts, PartCopy, PartResult, ScatterParts
from kvdock.datapath.cuda import CudaCopier
from kvdock.datapath.cuda_packed import PackedCudaCopier, TwoKinds
from kvdock.datapath.errors import CopierClosed, CudaError
from kvdock.shm.checksum import checksum

NAME, IDS = "NL_X_NB_TWO_BS_NH_HS", [[0, 1], [2, 3], [4, 5]]
KINDS = [True, False, True]
"""Which parts are packed."""


class Handle:
    """A copy with the CPU that answers like a CudaHandle. `error`: that of a failed copy; `seconds`: what it took."""

    def __init__(self, copied: CopyHandle, parts: Sequence[PartCopy], error: Exception | None, seconds: float) -> None:
        self._copied, self._parts, self._error, self._seconds = copied, parts, error, seconds
        self.waits = 0

    def done(self) -> bool:
        return self._copied.done()

    def wait(self, timeout_s: float | None) -> bool:
        self.waits += 1
        return self._copied.wait(timeout_s)

    def fit(self) -> list[bool]:
        return [found.fits for found in self._found()]

    def result(self) -> list[PartResult]:
        """Like a GPU's, which compares checksums alone; fit() says whether a slot holds a packed part."""
        return [
            PartResult(found.checksum, found.ok if found.fits else part.checksum is not None)
            for found, part in zip(self._found(), self._parts, strict=True)
        ]

    def wrong(self) -> list[int]:
        return [at for at, result in enumerate(self.result()) if not result.ok]

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        return self.result() if self.wait(timeout_s) else None

    def took_s(self) -> float | None:
        return self._seconds

    def _found(self) -> list[PartResult]:
        if self._error is not None:
            raise self._error
        return self._copied.result()


class OnCpu:
    """A CpuCopier that takes the arguments of a CudaCopier."""

    def __init__(self, copier: CpuCopier, seconds: float) -> None:
        self.copier, self.seconds = copier, seconds
        self.error: Exception | None = None
        self.handles: list[Handle] = []

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> Handle:
        return self._kept(self.copier.gather(parts), parts)

    def scatter(self, parts: ScatterParts, **_: Any) -> Handle:
        one_by_one = parts.copies() if isinstance(parts, DescribedParts) else parts
        return self._kept(self.copier.scatter(parts), one_by_one)

    def _kept(self, copied: CopyHandle, parts: Sequence[PartCopy]) -> Handle:
        self.handles.append(Handle(copied, parts, self.error, self.seconds))
        return self.handles[-1]


class Rig:
    """Blocks in memory, a slot for each part, and the copier under test."""

    def __init__(self) -> None:
        self.paged = Paged(NAME, torch.bfloat16, Shape(layers=2, blocks=6, tokens=16, heads=2, head_size=128))
        for layer, kv in self.paged.planes():
            for block in range(6):
                view = self.paged.block(layer, kv, block)
                view.copy_(torch.randn(view.shape).to(torch.bfloat16))
        self.shape = self.paged.layout.packed_shape(2, units=1000)
        raw_bytes = self.paged.layout.part_bytes(2)
        self.slots = Slots(3, max(raw_bytes, self.shape.packed_bytes))
        self.lengths = [self.shape.packed_bytes if kind else raw_bytes for kind in KINDS]
        self.raw = OnCpu(CpuCopier(self.paged.layout, threads=1), 1.0)
        self.packed = OnCpu(CpuCopier(self.paged.layout, threads=1, packing=self.shape), 3.0)
        self.copier = PackedCudaCopier(
            self.paged.layout, cast(CudaCopier, self.raw), cast(CudaCopier, self.packed), self.shape.packed_bytes
        )

    def stored(self, at: int) -> bytes:
        return self.slots.read(at)[: self.lengths[at]]

    def store(self) -> TwoKinds:
        return self.copier.gather([
            PartCopy(self.slots.address(at), ids, length=self.lengths[at]) for at, ids in enumerate(IDS)
        ])

    def load(self) -> TwoKinds:
        return self.copier.scatter([
            PartCopy(self.slots.address(at), ids, 0, checksum(self.stored(at)), self.lengths[at])
            for at, ids in enumerate(IDS)
        ])


def test_parts_of_both_kinds_are_reported_in_their_order() -> None:
    rig = Rig()
    wanted = [rig.paged.reference(ids) for ids in IDS]
    found = rig.store().result()
    assert [(one.checksum, one.ok, one.fits) for one in found] == [
        (checksum(rig.stored(at)), True, True) for at in range(3)
    ]
    assert rig.stored(1) == wanted[1]
    rig.paged.fill_guard()
    loaded = rig.load()
    verified = loaded.verified(None)
    assert verified is not None and all(one.ok for one in (*verified, *loaded.result()))
    assert [rig.paged.reference(ids) for ids in IDS] == wanted


@pytest.mark.parametrize("chosen", [(0, 1, 2), (0, 2), (1,)], ids=["both kinds", "packed", "raw"])
def test_parts_that_the_core_describes_are_copied_and_those_that_are_wrong_are_told(chosen: tuple[int, ...]) -> None:
    rig = Rig()
    wanted = [rig.paged.reference(IDS[at]) for at in chosen]
    rig.store().wait(None)
    sums = [checksum(rig.stored(at)) for at in chosen]
    for damaged in (None, len(chosen) - 1):
        rig.paged.fill_guard()
        expected = [value ^ (at == damaged) for at, value in enumerate(sums)]
        handle = rig.copier.scatter(DescribedParts(
            memoryview(array("Q", [rig.slots.address(at) for at in chosen])),
            memoryview(array("q", [block for at in chosen for block in IDS[at]])),
            memoryview(array("q", range(0, 2 * len(chosen) + 1, 2))), memoryview(array("q", [0] * len(chosen))),
            memoryview(array("Q", expected)), memoryview(array("q", [rig.lengths[at] for at in chosen])),
        ))
        assert handle.wrong() == ([] if damaged is None else [damaged])
        if damaged is None:
            assert [rig.paged.reference(IDS[at]) for at in chosen] == wanted


def test_a_call_takes_as_long_as_its_later_copy() -> None:
    handle = Rig().store()
    handle.wait(None)
    assert handle.took_s() == 3.0


@pytest.mark.parametrize("call", ["store", "load"])
def test_no_copy_runs_on_when_the_other_is_refused(call: str) -> None:
    rig = Rig()
    rig.packed.copier.close()
    with pytest.raises(CopierClosed):
        getattr(rig, call)()
    assert [handle.waits for handle in rig.raw.handles] == [1]


def test_a_failed_store_ends_and_its_result_says_why() -> None:
    rig = Rig()
    rig.packed.error = CudaError("a failed copy: found an error, wanted a copy")
    handle = rig.store()
    assert handle.wait(60.0) and handle.done()
    with pytest.raises(CudaError, match="a failed copy"):
        handle.result()


def test_a_slot_that_holds_no_packed_part_is_not_verified() -> None:
    rig = Rig()
    rig.store().result()
    rig.slots.write(2, random.randbytes(rig.lengths[2]))  # its checksum is right: load() takes it from the slot
    loaded = rig.load()
    verified = loaded.verified(None)
    assert verified is not None and [one.ok for one in verified] == [True, True, False]
    assert [one.ok for one in loaded.result()] == [True, True, False]
