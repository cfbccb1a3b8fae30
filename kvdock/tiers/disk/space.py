"""Tracks the place of each part, and frees space: the oldest segment is emptied as a whole.

Parts that were used since they were written get a second chance: they are copied to the next segment, those used last
first, up to a share of it. A part is used when it is loaded, and when the mover asks for it because the pool has
answered a prompt with its chunk. All other parts of the oldest segment are dropped. So the log is only written from
front to back, and a part that is never used costs one write. The share follows what it brings: it grows while at least
half of the copies in a segment were used again by the time that the segment is emptied, and shrinks while fewer were.

Locks: `changed` guards all maps and counts here and in segments, and is never held during input or output. `_freeing`
is held by the one thread that frees space; it does not touch segments that are being written, and waits for their
readers.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvdock.tiers.disk.index import Index, Row
from kvdock.tiers.disk.io import PIECE_BYTES, Io
from kvdock.tiers.disk.log import Entry, Kind, Log, Segment, key_of, name_of, read_record, record_block, record_bytes
from kvdock.tiers.record import Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Outcome, TierError, pages_bytes

LEAST_KEPT, MOST_KEPT, KEPT_STEP = 0.25, 0.75, 0.05
"""The share of a segment for second chances. bench/LOG.md compares it with LRU (2026-11-27)."""
PAYS: Final = 0.5
"""At least this share of the copies must be used again for the share to grow."""
NEVER: Final = Deadline()
_DROPPED_AT_ONCE: Final = 4096
"""How many parts are dropped before other threads get the lock."""
LOOK_S: Final = 0.05
"""How often a thread that waits for others checks its deadline, which may be cancelled."""


class Extent(NamedTuple):
    """Space for one record, to which no other thread writes."""

    segment: Segment
    offset: int


class Space:
    def __init__(self, log: Log, index: Index, io: Io) -> None:
        self._log, self._index, self._io = log, index, io
        self.changed = threading.Condition()
        self.entries: dict[bytes, Entry] = {}
        self.claimed: set[bytes] = set()
        """Parts that a thread is storing or copying: no other thread may store or delete them now."""
        self._dropped: list[bytes] = []
        """What was removed from the maps since take_dropped()."""
        self._freeing = threading.Lock()
        self._current: Segment | None = None
        self._uses = 0
        self._kept_share = LEAST_KEPT

    # ------------------------------------------------------------------ opening

    def fill(self, rows: Sequence[Row], is_named: Callable[[bytes], bool]) -> list[tuple[int, int]]:
        """Takes over the index's rows. Returns the rows (sequence, offset) that the log does not have, or whose parts
        are not named by a note any more. `is_named`: whether a note names the part of a key."""
        strays = []
        for row in rows:
            segment = self._log.segments.get(row.sequence)
            end = row.offset + record_bytes(row.length)
            if segment is None or end > segment.size_bytes or not is_named(row.key):
                strays.append((row.sequence, row.offset))
                continue
            self._put(row.key, Entry(segment, row.offset, row.length, row.checksum, row.used))
            segment.end_bytes = max(segment.end_bytes, end)
            segment.records += 1
            self._uses = max(self._uses, row.used)
        return strays

    def scan_tail(self, is_named: Callable[[bytes], bool], *, all_of_it: bool) -> int:
        """Takes over the parts in the log that are newer than all in the index. Returns how many. `all_of_it`: takes
        over all parts of the log.

        Earlier segments without a known part are emptied. Raises OSError, TierError.
        """
        found = 0
        newest = max((s.sequence for s in self._log.segments.values() if s.entries), default=0)
        for _, segment in sorted(self._log.segments.items()):
            if segment.sequence < newest and not segment.entries and not all_of_it:
                self._log.wipe(segment)
            elif segment.sequence >= newest or all_of_it:
                found += self._scan(segment, is_named)
        self._current = max(self._log.segments.values(), key=lambda segment: segment.sequence, default=None)
        return found

    def _scan(self, segment: Segment, is_named: Callable[[bytes], bool]) -> int:
        rows, strays = [], []
        for offset, record in self._log.scan(segment, segment.end_bytes):
            key = key_of(record.name)
            if not is_named(key):
                continue
            older = self.entries.get(key)
            if older is not None:  # the process ended while it was copied: one of the two is deleted for good
                self._log.mark_deleted(older.segment, older.offset, Record(record.name, older.length, older.checksum))
                strays.append((older.segment.sequence, older.offset))
            self._put(key, Entry(segment, offset, record.length, record.checksum))
            rows.append(Row(segment.sequence, offset, key, record.length, record.checksum, 0))
        self._index.remove(strays)
        self._index.add(rows)
        return len(rows)

    def _put(self, key: bytes, entry: Entry) -> None:
        self.drop(key)
        self.entries[key] = entry
        entry.segment.entries[key] = entry

    def drop(self, key: bytes) -> Entry | None:
        """Removes the part from the maps. The caller holds `changed`."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            del entry.segment.entries[key]
            self._dropped.append(key)
        return entry

    def drop_where(self, is_dropped: Callable[[bytes], bool]) -> None:
        """Removes parts from the maps. Their rows in the index and their bytes are freed with their segments; empty
        segments are freed first."""
        with self.changed:
            keys = list(self.entries)
        dropped = [key for key in keys if is_dropped(key)]
        for begin in range(0, len(dropped), _DROPPED_AT_ONCE):
            with self.changed:
                for key in dropped[begin : begin + _DROPPED_AT_ONCE]:
                    self.drop(key)

    # ------------------------------------------------------------------ reading

    def hold(self, key: bytes, length: int) -> Entry | None:
        """The part's entry. Its segment is not emptied until release(). None: there is no such part of that length."""
        with self.changed:
            entry = self.entries.get(key)
            if entry is None or entry.length != length:
                return None
            self._uses += 1
            entry.used = self._uses
            entry.segment.readers += 1
            return entry

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        """For each part whether it is there. Those that are count as used now."""
        with self.changed:
            for key in keys:
                if (entry := self.entries.get(key)) is not None:
                    self._uses += 1
                    entry.used = self._uses
            return [key in self.entries for key in keys]

    def take_dropped(self) -> list[bytes]:
        """The parts that were removed from the maps since the last call."""
        with self.changed:
            dropped, self._dropped = self._dropped, []
            return dropped

    def hold_to_delete(self, keys: Sequence[bytes], deadline: Deadline) -> tuple[dict[bytes, Entry], set[bytes]]:
        """(the entries removed from the maps, whose segments stay until release(); the keys that other threads are
        storing).

        If other threads are storing all of them, it waits first until that may have changed.
        """
        with self.changed:
            if self.claimed.issuperset(keys):
                self.wait(deadline)
            claimed = self.claimed.intersection(keys)
            dropped = {key: entry for key in keys if key not in claimed and (entry := self.drop(key))}
            for entry in dropped.values():
                entry.segment.readers += 1
            return dropped, claimed

    def release(self, entry: Entry) -> None:
        with self.changed:
            entry.segment.readers -= 1
            self.changed.notify_all()

    def forget(self, key: bytes, entry: Entry) -> None:
        """Removes the part from the maps and the index: the bytes there are not this part."""
        with self.changed:
            if self.entries.get(key) is not entry:
                return
            self.drop(key)
        with suppress(TierError, OSError):  # the row is removed when it is found again
            self._index.remove([(entry.segment.sequence, entry.offset)])

    # ------------------------------------------------------------------ writing

    def take(self, length: int) -> Extent | None:
        """Space in the current segment, which is not emptied until leave(); None: call free_space() first."""
        with self.changed:
            return self._take(self._current, length)

    def _take(self, segment: Segment | None, length: int) -> Extent | None:
        if segment is None or not self._fits_into(segment, length):
            return None
        extent = Extent(segment, segment.end_bytes)
        segment.end_bytes += record_bytes(length)
        segment.records += 1
        segment.writers += 1
        return extent

    def _fits_into(self, segment: Segment | None, length: int) -> bool:
        if segment is None or segment.records >= self._log.most_records:
            return False
        return segment.end_bytes + record_bytes(length) <= segment.size_bytes

    def put(self, written: Sequence[tuple[Record, Extent]]) -> None:
        """Adds parts that were written, to the index first. The caller still has to call leave()."""
        rows = [
            Row(extent.segment.sequence, extent.offset, key_of(record.name), record.length, record.checksum, 0)
            for record, extent in written
        ]
        self._index.add(rows)
        with self.changed:
            for row, (_, extent) in zip(rows, written, strict=True):
                self._put(row.key, Entry(extent.segment, row.offset, row.length, row.checksum))

    def leave(self, extents: Sequence[Extent]) -> None:
        """No thread writes to these extents any more."""
        with self.changed:
            for extent in extents:
                extent.segment.writers -= 1
            self.changed.notify_all()

    def unclaim(self, keys: Iterable[bytes]) -> None:
        with self.changed:
            self.claimed.difference_update(keys)
            self.changed.notify_all()

    def claim(self, keys: Sequence[bytes], deadline: Deadline) -> tuple[set[bytes], set[bytes]]:
        """Returns (the parts that the caller must store now, until unclaim(); the parts that other threads are
        storing). The tier has the others already.

        If other threads are storing all parts that the tier lacks, waits until that may have changed.
        """
        with self.changed:
            absent = {key for key in keys if key not in self.entries}
            if absent and absent <= self.claimed:
                self.wait(deadline)
                absent = {key for key in keys if key not in self.entries}
            others = absent & self.claimed
            mine = absent - others
            self.claimed |= mine
            return mine, others

    def wait_for_writers(self, deadline: Deadline) -> bool:
        """Waits for a moment. False: no thread is writing, or the deadline has passed."""
        with self.changed:
            if not any(segment.writers for segment in list(self._log.segments.values())):
                return False
            self.wait(deadline)
            return not deadline.is_over

    def wait(self, deadline: Deadline) -> None:
        """Waits until something has changed, or it is time to look at the deadline. The caller holds `changed`."""
        self.changed.wait(min(LOOK_S, deadline.left_s))

    # ------------------------------------------------------------------ freeing space

    def fits(self, length: int) -> bool:
        """Whether a part of this length fits into a segment at all."""
        return record_bytes(length) <= self._log.segment_bytes - PAGE_BYTES

    def free_space(self, length: int, deadline: Deadline) -> Outcome:
        """Frees space for a part. DONE: try take() again. LATE: the deadline has passed. FULL: no segment can be
        emptied as long as the caller and others write to extents that they have taken.

        Raises OSError, TierError.
        """
        while not self._freeing.acquire(timeout=LOOK_S):
            if deadline.is_over:
                return Outcome.LATE
        try:
            with self.changed:
                if self._fits_into(self._current, length):
                    return Outcome.DONE  # another thread has freed space
                current, self._current = self._current, None
            started = self._start_next(deadline)
            with self.changed:
                self._current = started or current
                self.changed.notify_all()
            return Outcome.DONE if started else Outcome.FULL
        finally:
            self._freeing.release()

    def _start_next(self, deadline: Deadline) -> Segment | None:
        """The next segment to fill, with the parts that were copied to it. If possible, there is then space for one
        more segment. None: there is no space."""
        fresh = self._log.start_segment()
        if fresh is None:  # the storage is smaller than the limit: use the segments that exist
            oldest = self._oldest()
            if oldest is not None:
                self._empty(oldest)
                fresh = self._log.start_segment()
        elif not self._log.has_spare:
            oldest = self._oldest(but=fresh)
            if oldest is not None:
                self._empty(oldest, fresh, deadline)
        return fresh

    def _oldest(self, but: Segment | None = None) -> Segment | None:
        """An empty segment, if there is one, else the oldest one. Segments that are being written are left out."""
        with self.changed:
            return min(
                (segment for segment in self._log.segments.values() if segment is not but and not segment.writers),
                key=lambda segment: (bool(segment.entries), segment.sequence), default=None,
            )

    def _empty(self, segment: Segment, into: Segment | None = None, deadline: Deadline = NEVER) -> None:
        """Copies the parts that get a second chance, drops the others, and wipes the segment once no thread reads it.

        Raises OSError, TierError; then the parts that were to be copied are still in their old place.
        """
        with self.changed:
            self._judge_copies(segment)
            moves = self._second_chances(segment, into) if into else []
            keys = {key for key, _, _ in moves}
            for key in segment.entries.keys() - keys:
                self.drop(key)
            self.claimed |= keys
        try:
            moved = [move for move in moves if not deadline.is_over and self._copy(*move)]
            rows = [Row(to.segment.sequence, to.offset, key, old.length, old.checksum, 0) for key, old, to in moved]
            self._index.replace_segment(segment.sequence, rows)
            with self.changed:
                for key, old, to in moved:
                    if self.entries.get(key) is old:
                        self._put(key, Entry(to.segment, to.offset, old.length, old.checksum, is_copy=True))
                for key in list(segment.entries):
                    self.drop(key)
                self.changed.wait_for(lambda: segment.readers == 0)
            self._log.wipe(segment)
        finally:
            self.unclaim(keys)
            self.leave([extent for _, _, extent in moves])

    def _judge_copies(self, segment: Segment) -> None:
        """The segment is about to be emptied. The caller holds `changed`."""
        used_again = [entry.used > 0 for entry in segment.entries.values() if entry.is_copy]
        if used_again:
            step = KEPT_STEP if sum(used_again) >= PAYS * len(used_again) else -KEPT_STEP
            self._kept_share = min(MOST_KEPT, max(LEAST_KEPT, self._kept_share + step))

    def _second_chances(self, segment: Segment, into: Segment) -> list[tuple[bytes, Entry, Extent]]:
        """(key, place of the part, place for its copy) of each part to copy. The caller holds `changed`."""
        used = sorted((item for item in segment.entries.items() if item[1].used), key=lambda item: -item[1].used)
        left_bytes = int(self._kept_share * into.size_bytes)
        left_records = int(self._kept_share * self._log.most_records)
        moves: list[tuple[bytes, Entry, Extent]] = []
        for key, entry in used:
            left_bytes -= record_bytes(entry.length)
            extent = self._take(into, entry.length) if left_bytes >= 0 and len(moves) < left_records else None
            if extent is None:
                break
            moves.append((key, entry, extent))
        return moves

    def _copy(self, key: bytes, entry: Entry, to: Extent) -> bool:
        """Copies a part. False: the bytes at its place are not this part, or the storage fails."""
        wanted = Kind.PART, Record(name_of(key), entry.length, entry.checksum)
        source, total = entry.segment, pages_bytes(entry.length)
        try:
            if read_record(self._io.read_block(source.fd, entry.offset), source.mark, entry.offset) != wanted:
                return False
            self._io.write_block(to.segment.fd, record_block(wanted[1], to.segment.mark, to.offset), to.offset)
            with mmap.mmap(-1, PIECE_BYTES) as buffer, memoryview(buffer) as view:
                for begin in range(0, total, PIECE_BYTES):
                    with view[: total - begin] as piece:
                        behind = PAGE_BYTES + begin
                        if not self._io.read(source.fd, [piece], entry.offset + behind):
                            return False
                        self._io.write(to.segment.fd, [piece], to.offset + behind)
        except (OSError, RecordError):
            return False
        return True

    def uses(self) -> list[tuple[int, int, int]]:
        """(sequence, offset, when it was last used) of each part that was used since it was written."""
        with self.changed:
            return [(e.segment.sequence, e.offset, e.used) for e in self.entries.values() if e.used]
