"""The pool as one thing: lock file, segments, table region and the table over them.

Ownership: made by `open_pool` in that order, undone by `close` in the reverse one; when opening fails
half-way nothing is left behind. The table and all methods are used from the event loop; only the
making of a segment (a fraction of a second per GiB) runs in a thread.
Invariant: the table knows a segment only once all of its memory is allocated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack

from kvdock._core import SEGMENT_HEADER_BYTES, SLOT_ALIGN, Mapping, Table
from kvdock.api.errors import StartupError
from kvdock.api.schemas import Segment
from kvdock.api.settings import Settings
from kvdock.datapath import shm
from kvdock.datapath.errors import PoolFull, PoolTooSmall
from kvdock.datapath.liveness import PoolLock, remove_stale
from kvdock.datapath.segments import SegmentInfo, SegmentPool

KEY_BYTES = 32
log = logging.getLogger("kvdock.api")


class Pool:
    """`table` may be called directly; what concerns memory goes through here."""

    def __init__(
        self, settings: Settings, *, lock: PoolLock, segments: SegmentPool, table: Table, incarnation: int,
        undo: ExitStack,
    ) -> None:
        self.table = table
        self.pool_id = segments.pool_id
        self.incarnation = incarnation
        self.limit_bytes = settings.pool_bytes
        self.largest_part_bytes = settings.segment_bytes - SEGMENT_HEADER_BYTES - SLOT_ALIGN
        self.lock_path = str(lock.path)
        self.growth_error = ""
        """Why the pool stopped growing below its limit; '' while it may."""
        self._lock = lock
        self._segments = segments
        self._undo = undo
        self._added: list[SegmentInfo] = []
        self._growing = asyncio.Lock()

    def close(self) -> None:
        """Removes every object of the pool. Engines that still map one keep their memory until they unmap it."""
        self._undo.close()

    # ---------------------------------------------------------------- members

    def lock_held(self, offset: int) -> bool:
        """Whether someone holds that byte of the lock file."""
        return self._lock.member_alive(offset)

    # ---------------------------------------------------------------- memory

    @property
    def ready(self) -> bool:
        """There is memory to give out."""
        return bool(self._added)

    @property
    def allocated_bytes(self) -> int:
        return self._segments.allocated_bytes

    @property
    def prefaulted_bytes(self) -> int:
        return self._segments.prefaulted_bytes()

    @property
    def segment_count(self) -> int:
        return len(self._added)

    def can_grow(self) -> bool:
        return not self.growth_error and self._segments.can_grow()

    def segments(self) -> list[Segment]:
        return [
            Segment(
                id=info.id, name=info.name, bytes=info.bytes, data_offset=info.data_offset,
                prefaulted_bytes=self._segments.prefaulted_bytes(info.id),
                used_bytes=self.table.segment_used_bytes(info.id),
            )
            for info in self._added
        ]

    async def make_room(self, space: int, keys: bytes, chunk_bytes: int) -> None:
        """Grows before a store that needs memory the pool does not have yet: growing beats evicting."""
        free_bytes = self.table.free_bytes()
        if free_bytes >= len(keys) // KEY_BYTES * chunk_bytes or not self.can_grow():
            return
        missing = sum(
            self.table.state_of(space, keys[start : start + KEY_BYTES]) == "absent"
            for start in range(0, len(keys), KEY_BYTES)
        )
        await self.grow_until(missing * chunk_bytes)

    async def grow_until(self, free_bytes: int) -> None:
        """Adds segments until so much is free or the pool may not grow. Concurrent calls share the work."""
        async with self._growing:
            while self.table.free_bytes() < free_bytes and self.can_grow():
                await self._grow()

    async def grow_once(self) -> bool:
        """One more segment, if the pool may grow."""
        before = self.segment_count
        async with self._growing:
            if self.segment_count == before and self.can_grow():
                await self._grow()
        return self.segment_count > before

    async def grow_first(self) -> None:
        """The first segment. Raises PoolTooSmall."""
        async with self._growing:
            if not self.ready:
                await self._grow()
                if self.growth_error:
                    raise StartupError("pool_too_small", self.growth_error)

    async def _grow(self) -> None:
        """One more segment; a refusal is remembered and ends growth for this server's life."""
        try:
            info = await asyncio.to_thread(self._segments.grow)
        except (PoolFull, PoolTooSmall, OSError) as error:
            self.growth_error = str(error)
            log.warning("the pool stops growing at %d bytes: %s", self.allocated_bytes, error)
            return
        self.table.add_segment(info.id, info.data_offset, info.data_bytes)
        self._added.append(info)
        log.info("segment %s added: %d bytes", info.name, info.bytes)


def open_pool(settings: Settings, randbits: Callable[[int], int]) -> Pool:
    """A new, empty pool; what dead servers left is removed first. `randbits(k)`: k random bits.

    Raises StartupError(pool_too_small) naming what the machine has and what was wanted.
    """
    remove_stale()
    pool_id, incarnation = randbits(64), randbits(23) + 1
    with ExitStack() as undo:
        try:
            lock = PoolLock.create(pool_id)
            undo.callback(lock.close, unlink=True)
            segments = SegmentPool(
                pool_id,
                limit_bytes=settings.pool_bytes,
                segment_bytes=settings.segment_bytes,
                prefault_threads=settings.prefault_threads,
            )
            undo.callback(segments.close, unlink=True)
            region = _make_region(settings, pool_id, undo)
        except PoolTooSmall as error:
            raise StartupError("pool_too_small", _advice(settings, error)) from error
        table = Table(
            region,
            pool_id=pool_id,
            incarnation=incarnation,
            limit_bytes=settings.pool_bytes,
            max_records=settings.table_records,
            max_grants=settings.table_grants,
            ask_ms=round(settings.ask_s * 1000),
            settle_ms=round(settings.settle_s * 1000),
            suspect_ms=settings.suspect_ms,
            session_cap=settings.session_cap,
            total_cap=settings.total_cap,
        )
        return Pool(
            settings, lock=lock, segments=segments, table=table, incarnation=incarnation, undo=undo.pop_all()
        )


def _make_region(settings: Settings, pool_id: int, undo: ExitStack) -> Mapping:
    name = shm.region_name(pool_id)
    region = shm.create_region(name, Table.region_bytes(settings.table_records, settings.table_grants))
    undo.callback(shm.unlink, name)
    return region


def _advice(settings: Settings, error: PoolTooSmall) -> str:
    return (
        f"pool_bytes={settings.pool_bytes} does not fit: {error}. "
        "Choose a smaller pool_bytes, or give more shared memory (docker run --shm-size)."
    )
