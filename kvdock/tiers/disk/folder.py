"""The disk tier's folder, which one process at a time may use."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvdock.shm.files import replace_durably
from kvdock.tiers.notes import HEAD_BYTES, Change, Note, NoteError
from kvdock.tiers.tier import NoSpace, ReadOnly, TierError, require_own

TIER: Final = "disk"
_PID_BYTES: Final = 16
"""The length never changes, so that even a full disk can overwrite it."""


class FolderInUse(TierError):
    """`pid`: the id of the process that uses the folder; 0: that process has not written its id yet."""

    def __init__(self, folder: Path, pid: int) -> None:
        user = pid or "(not known yet)"
        super().__init__(TIER, f"{folder} is used by process {user}; one process at a time may use it")
        self.pid = pid


class FolderLock:
    """A lock on the folder, which is held until close() or until the process ends. Its file has the process's id, if it
    can be written."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing. Raises FolderInUse, TierError, OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(TIER, folder)
        self._path, flags = folder / "lock", os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self._fd = os.open(self._path, os.O_RDONLY | flags)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            written = os.pread(self._fd, _PID_BYTES, 0)
            os.close(self._fd)
            raise FolderInUse(folder, int(written) if written.strip().isdigit() else 0) from error
        with suppress(OSError):  # of a full or read-only disk: others are not told the id then
            os.pwrite(self._fd, f"{os.getpid():<{_PID_BYTES - 1}}\n".encode(), 0)
        self._inode = os.fstat(self._fd).st_ino

    def require(self) -> None:
        """Raises TierError if the folder was removed or replaced, or if the lock was closed."""
        if self._fd < 0:
            raise TierError(TIER, "it was closed")
        try:
            found = self._path.stat().st_ino
        except OSError as error:
            raise TierError(TIER, f"the folder {self._path.parent} is lost: {error.strerror}") from error
        if found != self._inode:
            raise TierError(TIER, f"the folder {self._path.parent} was replaced by another")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# --------------------------------------------------------------------------- notes

# The notes of the disk tier: one small file, which is replaced as a whole and is durable before a change returns.

_log: Final = logging.getLogger(__name__)
_NAMESPACE_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskNotes:
    """Thread-safe. A file that cannot be read counts as missing: new notes are made, so parts in the log are not found
    again."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._path, self._lock = folder / "notes", threading.Lock()
        self._notes: dict[bytes, Note] = {}
        try:
            self._notes = dict(_read(self._path.read_bytes()))
        except FileNotFoundError:
            pass
        except NoteError as error:
            _log.error("%s is damaged, so the parts that the tier has are not found any more: %s", self._path, error)

    def of(self, namespace: bytes) -> Note | None:
        return self._notes.get(namespace)

    def namespaces(self) -> list[bytes]:
        return list(self._notes)

    def change(self, namespace: bytes, change: Change) -> Note:
        """The change is durable when it returns. Raises ReadOnly if the storage takes nothing, TierError; then nothing
        has changed."""
        with self._lock:
            before = self._notes.get(namespace)
            if (after := change(before)) == before:
                return after
            notes = {**self._notes, namespace: after}
            try:
                replace_durably(self._path, b"".join(
                    namespace + _LENGTH.pack(len(packed := note.packed())) + packed for namespace, note in notes.items()
                ))
            except OSError as error:
                kind = ReadOnly if error.errno == errno.EROFS else NoSpace if error.errno in _FULL else TierError
                raise kind(TIER, f"{self._path} cannot be written: {error}") from error
            self._notes = notes
            return after


def _read(data: bytes) -> Iterator[tuple[bytes, Note]]:
    """Raises NoteError."""
    at = 0
    while at < len(data):
        begin = at + _NAMESPACE_BYTES + _LENGTH.size
        if len(data) < begin + HEAD_BYTES:
            raise NoteError(f"it ends within a note, at byte {len(data)}")
        (length,) = _LENGTH.unpack_from(data, begin - _LENGTH.size)
        yield data[at : at + _NAMESPACE_BYTES], Note.read(data[begin : begin + length])
        at = begin + length
