"""POSIX shared memory by name: how the objects of a pool are named, made, opened and removed.

A pool with id P (16 hex digits) owns exactly these names in the shared-memory directory:

    kvdock-P.lock       the lock file: made first, removed last (locks.py)
    kvdock-P-table      the table region of the server
    kvdock-P-history-R  the time series of hours and days; while it is written, there is one with -R.new behind it
    kvdock-P-curve-R    the curve of hit shares by pool size; likewise
    kvdock-P-crash-R    while an adopted pool is not trusted yet: how its server crashed, empty until then
    kvdock-P-0000-R …   the segments, by number

R: 16 hex digits that no other user can guess, so that none can take the name of a later object. Each name has others:
what one has seen tells nothing about the next.

Invariants: an object that `create` returned has every byte allocated, so touching it cannot fail; a name for which
memory ran out is removed again. Anybody may put objects of any name into the directory: an object that is not this
user's own, or that others may open, is not listed, opened or removed. Engines of root may also open those of one
trusted user.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, get_args

from kvdock._core import HUGE_PAGE_BYTES, Mapping, allocate_huge
from kvdock.shm.errors import ForeignObject, PoolTooSmall

SHM_DIR: Final = Path("/dev/shm")
NOBODY: Final = -1
"""Where a user id is wanted: nobody's."""
Kept = Literal["history", "curve", "crash"]
_NAME: Final = re.compile(
    r"kvdock-([0-9a-f]{16})"
    r"(?:-(\d{4,})(?:-[0-9a-f]{16})?|-table|-(?:history|curve|crash)(?:-[0-9a-f]{16}){0,2}(?:\.new)?|\.lock)"
)
"""Earlier builds named segments without R: such names are known, so that leftovers are removed."""


def segment_name(pool_id: int, segment: int, drawn: int) -> str:
    """`drawn`: 64 random bits."""
    return f"/kvdock-{pool_id:016x}-{segment:04d}-{drawn:016x}"


def region_name(pool_id: int) -> str:
    return f"/kvdock-{pool_id:016x}-table"


def kept_path(pool_id: int, what: Kept, secret: bytes, shm_dir: Path = SHM_DIR) -> Path:
    """`secret`: the pool's, so that no other user can take the name."""
    drawn = hashlib.blake2b(what.encode(), key=secret, digest_size=8, person=b"kvdock kept").hexdigest()
    return Path(shm_dir) / f"kvdock-{pool_id:016x}-{what}-{drawn}"


def kept_paths(pool_id: int, secret: bytes) -> list[Path]:
    """What a server keeps beside the pool for the next one."""
    return [kept_path(pool_id, what, secret) for what in get_args(Kept)]


def fresh_path(path: Path) -> Path:
    """The path at which an object is written before it takes the place of the one at `path`."""
    return path.with_name(f"{path.name}.new")


def lock_path(pool_id: int, shm_dir: Path = SHM_DIR) -> Path:
    return Path(shm_dir) / f"kvdock-{pool_id:016x}.lock"


def is_own(found: os.stat_result, trusted_uid: int = NOBODY) -> bool:
    """Whether it is a regular file of this process's user, or of the trusted one, with one link, that nobody else may
    open."""
    is_private = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), trusted_uid) and is_private and (
        found.st_nlink == 1
    )


def require_own(fd: int, name: str, trusted_uid: int = NOBODY) -> None:
    """Raises ForeignObject unless the open object is_own."""
    found = os.fstat(fd)
    if not is_own(found, trusted_uid):
        users = f"{os.geteuid()}" if trusted_uid == NOBODY else f"{os.geteuid()} or {trusted_uid}"
        raise ForeignObject(
            f"shared memory object {name}",
            found=f"{stat.filemode(found.st_mode)} of user {found.st_uid}, {found.st_nlink} links",
            wanted=f"-rw------- of user {users}, 1 link",
        )


def pool_objects(shm_dir: Path = SHM_DIR) -> dict[int, list[str]]:
    """Our objects in the shared-memory directory by pool id, with the lock files, sorted by name."""
    found: dict[int, list[str]] = {}
    for path, own in _named(shm_dir):
        match = _NAME.fullmatch(path.name)
        if match and own:
            found.setdefault(int(match[1], 16), []).append(path.name)
    return found


def foreign_objects(shm_dir: Path = SHM_DIR) -> list[str]:
    """Objects in the directory that have a name of ours and belong to others, sorted."""
    return [path.name for path, own in _named(shm_dir) if not own]


def _named(shm_dir: Path) -> Iterator[tuple[Path, bool]]:
    """Objects that have a name of ours, each with whether it is our own."""
    ours = [path for path in Path(shm_dir).iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(ours):
        with suppress(FileNotFoundError):  # removed meanwhile
            yield path, is_own(path.lstat())


def open_own(path: Path, trusted_uid: int = NOBODY) -> int:
    """Opens an object or a lock file and returns its descriptor, readable and writable. `trusted_uid`: see is_own.
    Raises FileNotFoundError, PermissionError, ForeignObject."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise ForeignObject(f"shared memory object {path}", found=error.strerror, wanted="a regular file") from error
    try:
        require_own(fd, path.name, trusted_uid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def pool_exists(pool_id: int) -> bool:
    """Whether the pool's lock file is there: a server serves the pool, or may yet adopt it."""
    return lock_path(pool_id).exists()


def segment_names(pool_id: int, shm_dir: Path = SHM_DIR) -> Iterator[tuple[int, str]]:
    """(number, name) of each segment of the pool in the directory, sorted by name."""
    for entry in pool_objects(shm_dir).get(pool_id, []):
        match = _NAME.fullmatch(entry)
        if match and match[2]:
            yield int(match[2]), f"/{entry}"


def create(name: str, size_bytes: int) -> int:
    """A new object, mode 0600, all of `size_bytes` allocated, in huge pages where the kernel gives them; returns its
    descriptor.

    Raises FileExistsError when the name is taken, PoolTooSmall when memory runs out (then the name is removed).
    """
    fd = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        allocate_huge(fd, size_bytes)
        allocate(fd, size_bytes, name)
    except BaseException:
        os.close(fd)
        unlink(name)
        raise
    return fd


def allocate(fd: int, size_bytes: int, name: str) -> None:
    """posix_fallocate that turns a full file system into PoolTooSmall."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        there = os.fstatvfs(fd)
        raise PoolTooSmall(
            f"shared memory for {name}", found=there.f_bavail * there.f_frsize, wanted=size_bytes
        ) from error


def gives_huge_pages(shm_dir: Path = SHM_DIR) -> bool:
    """Whether a new object would get huge pages, which is tried with one without a name."""
    try:
        fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return allocate_huge(fd, HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    finally:
        os.close(fd)


def open_existing(name: str, trusted_uid: int = NOBODY) -> int:
    """The object's descriptor, readable and writable. `trusted_uid`: see is_own. Raises FileNotFoundError when there is
    no such object, ForeignObject when it is not is_own."""
    path = _path(name)
    try:
        return open_own(path, trusted_uid)
    except PermissionError as error:
        raise ForeignObject(f"shared memory object {path}", found=error.strerror, wanted="one of this user") from error


def unlink(name: str) -> None:
    """Removes the name; mappings of the object stay. No error when there is no such name."""
    _path(name).unlink(missing_ok=True)


def _path(name: str) -> Path:
    """Where an object is, as for shm_open(3) of every C library of Linux. Raises ValueError unless the name is one of
    ours, so that none leads out of the directory."""
    file = name.removeprefix("/")
    if not _NAME.fullmatch(file):
        raise ValueError(f"shared memory object: found {name!r}, wanted /kvdock-POOL-…")
    return SHM_DIR / file


def create_region(name: str, size_bytes: int) -> Mapping:
    """A new, zeroed, fully allocated object, mapped: for the server's table."""
    fd = create(name, size_bytes)
    try:
        return Mapping(fd, size_bytes)
    except BaseException:
        unlink(name)
        raise
    finally:
        os.close(fd)


def open_region(name: str) -> Mapping:
    """Maps an object that an earlier server left. Raises FileNotFoundError when there is none, ValueError when it is
    empty, ForeignObject when it is not this user's own."""
    fd = open_existing(name)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes:
            allocate(fd, size_bytes, name)  # reading a hole allocates memory, which might fail at that time
        return Mapping(fd, size_bytes)
    finally:
        os.close(fd)
