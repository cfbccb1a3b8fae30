"""Segments of shared memory: the server creates them, engines attach them.

SegmentPool (server) grows one POSIX object at a time up to a byte limit. A segment is at most 1 GiB:
it is one pin piece, and no slot crosses it. Before a segment is handed out, every byte of it is
allocated and its header is written; mapping its pages into the server (prefault) follows in the
background, so that the server's control group pays for them.

AttachedSegments (engine) maps segments by name and turns (segment, offset, length) into an address.
Offsets count from the start of the object, header included.

Thread safety: all methods of both may be called from any thread; close() once no copy is in flight.
Invariants: grow() never brings allocated_bytes over limit_bytes; segment ids rise and are never reused; when a
constructor or grow() raises, no object that it made is left behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvdock import _core
from kvdock.datapath import shm
from kvdock.datapath.capacity import Capacity
from kvdock.datapath.errors import (
    AttachError,
    PoolFull,
    SegmentAbsent,
    SegmentCorrupt,
    SegmentNotReady,
    SegmentWrongVersion,
    SlotOutOfBounds,
)
from kvdock.datapath.liveness import remove_stale
from kvdock.datapath.shm import create_region, open_region

__all__ = [
    "AttachedSegments",
    "SegmentDescription",
    "SegmentInfo",
    "SegmentPool",
    "create_region",
    "open_region",
    "remove_stale",
]

MAX_SEGMENT_BYTES: Final = 1 << 30
PREFAULT_PIECE_BYTES: Final = 16 << 20
_HEADER_ERRORS: Final[dict[str, type[AttachError]]] = {
    "not_ready": SegmentNotReady,
    "wrong_version": SegmentWrongVersion,
    "corrupt": SegmentCorrupt,
}


class SegmentDescription(Protocol):
    """What an engine must be told of a segment; sizes in bytes."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def data_offset(self) -> int: ...


@dataclass(frozen=True)
class SegmentInfo:
    """One segment: its POSIX name, the size of the whole object and where slots begin."""

    id: int
    name: str
    bytes: int
    data_offset: int

    @property
    def data_bytes(self) -> int:
        return self.bytes - self.data_offset


class _Prefault:
    """Background population of one mapping, piece by piece; the threads end when the pieces do."""

    def __init__(self, mapping: _core.Mapping, threads: int, name: str) -> None:
        self._mapping = mapping
        self._lock = threading.Lock()
        self._next = 0
        self._done_bytes = 0
        self._stopped = False
        self._error: OSError | None = None
        self._threads = [threading.Thread(target=self._run, name=f"prefault{name}-{i}") for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def done_bytes(self) -> int:
        return self._done_bytes

    def wait(self, timeout_s: float | None) -> bool:
        """True once every byte is populated, False on timeout; raises the OSError that ended it."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        if self._error is not None:
            raise self._error
        return self._done_bytes == self._mapping.bytes

    def stop(self) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                start = self._next
                if self._stopped or self._error is not None or start >= self._mapping.bytes:
                    return
                size = min(PREFAULT_PIECE_BYTES, self._mapping.bytes - start)
                self._next = start + size
            try:
                self._mapping.populate(start, size)
            except OSError as error:
                self._error = error
                return
            with self._lock:
                self._done_bytes += size


@dataclass(frozen=True)
class _Segment:
    info: SegmentInfo
    mapping: _core.Mapping
    prefault: _Prefault


class SegmentPool:
    """The server's half. Sizes in bytes, rounded down to pages. `first_bytes`: at most so much for the first
    segment, since a server is ready when that is allocated.

    adopt=True maps the segments an earlier server of this pool left (AttachError when one is damaged); with
    `known`, those alone: others were never given out, or nobody holds any of them, and their names go. Ids below
    `next_id` are not used again.
    Raises PoolTooSmall when `limit_bytes` cannot be had, ValueError for sizes out of range.
    """

    def __init__(
        self,
        pool_id: int,
        *,
        limit_bytes: int,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        first_bytes: int = MAX_SEGMENT_BYTES,
        shm_dir: Path = shm.SHM_DIR,
        prefault_threads: int = 2,
        capacity: Capacity | None = None,
        adopt: bool = False,
        known: Collection[int] | None = None,
        next_id: int = 0,
    ) -> None:
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
        self._capacity = capacity if capacity is not None else Capacity(shm_dir=Path(shm_dir))
        self._prefault_threads = prefault_threads
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._next_id = next_id
        self._closed = False
        if adopt:
            self._adopt(Path(shm_dir), known)
        else:
            self._capacity.require(limit_bytes)

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

    def wait_prefaulted(self, timeout_s: float | None = None) -> bool:
        """True once every segment is populated. OSError when the kernel refused."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for segment in list(self._segments.values()):
            if not segment.prefault.wait(None if until is None else max(0.0, until - time.monotonic())):
                return False
        return True

    def can_grow(self) -> bool:
        return not self._closed and self._next_bytes() > 0

    def grow(self) -> SegmentInfo:
        """Adds a segment: allocated, header written, prefault begun. Takes about 0.3 s a GiB without the GIL.

        PoolFull at the byte limit, PoolTooSmall when the machine has less than it had.
        """
        with self._lock:
            size = 0 if self._closed else self._next_bytes()
            if size == 0:
                raise PoolFull("pool limit (bytes)", found=self.allocated_bytes, wanted=f"less than {self.limit_bytes}")
            self._capacity.require(size)
            name = shm.segment_name(self.pool_id, self._next_id)
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

    def mapping(self, segment: int) -> _core.Mapping:
        """KeyError when the pool has no such segment."""
        return self._segments[segment].mapping

    def address(self, segment: int, offset: int, length: int) -> int:
        """Address in this process of bytes [offset, offset + length); SlotOutOfBounds."""
        found = self._segments.get(segment)
        return _address(found.info if found else None, found.mapping if found else None, segment, offset, length)

    def retire(self, segment: int) -> None:
        """Removes one segment: its name goes, and its memory as soon as nobody maps it. KeyError when it is not there.

        Only for a segment of which nobody holds a slot. Takes some ms a GiB.
        """
        with self._lock:
            gone = self._segments.pop(segment)
            shm.unlink(gone.info.name)
            gone.prefault.stop()
            gone.mapping.close()

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
                self._segments[key].mapping.close()
                if unlink:
                    shm.unlink(self._segments[key].info.name)
                del self._segments[key]

    def _next_bytes(self) -> int:
        """Size of the next segment; 0 when the limit leaves no room for a useful one."""
        wanted = self._segment_bytes if self._next_id else min(self._segment_bytes, self._first_bytes)
        size = _whole_pages(min(wanted, self.limit_bytes - self.allocated_bytes))
        return size if size >= _core.SEGMENT_HEADER_BYTES + _core.SLOT_ALIGN else 0

    def _add(self, info: SegmentInfo, mapping: _core.Mapping) -> None:
        mapping.advise_huge()  # a hint: mounts without huge pages ignore it
        prefault = _Prefault(mapping, self._prefault_threads, info.name)
        self._segments[info.id] = _Segment(info, mapping, prefault)
        self._next_id = max(self._next_id, info.id + 1)

    def _adopt(self, shm_dir: Path, known: Collection[int] | None) -> None:
        opened: list[tuple[SegmentInfo, _core.Mapping]] = []
        there = list(shm.segment_numbers(self.pool_id, shm_dir))
        for number in there if known is None else sorted(known):
            name = shm.segment_name(self.pool_id, number)
            mapping, fields = _map_checked(name, self.pool_id, number)
            opened.append((SegmentInfo(number, name, mapping.bytes, fields["data_offset"]), mapping))
        for info, mapping in opened:
            self._add(info, mapping)
        for number in set(there).difference(info.id for info, _ in opened):
            shm.unlink(shm.segment_name(self.pool_id, number))


class AttachedSegments:
    """The engine's half: the segments of one pool, mapped here."""

    def __init__(self, pool_id: int) -> None:
        self.pool_id = pool_id
        self._lock = threading.Lock()
        self._segments: dict[int, tuple[SegmentInfo, _core.Mapping]] = {}

    @property
    def segments(self) -> list[SegmentInfo]:
        return [info for info, _ in list(self._segments.values())]

    def attach(self, segment: SegmentDescription, *, populate: bool = False) -> SegmentInfo:
        """Maps a segment; once more is harmless. populate=True also maps its pages now, not at first use.

        SegmentAbsent, SegmentNotReady (try again), SegmentWrongVersion, SegmentCorrupt; the last also
        when the object is another than described.
        """
        with self._lock:
            if segment.id not in self._segments:
                mapping, fields = _map_checked(segment.name, self.pool_id, segment.id)
                found = SegmentInfo(segment.id, segment.name, mapping.bytes, fields["data_offset"])
                told = SegmentInfo(segment.id, segment.name, segment.bytes, segment.data_offset)
                if found != told:
                    raise SegmentCorrupt(f"segment {segment.name}", found=found, wanted=told)
                if populate:
                    mapping.populate(0, mapping.bytes)
                self._segments[segment.id] = (found, mapping)
            return self._segments[segment.id][0]

    def mapping(self, segment: int) -> _core.Mapping:
        """KeyError when it is not attached."""
        return self._segments[segment][1]

    def address(self, segment: int, offset: int, length: int) -> int:
        """Address in this process of bytes [offset, offset + length) of a segment; SlotOutOfBounds."""
        info, mapping = self._segments.get(segment, (None, None))
        return _address(info, mapping, segment, offset, length)

    def detach(self, segment: int) -> None:
        """Unmaps one segment (it retires). No error when it is not attached."""
        with self._lock:
            _, mapping = self._segments.pop(segment, (None, None))
            if mapping is not None:
                mapping.close()

    def close(self) -> None:
        for info in self.segments:
            self.detach(info.id)


def _whole_pages(size_bytes: int) -> int:
    return size_bytes - size_bytes % _core.SLOT_ALIGN


def _map_checked(name: str, pool_id: int, segment: int) -> tuple[_core.Mapping, dict[str, int]]:
    """Maps an object by name and judges its header; an AttachError names what is wrong."""
    try:
        fd = shm.open_existing(name)
    except FileNotFoundError as error:
        raise SegmentAbsent(f"segment {name}", found="no such object", wanted="a segment of the pool") from error
    try:
        size = os.fstat(fd).st_size
        if size < _core.SEGMENT_HEADER_BYTES:
            raise SegmentNotReady(f"segment {name} (bytes)", found=size, wanted=f">= {_core.SEGMENT_HEADER_BYTES}")
        mapping = _core.Mapping(fd, size)
    finally:
        os.close(fd)
    state, fields = _core.segment_header_read(mapping)
    if state in _HEADER_ERRORS:
        wanted = {"version": _core.SEGMENT_VERSION, "pool_id": pool_id, "segment": segment, "bytes": size}
        raise _HEADER_ERRORS[state](f"segment {name}: header is {state}", found=fields, wanted=wanted)
    if (fields["pool_id"], fields["segment"]) != (pool_id, segment):
        found = f"pool {fields['pool_id']:016x} segment {fields['segment']}"
        raise SegmentCorrupt(f"segment {name}", found=found, wanted=f"pool {pool_id:016x} segment {segment}")
    return mapping, fields


def _address(
    info: SegmentInfo | None, mapping: _core.Mapping | None, segment: int, offset: int, length: int
) -> int:
    if info is None or mapping is None:
        raise SlotOutOfBounds("segment", found=segment, wanted="one that is attached")
    if not (info.data_offset <= offset and 0 <= length <= info.bytes - offset):
        raise SlotOutOfBounds(
            f"bytes of {info.name}", found=f"[{offset}, +{length})", wanted=f"within [{info.data_offset}, {info.bytes})"
        )
    return mapping.address + offset
