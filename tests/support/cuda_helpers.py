"""For tests on a GPU: marks, copiers of every kind, and slots in page-locked or device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from bytes_helpers import Slots

from kvdock import _core
from kvdock.datapath.cuda import CopyTuning, CudaCopier
from kvdock.datapath.layout import PagedLayout

cuda: Any = torch.cuda
WHY_NOT = _core.cuda_unavailable()
GPUS = 0 if WHY_NOT else len(_core.cuda_devices())
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a GPU")]
needs_two_gpus = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=WHY_NOT or f"{GPUS} GPU, 2 wanted")]

MIB: Final = 1 << 20
STAGED: Final = CopyTuning(piece_bytes=MIB, direct_load_bytes=0, direct_store_bytes=0, least_band_bytes=0)
DIRECT: Final = replace(STAGED, direct_load_bytes=1 << 40, direct_store_bytes=1 << 40)
WAYS: Final = {"staged": STAGED, "direct": DIRECT}


class LockedBytes:
    """Allocates page-locked memory (`host`) or the device's, in which slots may lie; keeps it."""

    def __init__(self, *, host: bool, device: int = 0) -> None:
        self._host, self._device = host, device
        self._kept: list[object] = []

    def __call__(self, size: int) -> torch.Tensor:
        if not self._host:
            tensor = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
            self._kept.append(_core.CudaSlotMemory(
                device=self._device, address=tensor.data_ptr(), bytes=size, host=False
            ))
            return tensor
        buffer = _core.CudaBuffer(device=self._device, bytes=size, host=True)
        self._kept.append(buffer)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(buffer.address), dtype=torch.uint8)

    def close(self) -> None:
        for kept in self._kept:
            if isinstance(kept, _core.CudaSlotMemory):
                kept.close()
        self._kept.clear()


@contextmanager
def slots_in(kind: str, count: int, slot_bytes: int, device: int = 0) -> Iterator[Slots]:
    """`kind`: "host" or "device"."""
    memory = LockedBytes(host=kind == "host", device=device)
    try:
        yield Slots(count, slot_bytes, memory)
    finally:
        memory.close()


@contextmanager
def cuda_copier(layout: PagedLayout, tuning: CopyTuning = STAGED, device: int = 0) -> Iterator[CudaCopier]:
    # What torch has put on its stream (fresh random data, say) comes before the copies of a test.
    torch.cuda.synchronize(device)
    copier = CudaCopier(layout, device=device, tuning=tuning)
    try:
        yield copier
    finally:
        copier.close()


def new_stream() -> Any:
    """A torch.cuda.Stream, whose own module has no types."""
    return cuda.Stream()


def stream_of(stream: Any) -> int:
    """A torch stream as the copier takes it."""
    return int(stream.cuda_stream)


def keep_busy(stream: Any, cycles: int) -> None:
    """A kernel on `stream` that spins for so many clock cycles."""
    with torch.cuda.stream(stream):
        cuda._sleep(cycles)
