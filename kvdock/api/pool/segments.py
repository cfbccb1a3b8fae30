"""The server's segments: created, prefaulted, retired.

SegmentPool adds one POSIX shared-memory object at a time, up to a byte limit. A segment is at most 1 GiB: engines
register it as one piece, and no slot crosses it. Before a segment is handed out, every byte of it is
allocated and its header is written; mapping its pages into the server (prefault) follows in the
background, so that they are charged to the server's control group.

Thread safety: all methods may be called from any thread.
Invariants: grow() never brings allocated_bytes over limit_bytes; segment ids rise and are never used again; there are
at most MAX_SEGMENTS; when grow() raises, no object that it made is left behind.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from kvdock import _core
from kvdock.api.pool.capacity import Capacity
from kvdock.shm import objects as shm
from kvdock.shm.checksum import checksum
from kvdock.shm.errors import PoolFull, SegmentAbsent, SegmentCorrupt
from kvdock.shm.segment import MAX_SEGMENT_BYTES, SegmentInfo, map_checked

log = logging.getLogger("kvdock.api")

PREFAULT_PIECE_BYTES: Final = 16 << 20


class LeasedPart(NamedTuple):
    """Where a part of a chunk is, and the checksum with which it was stored."""

    segment: int
    offset: int
    length: int
    checksum: int


class Prefault:
    """Maps the pages of one mapping in background threads, piece by piece."""

    def __init__(self, mapping: _core.Mapping, threads: int, name: str) -> None:
        self._mapping = mapping
        self._lock = threading.Lock()
        self._next = 0
        self.done_bytes = 0
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name=f"prefault{name}-{i}") for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                start = self._next
                if self._stopped or start >= self._mapping.bytes:
                    return
                size = min(PREFAULT_PIECE_BYTES, self._mapping.bytes - start)
                self._next = start + size
            try:
                self._mapping.populate(start, size)
            except OSError as error:  # it only saves engines page faults
                log.warning("prefault ends at %d of %d bytes: %s", self.done_bytes, self._mapping.bytes, error)
                self._stopped = True
                return
            with self._lock:
                self.done_bytes += size


class RemovedSegments:
    """Ids of the segments that a pool has removed, in that order: the latest MAX_SEGMENTS."""

    def __init__(self) -> None:
        self.count = 0
        """How many were removed so far."""
        self._latest: deque[int] = deque(maxlen=_core.MAX_SEGMENTS)

    def add(self, segment: int) -> None:
        self._latest.append(segment)
        self.count += 1

    def since(self, count: int) -> list[int]:
        """Those that were removed after the first `count`, as far as they are known."""
        return list(islice(self._latest, max(0, count - self.count + len(self._latest)), None))


@dataclass(frozen=True)
class _Segment:
    info: SegmentInfo
    mapping: _core.Mapping
    prefault: Prefault


class SegmentPool:
    """Starts without a segment: `grow` makes one, `adopt` takes over those that an earlier server left."""

    def __init__(
        self,
        pool_id: int,
        *,
        limit_bytes: int,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        first_bytes: int = MAX_SEGMENT_BYTES,
        prefault_threads: int = 2,
        capacity: Capacity | None = None,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """Sizes in bytes, rounded down to pages. `first_bytes`: the first segment is not larger, because the server is
        ready as soon as it is allocated. `randbits(k)`: k random bits that nobody can guess, for names. Raises
        ValueError for sizes out of range."""
        smallest = _core.SEGMENT_HEADER_BYTES + _core.SLOT_ALIGN
        if not smallest <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"segment_bytes: found {segment_bytes}, wanted {smallest}..{MAX_SEGMENT_BYTES}")
        if limit_bytes < smallest:
            raise ValueError(f"limit_bytes: found {limit_bytes}, wanted at least {smallest}")
        if prefault_threads < 1:
            raise ValueError(f"prefault_threads: found {prefault_threads}, wanted at least 1")
        self.pool_id = pool_id
        self.limit_bytes = limit_bytes  # may be changed between two calls of grow()
        self._segment_bytes = _whole_pages(segment_bytes)
        self._first_bytes = max(_whole_pages(first_bytes), smallest)
        self._capacity = capacity if capacity is not None else Capacity()
        self._prefault_threads = prefault_threads
        self._randbits = randbits
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held while bytes of a segment are read or a segment is unmapped."""
        self._segments: dict[int, _Segment] = {}
        self._next_id = 0
        self._closed = False

    def require_limit(self) -> None:
        """Raises PoolTooSmall unless the machine can give `limit_bytes` more."""
        self._capacity.require(self.limit_bytes)

    def adopt(self, *, known: Collection[int] | None = None, next_id: int = 0) -> None:
        """Maps the segments that an earlier server of this pool left: all of them, or those that `known` names.

        The names of the others are removed: no engine holds any of them. Ids below `next_id` are not used again. Called
        once, before grow(). Raises AttachError when a segment is missing, damaged or there twice; then nothing is
        changed.
        """
        opened: list[tuple[SegmentInfo, _core.Mapping]] = []
        there = list(shm.segment_names(self.pool_id, shm.SHM_DIR))
        for number in sorted({number for number, _ in there} if known is None else known):
            name = _only_name(number, [name for found, name in there if found == number])
            mapping, fields = map_checked(name, self.pool_id, number)
            opened.append((SegmentInfo(number, name, mapping.bytes, fields["data_offset"]), mapping))
        self._next_id = next_id
        for info, mapping in opened:
            self._add(info, mapping)
        for name in {name for _, name in there}.difference(info.name for info, _ in opened):
            shm.unlink(name)

    @property
    def segments(self) -> list[SegmentInfo]:
        return [segment.info for segment in list(self._segments.values())]

    @property
    def allocated_bytes(self) -> int:
        return sum(info.bytes for info in self.segments)

    def prefaulted_bytes(self, segment: int | None = None) -> int:
        """Bytes populated so far in one segment, or in all."""
        wanted = list(self._segments.values()) if segment is None else [self._segments[segment]]
        return sum(one.prefault.done_bytes for one in wanted)

    def can_grow(self) -> bool:
        return not self._closed and self._next_bytes() > 0

    def grow(self) -> SegmentInfo:
        """Adds a segment: allocated, header written, prefault begun. Takes about 0.06 s a GiB without the GIL in
        huge pages, 0.3 s in small ones, and 3 s where the kernel gives huge pages slowly.

        PoolFull at the byte limit or with MAX_SEGMENTS, PoolTooSmall when the machine has less than it had.
        """
        with self._lock:
            size = 0 if self._closed else self._next_bytes()
            if size == 0:
                raise PoolFull("pool limit (bytes)", found=self.allocated_bytes, wanted=f"less than {self.limit_bytes}")
            if len(self._segments) >= _core.MAX_SEGMENTS:
                wanted = f"less than {_core.MAX_SEGMENTS}: a larger segment_bytes makes fewer"
                raise PoolFull("segments of a pool", found=len(self._segments), wanted=wanted)
            self._capacity.require(size)
            name = shm.segment_name(self.pool_id, self._next_id, self._randbits(64))
            info = SegmentInfo(self._next_id, name, size, _core.SEGMENT_HEADER_BYTES)
            fd = shm.create(name, size)
            try:
                mapping = _core.Mapping(fd, size)
                _core.segment_header_write(mapping, self.pool_id, info.id, info.data_offset)
                self._add(info, mapping)
            except BaseException:
                shm.unlink(name)
                raise
            finally:
                os.close(fd)
            return info

    def retire(self, segment: int) -> None:
        """Removes one segment: its name at once, and its memory as soon as no process maps it. Raises KeyError if there
        is none.

        Only for a segment in which no engine holds a slot. Takes some ms a GiB.
        """
        with self._lock:
            gone = self._segments.pop(segment)
            shm.unlink(gone.info.name)
            gone.prefault.stop()
            with self._reading:
                gone.mapping.close()

    def are_whole(self, parts: Iterable[LeasedPart]) -> bool:
        """Whether all of the parts have the bytes that were stored. Takes about 0.1 s a GiB without the GIL."""
        return all(map(self._is_whole, parts))

    def _is_whole(self, part: LeasedPart) -> bool:
        with self._reading:
            segment = self._segments.get(part.segment)
            if segment is None or not segment.mapping.reaches_end():
                return False  # these bytes are gone
            with memoryview(segment.mapping) as whole, whole[part.offset : part.offset + part.length] as stored:
                return checksum(stored) == part.checksum

    def available_bytes(self) -> int:
        """What the machine could still give to segments."""
        return min(available for _, available in self._capacity.limits())

    def close(self, *, unlink: bool = True) -> None:
        """Joins the prefault threads, unmaps, and removes the names unless a later server shall adopt them."""
        with self._lock:
            self._closed = True
            for segment in self._segments.values():
                segment.prefault.stop()
            while self._segments:
                key = next(iter(self._segments))
                with self._reading:
                    self._segments[key].mapping.close()
                if unlink:
                    shm.unlink(self._segments[key].info.name)
                del self._segments[key]

    def _next_bytes(self) -> int:
        """The size of the next segment; 0 if what is left of the limit is too small for one."""
        wanted = self._segment_bytes if self._next_id else min(self._segment_bytes, self._first_bytes)
        size = _whole_pages(min(wanted, self.limit_bytes - self.allocated_bytes))
        return size if size >= _core.SEGMENT_HEADER_BYTES + _core.SLOT_ALIGN else 0

    def _add(self, info: SegmentInfo, mapping: _core.Mapping) -> None:
        mapping.advise_huge()  # a hint: mounts without huge pages ignore it
        prefault = Prefault(mapping, self._prefault_threads, info.name)
        self._segments[info.id] = _Segment(info, mapping, prefault)
        self._next_id = max(self._next_id, info.id + 1)


def _only_name(segment: int, names: list[str]) -> str:
    """The only name of the segment. Raises SegmentAbsent if there is none, SegmentCorrupt if there are several."""
    if not names:
        raise SegmentAbsent(f"segment {segment}", found="no such object", wanted="a segment of the pool")
    if len(names) > 1:
        raise SegmentCorrupt(f"segment {segment}", found=" and ".join(names), wanted="one object")
    return names[0]


def _whole_pages(size_bytes: int) -> int:
    return size_bytes - size_bytes % _core.SLOT_ALIGN
