"""The segments of a pool that an engine process has mapped, and the addresses of slots in them.

Thread safety: all methods may be called from any thread. Call close() only when no copy is in flight.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

from kvdock import _core
from kvdock.datapath.threads import new_thread
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


# --------------------------------------------------------------------------- registration with the driver

# Registers the segments that an engine process maps with the GPU's driver, in the background.
#
# A GPU copies at full speed only from page-locked memory that its driver knows. Registering takes a fraction of a
# second for each GiB, and far longer if pages must be faulted in first. The engine's first step must not wait for this.
# So one thread takes the segments in the order of their ids: it maps the pages of a segment in small pieces, then
# registers the whole segment in one piece, since no slot crosses a segment.
#
# Its progress is one number, which the protocol calls `pinned_through`: every segment of the pool with an id below it
# is registered here. Ids rise and are never used again, so the number only rises, and keeps its meaning when a segment
# below it retires; a count of segments or bytes would not.
#
# A segment that cannot be registered stays above the number, and is tried again every `retry_s`.
#
# Threads: every method may be called from any thread. Invariants: a registered segment stays mapped (a buffer of its
# mapping is held, so AttachedSegments.detach raises BufferError before unregister()); `pinned_through` rises only after
# the registration that it reports.

log = logging.getLogger("kvdock.datapath")

POPULATE_PIECE_BYTES: Final = 16 << 20
RETRY_S: Final = 5.0
ADVICE: Final = (
    "raise the limit of locked memory (ulimit -l unlimited, docker --ulimit memlock=-1, systemd "
    "LimitMEMLOCK=infinity) and see that the machine has memory to spare; `kvdock doctor` shows both"
)
RegistrationFailed = (_core.CudaError, OSError, MemoryError)
"""The errors of registering. The cause of each may be temporary, so registering is tried again."""


class Registration(Protocol):
    """Memory that is registered until close(), which must not be called while a copy uses the memory."""

    def close(self) -> None:
        """Unregisters it."""


class Register(Protocol):
    """Registers [address, address + size_bytes), whose pages are mapped. Raises one of RegistrationFailed."""

    def __call__(self, address: int, size_bytes: int) -> Registration: ...


class CudaRegister:
    """Registers with the CUDA driver, for all devices of this process."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __call__(self, address: int, size_bytes: int) -> Registration:
        return _core.CudaSlotMemory(device=self._device, address=address, bytes=size_bytes, host=True)


class _Held(NamedTuple):
    """A registered segment: its registration, and the buffer that keeps it mapped."""

    registration: Registration
    view: memoryview

    def close(self) -> None:
        self.registration.close()
        self.view.release()


class SegmentRegistrar:
    """Registers the segments in `segments`, now and after each wake(). Its thread calls `progress` after each one."""

    def __init__(
        self,
        segments: AttachedSegments,
        register: Register,
        *,
        progress: Callable[[], None] = lambda: None,
        retry_s: float = RETRY_S,
        piece_bytes: int = POPULATE_PIECE_BYTES,
    ) -> None:
        self._segments, self._register, self._progress = segments, register, progress
        self._retry_s, self._piece_bytes = retry_s, piece_bytes
        self._changed = threading.Condition()  # guards what follows
        self._held: dict[int, _Held] = {}
        self._unwanted: set[int] = set()
        self._busy: int | None = None
        self._through = 0
        self._logged: int | None = None  # the segment whose failure was logged
        self._stopped = False
        self._thread = new_thread("kvdock-register", self._run)
        self._thread.start()

    @property
    def pinned_through(self) -> int:
        """Every segment of the pool with an id below it is registered."""
        return self._through

    def is_registered(self, segment: int) -> bool:
        """Whether that segment is."""
        return segment in self._held

    def wake(self) -> None:
        """Call it when more segments were attached."""
        with self._changed:
            self._changed.notify_all()

    def unregister(self, segment: int) -> None:
        """Call it before detach(), when no copy uses the segment. Afterwards neither the driver nor this thread uses
        the segment.

        Waits for the registration under way, if it is this segment's.
        """
        with self._changed:
            self._unwanted.add(segment)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._busy != segment)
            held = self._held.pop(segment, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Unregisters all segments. Waits for the registration under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        for segment in list(self._held):
            self._held.pop(segment).close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (segment := self._take_next()) is not None:
            held = None
            try:
                held = self._try(segment)
            finally:  # whatever happened, unregister() must not wait for ever
                with self._changed:
                    self._busy = None
                    if held is not None:
                        self._held[segment] = held
                        self._through = max(self._through, segment + 1)
                    self._changed.notify_all()
            if held is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._next() != segment, self._retry_s)
            else:
                self._progress()

    def _take_next(self) -> int | None:
        """The next segment to register, once there is one; None to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next() is not None)
            self._busy = None if self._stopped else self._next()
            return self._busy

    def _next(self) -> int | None:
        known = {info.id for info in self._segments.segments}
        return min(known - self._held.keys() - self._unwanted, default=None)

    def _try(self, segment: int) -> _Held | None:
        """Registers a segment. None when that failed, or the segment is no longer wanted."""
        mapping = self._segments.mapping(segment)
        view = memoryview(mapping)
        try:
            for start in range(0, mapping.bytes, self._piece_bytes):
                if self._stopped or segment in self._unwanted:
                    view.release()
                    return None
                mapping.populate(start, min(self._piece_bytes, mapping.bytes - start))
            registration = self._register(mapping.address, mapping.bytes)
        except RegistrationFailed as error:
            view.release()
            self._log_failure(segment, mapping.bytes, error)
            return None
        if self._logged == segment:
            log.info("segment %d is registered with the driver now", segment)
        return _Held(registration, view)

    def _log_failure(self, segment: int, size_bytes: int, error: Exception) -> None:
        """Warns once for each segment, with advice."""
        if self._logged == segment:
            log.debug("segment %d still cannot be registered: %s", segment, error)
            return
        self._logged = segment
        log.warning(
            "segment %d (%d bytes) cannot be registered with the GPU driver, next try in %g s; until then this process "
            "uses neither it nor later ones: %s. %s", segment, size_bytes, self._retry_s, error, ADVICE,
        )
