"""The tiers that the conformance suite is run for, and what it does to their storage from outside.

A tier joins by a subclass of TierSubject and its name in SUBJECTS.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from mooncake_subject import MooncakePeerSubject, MooncakeSubject
from objects_subject import FolderSubject, S3Subject
from redis_subject import RedisSubject
from tier_helpers import MIB
from tier_subject import TierSubject, files_of_64_kib, opened

from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, Tier

__all__ = ["SERVED", "SUBJECTS", "TierSubject", "opened"]


class DiskSubject(TierSubject):
    name = "disk"
    limit_bytes = 32 * MIB
    byte_of_body = PAGE_BYTES

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

    def flip(self, name: PartName, at: int) -> None:
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

    def exhausted(self) -> AbstractContextManager[None]:
        """No room for records can be had."""
        return files_of_64_kib()


SUBJECTS: tuple[type[TierSubject], ...] = (
    DiskSubject, RedisSubject, S3Subject, FolderSubject, MooncakeSubject,
)
SERVED = (*(kind for kind in SUBJECTS if kind.has_server), MooncakePeerSubject)
