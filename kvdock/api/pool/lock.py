"""The server's lock on its pool, and the pools that dead servers left. kvdock/shm/locks.py explains the lock file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvdock._core import MemberLock, lock_holder_alive
from kvdock.api.clock import boot_s
from kvdock.shm import objects as shm
from kvdock.shm.errors import ForeignObject, PoolGone, PoolInUse
from kvdock.shm.locks import LOCK_FILE_BYTES, SECRET_BYTES, SERVER_OFFSET

SECRET_OFFSET = LOCK_FILE_BYTES - SECRET_BYTES


class PoolLock:
    """The server's lock on its pool. `fd` is its own descriptor of the lock file, `inode` identifies the file.

    The lock ends with close(), or with the process.
    """

    def __init__(self, path: Path, fd: int, lock: MemberLock) -> None:
        self.path = path
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.secret = os.pread(fd, SECRET_BYTES, SECRET_OFFSET)
        self._lock = lock

    @classmethod
    def create(
        cls, pool_id: int, shm_dir: Path = shm.SHM_DIR, *, address: str = "", secret: bytes = bytes(SECRET_BYTES)
    ) -> PoolLock:
        """A new lock file, whose byte 0 is locked before it has a name. Raises FileExistsError if the pool id is in
        use.

        `address`: where the pool is served, so that the next server there finds it. `secret`: SECRET_BYTES random ones.
        """
        path = shm.lock_path(pool_id, shm_dir)
        fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        folder = -1
        try:
            shm.allocate(fd, LOCK_FILE_BYTES, path.name)
            os.pwrite(fd, address.encode()[:SECRET_OFFSET].ljust(SECRET_OFFSET, b"\0") + secret, 0)
            os.utime(fd, (boot_s(), boot_s()))
            lock = MemberLock(f"/proc/self/fd/{fd}", SERVER_OFFSET)
            # link(2) would link the symbolic link itself; with a folder descriptor it is followed.
            folder = os.open(shm_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except BaseException:
            os.close(fd)
            raise
        finally:
            if folder >= 0:
                os.close(folder)
        return cls(path, fd, lock)

    @classmethod
    def adopt(cls, pool_id: int, shm_dir: Path = shm.SHM_DIR) -> PoolLock:
        """Takes over a dead server's pool. PoolInUse while that server lives, PoolGone when nothing is left,
        ForeignObject when the lock file is not ours."""
        path = shm.lock_path(pool_id, shm_dir)
        try:
            fd = shm.open_own(path)
        except FileNotFoundError as error:
            raise PoolGone(f"lock file {path}", found="no such file", wanted="the lock file of a pool") from error
        try:
            lock = _take(fd, path)
            # A remover may have taken the lock and unlinked the file between our open and our lock.
            if not path.exists() or path.stat().st_ino != os.fstat(fd).st_ino:
                lock.close()
                raise PoolGone(f"lock file {path}", found="another or no file", wanted="the one that was opened")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, lock)

    def member_alive(self, offset: int) -> bool:
        """True while a process holds the byte at `offset`."""
        return lock_holder_alive(self.fd, offset)

    def touch(self) -> None:
        """Records now as the time when the server was last alive: in the file's times, by boot_s."""
        os.utime(self.fd, (boot_s(), boot_s()))

    def close(self, *, unlink: bool) -> None:
        """Gives the pool up; unlink=True removes the lock file, after everything else of the pool has been removed."""
        if self.fd < 0:
            return
        if unlink:
            self.path.unlink(missing_ok=True)
        self._lock.close()
        os.close(self.fd)
        self.fd = -1


def server_alive(pool_id: int, shm_dir: Path = shm.SHM_DIR) -> bool:
    """Whether a server holds the pool now. Raises ForeignObject."""
    try:
        fd = shm.open_own(shm.lock_path(pool_id, shm_dir))
    except FileNotFoundError:
        return False
    try:
        return lock_holder_alive(fd, SERVER_OFFSET)
    finally:
        os.close(fd)


def secret_of(pool_id: int, shm_dir: Path = shm.SHM_DIR) -> bytes:
    """The pool's secret, whether its server lives or not. FileNotFoundError, PermissionError, ForeignObject."""
    fd = shm.open_own(shm.lock_path(pool_id, shm_dir))
    try:
        return os.pread(fd, SECRET_BYTES, SECRET_OFFSET)
    finally:
        os.close(fd)


class LeftPool(NamedTuple):
    """A pool whose server is dead."""

    pool_id: int
    address: str
    idle_s: float
    """Time since its server last called `touch`."""


def pools_at(address: str, shm_dir: Path = shm.SHM_DIR) -> list[int]:
    """The pools that are, or were last, served at that socket, by the lock files that this process may open."""
    found = []
    for pool_id in shm.pool_objects(shm_dir):
        with suppress(FileNotFoundError, PermissionError, ForeignObject):
            if _look(pool_id, shm_dir)[1].address == address:
                found.append(pool_id)
    return found


def left_pools(shm_dir: Path = shm.SHM_DIR) -> list[LeftPool]:
    """Dead servers' pools with a lock file that this process may open; the one whose server died last comes first."""
    found = []
    for pool_id in shm.pool_objects(shm_dir):
        try:
            alive, left = _look(pool_id, shm_dir)
        except (FileNotFoundError, PermissionError, ForeignObject):
            continue
        if not alive:
            found.append(left)
    return sorted(found, key=lambda left: left.idle_s)


def _look(pool_id: int, shm_dir: Path) -> tuple[bool, LeftPool]:
    """Whether its server is alive, and what the lock file says about the pool. Raises ForeignObject."""
    fd = shm.open_own(shm.lock_path(pool_id, shm_dir))
    try:
        address = os.pread(fd, SECRET_OFFSET, 0).rstrip(b"\0").decode(errors="replace")
        left = LeftPool(pool_id, address, boot_s() - os.fstat(fd).st_mtime)
        return lock_holder_alive(fd, SERVER_OFFSET), left
    finally:
        os.close(fd)


def remove_stale(
    shm_dir: Path = shm.SHM_DIR, *, spare: Callable[[LeftPool], bool] = lambda left: False
) -> list[str]:
    """Removes objects that dead servers left, and returns the names of what it removed itself. Live pools stay, and so
    do those that `spare` chooses.

    A server may die at any moment, so each pool is checked by itself, and once more when its lock is held. The lock of
    a pool that stays is not taken, because its next server may be trying to take it. Engines that still map a removed
    object keep their memory until they unmap it. Objects of others stay too (shm.objects.is_own).
    """
    removed: list[str] = []
    for pool_id, names in shm.pool_objects(shm_dir).items():
        path = shm.lock_path(pool_id, shm_dir)
        try:
            alive, left = _look(pool_id, shm_dir)
            if alive or spare(left):
                continue
            lock = _lock_of(path)  # held while removing, so that nobody adopts it
            if spare(_look(pool_id, shm_dir)[1]):
                lock.close()
                continue
        except FileNotFoundError:
            lock = None  # a removal was cut short, or has just ended
        except (PoolInUse, PermissionError, ForeignObject):
            continue
        for name in sorted(names, key=lambda name: name == path.name):  # the lock file last
            with suppress(FileNotFoundError):  # another removed it
                (Path(shm_dir) / name).unlink()
                removed.append(name)
        if lock is not None:
            lock.close()
    return removed


def _lock_of(path: Path) -> MemberLock:
    fd = shm.open_own(path)
    try:
        return _take(fd, path)
    finally:
        os.close(fd)


def _take(fd: int, path: Path) -> MemberLock:
    """Takes the lock on the server's byte of the file that `fd` has open, whatever file is at `path` by now."""
    try:
        return MemberLock(f"/proc/self/fd/{fd}", SERVER_OFFSET)
    except BlockingIOError as error:
        raise PoolInUse(f"byte {SERVER_OFFSET} of {path}", found="held", wanted="free") from error
