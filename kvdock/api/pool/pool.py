"""The pool: lock file, table region, segments, and the table over them.

Ownership: `open_pool` makes them in that order and `close` removes them in reverse; if opening fails
half-way nothing is left behind. The table and all methods are used from the event loop; only the
creation and removal of a segment (a fraction of a second per GiB) run in a thread.
Invariants: the table knows a segment only once all of its memory is allocated, and a segment is removed
only after the table has forgotten it; growth and changes of the limits never overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from kvdock._core import KEY_BYTES, MAX_SEGMENTS, SEGMENT_HEADER_BYTES, SLOT_ALIGN, Mapping, Table, TableError
from kvdock.api.errors import AdoptionError, OtherFormat, StartupError
from kvdock.api.pool.adopt import Adopted, Means, PoolObjects, address_of, adopt_pool, is_strangers, left_at
from kvdock.api.pool.lock import PoolLock, remove_stale
from kvdock.api.pool.segments import LeasedPart, RemovedSegments, SegmentPool
from kvdock.api.settings import Settings
from kvdock.api.turns import next_slice
from kvdock.protocol import events as e
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.errors import ApiError
from kvdock.protocol.readable import exact_bytes
from kvdock.protocol.reports import PoolView
from kvdock.protocol.schemas import Segment
from kvdock.shm import objects as shm
from kvdock.shm.errors import PoolFull, PoolTooSmall
from kvdock.shm.locks import SECRET_BYTES
from kvdock.shm.segment import SegmentInfo

FIRST_SEGMENT_BYTES = 256 << 20
MOST_IDS = 100
"""How many ids a new pool tries while another user takes their names."""
"""Allocating a whole GiB takes 0.25 s, and engines can attach only once the first segment is allocated."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
RETIRE_SLICE_CHUNKS = 64
log = logging.getLogger("kvdock.api")


class GrowthRetry:
    """When the pool tries to grow again after an attempt that failed: after each further failure it waits longer."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.error = ""
        """The error of the last attempt; '' if it succeeded or there was none."""
        self._now_s = now_s
        self._wait_s, self._at_s = FIRST_RETRY_S, 0.0

    def is_due(self) -> bool:
        return not self.error or self._now_s() >= self._at_s

    def failed(self, error: str) -> float:
        """Returns how many seconds it waits now."""
        self.error, waits_s = error, self._wait_s
        self._at_s, self._wait_s = self._now_s() + waits_s, min(2 * waits_s, LONGEST_RETRY_S)
        return waits_s

    def succeeded(self) -> None:
        self.error, self._wait_s = "", FIRST_RETRY_S

    def skip_wait(self) -> None:
        """The limits have changed: the next attempt need not wait."""
        self._at_s = 0.0


class Pool:
    """`table` may be called directly, but segments are added and removed only here."""

    def __init__(
        self, settings: Settings, objects: PoolObjects, now_s: Callable[[], float], publish: Callable[[e.Event], None],
        adopted: Adopted | None = None,
    ) -> None:
        self.table = table = objects.table
        self.clock_ms = adopted.found["clock_ms"] if adopted else 0
        """The time from which the server clock continues, in milliseconds."""
        self.limits = Limits(**{name: getattr(settings, name) for name in Limits.__struct_fields__})
        """In effect now, complete and checked; `change_limits` replaces them."""
        self._has_tiers = settings.has_tiers
        table.set_eviction(self.policy_of(self.limits))
        self.left_out = ""
        """The pool that was left for this server and that it could not use, and why; '': there is none."""
        self.removed = RemovedSegments()
        self.unheard: dict[int, int] = {
            member.member: member.lock_offset for member in table.members() if member.state == "suspect"
        }
        """Members of an adopted pool that have not come back yet: table id → lock offset."""
        self._objects, self._segments = objects, objects.segments
        self._added: list[SegmentInfo] = []
        self._retiring: list[int] = []
        self._segment_bytes = settings.segment_bytes
        self._publish = publish
        self._retry = GrowthRetry(now_s)
        self._growing = asyncio.Lock()
        if adopted:
            self._added = list(objects.segments.segments)
            self._retiring = list(adopted.retiring)
            for segment in adopted.removed:
                self.removed.add(segment)
            self._choose_retiring()

    def close(self) -> None:
        """Removes every object of the pool. Engines that still map one keep their memory until they unmap it."""
        self._objects.close()

    def leave(self) -> None:
        """Leaves every object of the pool, with byte 0 of the lock file free, for a later server."""
        self._objects.leave()

    def view(self) -> PoolView:
        """The pool's sizes, for people."""
        stats = self.table.stats()
        return PoolView(
            limit_bytes=self.limit_bytes,
            allocated_bytes=self.allocated_bytes,
            prefaulted_bytes=self.prefaulted_bytes,
            free_bytes=self.table.free_bytes(),
            reserved_bytes=stats["reserved_bytes"],
            ready_bytes=stats["ready_bytes"],
            quarantined_bytes=stats["quarantined_bytes"],
            held_bytes=stats["held_bytes"],
            retained_bytes=stats["retained_bytes"],
            kv_bytes=stats["kv_bytes"],
            raw_parts=stats["raw_parts"],
            segments=self.segment_count,
        )

    @property
    def pool_id(self) -> int:
        return self._segments.pool_id

    @property
    def incarnation(self) -> int:
        return self.table.incarnation

    # ---------------------------------------------------------------- members

    @property
    def lock_path(self) -> str:
        return str(self._objects.lock.path)

    @property
    def secret(self) -> bytes:
        """Random bytes that all servers of this pool share, and that no other user can read."""
        return self._objects.lock.secret

    def lock_held(self, offset: int) -> bool:
        """Whether a process holds that byte of the lock file."""
        return self._objects.lock.member_alive(offset)

    def unheard_has_lock(self, nonce: bytes, offset: int) -> bool:
        """Whether that byte is of a member of the adopted pool that has not attached again, other than `nonce`."""
        if offset not in self.unheard.values():
            return False
        return any(
            member.member in self.unheard and member.lock_offset == offset and member.nonce != nonce
            for member in self.table.members()
        )

    def is_unheard(self, nonce: bytes) -> bool:
        """Whether a member of the adopted pool with that id has not attached again."""
        return any(member.nonce == nonce for member in self.table.members_named(list(self.unheard)))

    def touch(self) -> None:
        """Records the time in the lock file, so that later servers know when this one died. Called again and again."""
        self._objects.lock.touch()
        if self._objects.crash_mark is not None:
            self._objects.crash_mark.end_when_due()

    def missing(self) -> list[str]:
        """Names of objects of the pool that were removed by others: engines that start now cannot attach."""
        names = [*(info.name for info in self._added), self._objects.lock.path.name]
        return [name for name in names if not (shm.SHM_DIR / name.removeprefix("/")).exists()]

    # ---------------------------------------------------------------- memory

    @property
    def ready(self) -> bool:
        """Whether there is memory to give out."""
        return bool(self._added)

    @property
    def limit_bytes(self) -> int:
        return self.limits.pool_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._segments.allocated_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of slots that are free, and bytes that the pool has not allocated yet."""
        return max(0, self.limit_bytes - self.allocated_bytes) + self.table.free_bytes()

    @property
    def prefaulted_bytes(self) -> int:
        return self._segments.prefaulted_bytes()

    @property
    def segment_count(self) -> int:
        return len(self._added)

    @property
    def retiring(self) -> list[int]:
        """Ids of the segments that are being drained."""
        return list(self._retiring)

    @property
    def largest_part_bytes(self) -> int:
        """The largest size that a part may have: no slot crosses a segment."""
        return self._segment_bytes - SEGMENT_HEADER_BYTES - SLOT_ALIGN

    @property
    def growth_error(self) -> str:
        """Why the last attempt to grow failed; '' if it succeeded or there was none."""
        return self._retry.error

    def can_grow(self) -> bool:
        """Whether the pool may grow now: not at its limit, and not for a while after an attempt that failed."""
        return self._retry.is_due() and self._segments.can_grow()

    @property
    def segment_infos(self) -> Sequence[SegmentInfo]:
        """In rising order of their ids, including those that are being drained."""
        return self._added

    def segments(self, infos: Sequence[SegmentInfo] | None = None) -> list[Segment]:
        """All segments, or those that `infos` names."""
        return [
            Segment(
                id=info.id, name=info.name, bytes=info.bytes, data_offset=info.data_offset,
                prefaulted_bytes=self._segments.prefaulted_bytes(info.id),
                used_bytes=self.table.segment_used_bytes(info.id), retiring=info.id in self._retiring,
            )
            for info in (self._added if infos is None else infos)
        ]

    async def grow_for(self, space: int, keys: bytes, chunk_bytes: int) -> None:
        """Grows before a store that needs memory that the pool does not have yet: growing is better than evicting."""
        if self.table.available_bytes() >= len(keys) // KEY_BYTES * chunk_bytes or not self.can_grow():
            return
        missing = 0
        for start in range(0, len(keys), KEY_BYTES):
            missing += self.table.state_of(space, keys[start : start + KEY_BYTES]) == "absent"
            if start % (512 * KEY_BYTES) == 0:
                await next_slice()  # each slice takes about 0.5 ms
        await self.grow_until(missing * chunk_bytes)

    async def grow_until(self, wanted_bytes: int) -> None:
        """Adds segments until `wanted_bytes` are free or the pool may not grow. Concurrent calls share the work."""
        async with self._growing:
            while self.table.available_bytes() < wanted_bytes and self.can_grow():
                await self._grow()

    async def grow_once(self) -> bool:
        """Adds one segment, if the pool may grow. Returns whether the pool has more segments than before."""
        before = self.segment_count
        async with self._growing:
            if self.segment_count == before and self.can_grow():
                await self._grow()
        return self.segment_count > before

    async def grow_first(self) -> None:
        """Allocates the first segment. Raises StartupError(pool_too_small)."""
        async with self._growing:
            if not self.ready:
                await self._grow()
                if self.growth_error:
                    raise StartupError("pool_too_small", self.growth_error)

    async def _grow(self) -> None:
        """Adds one segment. After a failure the next attempt waits, and longer after each further failure."""
        try:
            info = await asyncio.to_thread(self._segments.grow)
            try:
                self.table.add_segment(info.id, info.data_offset, info.data_bytes)
            except TableError:
                await asyncio.to_thread(self._segments.retire, info.id)
                raise
        except (PoolFull, PoolTooSmall, OSError, TableError) as error:
            retry_s = self._retry.failed(str(error))
            self._publish(e.GrowthFailed(why=str(error), allocated_bytes=self.allocated_bytes, retry_s=retry_s))
            return
        self._retry.succeeded()
        self._added.append(info)
        self._publish(e.Grown(segment=info.id, bytes=info.bytes, allocated_bytes=self.allocated_bytes))

    async def are_whole(self, parts: Sequence[LeasedPart]) -> bool:
        """Whether all of the parts have the bytes that were stored, read in a thread."""
        return await asyncio.to_thread(self._segments.are_whole, parts)

    # ---------------------------------------------------------------- limits

    async def change_limits(self, changes: dict[str, object]) -> None:
        """Replaces some limits, all of them or none. A smaller pool_bytes only begins here: `drain` completes it.

        Raises ApiError: bad_argument, no_memory (the machine cannot hold a pool of that size).
        """
        async with self._growing:
            limits = _changed(self.limits, changes, self._segment_bytes)
            more_bytes = limits.pool_bytes - max(self.limit_bytes, self.allocated_bytes)
            if more_bytes > 0:
                missing = limits.pool_bytes - self.allocated_bytes
                available = await asyncio.to_thread(self._segments.available_bytes)
                if missing > available:
                    raise ApiError(
                        "no_memory", "shared memory or the control group has less memory free than the pool needs",
                        found=missing, wanted=f"<= {available} bytes more than the pool has",
                    )
            if limits.pool_bytes > self.limit_bytes:
                self._require_segments(limits.pool_bytes)
            self.limits = limits
            self._segments.limit_bytes = limits.pool_bytes
            self._retry.skip_wait()
            self._choose_retiring()
            self._limit_table()

    def _require_segments(self, pool_bytes: int) -> None:
        """Raises ApiError(bad_argument) unless `pool_bytes` fit into the segments that the pool may have once it is
        drained."""
        staying = [info.bytes for info in self._added if info.id not in self._retiring]
        most_bytes = sum(staying) + (MAX_SEGMENTS - max(1, len(staying))) * self._segment_bytes
        if pool_bytes > most_bytes:
            raise ApiError(
                "bad_argument", f"a pool has at most {MAX_SEGMENTS} segments: serve with a larger segment_bytes",
                found=pool_bytes, wanted=f"pool_bytes <= {most_bytes} with segment_bytes {self._segment_bytes}",
            )

    async def drain(self) -> None:
        """Evicts chunks that no engine holds from retiring segments, in slices, and removes segments that are empty."""
        for segment in tuple(self._retiring):
            before = -1
            in_use = self.table.retire_segment(segment, RETIRE_SLICE_CHUNKS)
            while in_use not in (0, before):
                await next_slice()
                before, in_use = in_use, self.table.retire_segment(segment, RETIRE_SLICE_CHUNKS)
            if in_use == 0:
                async with self._growing:
                    await self._remove(segment)

    async def _remove(self, segment: int) -> None:
        """Removes the segment: it is no longer listed, and heartbeat answers name it as retired."""
        self.table.remove_segment(segment)
        self._added = [info for info in self._added if info.id != segment]
        self._retiring.remove(segment)
        self.removed.add(segment)
        await asyncio.to_thread(self._segments.retire, segment)
        self._limit_table()
        self._publish(e.Shrunk(segment=segment, allocated_bytes=self.allocated_bytes))

    def _choose_retiring(self) -> None:
        """Adds the segments with the fewest bytes in use to those that retire, until the others fit the limit."""
        staying = [info for info in self._added if info.id not in self._retiring]
        excess_bytes = sum(info.bytes for info in staying) - self.limit_bytes
        for info in sorted(staying, key=lambda info: (self.table.segment_used_bytes(info.id), -info.id)):
            if excess_bytes <= 0:
                return
            self._retiring.append(info.id)
            excess_bytes -= info.bytes

    def _limit_table(self) -> None:
        """Sets the table's limit and caps. The caps are shares of the limit, which is never below the allocated
        bytes."""
        self.table.set_limits(
            limit_bytes=max(self.limit_bytes, self.allocated_bytes),
            session_cap=self.limits.session_cap, total_cap=self.limits.total_cap,
        )
        self.table.set_eviction(self.policy_of(self.limits))

    def policy_of(self, limits: Limits) -> str:
        """The table's eviction policy. Where there are lower tiers it declines no chunk: they get theirs from the
        pool."""
        return "selective" if limits.eviction == "adaptive" and not self._has_tiers else limits.eviction


def _changed(limits: Limits, changes: dict[str, object], segment_bytes: int) -> Limits:
    """`limits` with some values replaced. Raises ApiError(bad_argument) when they do not fit together."""
    limits = msgspec.structs.replace(limits, **changes)
    if limits.pool_bytes < segment_bytes:
        raise ApiError(
            "bad_argument", "a pool is at least one segment: serve with a smaller segment_bytes",
            found=limits.pool_bytes, wanted=f"pool_bytes >= {segment_bytes}",
        )
    if limits.high_water < limits.low_water:
        raise ApiError(
            "bad_argument", "high_water is at least low_water",
            found=limits.high_water, wanted=f">= {limits.low_water}",
        )
    return limits


def open_pool(
    settings: Settings, randbits: Callable[[int], int], now_s: Callable[[], float] = time.monotonic,
    publish: Callable[[e.Event], None] = lambda event: None, *, catches_signals: bool = False,
) -> Pool:
    """The pool that a dead server left at this socket, or a new, empty one, as `settings.adopt` says. Other pools that
    dead servers left are removed. `randbits(k)`: k random bits. `now_s` times the attempts to grow. `publish` gets
    the pool's events. `catches_signals`: the process's signals are the server's to catch.

    Raises StartupError: not_adoptable, no_name, or pool_too_small naming what the machine has and what was wanted.
    """
    means = Means(randbits, now_s, catches_signals)
    adopted = _adopt(settings, left_at(address_of(settings)), means, publish)
    _clear_up(address_of(settings))
    foreign = shm.foreign_objects()
    if foreign:
        shown = ", ".join(ascii(name) for name in foreign[:4])
        log.warning(
            "%s holds %d objects with names of kvdock that another user owns or may open; they are left alone: %s",
            shm.SHM_DIR, len(foreign), shown,
        )
    if isinstance(adopted, Adopted):
        return Pool(settings, adopted.objects, now_s, publish, adopted)
    pool = Pool(settings, _new_pool(settings, randbits), now_s, publish)
    pool.left_out = adopted
    return pool


def _adopt(
    settings: Settings, left: list[int], means: Means, publish: Callable[[e.Event], None]
) -> Adopted | str:
    """A text: there is no pool to adopt or adoption is switched off (''), or the pool is damaged, and why; then it is
    removed. A pool in another format stays, and the server does not start."""
    if settings.adopt == "never" or not left:
        if settings.adopt == "require":
            raise StartupError("not_adoptable", f"adopt=require: no server has left a pool at {address_of(settings)}")
        return ""
    pool_id = left[0]
    try:
        adopted = adopt_pool(settings, pool_id, means)
    except OtherFormat as error:
        what = f"pool {pool_id:016x}, left at {address_of(settings)}, is kept for the release that made it: {error}"
        advice = "Start that release again, or remove the pool with --adopt=never"
        raise StartupError("not_adoptable", f"{what}. {advice}") from error
    except AdoptionError as error:
        if settings.adopt == "require":
            raise StartupError("not_adoptable", f"pool {pool_id:016x} cannot be taken over: {error}") from error
        log.error("pool %016x cannot be taken over, starting with an empty one: %s", pool_id, error)
        return f"pool {pool_id:016x}: {error}"
    found = adopted.found
    publish(e.Adopted(
        pool=f"{pool_id:016x}", chunks=found["chunks"], sessions=found["sessions"], leases=found["leases"],
        aborted=found["aborted"], dropped=found["dropped"],
    ))
    if found["dropped"]:
        log.warning("pool %016x: %d chunks were damaged and are no longer found", pool_id, found["dropped"])
    return adopted


def _clear_up(address: str) -> None:
    for name in remove_stale(spare=lambda left: is_strangers(left, address)):
        if name.endswith(".lock"):  # each pool has one, which is removed last
            log.warning("a server that is gone had left its pool in shared memory: removed %s and its segments", name)


def _new_pool(settings: Settings, randbits: Callable[[int], int]) -> PoolObjects:
    """Another user who sees the name of the lock can take that of the table, but has to be quicker each time."""
    for _ in range(MOST_IDS):
        try:
            return _new_objects(settings, randbits)
        except FileExistsError as error:
            taken = error.filename
    raise StartupError("no_name", f"somebody else was quicker to take the names of {MOST_IDS} pools, such as {taken}")


def _new_objects(settings: Settings, randbits: Callable[[int], int]) -> PoolObjects:
    pool_id, incarnation = randbits(64), randbits(22) + 1  # servers that adopt the pool continue this count
    with ExitStack() as undo:
        try:
            secret = randbits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "little")
            lock = PoolLock.create(pool_id, address=address_of(settings), secret=secret)
            undo.callback(lock.close, unlink=True)
            for kept in shm.kept_paths(pool_id, secret):
                undo.callback(kept.unlink, missing_ok=True)
            region = _make_region(settings, pool_id, undo)  # first, because the segments must fit beside it
            segments = SegmentPool(
                pool_id,
                limit_bytes=settings.pool_bytes,
                segment_bytes=settings.segment_bytes,
                first_bytes=FIRST_SEGMENT_BYTES,
                prefault_threads=settings.prefault_threads,
                randbits=randbits,
            )
            undo.callback(segments.close, unlink=True)
            segments.require_limit()
        except PoolTooSmall as error:
            raise StartupError("pool_too_small", _advice(settings, error)) from error
        table = Table(
            region,
            pool_id=pool_id,
            lock_inode=lock.inode,
            incarnation=incarnation,
            limit_bytes=settings.pool_bytes,
            max_records=settings.table_records,
            max_grants=settings.table_grants,
            ask_ms=round(settings.ask_s * 1000),
            settle_ms=round(settings.settle_s * 1000),
            suspect_ms=settings.suspect_ms,
            session_cap=settings.session_cap,
            total_cap=settings.total_cap,
            grace_ms=round(settings.weights_grace_s * 1000),
        )
        return PoolObjects(lock, segments, table, undo.pop_all())


def _make_region(settings: Settings, pool_id: int, undo: ExitStack) -> Mapping:
    name = shm.region_name(pool_id)
    region = shm.create_region(name, Table.region_bytes(settings.table_records, settings.table_grants))
    undo.callback(shm.unlink, name)
    return region


def _advice(settings: Settings, error: PoolTooSmall) -> str:
    return (
        f"pool_bytes={exact_bytes(settings.pool_bytes)} does not fit beside the chunk table: {error}. "
        "Choose a smaller pool_bytes, or give more shared memory (docker run --shm-size)."
    )
