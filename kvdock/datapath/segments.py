"""The segments of a pool that an engine process has mapped, and the addresses of slots in them.

Thread safety: all methods may be called from any thread. Call close() only when no copy is in flight.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvdock import _core
from kvdock.shm.errors import SegmentCorrupt
from kvdock.shm.objects import NOBODY
from kvdock.shm.segment import SegmentInfo, address_of, map_checked


class AttachedSegments:
    """The segments of one pool that this process has mapped. `trusted_uid`: see shm.objects.is_own."""

    def __init__(self, pool_id: int, trusted_uid: int = NOBODY) -> None:
        self.pool_id, self._trusted_uid = pool_id, trusted_uid
        self._lock = threading.Lock()
        self._segments: dict[int, tuple[SegmentInfo, _core.Mapping]] = {}
        self._readers: Counter[int] = Counter()
        self._detached: dict[int, _core.Mapping] = {}
        """Mappings of detached segments that are still read, by the segment's id."""

    @property
    def segments(self) -> list[SegmentInfo]:
        """The segments that are mapped now."""
        return [info for info, _ in list(self._segments.values())]

    def attach(self, segment: SegmentInfo, *, populate: bool = False) -> SegmentInfo:
        """Maps a segment; repeating it is harmless. `populate`: also maps its pages now, instead of at their first use.

        Raises SegmentAbsent, SegmentNotReady (try again), SegmentWrongVersion, SegmentCorrupt. SegmentCorrupt also
        means that the object differs from its description.
        """
        with self._lock:
            if segment.id not in self._segments:
                mapping, fields = map_checked(segment.name, self.pool_id, segment.id, self._trusted_uid)
                found = SegmentInfo(segment.id, segment.name, mapping.bytes, fields["data_offset"])
                if found != segment:
                    raise SegmentCorrupt(f"segment {segment.name}", found=found, wanted=segment)
                if populate:
                    mapping.populate(0, mapping.bytes)
                self._segments[segment.id] = (found, mapping)
            return self._segments[segment.id][0]

    def mapping(self, segment: int) -> _core.Mapping:
        """The mapping of a segment. Raises KeyError when the segment is not attached."""
        return self._segments[segment][1]

    def address(self, segment: int, offset: int, length: int) -> int:
        """Address in this process of bytes [offset, offset + length) of a segment; SlotOutOfBounds."""
        info, mapping = self._segments.get(segment, (None, None))
        return address_of(info, mapping, segment, offset, length)

    def require_whole(self, segment: int) -> None:
        """SegmentCorrupt when its object has become shorter: a copy would end this process with SIGBUS. Call it before
        each copy: it costs about a microsecond. It cannot see that an object becomes shorter later."""
        info, mapping = self._segments.get(segment, (None, None))
        if info is not None and mapping is not None and not mapping.reaches_end():
            raise SegmentCorrupt(f"segment {info.name}", found="fewer bytes", wanted=f"{info.bytes} bytes")

    @contextmanager
    def reading(self, segment: int) -> Iterator[bool]:
        """A context in which the segment stays mapped, for a reader without a lease. It yields False if the segment is
        not attached."""
        with self._lock:
            is_there = segment in self._segments
            self._readers[segment] += is_there
        try:
            yield is_there
        finally:
            with self._lock:
                self._readers[segment] -= is_there
                if not self._readers[segment] and (mapping := self._detached.pop(segment, None)) is not None:
                    mapping.close()

    def detach(self, segment: int) -> None:
        """Unmaps one segment, once no reading() of it is open. No error when it is not attached."""
        with self._lock:
            _, mapping = self._segments.pop(segment, (None, None))
            if mapping is None:
                return
            if self._readers[segment]:
                self._detached[segment] = mapping
            else:
                mapping.close()

    def close(self) -> None:
        """Unmaps all segments. No copy may be using them."""
        for info in self.segments:
            self.detach(info.id)
