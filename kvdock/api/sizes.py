"""Sizes as people write them: `64M`, `64MiB`, `1.5GB`, and for some settings `50%` and `auto`.

One letter is a binary unit, as in Docker and systemd: `64M` is `64MiB`. `64MB` is 64 million bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvdock.api.errors import SettingsError
from kvdock.api.pool.capacity import Capacity
from kvdock.protocol.readable import exact_bytes

MIB: Final = 1 << 20
AUTO_POOL: Final = 0.8
"""The share of shared memory that `pool_bytes=auto` takes: the chunk table and the server need some of the rest."""
AUTO_DISK: Final = 0.5
"""The share of its file system that `disk_bytes=auto` takes."""
_UNITS: Final = {
    "": 1, "b": 1, **{f"{letter}{end}": 1 << shift for letter, shift in zip("kmgt", (10, 20, 30, 40), strict=True)
                      for end in ("", "ib")},
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}
_NUMBER: Final = r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*"
"""Short enough to be a float and, with any unit, an int that Python converts."""
_SIZE: Final = re.compile(_NUMBER + r"([a-zA-Z]*)\s*")
_SHARE: Final = re.compile(_NUMBER + r"%\s*")


class Whole(NamedTuple):
    """What a share is a share of."""

    name: str
    """In words, for people: `the size of /dev/shm`."""
    bytes: int


def parse_bytes(text: str) -> int:
    """'4GiB' → 4294967296. Raises SettingsError naming the text."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise SettingsError(f"a size like 512MiB, 64M or 4GiB was wanted, found {text!r}")
    number, unit = match[1], _UNITS[match[2].lower()]
    return int(float(number) * unit) if "." in number else int(number) * unit


def parse_size(text: str, whole: Callable[[], Whole] | None, auto: float | None = None) -> int:
    """As parse_bytes; also `50%` of `whole`, and `auto`, which is the share `auto` of it, both rounded down to MiB.

    Raises SettingsError naming the text, also if there is no `whole`.
    """
    match, is_auto = _SHARE.fullmatch(text), text.strip().lower() == "auto"
    if not (match or is_auto):
        return parse_bytes(text)
    share = float(match[1]) / 100 if match else auto
    if whole is None or share is None:
        raise SettingsError(f"a size like 64M was wanted, found {text!r}: there is nothing that it is a share of")
    if not 0 < share <= 1:
        raise SettingsError(f"a share above 0% and up to 100% was wanted, found {text!r}")
    try:
        found = whole()
    except OSError as error:
        raise SettingsError(f"{text!r} cannot be computed: {error}") from error
    size_bytes = int(found.bytes * share) // MIB * MIB
    if not size_bytes:
        raise SettingsError(f"{text!r} of {found.name}, which is {exact_bytes(found.bytes)}, is less than 1MiB")
    return size_bytes


def shared_memory(capacity: Capacity | None = None) -> Whole:
    """The size of /dev/shm or, if that is less, the memory limit of this process's control groups. Raises OSError."""
    wholes = (Whole(name, size_bytes) for name, size_bytes in (capacity or Capacity()).sizes())
    return min(wholes, key=lambda one: one.bytes)


def file_system_of(folder: str) -> Whole:
    """The file system that the folder lies on, or will lie on once it is made. Raises OSError."""
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    found = os.statvfs(there)
    return Whole(f"the file system of {there}", found.f_blocks * found.f_frsize)
