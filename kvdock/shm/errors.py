"""The errors of a pool's shared memory: its segments and its lock file. Every error names the value found and the value
wanted.

    ShmError
    ├── PoolTooSmall        the machine has less shared memory than was asked for
    ├── PoolFull            the pool has reached its own byte limit
    ├── PoolInUse           another server holds byte 0 of the pool's lock file
    ├── PoolGone            the pool's lock file is missing, or was replaced meanwhile
    ├── SlotOutOfBounds     bytes outside a segment's data, or in a segment that is not mapped here
    └── AttachError         a segment cannot be used by this process
        ├── SegmentAbsent        no shared memory object of that name
        ├── SegmentNotReady      its header is not written yet: try again
        ├── SegmentNotRegistered it is mapped, but not yet registered with the GPU's driver: try again
        ├── ForeignObject        it is another user's, or other users may open, link or replace it
        ├── SegmentWrongVersion  it was written by a build with another layout
        └── SegmentCorrupt       the header contradicts itself, the object or the caller
"""

from __future__ import annotations


class ShmError(Exception):
    """`found` and `wanted` are the values that the message names."""

    def __init__(self, message: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{message}: found {found}, wanted {wanted}")
        self.found = found
        self.wanted = wanted


class PoolTooSmall(ShmError):
    """found, wanted: bytes, which the message has in MiB."""

    def __init__(self, message: str, *, found: int, wanted: int) -> None:
        super().__init__(message, found=f"{found >> 20:,} MiB", wanted=f"{wanted / (1 << 20):,.0f} MiB")
        self.found, self.wanted = found, wanted


class PoolFull(ShmError):
    """found, wanted: bytes."""


class PoolInUse(ShmError):
    """found, wanted: whether the byte is held."""


class PoolGone(ShmError):
    """found, wanted: which lock file is there."""


class SlotOutOfBounds(ShmError):
    """found, wanted: bytes, or the id of a segment."""


class AttachError(ShmError):
    """A segment cannot be used by this process."""


class SegmentAbsent(AttachError):
    pass


class ForeignObject(AttachError):
    """Raised for a lock file or a table too. found, wanted: kind, owner, mode and links."""


class SegmentNotRegistered(AttachError):
    pass


class SegmentNotReady(AttachError):
    pass


class SegmentWrongVersion(AttachError):
    pass


class SegmentCorrupt(AttachError):
    pass
