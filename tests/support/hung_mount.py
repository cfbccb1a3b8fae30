"""A FUSE file system that answers nothing but what it is: whoever asks it for a file hangs in the kernel, and cannot
even be killed. It speaks the kernel's protocol (fuse(4)) itself."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

GETATTR, INIT = 3, 26
HEADER = struct.Struct("=IIQQIIII")
"""Length, operation, number, node, user, group, process, padding."""
ANSWER = struct.Struct("=IiQ")
"""Length, error, number."""
INITED = struct.Struct("=IIIIHHII32x")
"""Major and minor version, read-ahead, flags, most and many in the background, largest write, granularity of time."""
ATTRIBUTES = struct.Struct("=QIIQQQQQQIIIIIIIIII")
"""For how long they hold, and what stat(2) gives of the root."""
MNT_FORCE, MNT_DETACH = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _answer(operation: int) -> bytes | None:
    if operation == INIT:
        return INITED.pack(7, 31, 0, 0, 0, 0, 4096, 1)
    if operation == GETATTR:
        attributes = (1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o700, 2, 0, 0, 0, 4096, 0)
        return ATTRIBUTES.pack(60, 0, 0, *attributes)
    return None


def _serve(device: int, asked: threading.Event) -> None:
    with suppress(OSError):  # it was unmounted
        while True:
            _, operation, number, *_ = HEADER.unpack_from(os.read(device, 1 << 17))
            if (body := _answer(operation)) is not None:
                os.write(device, ANSWER.pack(ANSWER.size + len(body), 0, number) + body)
            else:
                asked.set()


@contextmanager
def hung_mount(folder: Path) -> Iterator[threading.Event]:
    """At the empty folder; the event is set once somebody hangs. At the end calls that hang there fail, and end."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        # .ci/run fails where a test skips itself.
        pytest.skip(f"FUSE cannot be used here: {error}")
    try:
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if _libc.mount(b"kvdock-test", os.fsencode(folder), b"fuse", 0, options):
            pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        asked = threading.Event()
        threading.Thread(target=_serve, args=(device, asked), daemon=True).start()
        try:
            yield asked
        finally:
            assert _libc.umount2(os.fsencode(folder), MNT_FORCE | MNT_DETACH) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(device)
