"""Takes over the pool that a dead server has left.

A pool belongs to the address where it was served. The next server there adopts it, completely or not at all; a server
at another address leaves it alone for ORPHAN_S after its server's death, and removes it then.
Invariants: nothing of a pool is changed before all of it has been checked; the pool's lock is held before its segments
and its table are read. Only here is table data of an earlier server used, and only after it has passed its checks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvdock._core import Table, TableError
from kvdock.api.errors import AdoptionError, OtherFormat, StartupError
from kvdock.api.pool.kept_object import read_own
from kvdock.api.pool.lock import LeftPool, PoolLock, left_pools, pools_at, secret_of
from kvdock.api.pool.segments import SegmentPool
from kvdock.api.settings import Settings
from kvdock.protocol.access import credentials_of
from kvdock.shm import objects as shm
from kvdock.shm.errors import AttachError, ForeignObject, PoolGone, PoolInUse, PoolTooSmall, SegmentWrongVersion
from kvdock.shm.objects import kept_path

# --------------------------------------------------------------------------- the mark of a crash

# Tells the next server that this one crashed while it used a pool that it had taken over.
#
# Only a crash of the server itself counts: SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT. Its signal handler (Python's
# faulthandler) writes which it was into a file beside the pool. A process that is killed, by an operator or for want of
# memory, writes nothing, and its end says nothing about the pool.
# Invariant: while an adopted pool is used and not yet trusted, the file is there, and empty until a crash.

TRUSTED_S: Final = 600.0
"""After that long an adopted pool is trusted, and a crash is not held against it. By then engines have come back or are
given up, their leases have ended, and the table was read as a whole many times: what adoption missed has been met."""
HEADING: Final = "Fatal Python error: "
"""With it faulthandler begins."""
log = logging.getLogger("kvdock.api")


class CrashMark:
    """The file at `path`. `now_s`: a clock that nobody sets."""

    def __init__(self, path: Path, now_s: Callable[[], float]) -> None:
        self._path, self._now_s = path, now_s
        self._trusted_at_s = 0.0
        self._fd = -1
        self._had_handler = False

    def read(self) -> str:
        """How the last server that used the pool without trusting it crashed, like `Segmentation fault`; '': it did
        not."""
        try:
            lines = read_own(self._path).decode(errors="replace").splitlines()
        except (OSError, ForeignObject):  # there is none of this user
            return ""
        return lines[0].removeprefix(HEADING) if lines else ""

    def begin(self, *, catches_signals: bool) -> None:
        """From now on a crash is written down. `catches_signals`: whether this process's signals are the server's to
        catch; without, nothing is done."""
        if not catches_signals:
            return
        try:
            self._path.unlink(missing_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.warning("a crash will not be held against the pool: %s", error)
            return
        self._trusted_at_s = self._now_s() + TRUSTED_S
        self._had_handler = faulthandler.is_enabled()
        faulthandler.enable(self._fd, all_threads=False)

    def end_when_due(self) -> None:
        if self._fd >= 0 and self._now_s() >= self._trusted_at_s:
            self.end()

    def end(self) -> None:
        """The pool is trusted, or is not used any more: the file is removed."""
        if self._fd < 0:
            return
        if self._had_handler:
            faulthandler.enable()
        else:
            faulthandler.disable()
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


# --------------------------------------------------------------------------- adoption

ORPHAN_S = 300.0
"""Long enough for any supervisor to start the server again."""


class PoolObjects(NamedTuple):
    """What a pool consists of: its lock file, its segments, and the table over them."""

    lock: PoolLock
    segments: SegmentPool
    table: Table
    undo: ExitStack
    """Removes all of them."""
    crash_mark: CrashMark | None = None
    """An adopted pool has one."""

    def close(self) -> None:
        """Removes them. Engines that still map one keep their memory until they unmap it."""
        self.undo.close()

    def leave(self) -> None:
        """Leaves them, with byte 0 of the lock file free, for a later server."""
        self.undo.pop_all()
        if self.crash_mark is not None:
            self.crash_mark.end()
        self.segments.close(unlink=False)
        self.lock.close(unlink=False)


class Adopted(NamedTuple):
    """A pool taken over."""

    objects: PoolObjects
    found: dict[str, int]
    """What the table has found in the pool: see Table.adopt."""
    retiring: list[int]
    """Ids of the segments that were being drained."""
    removed: list[int]
    """Ids of removed segments: members that have not attached again may still map them."""


def address_of(settings: Settings) -> str:
    return str(Path(settings.socket_path).absolute())


def left_at(address: str) -> list[int]:
    """Pools that the server at `address` may adopt; the one whose server died last comes first."""
    return [left.pool_id for left in left_pools() if left.address == address]


def is_strangers(left: LeftPool, address: str) -> bool:
    """Whether the pool is still kept for the next server at an address other than `address`."""
    waits = left.address and left.idle_s < ORPHAN_S and Path(left.address).parent.is_dir()
    return bool(waits) and left.address != address


def check_format(pool_id: int) -> None:
    """Raises OtherFormat if this release could not take the pool over, and changes nothing; its server may live. Raises
    OSError, TableError, ForeignObject, ValueError if nothing can be said about the pool."""
    region = shm.open_region(shm.region_name(pool_id))
    inode = shm.lock_path(pool_id).stat().st_ino
    try:
        Table.stored_segments(region, pool_id=pool_id, lock_inode=inode)
    except TableError as error:
        if error.code == "wrong_version":
            raise _other_format(error) from error
        raise


def require_formats(socket_path: str) -> None:
    """Raises StartupError(not_adoptable) if this release could not take over a pool of the server that listens there:
    to be called before that server is asked to leave, since nobody would serve then."""
    for pool_id in pools_at(socket_path):
        with suppress(OSError, TableError, ForeignObject, ValueError):  # of damage the next server has its own say
            try:
                check_format(pool_id)
            except OtherFormat as error:
                why = f"pool {pool_id:016x} at {socket_path} cannot be taken over, so its server goes on: {error}"
                advice = "Stop that server and start this one with --adopt=never, which removes the pool"
                raise StartupError("not_adoptable", f"{why}. {advice}") from error


def _other_format(error: TableError) -> OtherFormat:
    return OtherFormat(f"{error} (found format {error.found}, this release reads {error.wanted})")


def crash_of(pool_id: int) -> str:
    """How the server crashed that had taken the pool over before; '': none did. Raises OSError, ForeignObject."""
    return CrashMark(kept_path(pool_id, "crash", secret_of(pool_id)), time.monotonic).read()


class Means(NamedTuple):
    """What adoption needs of the process."""

    randbits: Callable[[int], int]
    """randbits(k): k random bits that nobody can guess."""
    now_s: Callable[[], float] = time.monotonic
    """A clock that nobody sets."""
    catches_signals: bool = False
    """The process's signals are the server's to catch."""


def adopt_pool(settings: Settings, pool_id: int, means: Means) -> Adopted:
    """Raises AdoptionError; then the pool is unchanged, and no server holds it."""
    with ExitStack() as undo:
        try:
            lock = PoolLock.adopt(pool_id)
            undo.callback(lock.close, unlink=False)
            taken = _take(settings, pool_id, lock, means, undo)
        except TableError as error:
            if error.code == "wrong_version":
                raise _other_format(error) from error
            raise AdoptionError(f"{error.code}: {error} (found {error.found}, wanted {error.wanted})") from error
        except SegmentWrongVersion as error:
            raise OtherFormat(str(error)) from error
        except (AttachError, PoolGone, PoolInUse, PoolTooSmall, OSError, ValueError) as error:
            raise AdoptionError(str(error)) from error
        undo.pop_all()
        return taken


def _take(
    settings: Settings, pool_id: int, lock: PoolLock, means: Means, undo: ExitStack
) -> Adopted:
    mark = CrashMark(kept_path(pool_id, "crash", lock.secret), means.now_s)
    crash = mark.read()
    if not crash:
        undo.callback(mark.end)
        mark.begin(catches_signals=means.catches_signals)
    region = shm.open_region(shm.region_name(pool_id))
    stored = Table.stored_segments(region, pool_id=pool_id, lock_inode=lock.inode)  # the format comes first
    if not any(lock.secret):
        raise AdoptionError("found no secret in the lock file, wanted the pool's")
    if crash:
        raise AdoptionError(f"the server that had taken it over before crashed ({crash})")
    segments = SegmentPool(
        pool_id,
        limit_bytes=settings.pool_bytes,
        segment_bytes=settings.segment_bytes,
        prefault_threads=settings.prefault_threads,
        randbits=means.randbits,
    )
    undo.callback(segments.close, unlink=False)
    segments.adopt(
        known=[number for number, state, _, _ in stored if state != "gone"],
        next_id=max((number + 1 for number, _, _, _ in stored), default=0),
    )
    table, found = Table.adopt(
        region,
        pool_id=pool_id,
        lock_inode=lock.inode,
        segments=[(info.id, info.data_offset, info.data_bytes) for info in segments.segments],
        limit_bytes=max(settings.pool_bytes, segments.allocated_bytes),
        ask_ms=round(settings.ask_s * 1000),
        settle_ms=round(settings.settle_s * 1000),
        suspect_ms=settings.suspect_ms,
        session_cap=settings.session_cap,
        total_cap=settings.total_cap,
        grace_ms=round(settings.weights_grace_s * 1000),
    )
    ends = ExitStack()
    ends.callback(lock.close, unlink=True)
    ends.callback(shm.unlink, shm.region_name(pool_id))
    for kept in shm.kept_paths(pool_id, lock.secret):
        ends.callback(kept.unlink, missing_ok=True)
    ends.callback(segments.close, unlink=True)
    ends.callback(mark.end)
    return Adopted(
        PoolObjects(lock, segments, table, ends, mark), found,
        retiring=[number for number, state, _, _ in stored if state == "retiring"],
        removed=[number for number, state, _, _ in stored if state == "gone"],
    )


# --------------------------------------------------------------------------- taking over from a live server

# Asks the server at a socket to end and leave its pool: `kvdock serve --takeover`, a rolling upgrade.
#
# The kernel names the process that listens at the socket. It gets the signal HAND_OVER, finishes its reservations and
# leaves its pool. A server that does not know the signal is killed by it, which leaves the pool too. The new server
# then adopts the pool (kvdock/api/pool/adopt.py).

HAND_OVER: Final = signal.SIGUSR2
CONNECT_S: Final = 1.0


def ask_to_leave(socket_path: str, *, patience_s: float) -> int:
    """Returns once the server that listened there has ended: its process id; 0 if none listened.

    Raises StartupError(socket_in_use): it belongs to another user or pid namespace, or did not end within `patience_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(CONNECT_S)
        try:
            asking.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            return 0
        except OSError as error:
            raise StartupError("socket_in_use", f"socket {socket_path}: {error}") from error
        pid, uid = credentials_of(asking)
        if uid != os.geteuid():
            raise StartupError(
                "socket_in_use",
                f"the server at {socket_path}: found user {uid}, wanted {os.geteuid()}: start this one as user {uid}",
            )
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            raise StartupError(
                "socket_in_use", f"the server at {socket_path} cannot be asked to leave: process {pid}: {error}"
            ) from error
        try:
            _end(process, pid, asking, patience_s)
        finally:
            os.close(process)
    return pid


def _end(process: int, pid: int, connection: socket.socket, patience_s: float) -> None:
    connection.setblocking(False)
    try:
        # While our connection is open its server lives, so the descriptor names that server and no later process.
        if connection.recv(1) == b"":
            return
    except BlockingIOError:
        pass
    try:
        signal.pidfd_send_signal(process, HAND_OVER)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise StartupError("socket_in_use", f"process {pid} is another user's: it cannot be asked to leave") from error
    if not select.select([process], [], [], patience_s)[0]:
        raise StartupError("socket_in_use", f"process {pid} has not ended within {patience_s:g} s of being asked to")
