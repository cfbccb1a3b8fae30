"""Reads and writes of whole pages, by a few threads: straight between memory and storage (O_DIRECT), or through the
page cache where the file system has no other way.

Python drops the GIL in each of these calls. Long ones are cut into pieces, so that one part keeps several threads busy.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from kvdock.tiers.disk.folder import TIER
from kvdock.tiers.tier import PAGE_BYTES, TierError

PIECE_BYTES: Final = 4 << 20
THREADS: Final = 8
FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The storage, a quota or a limit of the process leaves no room."""
LOST_ERRORS: Final = frozenset({errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EBADF, errno.ESHUTDOWN})
"""No later call would fare better."""


def raise_if_lost(error: OSError) -> None:
    """Raises TierError where the storage as a whole is lost."""
    if error.errno in LOST_ERRORS:
        raise TierError(TIER, f"the storage is lost: {error}") from error


def takes_direct(folder: Path) -> bool:
    """Whether files there can be read and written past the page cache: tried with a file that has no name.

    Raises OSError where not even that can be made.
    """
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.pwritev(fd, [page], 0) == PAGE_BYTES == os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        if error.errno in FULL_ERRORS:
            return True
        raise
    finally:
        os.close(fd)


def _behind(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of them after so many bytes."""
    for index, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= len(buffer)
    return []


def _pieces(buffers: Sequence[memoryview], most_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """(where it begins, buffers) for each piece of at most `most_bytes`, a multiple of PAGE_BYTES."""
    begin, rest = 0, list(buffers)
    while rest:
        piece, room = [], most_bytes
        for buffer in rest:
            piece.append(buffer[:room])
            room -= len(piece[-1])
            if room == 0:
                break
        yield begin, piece
        begin, rest = begin + most_bytes - room, _behind(rest, most_bytes - room)


class Transfer:
    """One record's bytes under way."""

    def __init__(self, pieces: list[Future[bool]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def end(self) -> bool:
        """Waits until nothing of it touches its memory any more. False: the file ended before the record did.

        Raises the OSError of a piece, but not before all of them have ended.
        """
        wait(self._pieces)
        return all(piece.result() for piece in self._pieces)


class Headers:
    """Page-aligned blocks for records' headers, used again and again. Safe for threads."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()

    def take(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, PAGE_BYTES))

    def give_back(self, block: memoryview) -> None:
        self._free.append(block)


class Io:
    """The threads that read and write, and how files are opened. `direct`: past the page cache."""

    def __init__(self, *, direct: bool, threads: int = THREADS) -> None:
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self._pool = ThreadPoolExecutor(threads, "kvdock-disk")
        self.most_pieces = 2 * threads
        """So many pieces under way keep every thread busy."""
        self.headers = Headers()
        self._lock = threading.Lock()
        self.wear_bytes = 0
        """Written since it was made."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """Its descriptor, mode 0600. Raises OSError."""
        return os.open(path, self._flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
        """False: the file ends before. Raises OSError."""
        rest, done = list(buffers), 0
        while rest:
            moved = os.preadv(fd, rest, offset + done)
            if moved == 0 or moved % PAGE_BYTES:
                return False
            rest, done = _behind(rest, moved), done + moved
        return True

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
        """True. Raises OSError."""
        rest, done = list(buffers), 0
        while rest:
            moved = os.pwritev(fd, rest, offset + done)
            if moved == 0 or moved % PAGE_BYTES:
                raise OSError(errno.ENOSPC, "the storage took less than whole pages")
            rest, done = _behind(rest, moved), done + moved
        with self._lock:
            self.wear_bytes += done
        return True

    def begin(self, call: Move, fd: int, buffers: Sequence[memoryview], offset: int) -> Transfer:
        """`call`: self.read or self.write, for each piece, in threads."""
        pieces = _pieces(buffers, PIECE_BYTES)
        return Transfer([self._pool.submit(call, fd, piece, offset + begin) for begin, piece in pieces])

    def write_block(self, fd: int, block: bytes, offset: int) -> None:
        """One page, in the calling thread. Raises OSError."""
        header = self.headers.take()
        header[:] = block
        try:
            self.write(fd, [header], offset)
        finally:
            self.headers.give_back(header)

    def read_block(self, fd: int, offset: int) -> bytes:
        """One page, in the calling thread; shorter where the file ends. Raises OSError."""
        header = self.headers.take()
        try:
            return bytes(header) if self.read(fd, [header], offset) else b""
        finally:
            self.headers.give_back(header)

    def close(self) -> None:
        """Waits for what is under way."""
        self._pool.shutdown()


Move = Callable[[int, Sequence[memoryview], int], bool]
