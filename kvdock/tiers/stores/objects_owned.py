"""What an object store has of each namespace: lists it, removes it, and knows when a namespace was last used.

The object `used` of a namespace is written again by each server that serves it. The time is the store's own, so the
clocks of servers do not count. A folder knows also when each object was last used: the tier sets its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kvdock.tiers.notes import name_of_note
from kvdock.tiers.record import VERSION, folder_of, namespace_of
from kvdock.tiers.tier import AGE_S, Holding

ROOT: Final = f"kvdock/{VERSION}"
_CLOCK: Final = f"{ROOT}/clock"
_PAGE: Final = 1000
_LIBC: Final = ctypes.CDLL(None)
_AT_FDCWD: Final = -100
_NOW_AND_UNCHANGED: Final = struct.pack("4q", 0, (1 << 30) - 1, 0, (1 << 30) - 2)
"""Two of Linux's `struct timespec`: UTIME_NOW and UTIME_OMIT."""


@dataclass
class _Found:
    objects: int = 0
    bytes: int = 0
    used: datetime | None = None
    newest: datetime | None = None
    by_age: Counter[int] = field(default_factory=Counter)


class OwnedObjects:
    """`folder`: of the store, if it is one of this machine."""

    def __init__(self, store: Any, obstore: Any, folder: Path | None) -> None:
        self._store, self._obstore, self._folder = store, obstore, folder

    async def mark(self, namespace: bytes, label: bytes) -> None:
        await self._obstore.put_async(self._store, _mark_of(namespace), label, use_multipart=False)

    async def holdings(self) -> list[Holding]:
        now, all_found = await self._now(), dict[bytes, _Found]()
        async for path, size, time in self._listed(ROOT):
            if (namespace := _namespace_of(path)) is None:
                continue
            found = all_found.setdefault(namespace, _Found())
            if path == _mark_of(namespace):
                found.used = time
            elif path != name_of_note(namespace):
                found.objects += 1
                found.bytes += size
                found.newest = max(time, found.newest or time)
                found.by_age[int(_age_s(now, time) // AGE_S)] += size  # some are stored while others are listed
        return [
            Holding(
                namespace, await self._label(namespace) if found.used else b"", found.objects, found.bytes,
                _age_s(now, found.used or found.newest), found.by_age,
            ) for namespace, found in all_found.items()
        ]

    async def empty(self, namespace: bytes, older_s: float) -> int:
        """Removes at most a page of objects, and returns how many."""
        now, folder, paths = await self._now(), folder_of(namespace).rstrip("/"), list[str]()
        kept = {name_of_note(namespace), _mark_of(namespace)}
        async for path, _, time in self._listed(folder):
            if path not in kept and (now - time).total_seconds() >= older_s:
                paths.append(path)
            if len(paths) == _PAGE:
                break
        await self._remove(paths)
        return len(paths)

    async def forget(self, namespace: bytes) -> None:
        await self._remove([_mark_of(namespace), name_of_note(namespace)])

    def used(self, path: str) -> None:
        """An object of a folder is used: its access time is set to the file system's time. Its other time stays, which
        says whether it was replaced."""
        if self._folder is not None:
            _LIBC.utimensat(_AT_FDCWD, os.fsencode(self._folder / path), _NOW_AND_UNCHANGED, 0)

    async def _now(self) -> datetime:
        await self._obstore.put_async(self._store, _CLOCK, b"", use_multipart=False)
        return _time((await self._obstore.head_async(self._store, _CLOCK))["last_modified"])

    async def _label(self, namespace: bytes) -> bytes:
        try:
            return bytes(await (await self._obstore.get_async(self._store, _mark_of(namespace))).bytes_async())
        except FileNotFoundError:
            return b""

    async def _listed(self, folder: str) -> AsyncIterator[tuple[str, int, datetime]]:
        """(path, size, time) of each object."""
        async for page in self._obstore.list(self._store, folder, chunk_size=_PAGE):
            found = [(str(one["path"]), int(one["size"]), _time(one["last_modified"])) for one in page]
            if self._folder is not None:
                found = await asyncio.to_thread(self._with_uses, found)
            for one in found:
                yield one

    def _with_uses(self, page: Sequence[tuple[str, int, datetime]]) -> list[tuple[str, int, datetime]]:
        assert self._folder is not None
        found = []
        for path, size, time in page:
            with contextlib.suppress(OSError):  # it is gone meanwhile
                used = datetime.fromtimestamp((self._folder / path).stat().st_atime, UTC)
                found.append((path, size, max(time, used)))
        return found

    async def _remove(self, paths: list[str]) -> None:
        try:
            if paths:
                await self._obstore.delete_async(self._store, paths)
        except FileNotFoundError:  # another server removes the same objects
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    await self._obstore.delete_async(self._store, path)
        if self._folder is not None:
            for path in paths:
                self._remove_empty((self._folder / path).parent)

    def _remove_empty(self, folder: Path) -> None:
        assert self._folder is not None
        while folder != self._folder:
            try:
                folder.rmdir()
            except OSError:  # it has something
                return
            folder = folder.parent


def _mark_of(namespace: bytes) -> str:
    return folder_of(namespace) + "used"


def _namespace_of(path: str) -> bytes | None:
    return namespace_of(path.removeprefix(f"{ROOT}/").partition("/")[0])


def _time(found: Any) -> datetime:
    assert isinstance(found, datetime)
    return found


def _age_s(now: datetime, then: datetime | None) -> float:
    return 0.0 if then is None else max(0.0, (now - then).total_seconds())
