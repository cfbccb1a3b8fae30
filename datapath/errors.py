"""The error tree of the data path. Every error names the value found and the value wanted.

    DatapathError
    ├── PoolTooSmall        /dev/shm or the control group cannot hold what was asked for
    ├── PoolFull            the pool has reached its own byte limit
    ├── PoolInUse           another server holds byte 0 of the pool's lock file
    ├── PoolGone            the pool's lock file is missing, or was replaced meanwhile
    ├── SlotOutOfBounds     bytes outside the data of a segment (or of one not attached)
    ├── ManifestError       a manifest or token list without one canonical form
    ├── CopierClosed        a copy was submitted after close()
    ├── DeviceUnknown       a device name that is none
    ├── NoCuda              a GPU was asked for that this process cannot use
    └── AttachError         a segment cannot be used by this engine
        ├── SegmentAbsent        no shared memory object of that name
        ├── SegmentNotReady      its header is not written yet: try again
        ├── SegmentNotPinned     it is mapped, but the GPU's driver does not know it yet: try again
        ├── SegmentWrongVersion  written by a build with another layout
        └── SegmentCorrupt       the header contradicts itself, the object or the caller

    ValueError
    ├── LayoutError         strides that no copy can follow (from the native core)
    └── CopyError           ids, lengths or skips outside a layout (from the native core)

    RuntimeError
    └── CudaError           the GPU's driver refused (from the native core)
"""

from __future__ import annotations

from kvdock._core import CopyError, CudaError, LayoutError

__all__ = [
    "AttachError",
    "CopierClosed",
    "CopyError",
    "CudaError",
    "DatapathError",
    "DeviceUnknown",
    "LayoutError",
    "ManifestError",
    "NoCuda",
    "PoolFull",
    "PoolGone",
    "PoolInUse",
    "PoolTooSmall",
    "SegmentAbsent",
    "SegmentCorrupt",
    "SegmentNotPinned",
    "SegmentNotReady",
    "SegmentWrongVersion",
    "SlotOutOfBounds",
    "copy_error",
    "layout_error",
]


class DatapathError(Exception):
    """`found` and `wanted` are the values the message names."""

    def __init__(self, message: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{message}: found {found}, wanted {wanted}")
        self.found = found
        self.wanted = wanted


class PoolTooSmall(DatapathError):
    """found, wanted: bytes."""


class PoolFull(DatapathError):
    """found, wanted: bytes."""


class PoolInUse(DatapathError):
    pass


class PoolGone(DatapathError):
    pass


class SlotOutOfBounds(DatapathError):
    pass


class ManifestError(DatapathError, ValueError):
    pass


class CopierClosed(DatapathError):
    pass


class DeviceUnknown(DatapathError, ValueError):
    pass


class NoCuda(DatapathError):
    """The message is one sentence for people."""

    def __init__(self, sentence: str, *, found: object, wanted: object) -> None:
        super().__init__(sentence, found=found, wanted=wanted)
        self.args = (sentence,)


class AttachError(DatapathError):
    pass


class SegmentAbsent(AttachError):
    pass


class SegmentNotPinned(AttachError):
    pass


class SegmentNotReady(AttachError):
    pass


class SegmentWrongVersion(AttachError):
    pass


class SegmentCorrupt(AttachError):
    pass


def layout_error(message: str, *, found: object, wanted: object) -> LayoutError:
    """A LayoutError in the shape the native core gives it."""
    error = LayoutError(f"{message}: found {found}, wanted {wanted}")
    error.found, error.wanted = found, wanted
    return error


def copy_error(message: str, *, found: object, wanted: object) -> CopyError:
    """A CopyError in the shape the native core gives it."""
    error = CopyError(f"{message}: found {found}, wanted {wanted}")
    error.found, error.wanted = found, wanted
    return error
