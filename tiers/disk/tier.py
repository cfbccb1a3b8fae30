"""The disk tier, in its simplest form: one file for each record."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Loaded, Outcome, TierError, ToLoad, ToStore, Usage


class DiskTier:
    name = "disk"

    def __init__(self, folder: Path, limit_bytes: int, lock: int) -> None:
        self._folder, self._limit, self._fd, self._wear = folder, limit_bytes, lock, 0
        self._lock = threading.RLock()

    @classmethod
    def open(cls, folder: Path, limit_bytes: int) -> DiskTier:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise TierError("disk", "another process has it") from error
        return cls(folder, limit_bytes, fd)

    def _path(self, name: PartName) -> Path:
        return self._folder / name.text().replace("/", "-")

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        return [not deadline.is_over and self._path(name).exists() for name in names]

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        return [Loaded(Outcome.LATE) if deadline.is_over else self._load(one) for one in parts]

    def _load(self, one: ToLoad) -> Loaded:
        try:
            data = self._path(one.name).read_bytes()
        except FileNotFoundError:
            return Loaded(Outcome.MISSING)
        try:
            record = Record.read_of(data[:HEADER_BYTES], one.name, one.length)
        except RecordError:
            return Loaded(Outcome.DAMAGED)
        if len(data) != PAGE_BYTES + one.length:
            return Loaded(Outcome.DAMAGED)
        one.pages[: one.length] = data[PAGE_BYTES:]
        return Loaded(Outcome.DONE, record.checksum)

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        return [Outcome.LATE if deadline.is_over else self._store(one) for one in parts]

    def _store(self, one: ToStore) -> Outcome:
        with self._lock:
            path = self._path(one.record.name)
            used = self.usage().bytes_used
            length = PAGE_BYTES + one.record.length
            if path.exists():
                return Outcome.DONE
            if used + length > self._limit:
                return Outcome.FULL
            try:
                path.with_suffix(".new").write_bytes(
                    one.record.header().ljust(PAGE_BYTES, b"\0") + bytes(one.pages[: one.record.length])
                )
            except OSError:
                return Outcome.FULL
            path.with_suffix(".new").replace(path)
            self._wear += length
            return Outcome.DONE

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        with self._lock:
            return [Outcome.LATE if deadline.is_over else self._delete(name) for name in names]

    def _delete(self, name: PartName) -> Outcome:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return Outcome.MISSING
        return Outcome.DONE

    def usage(self) -> Usage:
        with self._lock:
            sizes = [path.stat().st_size for path in self._folder.glob("kvdock-*") if path.suffix != ".new"]
        return Usage(len(sizes), sum(sizes), self._limit, self._wear)

    def close(self, deadline: Deadline) -> None:
        os.close(self._fd)
