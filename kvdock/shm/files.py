"""Files that outlive a crash of the machine."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvdock.shm.objects import fresh_path


def read_regular(path: Path, at_most: int) -> bytes:
    """The content of a file. Raises OSError, also if it is longer, or a pipe, a device, a folder or a link, so that
    nobody waits for what never comes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"found {stat.filemode(found.st_mode)}, wanted a file")
        if found.st_size > at_most:
            raise OSError(errno.EFBIG, f"found {found.st_size} bytes, wanted at most {at_most}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def replace_durably(path: Path, content: bytes) -> None:
    """Gives the file this content, for its user alone, and returns when that is on the disk. A process that dies on the
    way leaves the file as it was, and perhaps a file beside it, which the next call overwrites. Raises OSError."""
    fresh = fresh_path(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(fresh, flags, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
