"""Reads and writes whole pages with a few threads: directly between memory and storage (O_DIRECT), or through the page
cache where the file system does not allow that.

Python releases the GIL in each of these calls. Long ones are cut into pieces, so that one part keeps several threads
busy.
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

from kvdock.tiers.disk.files import File, Files, most_open
from kvdock.tiers.disk.folder import TIER
from kvdock.tiers.tier import PAGE_BYTES, ReadOnly, TierError, pages_bytes

PIECE_BYTES: Final = 4 << 20
MOST_RUN: Final = 256
"""The most records that one call reads or writes: two pieces of memory for each, of 1,024."""
THREADS: Final = 8
FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean that the storage, a quota or a limit of the process leaves no space."""
LOST_ERRORS: Final = frozenset({errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EBADF, errno.ESHUTDOWN})
"""Errors after which later calls would fail as well."""


def raise_if_lost(error: OSError) -> None:
    """Raises TierError if the error means that the storage as a whole is lost, and ReadOnly if it cannot be written."""
    if error.errno == errno.EROFS:
        raise ReadOnly(TIER, "the file system is read-only") from error
    if error.errno in LOST_ERRORS:
        raise TierError(TIER, f"the storage is lost: {error}") from error


def takes_direct(folder: Path) -> bool:
    """Whether files in the folder can be read and written past the page cache, which is tried with a file without a
    name. True: they can, or there is no space for that file, or the file system is read-only.

    Raises OSError if that file cannot be made for another reason.
    """
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        if error.errno in (*FULL_ERRORS, errno.EROFS):
            return True
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
    """The rest of the buffers after their first `moved` bytes."""
    for index, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= len(buffer)
    return []


def _pieces(buffers: Sequence[memoryview], most_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, buffers) of pieces of about `most_bytes`, of whole pages. All are about as long: the page of a record's
    header makes no piece of its own."""
    begin, rest, whole = 0, list(buffers), sum(map(len, buffers))
    count = max(1, -(-(whole - PAGE_BYTES) // most_bytes))
    if count == 1:
        yield 0, rest
        return
    most_bytes = pages_bytes(-(-whole // count))
    while rest:
        piece, left = [], most_bytes
        for buffer in rest:
            piece.append(buffer[:left])
            left -= len(piece[-1])
            if left == 0:
                break
        yield begin, piece
        begin, rest = begin + most_bytes - left, _behind(rest, most_bytes - left)


class Transfer:
    """A read or write of one record in progress."""

    def __init__(self, pieces: list[Future[bool]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def end(self) -> bool:
        """Waits until the transfer does not use its memory any more. False: the file ended before the record did.

        Raises the OSError of a piece, after all pieces have ended.
        """
        wait(self._pieces)
        return all(piece.result() for piece in self._pieces)


class Headers:
    """Page-aligned blocks of some pages for records' headers, which are reused. Thread-safe."""

    def __init__(self, pages: int = 1) -> None:
        self._size_bytes = pages * PAGE_BYTES
        self._free: deque[memoryview] = deque()

    def take(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, self._size_bytes))

    def give_back(self, block: memoryview) -> None:
        self._free.append(block)


class Io:
    """The threads that read and write, and the files. `direct`: whether they bypass the page cache. `most_files`: how
    many files are open at a time; None: as most_open() says."""

    def __init__(self, *, direct: bool, threads: int = THREADS, most_files: int | None = None) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self.files = Files(flags, most_open() if most_files is None else most_files)
        self._pool = ThreadPoolExecutor(threads, "kvdock-disk")
        self.most_pieces = 2 * threads
        """How many pieces in progress keep every thread busy."""
        self.headers, self.run_headers, self.blocks = Headers(), Headers(MOST_RUN), Headers(PIECE_BYTES // PAGE_BYTES)
        """`run_headers`: behind the beginning of each page, which is a record's, they are zero. `blocks`: for copies of
        records."""
        self._lock = threading.Lock()
        self.wear_bytes = 0
        """Bytes written by this instance."""
        self.fault = ""
        """The last error of a read or write, with the file and the name of the error."""

    def read(self, file: File, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fills the buffers from the file. False: the file ends before they are full. Raises OSError."""
        rest, done = list(buffers), 0
        while rest:
            moved = self._noted(os.preadv, file, rest, offset + done)
            if moved == 0 or moved % PAGE_BYTES:
                return False
            rest, done = _behind(rest, moved), done + moved
        return True

    def write(self, file: File, buffers: Sequence[memoryview], offset: int) -> bool:
        """Writes the buffers and returns True. Raises OSError, also if the storage takes less than whole pages."""
        rest, done = list(buffers), 0
        while rest:
            moved = self._noted(os.pwritev, file, rest, offset + done)
            if moved == 0 or moved % PAGE_BYTES:
                raise OSError(errno.ENOSPC, "the storage took less than whole pages")
            rest, done = _behind(rest, moved), done + moved
        with self._lock:
            self.wear_bytes += done
        return True

    def _noted(
        self, call: Callable[[int, list[memoryview], int], int], file: File, buffers: list[memoryview], offset: int
    ) -> int:
        try:
            with self.files.using(file) as fd:
                return call(fd, buffers, offset)
        except OSError as error:
            if error.errno == errno.EBADF and self.files.is_read_only:
                error.errno, error.strerror = errno.EROFS, os.strerror(errno.EROFS)  # as when it was opened
            self.note(error, file.path)
            raise

    def note(self, error: OSError, path: Path) -> None:
        """Remembers an error, for people."""
        self.fault = f"{path}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"

    def begin(self, call: Move, file: File, buffers: Sequence[memoryview], offset: int) -> Transfer:
        """Starts `call`, which is self.read or self.write, for each piece in a thread."""
        pieces = _pieces(buffers, PIECE_BYTES)
        return Transfer([self._pool.submit(call, file, piece, offset + begin) for begin, piece in pieces])

    def write_block(self, file: File, block: bytes, offset: int) -> None:
        """Writes one page in the calling thread. Raises OSError."""
        header = self.headers.take()
        header[:] = block
        try:
            self.write(file, [header], offset)
        finally:
            self.headers.give_back(header)

    def read_block(self, file: File, offset: int) -> bytes:
        """Reads one page in the calling thread; b"" if the file ends before. Raises OSError."""
        header = self.headers.take()
        try:
            return bytes(header) if self.read(file, [header], offset) else b""
        finally:
            self.headers.give_back(header)

    def close(self) -> None:
        """Waits until everything that begin() has started has ended."""
        self._pool.shutdown()


Move = Callable[[File, Sequence[memoryview], int], bool]
