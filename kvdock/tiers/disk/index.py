"""The index: where each part is in the log. It is kept in SQLite, so that opening a log does not mean reading all of
it.

The log decides what is stored; the index can be lost at any time. It is read once, a segment at a time, after the tier
was opened (reader.py): lookups use a map in memory. Rows are in the order of the log, so a batch adds neighbouring
rows, and a segment's rows are removed at once.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from kvdock.tiers.disk.folder import TIER
from kvdock.tiers.disk.io import FULL_ERRORS
from kvdock.tiers.disk.log import KEY_BYTES
from kvdock.tiers.tier import PAGE_BYTES, TierError

_log: Final = logging.getLogger(__name__)

IN_MEMORY: Final = Path(":memory:")
"""SQLite's name for a database without a file."""
SCHEMA_VERSION: Final = 2
"""An index of another version is made again from the log. While one is made, its version is 0."""
ROW_BYTES: Final = 192
"""The most storage that a row takes, with the free space in its page."""
_BATCH_ROWS: Final = 512
"""The most rows of a transaction, which bounds how much it writes to SQLite's own log."""
PAGE_BITS: Final = 20
"""A place is the sequence of its segment, and in so many bits below it the page there."""
_INSERT: Final = "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)"
_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")


class Row(NamedTuple):
    """`used`: the greater, the later the part was last used; 0: it was not used before the tier was last closed."""

    sequence: int
    offset: int
    key: bytes
    length: int
    checksum: int
    used: int


class Index:
    """Thread-safe. A method raises TierError if the index fails, and, except for close(), OSError (ENOSPC) if the
    storage is full."""

    def __init__(self, path: Path, wal_bytes: int) -> None:
        """Raises sqlite3.DatabaseError if the file is not an index of this version; OSError."""
        self.path, self._wal_bytes, self._lock = path, wal_bytes, threading.Lock()
        if path != IN_MEMORY:
            _make_private(path)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._set_up(wal_bytes)
            self.newest()
        except BaseException:
            self._db.close()
            raise
        self.bytes_used = 0
        self._measure()

    @classmethod
    def open(cls, path: Path, wal_bytes: int) -> tuple[Index, str]:
        """Returns the index, and why it was made again; "": it was not. The caller adds rows to one that was made
        again, then calls finish(). Where nothing can be written, as on a full disk, the index is in memory, and is made
        again at the next start. Raises TierError, OSError."""
        why, is_unwritable = "" if path.exists() else "it was missing", False
        for _ in range(2):
            try:
                return cls(path, wal_bytes), why
            except sqlite3.DatabaseError as error:
                why, is_unwritable = str(error), _code_of(error) == sqlite3.SQLITE_FULL
                _unlink(path)
            except OSError as error:
                if error.errno not in (*FULL_ERRORS, errno.EROFS):
                    raise
                why, is_unwritable = str(error), True
        if not is_unwritable:
            raise TierError(TIER, f"the index {path} cannot be made: {why}")
        _log.warning("%s cannot be written, so the index is in memory until the next start: %s", path, why)
        return cls(IN_MEMORY, wal_bytes), why

    def make_again(self) -> None:
        """Removes all rows, and the file that had them. Raises TierError, OSError."""
        with self._lock:
            self._db.close()
            _unlink(self.path)
            made, _ = Index.open(self.path, self._wal_bytes)
            self.path, self._db = made.path, made._db

    def finish(self) -> None:
        """Each segment's rows were added to an index that was made again. Raises TierError, OSError."""
        with self._transaction():
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _set_up(self, wal_bytes: int) -> None:
        run = self._db.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run(f"PRAGMA wal_autocheckpoint = {wal_bytes // PAGE_BYTES}")
        (version,) = run("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise sqlite3.DatabaseError(f"found version {version}, wanted {SCHEMA_VERSION}")
        if version == 0 and run("SELECT 1 FROM sqlite_master").fetchone():
            raise sqlite3.DatabaseError("it was not finished")
        run(
            "CREATE TABLE IF NOT EXISTS parts (place INTEGER PRIMARY KEY, name BLOB NOT NULL,"
            " length INTEGER NOT NULL, checksum INTEGER NOT NULL, used INTEGER NOT NULL)"
        )

    def newest(self) -> int:
        """The highest sequence of all rows; 0: there are none. Raises sqlite3.DatabaseError."""
        with self._lock:
            (place,) = self._db.execute("SELECT max(place) FROM parts").fetchone()
        return (place or 0) >> PAGE_BITS

    def rows(self, sequence: int) -> list[tuple[int, bytes, int, int, int]]:
        """(place, name, length, checksum, used) of the segment's parts, in their order. Raises TierError if they cannot
        be read."""
        with self._lock, _as_tier_error():
            found: list[tuple[int, bytes, int, int, int]] = self._db.execute(
                "SELECT place, name, length, checksum, used FROM parts WHERE place >= ? AND place < ? ORDER BY place",
                _bounds(sequence, sequence + 1),
            ).fetchall()
        if any(
            tuple(map(type, row)) != (int, bytes, int, int, int) or len(row[1]) != KEY_BYTES or min(row[2:]) < 0
            for row in found
        ):
            raise TierError(TIER, "found a row with other values than a place, a name and numbers")
        return found

    def keep_only(self, sequences: Iterable[int]) -> None:
        """Removes the rows of all other segments. Raises TierError, OSError."""
        for before, after in pairwise([-1, *sorted(sequences), 1 << (62 - PAGE_BITS)]):
            bounds = _bounds(before + 1, after)
            while before + 1 < after and self._has(bounds):
                with self._transaction():
                    self._db.execute(
                        "DELETE FROM parts WHERE place IN (SELECT place FROM parts WHERE place >= ? AND place < ?"
                        f" LIMIT {_BATCH_ROWS})", bounds,
                    )

    def _has(self, bounds: tuple[int, int]) -> bool:
        with self._lock, _as_tier_error():
            found = self._db.execute("SELECT 1 FROM parts WHERE place >= ? AND place < ? LIMIT 1", bounds)
            return found.fetchone() is not None

    def add(self, rows: Sequence[Row]) -> None:
        """As add_places()."""
        self.add_places([(place_of(row.sequence, row.offset), *row[2:]) for row in rows])

    def add_places(self, rows: Sequence[tuple[int, bytes, int, int, int]]) -> None:
        """Adds rows in transactions of at most _BATCH_ROWS. A row is as rows() returns it."""
        self._many(_INSERT, rows)

    def remove(self, rows: Iterable[tuple[int, int]]) -> None:
        """`rows`: (sequence, offset) of each."""
        self._many("DELETE FROM parts WHERE place = ?", [(place_of(*at),) for at in rows])

    def empty_gaps(self, sequence: int, gaps: Sequence[tuple[int, int]]) -> None:
        """Removes the segment's rows in these gaps, (begin, end) of each. They are gone even if power is lost when this
        has returned."""
        self._set_synchronous("FULL")
        try:
            self._many(
                "DELETE FROM parts WHERE place >= ? AND place < ?",
                [(place_of(sequence, begin), place_of(sequence, end)) for begin, end in gaps],
            )
        finally:
            self._set_synchronous("NORMAL")

    def _set_synchronous(self, how: str) -> None:
        with self._lock, _as_tier_error():
            self._db.execute(f"PRAGMA synchronous = {how}")

    def remember_use(self, used: Iterable[tuple[int, int, int]]) -> None:
        """`used`: (sequence, offset, when it was last loaded) of each, as in Row."""
        self._many("UPDATE parts SET used = ? WHERE place = ?", [(when, place_of(s, o)) for s, o, when in used])

    def close(self) -> None:
        """Closes the index and makes committed changes durable. On a full disk they stay in SQLite's own log."""
        with self._lock, _as_tier_error():
            try:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
            finally:
                self._db.close()

    def _many(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        for begin in range(0, len(values), _BATCH_ROWS):
            with self._transaction():
                self._db.executemany(statement, values[begin : begin + _BATCH_ROWS])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, _as_tier_error():
            self._db.execute("BEGIN")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._measure()

    def _measure(self) -> None:
        paths = (self.path.with_name(self.path.name + suffix) for suffix in _SUFFIXES)
        self.bytes_used = sum(path.stat().st_blocks * 512 for path in paths if path.exists())


def _make_private(path: Path) -> None:
    """SQLite makes files with the umask's mode, and those beside the index with the mode of the index."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # one that an earlier version has made
    finally:
        os.close(fd)


def _code_of(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0))


@contextmanager
def _as_tier_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if _code_of(error) == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, f"no space for the index: {error}") from error
        raise TierError(TIER, f"the index fails: {error}") from error


def place_of(sequence: int, offset: int) -> int:
    return sequence << PAGE_BITS | offset // PAGE_BYTES


def offset_of(place: int) -> int:
    return (place & ((1 << PAGE_BITS) - 1)) * PAGE_BYTES


def where(place: int) -> tuple[int, int]:
    """(sequence, offset)."""
    return place >> PAGE_BITS, offset_of(place)


def _bounds(sequence: int, end: int) -> tuple[int, int]:
    """The places of the segments from `sequence` on, without `end`."""
    return place_of(sequence, 0), place_of(end, 0)


def _unlink(path: Path) -> None:
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
