"""One segment of shared memory: its description, how it is mapped and checked, and the addresses of its slots.

Offsets count from the start of the object, header included.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvdock import _core
from kvdock.shm import objects
from kvdock.shm.errors import (
    AttachError,
    SegmentAbsent,
    SegmentCorrupt,
    SegmentNotReady,
    SegmentWrongVersion,
    SlotOutOfBounds,
)

MAX_SEGMENT_BYTES: Final = 1 << 30
_HEADER_ERRORS: Final[dict[str, type[AttachError]]] = {
    "not_ready": SegmentNotReady,
    "wrong_version": SegmentWrongVersion,
    "corrupt": SegmentCorrupt,
}


@dataclass(frozen=True)
class SegmentInfo:
    """A segment's POSIX name, the size of the whole object, and where its slots begin."""

    id: int
    name: str
    bytes: int
    data_offset: int

    @property
    def data_bytes(self) -> int:
        return self.bytes - self.data_offset


def map_checked(
    name: str, pool_id: int, segment: int, trusted_uid: int = objects.NOBODY
) -> tuple[_core.Mapping, dict[str, int]]:
    """Maps an object by name and checks its header. `trusted_uid`: see objects.is_own. Returns the mapping and the
    header's fields. Raises AttachError."""
    try:
        fd = objects.open_existing(name, trusted_uid)
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


def address_of(
    info: SegmentInfo | None, mapping: _core.Mapping | None, segment: int, offset: int, length: int
) -> int:
    """The address of bytes [offset, offset + length) of a segment. `info` and `mapping` are None if it is not mapped.
    Raises SlotOutOfBounds."""
    if info is None or mapping is None:
        raise SlotOutOfBounds("segment", found=segment, wanted="one that is attached")
    if not (info.data_offset <= offset and 0 <= length <= info.bytes - offset):
        raise SlotOutOfBounds(
            f"bytes of {info.name}", found=f"[{offset}, +{length})", wanted=f"within [{info.data_offset}, {info.bytes})"
        )
    return mapping.address + offset
