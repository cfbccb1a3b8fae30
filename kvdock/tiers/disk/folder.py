"""The disk tier's folder, which one process at a time may use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from kvdock.tiers.tier import TierError, require_own

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
    """A lock on the folder, which is held until close() or until the process ends. Its file has the process's id."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing. Raises FolderInUse, TierError, OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(TIER, folder)
        self._path = folder / "lock"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            written = os.pread(self._fd, _PID_BYTES, 0)
            os.close(self._fd)
            raise FolderInUse(folder, int(written) if written.strip().isdigit() else 0) from error
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
