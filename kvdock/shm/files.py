"""Files that outlive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path

from kvdock.shm.objects import fresh_path


def replace_durably(path: Path, content: bytes) -> None:
    """Gives the file this content, for its user alone, and returns when that is on the disk. A process that dies on the
    way leaves the file as it was, and perhaps a file beside it, which the next call overwrites. Raises OSError."""
    fresh = fresh_path(path)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
