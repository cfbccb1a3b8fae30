"""A member's proof that it is alive: a locked byte of the pool's lock file (kvdock/shm/locks.py)."""

from __future__ import annotations

import os
import random
from pathlib import Path

from kvdock._core import MemberLock
from kvdock.shm.locks import MEMBER_OFFSETS
from kvdock.shm.objects import NOBODY, open_own


class MemberLiveness:
    """Keeps the byte at `offset` of the lock file locked until close(), or until this process's address space ends.

    `with_children`: the byte stays locked until the address spaces of its forked children have ended, too. A process
    that copies with a GPU needs this (csrc/segment/liveness.h has the reason). Raises OSError when the lock file cannot
    be opened, ForeignObject when it is neither this user's own nor that of `trusted_uid`.
    """

    def __init__(
        self, lock_file: str | Path, *, source: random.Random, with_children: bool = False, trusted_uid: int = NOBODY
    ) -> None:
        fd = open_own(Path(lock_file), trusted_uid)
        try:
            self._lock = _take_free(fd, source, with_children)
        finally:
            os.close(fd)
        self.offset = self._lock.offset

    def close(self) -> None:
        """Unlocks the byte. Call it only after every copy of this process has ended."""
        self._lock.close()


def _take_free(fd: int, source: random.Random, with_children: bool) -> MemberLock:
    while True:
        try:
            return MemberLock(f"/proc/self/fd/{fd}", source.randrange(*MEMBER_OFFSETS), with_children=with_children)
        except BlockingIOError:
            continue  # another member has locked that byte: draw again
