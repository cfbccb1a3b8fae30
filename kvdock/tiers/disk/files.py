"""The files of the segments. Not all of them are open: one that was closed for another is opened again when it is used,
so a disk may have more segments than the process may have descriptors."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SHARE: Final = 2
"""One descriptor of so many that the process may have is for a segment."""
_LEAST_OPEN: Final = 16
_NO_MORE: Final = (errno.EMFILE, errno.ENFILE)


def most_open() -> int:
    """How many files of segments this process may keep open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_LEAST_OPEN, soft // _SHARE)


class File:
    """`fd`: -1 while the file is closed; `uses`: of the descriptor, by threads now. Files guards both."""

    __slots__ = ("fd", "path", "uses")

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd, self.uses = path, fd, 0


class Files:
    """Thread-safe. `flags`: of os.open() for a file that may be read and written."""

    def __init__(self, flags: int, most: int) -> None:
        self._flags, self._most, self._lock = flags, most, threading.Lock()
        self._open: OrderedDict[File, None] = OrderedDict()
        """Those that are open; the one that was used last is at the end."""
        self.is_read_only = False
        """Whether a file could only be opened for reading, since the file system is read-only."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """A new file has mode 0600. On a read-only file system the file can only be read. Raises OSError."""
        with self._lock:
            file = File(path, self._opened(path, create=create))
            self._open[file] = None
            return file

    @contextmanager
    def using(self, file: File) -> Iterator[int]:
        """Gets a descriptor, which stays open meanwhile. Raises OSError."""
        with self._lock:
            if file.fd < 0:
                file.fd = self._opened(file.path)
                self._open[file] = None
            self._open.move_to_end(file)
            file.uses += 1
            fd = file.fd
        try:
            yield fd
        finally:
            with self._lock:
                file.uses -= 1

    def close(self, file: File) -> None:
        """Nobody uses the file any more."""
        with self._lock:
            self._close(file)

    def _opened(self, path: Path, *, create: bool = False) -> int:
        if len(self._open) >= self._most:
            self._close_idle()
        while True:
            try:
                return os.open(path, self._flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
            except OSError as error:
                if error.errno in _NO_MORE and self._close_idle():
                    continue
                if create or error.errno != errno.EROFS:
                    raise
                self.is_read_only = True
                return os.open(path, self._flags & ~os.O_RDWR)

    def _close_idle(self) -> bool:
        """Closes the file that nobody has used for longest. Returns whether there was one."""
        idle = next((file for file in self._open if file.uses == 0), None)
        if idle is not None:
            self._close(idle)
        return idle is not None

    def _close(self, file: File) -> None:
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1
            del self._open[file]
