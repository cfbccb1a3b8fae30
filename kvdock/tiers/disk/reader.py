"""Reads the index after a tier was opened, the newest segments first, so that the tier serves at once. Where the index
was lost, the segments themselves are read.

A segment is read once: by a thread of its own, or before it is emptied. Until all are read, the tier may not find what
it has, and may then store it twice. Of two records of a part the newer one remains.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, TypeVar

from kvdock.tiers.disk.index import Index, Row, offset_of, place_of, where
from kvdock.tiers.disk.log import Log, Segment, key_of, name_of, record_bytes
from kvdock.tiers.disk.space import LOOK_S, Found, Space
from kvdock.tiers.record import Record
from kvdock.tiers.tier import PAGE_BYTES, Deadline, TierError

_log: Final = logging.getLogger(__name__)

READ_AT_ONCE: Final = 1 << 12
"""How many parts are read before the tier is used."""
_TAKEN_AT_ONCE: Final = 256
"""How many parts are taken into the map before other threads get its lock."""


_T = TypeVar("_T")


class Reader:
    """`is_named`: whether a note names the part of a key."""

    def __init__(self, space: Space, log: Log, index: Index, is_named: Callable[[bytes], bool]) -> None:
        self._space, self._log, self._index, self._is_named = space, log, index, is_named
        self._why = ""
        self._reading = threading.Lock()
        self._newest = self._looked_at = self._found = 0
        """Segments from `_newest` on may have records that the index lacks. `_looked_at`: how many parts were read.
        `_found`: how many of them were added to an index that was made again."""
        self._left: list[Segment] = []
        self._ended, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdock-disk-index", daemon=True)

    def start(self, why: str) -> None:
        """Reads some segments, and the others in a thread. `why`: why the index was made again; "": it was not.

        Raises TierError, OSError.
        """
        self._why, self._space.read = why, self.read
        if not why:
            self._newest = self._index.newest()
            try:
                self._index.keep_only(self._log.segments)
            except TierError as error:
                self._make_again(error)
        self._left = [segment for _, segment in sorted(self._log.segments.items())]
        newest = self._left[-1] if self._left else None
        while self._left and self._looked_at < READ_AT_ONCE:
            self.read(self._left.pop())
        self._space.begin_at(newest)
        if self._left:
            self._thread.start()
        else:
            self._end()

    def read(self, segment: Segment) -> None:
        """Takes the segment's parts into the map, if that was not done before. Raises TierError, OSError."""
        with self._reading:
            if segment.is_read:
                return
            try:
                try:
                    rows = [] if self._why else self._index.rows(segment.sequence)
                except TierError as error:
                    self._make_again(error)
                    rows = []
                ends = [end for row in rows if (end := offset_of(row[0]) + record_bytes(row[2])) <= segment.size_bytes]
                end = max(ends, default=PAGE_BYTES)
                segment.gaps, segment.records = [(end, segment.size_bytes)], len(ends)
                self._take(segment, (Found(*row) for row in rows))
                if segment.sequence >= self._newest:
                    self._scan(segment, end)
            finally:  # what could not be read is missing
                segment.is_read = True
            self._space.list_soon(segment)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, deadline: Deadline) -> bool:
        """Waits until all was read. False: the deadline has passed before."""
        while not deadline.is_over and not self._ended.wait(min(LOOK_S, deadline.left_s)):
            pass
        return self.has_ended

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._left and not self._stopped.is_set():
            segment = self._left.pop()
            try:
                self.read(segment)
            except (OSError, TierError) as error:
                _log.warning("not all of %s could be read: %s", segment.file.path, error)
        if not self._left:
            try:
                self._end()
            except (OSError, TierError) as error:
                _log.warning("the index is made anew at the next start: %s", error)

    def _end(self) -> None:
        try:
            if self._found:
                _log.warning("%s was made anew from the log, %d parts: %s", self._index.path, self._found, self._why)
            if self._why:
                self._index.finish()
        finally:
            self._ended.set()

    def _make_again(self, error: TierError) -> None:
        """The index has to be read no more: it gets what is in the map, and what is found in the other segments."""
        self._index.make_again()
        self._newest, self._why = 0, error.why
        for segment in list(self._log.segments.values()):
            if segment.is_read:
                self._add(self._space.found_in(segment))

    def _scan(self, segment: Segment, begin: int) -> None:
        for some in _slices(self._log.scan(segment, begin)):
            found = [
                Found(place_of(segment.sequence, offset), key_of(record.name), record.length, record.checksum)
                for offset, record in some
            ]
            self._add(self._take(segment, found))

    def _add(self, found: Iterable[Found]) -> None:
        rows = [Row(*where(one.place), one.key, one.length, one.checksum, one.used) for one in found]
        self._index.add(rows)
        self._found += len(rows) if self._why else 0

    def _take(self, segment: Segment, found: Iterable[Found]) -> list[Found]:
        """Returns what the map has taken. Others leave the index; of parts that are there twice, the older record is
        deleted for good: it would be found again when the newer one was deleted."""
        taken: list[Found] = []
        for some in _slices(found):
            self._looked_at += len(some)
            mine, older, strays = self._space.take_over(segment, some, self._is_named)
            taken += mine
            for key, entry in older:
                with suppress(OSError):  # it is not found as long as the index has the other
                    record = Record(name_of(key), entry.length, entry.checksum)
                    self._log.mark_deleted(entry.segment, entry.offset, record)
                self._space.release(entry)
            if gone := [*strays, *((entry.segment.sequence, entry.offset) for _, entry in older)]:
                with suppress(OSError):  # of a full disk: they are found again at the next start
                    self._index.remove(gone)
        return taken


def _slices(items: Iterable[_T]) -> Iterator[list[_T]]:
    left = iter(items)
    while some := list(islice(left, _TAKEN_AT_ONCE)):
        yield some
