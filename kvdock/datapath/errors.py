"""The errors of copies and devices. A message names the value found and the value wanted; NoCuda's is one sentence. The
data path also raises the errors of segments, which are in kvdock/shm/errors.py.

    DatapathError
    ├── CopierClosed        a copy was submitted after close()
    ├── DeviceUnknown       a name that names no device
    └── NoCuda              a GPU was asked for that this process cannot use

    ValueError
    ├── LayoutError         strides that copies do not support (from the native core)
    └── CopyError           impossible ids, lengths, skips or addresses (from the native core)

    RuntimeError
    └── CudaError           the GPU's driver refused (from the native core)
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from kvdock._core import CopyError as CopyError, CudaError as CudaError, LayoutError as LayoutError

E = TypeVar("E", LayoutError, CopyError)


class DatapathError(Exception):
    """`found` and `wanted` are the values that the message names."""

    def __init__(self, message: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{message}: found {found}, wanted {wanted}")
        self.found = found
        self.wanted = wanted


class CopierClosed(DatapathError):
    """The copier was closed before this call."""


class DeviceUnknown(DatapathError, ValueError):
    """The name names no device: not `cpu`, `cuda` or `cuda:N`."""


class NoCuda(DatapathError):
    """The message is one sentence for people."""

    def __init__(self, sentence: str, *, found: object, wanted: object) -> None:
        super().__init__(sentence, found=found, wanted=wanted)
        self.args = (sentence,)


def _as_core(kind: type[E], message: str, *, found: object, wanted: object) -> E:
    """Makes an error of a class of the native core, with the same message and attributes as the core does."""
    error = kind(f"{message}: found {found}, wanted {wanted}")
    error.found, error.wanted = found, wanted
    return error


layout_error, copy_error = partial(_as_core, LayoutError), partial(_as_core, CopyError)
