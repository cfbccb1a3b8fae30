"""The log: segment files of one size, filled one after the other. Once all are full, parts of a segment are evicted,
and new records are written to the gaps. Files of an earlier size are removed when they are emptied. A record is a block
that describes it, and the part's pages.

Invariants: the files never take more than `capacity_bytes` together, because they are allocated whole before they are
used. Nothing is written to a place from which a thread reads, or where a part is that the map has (space.py).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from kvdock.tiers.disk.files import File
from kvdock.tiers.disk.io import FULL_ERRORS, Io
from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, pages_bytes

_NAME: Final = re.compile(r"segment-(\d{6})\.log")
_SCAN_BYTES: Final = 1 << 20


class Entry(NamedTuple):
    """The place of a part. `used`, `uses`: as in PartMap."""

    segment: Segment
    offset: int
    length: int
    checksum: int
    used: int = 0
    uses: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """`gaps`: where records may be written: (begin, end) of each, in their order. `readers`: how many threads are
    loading from each offset. `writers`: how many records threads are storing to it. They are guarded by the lock of
    space.py, like `records` and `turn`."""

    file: File
    size_bytes: int
    sequence: int = 0
    mark: bytes = b""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    records: int = 0
    """How many records it has, those included that were deleted since it was last chosen to be filled."""
    readers: Counter[int] = field(default_factory=Counter)
    writers: int = 0
    turn: int = 0
    """The higher, the later it was chosen to be filled."""
    is_read: bool = True
    """Whether the map has all its parts. The reader (reader.py) guards it."""


class Extent(NamedTuple):
    """Space for one record, to which no other thread writes."""

    segment: Segment
    offset: int


def follows(place: Entry | Extent, before: Entry | Extent, length: int) -> bool:
    """Whether the record begins where the one before it, with a part of this length, ends."""
    return place.segment is before.segment and place.offset == before.offset + record_bytes(length)


class Log:
    """The segments, filled and free."""

    def __init__(self, folder: Path, io: Io, segment_bytes: int, capacity_bytes: int, most_records: int) -> None:
        """`capacity_bytes`: the most that all segments take. `most_records`: in one segment. Opens the segments in the
        folder. Removes segments that cannot be used, and the oldest ones if not all of them fit. Raises OSError."""
        self._folder, self._io = folder, io
        self.segment_bytes, self._capacity_bytes, self.most_records = segment_bytes, capacity_bytes, most_records
        self.segments: dict[int, Segment] = {}
        """The segments in use, by sequence; none of them is in `free`."""
        self.free: list[Segment] = []
        self.bytes_used = 0
        self._last = self._number = 0
        for path in sorted(folder.iterdir()):
            if match := _NAME.fullmatch(path.name):
                self._number = max(self._number, int(match[1]))
                self._open(path)
        for segment in [*self.free, *(self.segments[sequence] for sequence in sorted(self.segments))]:
            if self.bytes_used > capacity_bytes:
                self._remove(segment)

    def _open(self, path: Path) -> None:
        segment = Segment(self._io.files.open(path), path.stat().st_size)
        found = SegmentBlock.read(self._io.read_block(segment.file, 0))
        if found is not None and found.sequence not in self.segments:
            segment.sequence, segment.size_bytes, segment.mark = found
            segment.is_read = False
            self.segments[found.sequence] = segment
            self._last = max(self._last, found.sequence)
        elif segment.size_bytes == self.segment_bytes:
            self.free.append(segment)
        self.bytes_used += segment.size_bytes
        if segment not in self.free and segment.sequence == 0:
            self._remove(segment)

    @property
    def has_spare(self) -> bool:
        """Whether one more segment fits."""
        return bool(self.free) or self.bytes_used + self.segment_bytes <= self._capacity_bytes

    def start_segment(self) -> Segment | None:
        """An empty segment, ready to be filled; None: the limit or the storage leaves no space. Raises OSError."""
        if not self.has_spare:
            return None
        try:
            segment = self.free.pop() if self.free else self._grow()
        except OSError as error:
            if error.errno in FULL_ERRORS:
                return None
            raise
        try:
            self._last += 1
            block = SegmentBlock.new(self._last, segment.size_bytes)
            self._io.write_block(segment.file, block.block(), 0)
        except BaseException:
            self.free.append(segment)
            raise
        segment.sequence, _, segment.mark = block
        segment.gaps, segment.records = [(PAGE_BYTES, segment.size_bytes)], 0
        self.segments[segment.sequence] = segment
        return segment

    def _grow(self) -> Segment:
        self._number += 1
        path = self._folder / f"segment-{self._number:06}.log"
        file = self._io.files.open(path, create=True)
        try:
            with self._io.files.using(file) as fd:
                os.posix_fallocate(fd, 0, self.segment_bytes)
        except BaseException as error:
            self._io.files.close(file)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                self._io.note(error, path)
            raise
        self.bytes_used += self.segment_bytes
        return Segment(file, self.segment_bytes)

    def wipe(self, segment: Segment) -> None:
        """Removes everything from the segment; start_segment() may use it again. Raises OSError."""
        del self.segments[segment.sequence]
        if segment.size_bytes == self.segment_bytes:
            self.free.append(segment)
            self._io.write_block(segment.file, bytes(PAGE_BYTES), 0)
        else:
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        self.segments.pop(segment.sequence, None)
        if segment in self.free:
            self.free.remove(segment)
        self._io.files.close(segment.file)
        segment.file.path.unlink(missing_ok=True)
        self.bytes_used -= segment.size_bytes

    def mark_deleted(self, segment: Segment, offset: int, record: Record) -> None:
        """Overwrites the record's block, so that no scan takes it for a part again. Needs no space. Raises OSError."""
        self._io.write_block(segment.file, record_block(record, segment.mark, offset, Kind.DELETED), offset)

    def scan(self, segment: Segment, begin: int) -> Iterator[tuple[int, Record]]:
        """(offset, record) of each part from the offset `begin` on; the segment's gap begins after the last one.

        A record that is damaged or was never written whole is skipped, because several threads write at a time, so
        whole records may follow. Raises OSError.
        """
        with self._io.files.using(segment.file) as fd:
            end = min(segment.size_bytes, os.fstat(fd).st_size // PAGE_BYTES * PAGE_BYTES)
        offset: int | None = begin
        while offset is not None and offset < end:
            try:
                kind, record = read_record(self._io.read_block(segment.file, offset), segment.mark, offset)
            except RecordError:
                offset = self._next_mark(segment, offset + PAGE_BYTES, end)
                continue
            if kind is Kind.PART:
                yield offset, record
            offset += record_bytes(record.length)
            segment.gaps = [(offset, segment.size_bytes)]
            segment.records += 1

    def _next_mark(self, segment: Segment, begin: int, end: int) -> int | None:
        """The offset of the next block that has the segment's mark; None: there is none."""
        with mmap.mmap(-1, _SCAN_BYTES) as buffer, memoryview(buffer) as view:
            for offset in range(begin, end, _SCAN_BYTES):
                with view[: end - offset] as some:
                    if not self._io.read(segment.file, [some], offset):
                        return None
                at = -1
                while (at := buffer.find(segment.mark, at + 1, end - offset)) >= 0:
                    if at % PAGE_BYTES == MARK_AT:
                        return offset + at - MARK_AT
        return None

    def sync(self, segments: Iterable[Segment] | None = None) -> None:
        """Makes everything that was written to `segments` durable; None: to all segments. Raises OSError."""
        for segment in self.segments.values() if segments is None else segments:
            with suppress(FileNotFoundError), self._io.files.using(segment.file) as fd:  # somebody may have removed it
                os.fdatasync(fd)

    def close(self) -> None:
        for segment in (*self.segments.values(), *self.free):
            self._io.files.close(segment.file)


# --------------------------------------------------------------------------- the blocks

# The blocks of a log: one at the start of each segment, and one before each part that describes the part and its
# place.
#
# A segment gets a new random mark each time it is filled from the start, and every record in it carries the mark. So
# bytes that an earlier use has left, and a part's own bytes, are never taken for a record.

LOG_VERSION: Final = 2
MARK_BYTES: Final = 16
MARK_AT: Final = HEADER_BYTES
"""Where the mark is in a record's block."""
KEY_BYTES: Final = 86
NAMESPACE_BYTES: Final = 32
"""A key in the tier's maps begins with the namespace."""
_GROUP_AT: Final = 64
_MAGIC: Final = b"kvdock disk log\0"
_KEY: Final = struct.Struct("<32s32sBBIQQ")  # namespace, key, group, writer, deletion, birth, generation
_SEGMENT: Final = struct.Struct("<16sIIQQ16s")  # magic, version, 0, sequence, capacity, mark
_RECORD: Final = struct.Struct("<16sQB")  # mark, offset, kind
_CRC: Final = struct.Struct("<I")
_RECORD_END: Final = HEADER_BYTES + _RECORD.size
RECORD_HEAD_BYTES: Final = _RECORD_END + _CRC.size


class Kind(IntEnum):
    PART = 1
    DELETED = 2
    """A part that was deleted; its pages are not free yet."""


class SegmentBlock(NamedTuple):
    """`sequence`: a number that rises each time a segment is filled anew. `capacity_bytes`: the size of the segment,
    with this block."""

    sequence: int
    capacity_bytes: int
    mark: bytes

    @staticmethod
    def new(sequence: int, capacity_bytes: int) -> SegmentBlock:
        return SegmentBlock(sequence, capacity_bytes, os.urandom(MARK_BYTES))

    def block(self) -> bytes:
        fields = _SEGMENT.pack(_MAGIC, LOG_VERSION, 0, *self)
        return (fields + _CRC.pack(crc32(fields))).ljust(PAGE_BYTES, b"\0")

    @staticmethod
    def read(block: bytes | memoryview) -> SegmentBlock | None:
        """None: the segment is empty or damaged, or was written by another version."""
        fields = bytes(block[: _SEGMENT.size])
        if len(block) < PAGE_BYTES or _CRC.unpack_from(block, _SEGMENT.size)[0] != crc32(fields):
            return None
        magic, version, _, sequence, capacity_bytes, mark = _SEGMENT.unpack(fields)
        return SegmentBlock(sequence, capacity_bytes, mark) if (magic, version) == (_MAGIC, LOG_VERSION) else None


def record_head(record: Record, mark: bytes, offset: int, kind: Kind = Kind.PART) -> bytes:
    """RECORD_HEAD_BYTES bytes, the beginning of record_block(); zeros follow."""
    fields = record.header() + _RECORD.pack(mark, offset, kind)
    return fields + _CRC.pack(crc32(fields))


def record_block(record: Record, mark: bytes, offset: int, kind: Kind = Kind.PART) -> bytes:
    """The block of PAGE_BYTES before a part's pages. `offset`: that of the block in the segment."""
    return record_head(record, mark, offset, kind).ljust(PAGE_BYTES, b"\0")


def read_record(block: bytes | memoryview, mark: bytes, offset: int) -> tuple[Kind, Record]:
    """Raises RecordError unless the record was written at this offset since the segment got this mark."""
    record = Record.read(block)
    if _CRC.unpack_from(block, _RECORD_END)[0] != crc32(block[:_RECORD_END]):
        raise RecordError("the record's block does not match its CRC")
    found_mark, found_offset, kind = _RECORD.unpack_from(block, MARK_AT)
    if (found_mark, found_offset) != (mark, offset):
        raise RecordError(f"found a record for offset {found_offset} or of another segment, wanted one for {offset}")
    return Kind(kind), record


def key_of(name: PartName) -> bytes:
    """KEY_BYTES bytes that name the part in this tier's maps."""
    return _KEY.pack(
        name.namespace, name.key, name.group, name.writer, name.deletion, name.birth, name.generation
    )


def name_of(key: bytes) -> PartName:
    namespace, chunk, group, writer, deletion, birth, generation = _KEY.unpack(key)
    return PartName(namespace, chunk, group, writer, birth, generation, deletion)


def chunk_of(key: bytes) -> tuple[bytes, bytes]:
    """(namespace, chunk) of a key in this tier's maps."""
    return key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:_GROUP_AT]


def is_first(key: bytes) -> bool:
    """Whether it names the first group's part of the first writer."""
    return key[_GROUP_AT : _GROUP_AT + 2] == b"\0\0"


def record_bytes(length: int) -> int:
    """The bytes that a part of this length takes in a segment."""
    return PAGE_BYTES + pages_bytes(length)
