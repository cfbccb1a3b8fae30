"""Pins the segments that an engine process maps, in the background, so that its first step does not wait.

A GPU copies at full speed only from memory that its driver knows. Registering a segment takes a fraction of a
second a GiB, and far longer where pages must be faulted in first. So one thread goes through the segments in
the order of their ids: it maps the pages of one in small pieces, then has the Pin register the whole segment,
in one piece, since no slot crosses a segment.

How far it has come is one number: `pinned_through = n` says that every segment with an id below n that the
pool still has is pinned here. Ids rise and are never used again, so the number only rises, and keeps its
meaning when a segment below it retires; a count of segments or bytes would not.

A segment that cannot be pinned stays above the number, and is tried again every `retry_s`.

Threads: every method may be called from any thread. Invariants: a pinned segment stays mapped (a buffer of its
mapping is held; AttachedSegments.detach raises BufferError before unpin()); `pinned_through` is raised after
the registration it speaks of.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from kvdock import _core
from kvdock.datapath.segments import AttachedSegments

log = logging.getLogger("kvdock.datapath")

POPULATE_PIECE_BYTES: Final = 16 << 20
RETRY_S: Final = 5.0
ADVICE: Final = (
    "raise the limit of locked memory (ulimit -l unlimited, docker --ulimit memlock=-1, systemd "
    "LimitMEMLOCK=infinity) and see that the machine has memory to spare; `kvdock doctor` shows both"
)
PinFailed = (_core.CudaError, OSError, MemoryError)
"""What registering may raise; all of it may pass, so all of it is tried again."""


class Pinned(Protocol):
    """A registration; it ends with close(), which is for when no copy uses the memory."""

    def close(self) -> None: ...


class Pin(Protocol):
    """Registers [address, address + size_bytes), whose pages are there. Raises one of PinFailed."""

    def __call__(self, address: int, size_bytes: int) -> Pinned: ...


class CudaPin:
    """Registers with the CUDA driver, for all devices of this process."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __call__(self, address: int, size_bytes: int) -> Pinned:
        return _core.CudaSlotMemory(device=self._device, address=address, bytes=size_bytes, host=True)


class _Held(NamedTuple):
    """A pinned segment: its registration, and the buffer that keeps it mapped."""

    pinned: Pinned
    view: memoryview

    def close(self) -> None:
        self.pinned.close()
        self.view.release()


class SegmentPinner:
    """Pins what `segments` holds and what wake() announces. `progress` is called, in the thread, after each."""

    def __init__(
        self,
        segments: AttachedSegments,
        pin: Pin,
        *,
        progress: Callable[[], None] = lambda: None,
        retry_s: float = RETRY_S,
        piece_bytes: int = POPULATE_PIECE_BYTES,
    ) -> None:
        self._segments, self._pin, self._progress = segments, pin, progress
        self._retry_s, self._piece_bytes = retry_s, piece_bytes
        self._changed = threading.Condition()  # guards what follows
        self._held: dict[int, _Held] = {}
        self._unwanted: set[int] = set()
        self._busy: int | None = None
        self._through = 0
        self._told: int | None = None  # the segment whose failure was logged
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvdock-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_through(self) -> int:
        """Every segment with an id below it that the pool still has is pinned."""
        return self._through

    def is_pinned(self, segment: int) -> bool:
        return segment in self._held

    def wake(self) -> None:
        """More segments were attached."""
        with self._changed:
            self._changed.notify_all()

    def unpin(self, segment: int) -> None:
        """Before detach(); returns once neither the driver nor this thread uses it. For when no copy does.

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
        """Unpins all. Waits for the registration under way."""
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
            finally:  # whatever happened, unpin() must not wait for ever
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
        """The next segment to pin, once there is one; None to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next() is not None)
            self._busy = None if self._stopped else self._next()
            return self._busy

    def _next(self) -> int | None:
        known = {info.id for info in self._segments.segments}
        return min(known - self._held.keys() - self._unwanted, default=None)

    def _try(self, segment: int) -> _Held | None:
        """None when it failed, or is no longer wanted."""
        mapping = self._segments.mapping(segment)
        view = memoryview(mapping)
        try:
            for start in range(0, mapping.bytes, self._piece_bytes):
                if self._stopped or segment in self._unwanted:
                    view.release()
                    return None
                mapping.populate(start, min(self._piece_bytes, mapping.bytes - start))
            pinned = self._pin(mapping.address, mapping.bytes)
        except PinFailed as error:
            view.release()
            self._tell_failure(segment, mapping.bytes, error)
            return None
        if self._told == segment:
            log.info("segment %d is pinned now", segment)
        return _Held(pinned, view)

    def _tell_failure(self, segment: int, size_bytes: int, error: Exception) -> None:
        """Once a segment, with what to do."""
        if self._told == segment:
            log.debug("segment %d still cannot be pinned: %s", segment, error)
            return
        self._told = segment
        log.warning(
            "segment %d (%d bytes) cannot be pinned, next try in %g s; what lies there and behind is not used by this "
            "process: %s. %s", segment, size_bytes, self._retry_s, error, ADVICE,
        )
