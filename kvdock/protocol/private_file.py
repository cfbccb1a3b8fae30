"""Files that only their owner may write and read: access tokens, and the file that says which exist."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvdock.protocol.errors import KvdockError

MAX_BYTES: Final = 1 << 20
FORBIDDEN_BITS: Final = 0o037
"""The group may read: where files belong to root, as in containers, it is how a server reads them."""


class PrivateFileError(KvdockError, ValueError):
    """The file cannot be read, or others may read or write it; the message names the file."""


def read_private(path: str | Path) -> str:
    """The text of a regular file of this user or root that others can neither write to nor read. PrivateFileError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="utf-8") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
                raise PrivateFileError(f"{path}: found {_shown(found)}, wanted a file of user {os.geteuid()} or root")
            if found.st_mode & FORBIDDEN_BITS:
                raise PrivateFileError(f"{path}: found {_shown(found)}, wanted one that others cannot open: chmod 600")
            if found.st_size > MAX_BYTES:
                raise PrivateFileError(f"{path}: found {found.st_size} bytes, wanted at most {MAX_BYTES}")
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise PrivateFileError(f"{path}: {error}") from error


def _shown(found: os.stat_result) -> str:
    return f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
