"""Taking over the pool that a dead server left: which one, whether it is whole, and as what.

A pool belongs to the address it was served at. The next server there adopts it, as a whole or not at all; a server
at another address leaves it alone for ORPHAN_S after its server's death, and removes it then.
Invariants: nothing of a pool is changed before all of it has been judged; the pool's lock is held from before the
first look. Only here are words of the table that an earlier server wrote believed, and only after its checks.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvdock._core import Table, TableError
from kvdock.api.errors import AdoptionError
from kvdock.api.pool.lock import LeftPool, PoolLock, left_pools
from kvdock.api.pool.segments import SegmentPool
from kvdock.api.settings import Settings
from kvdock.shm import objects as shm
from kvdock.shm.errors import AttachError, PoolGone, PoolInUse, PoolTooSmall

ORPHAN_S = 300.0
"""Long enough for any supervisor to start the server again."""


class Adopted(NamedTuple):
    """A pool taken over. `undo` gives it up again, as it is."""

    lock: PoolLock
    segments: SegmentPool
    table: Table
    found: dict[str, int]
    """What the table counted: see Table.adopt."""
    retiring: list[int]
    """Ids of the segments that were being drained."""
    retired: list[int]
    """Ids of those that are gone: members that were away may still map them."""
    undo: ExitStack


def address_of(settings: Settings) -> str:
    return str(Path(settings.socket_path).absolute())


def left_at(address: str) -> list[int]:
    """Pools that may be adopted by the server at `address`: the last to die first."""
    return [left.pool_id for left in left_pools() if left.address == address]


def is_strangers(left: LeftPool, address: str) -> bool:
    """Whether the server at `address` must leave this pool to another's successor."""
    waits = left.address and left.idle_s < ORPHAN_S and Path(left.address).parent.is_dir()
    return bool(waits) and left.address != address


def adopt_pool(settings: Settings, pool_id: int) -> Adopted:
    """Raises AdoptionError; then the pool is as it was, and nobody's."""
    with ExitStack() as undo:
        try:
            lock = PoolLock.adopt(pool_id)
            undo.callback(lock.close, unlink=False)
            taken = _take(settings, pool_id, lock, undo)
        except TableError as error:
            raise AdoptionError(f"{error.code}: {error} (found {error.found}, wanted {error.wanted})") from error
        except (AttachError, PoolGone, PoolInUse, PoolTooSmall, OSError, ValueError) as error:
            raise AdoptionError(str(error)) from error
        undo.pop_all()
        return taken


def _take(settings: Settings, pool_id: int, lock: PoolLock, undo: ExitStack) -> Adopted:
    region = shm.open_region(shm.region_name(pool_id))
    stored = Table.stored_segments(region, pool_id=pool_id, lock_inode=lock.inode)
    segments = SegmentPool(
        pool_id,
        limit_bytes=settings.pool_bytes,
        segment_bytes=settings.segment_bytes,
        prefault_threads=settings.prefault_threads,
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
    )
    ends = ExitStack()
    ends.callback(lock.close, unlink=True)
    ends.callback(shm.unlink, shm.region_name(pool_id))
    ends.callback(segments.close, unlink=True)
    return Adopted(
        lock, segments, table, found,
        retiring=[number for number, state, _, _ in stored if state == "retiring"],
        retired=[number for number, state, _, _ in stored if state == "gone"],
        undo=ends,
    )
