"""A file system of some MiB in memory, for what happens when a real one is full."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MNT_DETACH = 2
MS_RDONLY, MS_REMOUNT = 1, 32
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def little_mount(folder: Path, size_bytes: int) -> Iterator[None]:
    """At the empty folder."""
    if _libc.mount(b"kvdock-test", os.fsencode(folder), b"tmpfs", 0, f"size={size_bytes},mode=700".encode()):
        # .ci/run fails where a test skips itself.
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        _libc.umount2(os.fsencode(folder), MNT_DETACH)


def make_read_only(folder: Path) -> None:
    """No file there may be open for writing."""
    if _libc.mount(b"kvdock-test", os.fsencode(folder), b"tmpfs", MS_REMOUNT | MS_RDONLY, None):
        raise OSError(ctypes.get_errno(), f"{folder} cannot be made read-only")


def fill(folder: Path) -> None:
    """Leaves no page free."""
    fd = os.open(folder / "filling", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        return
    finally:
        os.close(fd)
