"""Page-locking for machines without a GPU: mlock, with the kernel's own accounting and its own refusals."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_IPC_LOCK = 14


class MemoryLock:
    """A datapath.registration.Register: memory that the kernel may not swap out; refused beyond RLIMIT_MEMLOCK."""

    class Locked:
        def __init__(self, address: int, size_bytes: int) -> None:
            self.address, self.size_bytes = address, size_bytes
            _check(_libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)))

        def close(self) -> None:
            _check(_libc.munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes)))

    def __call__(self, address: int, size_bytes: int) -> Locked:
        return self.Locked(address, size_bytes)


class GatedLock(MemoryLock):
    """Waits at a gate before it locks, so that a test can look at what is half done."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def __call__(self, address: int, size_bytes: int) -> MemoryLock.Locked:
        self.reached.set()
        assert self.gate.wait(20.0)
        return super().__call__(address, size_bytes)


def locked_bytes() -> int:
    """What this process has locked, as the kernel counts it."""
    found = re.search(r"^VmLck:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def no_locked_memory() -> Iterator[None]:
    """This thread, and those it starts meanwhile, may lock nothing: the limit is 0 and root's privilege is gone.

    Threads it started keep their lack of privilege; the limit is the process's, and comes back at the end."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    before = _effective()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    _set_effective(before & ~(1 << _CAP_IPC_LOCK))
    try:
        yield
    finally:
        _set_effective(before)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _capabilities() -> ctypes.Array[_Data]:
    data = (_Data * 2)()
    _check(_libc.capget(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), data))
    return data


def _effective() -> int:
    low: int = _capabilities()[0].effective
    return low


def _set_effective(low: int) -> None:
    data = _capabilities()
    data[0].effective = low
    _check(_libc.capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), data))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
