"""The tiers that the conformance suite is run for, and what it does to their storage from outside.

A tier joins by a subclass of TierSubject here and its name in SUBJECTS.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

from tier_helpers import KIB, MIB, patient

from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, Tier


class TierSubject:
    """One tier's storage under test. The suite makes one for each module, in an empty folder of its own, and calls
    reset() before each test. What needs a package that is absent says pytest.skip in __init__.

    What changes a stored record from outside may be called while a Tier is open.
    """

    name: ClassVar[str]
    limit_bytes: ClassVar[int] = 0
    """What the tiers that open() makes may use; at most some tens of MiB. 0: this tier knows no limit."""
    has_server: ClassVar[bool] = False
    """Whether stop, resume, kill and restart work."""
    is_shared: ClassVar[bool] = False
    """Whether two Tiers may be open at the same time over the same storage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self) -> None:
        """Empties the storage; the server, if there is one, runs afterwards."""
        raise NotImplementedError

    def open(self) -> Tier:
        """Over what is stored already."""
        raise NotImplementedError

    def corrupt_header(self, name: PartName) -> None:
        """Changes a byte of the stored record's header."""
        raise NotImplementedError

    def corrupt_body(self, name: PartName) -> None:
        """Changes a byte of the stored part."""
        raise NotImplementedError

    def truncate(self, name: PartName) -> None:
        """Cuts the stored record off in the middle of its part."""
        raise NotImplementedError

    def misplace(self, name: PartName, other: PartName) -> None:
        """Puts what is stored of `other` (of the same length) where `name` is looked for."""
        raise NotImplementedError

    def exhausted(self) -> AbstractContextManager[None]:
        """The storage takes (nearly) nothing more, whatever the tier's own limit is."""
        raise NotImplementedError

    def stop(self) -> None:
        """The server hangs (SIGSTOP)."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        """The server is gone (SIGKILL); what it stored may be lost."""
        raise NotImplementedError

    def restart(self) -> None:
        """Where it was, after kill()."""
        raise NotImplementedError

    def end(self) -> None:
        """Stops and removes what was started."""


class DiskSubject(TierSubject):
    name = "disk"
    limit_bytes = 32 * MIB

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def reset(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)

    def open(self) -> Tier:
        return DiskTier.open(self.store, self.limit_bytes)

    def find(self, name: PartName) -> tuple[Path, int]:
        """The file and the offset of its record's header: records say themselves what they are."""
        for path in sorted(self.store.rglob("*")):
            data = path.read_bytes() if path.is_file() else b""
            for offset in range(0, len(data), PAGE_BYTES):
                try:
                    if Record.read(data[offset : offset + HEADER_BYTES]).name == name:
                        return path, offset
                except RecordError:
                    continue
        raise AssertionError(f"{name.text()} is in no file")

    def corrupt_header(self, name: PartName) -> None:
        self._flip(name, HEADER_BYTES // 2)

    def corrupt_body(self, name: PartName) -> None:
        self._flip(name, PAGE_BYTES)

    def _flip(self, name: PartName, at: int) -> None:
        path, offset = self.find(name)
        with path.open("r+b") as file:
            file.seek(offset + at)
            byte = file.read(1)[0]
            file.seek(offset + at)
            file.write(bytes([byte ^ 1]))

    def truncate(self, name: PartName) -> None:
        path, offset = self.find(name)
        os.truncate(path, offset + PAGE_BYTES + 1)

    def misplace(self, name: PartName, other: PartName) -> None:
        at, offset = self.find(name)
        source, begin = self.find(other)
        data = source.read_bytes()[begin:]
        length = PAGE_BYTES + -(-Record.read(data).length // PAGE_BYTES) * PAGE_BYTES
        with at.open("r+b") as file:
            file.seek(offset)
            file.write(data[:length])

    @contextmanager
    def exhausted(self) -> Iterator[None]:
        """No file of this process may grow beyond 64 KiB, so that no room for records can be had."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


SUBJECTS: tuple[type[TierSubject], ...] = (DiskSubject,)
SERVED = tuple(kind for kind in SUBJECTS if kind.has_server)


@contextmanager
def opened(subject: TierSubject) -> Iterator[Tier]:
    """The subject's tier, closed at the end."""
    tier = subject.open()
    try:
        yield tier
    finally:
        tier.close(patient())
