"""Measures the rate of plain copies on this machine, with which the rate of an engine's copies is compared.

In host memory it is the rate of memcpy with the copier's threads, measured here once in a process. On a GPU it is the
rate of one copy between page-locked memory and the device, as the calibration of copies measured it.
"""

from __future__ import annotations

import mmap
import time
from array import array
from ctypes import addressof, c_char
from functools import cache

from kvdock import _core
from kvdock.datapath.cuda import require_cuda
from kvdock.datapath.devices import Device
from kvdock.datapath.tuning import cached_tunings

SCRATCH_BYTES = 96 << 20
"""Larger than the caches of processors."""
PIECE_BYTES = 64 << 10
ROUNDS = 3
"""The first one is slower: its copies are the first to touch the memory that they write."""


def ceiling_bytes_per_s(device: Device, threads: int) -> float:
    """The bytes that plain copies copy in a second, by the best measurement. 0: not known, because copies on that GPU
    were not calibrated. Raises NoCuda."""
    if device.cuda is None:
        return _memcpy_bytes_per_s(threads)
    uuid = require_cuda(device.cuda).uuid
    return max((one.plain_load_bytes_per_s for one in cached_tunings() if one.uuid == uuid), default=0.0)


@cache
def _memcpy_bytes_per_s(threads: int) -> float:
    """Measures memcpy, which takes some tenths of a second. Only memcpy_pieces touches the memory: it lets the engine's
    thread run meanwhile."""
    with mmap.mmap(-1, SCRATCH_BYTES) as source, mmap.mmap(-1, SCRATCH_BYTES) as spare:
        from_, to = (
            array("Q", range(start, start + SCRATCH_BYTES, PIECE_BYTES)) for start in map(_address_of, (source, spare))
        )
        _core.memcpy_pieces(from_, to, PIECE_BYTES, threads=threads)  # the source has pages of its own from now on
        took_s = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            _core.memcpy_pieces(to, from_, PIECE_BYTES, threads=threads)
            took_s.append(time.perf_counter() - began)
    return SCRATCH_BYTES / min(took_s)


def _address_of(memory: mmap.mmap) -> int:
    return addressof(c_char.from_buffer(memory))
