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

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvdock._core import PartMap
from kvdock.tiers.disk.copies import Move, copy_all
from kvdock.tiers.disk.index import Index, Row, offset_of, place_of, where
from kvdock.tiers.disk.io import Io
from kvdock.tiers.disk.log import Entry, Extent, Log, Segment, record_bytes
from kvdock.tiers.record import Record
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Outcome, TierError

LEAST_KEPT, MOST_KEPT, KEPT_STEP = 0.25, 0.75, 0.05
"""The share of a segment for second chances. bench/LOG.md compares it with LRU (2026-11-27)."""
PAYS: Final = 0.5
"""At least this share of the copies must be used again for the share to grow."""
NEVER: Final = Deadline()
FIRST_USE: Final = 1 << 48
"""The number of a new tier's first use. What close() wrote into the index is lower."""
LOOK_S: Final = 0.05
"""How often a thread that waits for others checks its deadline, which may be cancelled."""


class Found(NamedTuple):
    """A part that was found in the index or in the log. `used`: see index.Row."""

    place: int
    key: bytes
    length: int
    checksum: int
    used: int = 0


class Space:
    """`read`: called with a segment before it is emptied: takes its parts into the map, if that was not done before."""

    def __init__(self, log: Log, index: Index, io: Io) -> None:
        self._log, self._index, self._io = log, index, io
        self.changed = threading.Condition()
        self.read: Callable[[Segment], None] = lambda _: None
        self._places = PartMap()
        self._unlisted: deque[int] = deque()
        """Segments, by sequence, that have parts which take_listed() has to return."""
        self.claimed: set[bytes] = set()
        """Parts that a thread is storing or copying: no other thread may store or delete them now."""
        self._dropped: list[bytes] = []
        """What was removed from the maps since take_dropped()."""
        self._freeing = threading.Lock()
        self._current: Segment | None = None
        self._uses = FIRST_USE
        self._kept_share = LEAST_KEPT

    # ------------------------------------------------------------------ opening

    def expect(self, parts: int) -> None:
        """Makes room for about so many parts."""
        self._places.reserve(parts)

    def begin_at(self, segment: Segment | None) -> None:
        """The next part is written to this segment, behind its others."""
        self._current = segment

    def take_over(
        self, segment: Segment, found: Sequence[Found], is_named: Callable[[bytes], bool]
    ) -> tuple[list[Found], list[tuple[bytes, Entry]], list[tuple[int, int]]]:
        """Takes parts of the segment into the map. Returns those taken, the older records of parts that are there
        twice, whose segments stay until release(), and the places (sequence, offset) of what the log cannot have or no
        note names any more. `is_named`: whether a note names the part of a key."""
        taken, older, strays = [], [], []
        with self.changed:
            for one in found:
                offset = offset_of(one.place)
                if offset + record_bytes(one.length) > segment.size_bytes or not is_named(one.key):
                    strays.append((segment.sequence, offset))
                    continue
                known = self._places.get(one.key)
                if one.key in self.claimed or (known is not None and known[0] > one.place):
                    superseded: Entry | None = Entry(segment, offset, one.length, one.checksum)
                else:
                    superseded = self.drop(one.key)
                    self._places.put(one.key, one.place, one.length, one.checksum, one.used)
                    taken.append(one)
                if superseded is not None:
                    superseded.segment.readers += 1
                    older.append((one.key, superseded))
        return taken, older, strays

    def found_in(self, segment: Segment) -> list[Found]:
        with self.changed:
            return [Found(part[0], key, *part[1:4]) for key, part in self._places.of_segment(segment.sequence)]

    def list_soon(self, segment: Segment) -> None:
        """take_listed() returns the segment's parts, too."""
        with self.changed:
            self._unlisted.append(segment.sequence)

    def take_listed(self) -> list[bytes] | None:
        """The parts of one more segment; None: there is none for now."""
        with self.changed:
            return self._keys_of(self._unlisted.popleft()) if self._unlisted else None

    @property
    def is_listed(self) -> bool:
        return not self._unlisted

    # ------------------------------------------------------------------ the map

    @property
    def count(self) -> int:
        return len(self._places)

    def has(self, key: bytes) -> bool:
        with self.changed:
            return key in self._places

    def entry(self, key: bytes) -> Entry | None:
        """The caller holds `changed`."""
        part = self._places.get(key)
        return None if part is None else self._entry(part)

    def _entry(self, part: tuple[int, int, int, int, bool]) -> Entry:
        sequence, offset = where(part[0])
        return Entry(self._log.segments[sequence], offset, *part[1:])

    def _put(self, key: bytes, entry: Entry) -> None:
        if key in self._places:
            self._dropped.append(key)
        self._places.put(key, place_of(entry.segment.sequence, entry.offset), *entry[2:])

    def drop(self, key: bytes) -> Entry | None:
        """Removes the part from the map. The caller holds `changed`."""
        entry = self.entry(key)
        if entry is not None:
            self._places.drop(key)
            self._dropped.append(key)
        return entry

    def parts(self) -> Iterator[list[tuple[bytes, Entry]]]:
        """The parts of each segment, from the oldest on. Each is listed by itself, so other threads get the lock."""
        with self.changed:
            sequences = sorted(self._log.segments)
        for sequence in sequences:
            with self.changed:
                some = [(key, self._entry(part)) for key, part in self._places.of_segment(sequence)]
            yield some

    def _keys_of(self, sequence: int) -> list[bytes]:
        return [key for key, _ in self._places.of_segment(sequence)]

    def drop_where(self, is_dropped: Callable[[bytes], bool]) -> None:
        """Removes parts from the map. Their rows in the index and their bytes are freed with their segments; empty
        segments are freed first."""
        with self.changed:
            sequences = sorted(self._log.segments)
        for sequence in sequences:
            with self.changed:
                for key in filter(is_dropped, self._keys_of(sequence)):
                    self.drop(key)

    # ------------------------------------------------------------------ reading

    def hold_all(self, parts: Sequence[tuple[bytes, int]]) -> list[Entry | None]:
        """The entry of each part, whose segment is not emptied until release(). None: there is no such part of that
        length."""
        found: list[Entry | None] = []
        with self.changed:
            for key, length in parts:
                part = self._places.get(key)
                if part is None or part[1] != length:
                    found.append(None)
                    continue
                self._uses += 1
                self._places.use(key, self._uses)
                entry = self._entry(part)
                entry.segment.readers += 1
                found.append(entry)
        return found

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        """For each part whether it is there. Those that are count as used now."""
        with self.changed:
            first = self._uses + 1
            self._uses += len(keys)
            return [self._places.use(key, number) for number, key in enumerate(keys, first)]

    def take_dropped(self) -> list[bytes]:
        """The parts that were removed from the map since the last call."""
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

    def release(self, *entries: Entry) -> None:
        with self.changed:
            for entry in entries:
                entry.segment.readers -= 1
            self.changed.notify_all()

    def forget(self, key: bytes, entry: Entry) -> None:
        """Removes the part from the maps and the index: the bytes there are not this part."""
        with self.changed:
            if not self._is_at(key, entry):
                return
            self.drop(key)
        with suppress(TierError, OSError):  # the row is removed when it is found again
            self._index.remove([(entry.segment.sequence, entry.offset)])

    def _is_at(self, key: bytes, entry: Entry) -> bool:
        part = self._places.get(key)
        return part is not None and part[0] == place_of(entry.segment.sequence, entry.offset)

    # ------------------------------------------------------------------ writing

    def take(self, length: int) -> Extent | None:
        """Space in the current segment, which is not emptied until leave(); None: call free_space() first."""
        with self.changed:
            return self._take(self._current, length)

    def take_run(self, lengths: Iterable[int], most_bytes: int, most: int) -> list[Extent]:
        """Space for records that follow one another, as take(): for as many parts as the segment has room for, and at
        most `most` of `most_bytes` together, or a single longer one."""
        extents: list[Extent] = []
        with self.changed:
            segment = self._current
            if segment is None:
                return extents
            most = min(most, self._log.most_records - segment.records)
            begin = end = segment.end_bytes
            for length in lengths:
                after = end + record_bytes(length)
                if len(extents) >= most or after > segment.size_bytes or (extents and after - begin > most_bytes):
                    break
                extents.append(Extent(segment, end))
                end = after
            segment.end_bytes = end
            segment.records += len(extents)
            segment.writers += len(extents)
        return extents

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

    def put(self, written: Sequence[tuple[bytes, Record, Extent]]) -> None:
        """Adds parts that were written, with their keys, to the index first. The caller still has to call leave()."""
        rows = [
            (place_of(extent.segment.sequence, extent.offset), key, record.length, record.checksum, 0)
            for key, record, extent in written
        ]
        self._index.add_places(rows)
        with self.changed:
            for place, key, length, checksum, _ in rows:
                if key in self._places:
                    self._dropped.append(key)
                self._places.put(key, place, length, checksum)

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
            absent = {key for key in keys if key not in self._places}
            if absent and absent <= self.claimed:
                self.wait(deadline)
                absent = {key for key in keys if key not in self._places}
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

    @property
    def longest_part(self) -> int:
        """In bytes: with its header it takes a whole segment."""
        return self._log.segment_bytes - PAGE_BYTES - record_bytes(0)

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
            started = None
            try:
                started = self._start_next(deadline)
            finally:
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
                key=lambda one: (not one.is_read or self._places.size_of(one.sequence) > 0, one.sequence), default=None,
            )

    def _empty(self, segment: Segment, into: Segment | None = None, deadline: Deadline = NEVER) -> None:
        """Copies the parts that get a second chance, drops the others, and wipes the segment once no thread reads it.

        Raises OSError, TierError; then all parts are still in their old place, unless the segment itself cannot be
        written: a full disk takes no change of the index either, and is read.
        """
        self.read(segment)
        with self.changed:
            parts = self._places.of_segment(segment.sequence)
            self._judge_copies([part[3] > 0 for _, part in parts if part[4]])
            moves = self._second_chances([(key, self._entry(part)) for key, part in parts], into) if into else []
            keys = {key for key, _, _ in moves}
            self.claimed |= keys
        try:
            moved = copy_all(self._io, moves, deadline)
            rows = [Row(to.segment.sequence, to.offset, key, old.length, old.checksum, 0) for key, old, to in moved]
            self._index.replace_segment(segment.sequence, rows)
            with self.changed:
                for key, old, to in moved:
                    if self._is_at(key, old):
                        self._put(key, Entry(to.segment, to.offset, old.length, old.checksum, is_copy=True))
                for key in self._keys_of(segment.sequence):
                    self.drop(key)
                if into is not None and segment.sequence in self._unlisted:
                    self._unlisted.append(into.sequence)
                self.changed.wait_for(lambda: segment.readers == 0)
            self._log.wipe(segment)
        finally:
            self.unclaim(keys)
            self.leave([extent for _, _, extent in moves])

    def _judge_copies(self, used_again: Sequence[bool]) -> None:
        """`used_again`: of each copy in a segment that is about to be emptied. The caller holds `changed`."""
        if used_again:
            step = KEPT_STEP if sum(used_again) >= PAYS * len(used_again) else -KEPT_STEP
            self._kept_share = min(MOST_KEPT, max(LEAST_KEPT, self._kept_share + step))

    def _second_chances(
        self, parts: Sequence[tuple[bytes, Entry]], into: Segment
    ) -> list[Move]:
        """What to copy. The caller holds `changed`."""
        used = sorted((part for part in parts if part[1].used), key=lambda part: -part[1].used)
        left_bytes = int(self._kept_share * into.size_bytes)
        left_records = int(self._kept_share * self._log.most_records)
        moves: list[Move] = []
        for key, entry in used:
            left_bytes -= record_bytes(entry.length)
            extent = self._take(into, entry.length) if left_bytes >= 0 and len(moves) < left_records else None
            if extent is None:
                break
            moves.append(Move(key, entry, extent))
        return moves

    def uses(self) -> list[tuple[int, int, int]]:
        """(sequence, offset, a number) of each part that was used since it was written, in the order of their uses."""
        used = sorted((e.used, e.segment.sequence, e.offset) for some in self.parts() for _, e in some if e.used)
        return [(sequence, offset, number) for number, (_, sequence, offset) in enumerate(used, 1)]
