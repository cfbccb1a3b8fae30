"""The errors of copies and devices. Every error names the value found and the value wanted. Those of segments, which
the data path also raises, are in shm/errors.py.

    DatapathError
    ├── CopierClosed        a copy was submitted after close()
    ├── DeviceUnknown       a name that is no device's
    └── NoCuda              a GPU was asked for that this process cannot use

    ValueError
    ├── LayoutError         strides that no copy can follow (from the native core)
    └── CopyError           ids, lengths, skips or addresses that a copy cannot have (from the native core)

    RuntimeError
    └── CudaError           the GPU's driver refused (from the native core)
"""

from __future__ import annotations

from kvdock._core import CopyError, CudaError, LayoutError

__all__ = [
    "CopierClosed",
    "CopyError",
    "CudaError",
    "DatapathError",
    "DeviceUnknown",
    "LayoutError",
    "NoCuda",
    "copy_error",
    "layout_error",
]


class DatapathError(Exception):
    """`found` and `wanted` are the values the message names."""

    def __init__(self, message: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{message}: found {found}, wanted {wanted}")
        self.found = found
        self.wanted = wanted


class CopierClosed(DatapathError):
    pass


class DeviceUnknown(DatapathError, ValueError):
    pass


class NoCuda(DatapathError):
    """The message is one sentence for people."""

    def __init__(self, sentence: str, *, found: object, wanted: object) -> None:
        super().__init__(sentence, found=found, wanted=wanted)
        self.args = (sentence,)


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
