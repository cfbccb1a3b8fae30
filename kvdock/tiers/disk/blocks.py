"""The blocks of a log: one at the start of each segment, and one before each part that describes the part and its
place.

A segment gets a new random mark each time it is filled from the start, and every record in it carries the mark. So
bytes that an earlier use has left, and a part's own bytes, are never taken for a record.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import Final, NamedTuple
from zlib import crc32

from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, pages_bytes

LOG_VERSION: Final = 2
MARK_BYTES: Final = 16
MARK_AT: Final = HEADER_BYTES
"""Where the mark is in a record's block."""
KEY_BYTES: Final = 86
NAMESPACE_BYTES: Final = 32
"""A key in the tier's maps begins with the namespace."""
_MAGIC: Final = b"kvdock disk log\0"
_KEY: Final = struct.Struct("<32s32sBBIQQ")  # namespace, key, group, writer, deletion, birth, generation
_SEGMENT: Final = struct.Struct("<16sIIQQ16s")  # magic, version, 0, sequence, capacity, mark
_RECORD: Final = struct.Struct("<16sQB")  # mark, offset, kind
_CRC: Final = struct.Struct("<I")
_RECORD_END: Final = HEADER_BYTES + _RECORD.size


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


def record_block(record: Record, mark: bytes, offset: int, kind: Kind = Kind.PART) -> bytes:
    """The block of PAGE_BYTES before a part's pages. `offset`: that of the block in the segment."""
    fields = record.header() + _RECORD.pack(mark, offset, kind)
    return (fields + _CRC.pack(crc32(fields))).ljust(PAGE_BYTES, b"\0")


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


def record_bytes(length: int) -> int:
    """The bytes that a part of this length takes in a segment."""
    return PAGE_BYTES + pages_bytes(length)
