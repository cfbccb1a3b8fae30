"""Tracks the place of each part, and makes space: parts of a segment are evicted, and new ones are written to the gaps.

Segments take turns. Which parts of a segment go says the map (csrc/base/part_worth.h): those that would be the first to
go of all segments, with those of similar age, so that it may be all or a few. What stays is not moved, so each part is
written once. A part is used when it is loaded, and when the mover asks for it because the pool has answered a prompt
with its chunk.

Locks: `changed` guards all maps and counts here and in segments, and is never held during input or output. `_freeing`
is held by the one thread that frees space; it does not touch segments that are being written, and waits for readers of
what is not in the map any more.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvdock._core import FIRST_MOMENT, PartMap
from kvdock.tiers.disk.index import Index, offset_of, place_of, where
from kvdock.tiers.disk.io import Io
from kvdock.tiers.disk.log import Entry, Extent, Log, Segment, record_bytes
from kvdock.tiers.record import Record
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Outcome, TierError

KEPT: Final = 0.95
"""The share of all parts that stays when all segments have had their turn. bench/LOG.md (2026-11-29) compares some."""
LEAST_FREED: Final = 0.125
"""The least share of a segment in which there is no part after its turn."""
LOOKS: Final = 8
"""The most segments at which a search for one to empty looks. It ends early at a segment of which at least LEAST_FREED
would be evicted anyway."""
LONG_AGO: Final = FIRST_MOMENT - (1 << 40)
"""The last use of a part that was not used before the tier was last closed."""
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
        self._turns = 0

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
        twice, whose places stay until release(), and the places (sequence, offset) of what the log cannot have or no
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
                    used, uses = (one.used, 1) if one.used else (LONG_AGO, 0)
                    self._places.put_back(one.key, one.place, one.length, one.checksum, used, uses)
                    taken.append(one)
                if superseded is not None:
                    superseded.segment.readers[superseded.offset] += 1
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

    def _entry(self, part: tuple[int, int, int, int, int]) -> Entry:
        sequence, offset = where(part[0])
        return Entry(self._log.segments[sequence], offset, *part[1:])

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
        """The entry of each part, whose place is not written to until release(). None: there is no such part of that
        length."""
        found: list[Entry | None] = []
        with self.changed:
            for key, length in parts:
                part = self._places.get(key)
                if part is None or part[1] != length:
                    found.append(None)
                    continue
                self._places.use(key)
                entry = self._entry(part)
                entry.segment.readers[entry.offset] += 1
                found.append(entry)
        return found

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        """For each part whether it is there. Those that are count as used now, the first ones of a prompt last, so that
        its end is evicted first."""
        with self.changed:
            return [self._places.use(key) for key in reversed(keys)][::-1]

    def take_dropped(self) -> list[bytes]:
        """The parts that were removed from the map since the last call."""
        with self.changed:
            dropped, self._dropped = self._dropped, []
            return dropped

    def hold_to_delete(self, keys: Sequence[bytes], deadline: Deadline) -> tuple[dict[bytes, Entry], set[bytes]]:
        """(the entries removed from the maps, whose places stay until release(); the keys that other threads are
        storing).

        If other threads are storing all of them, it waits first until that may have changed.
        """
        with self.changed:
            if self.claimed.issuperset(keys):
                self.wait(deadline)
            claimed = self.claimed.intersection(keys)
            dropped = {key: entry for key in keys if key not in claimed and (entry := self.drop(key))}
            for entry in dropped.values():
                entry.segment.readers[entry.offset] += 1
            return dropped, claimed

    def release(self, *entries: Entry) -> None:
        with self.changed:
            for entry in entries:
                readers = entry.segment.readers
                readers[entry.offset] -= 1
                if not readers[entry.offset]:
                    del readers[entry.offset]
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

    def take_run(self, lengths: Sequence[int], most_bytes: int, most: int) -> list[Extent]:
        """Space in the current segment for records that follow one another, which is not emptied until leave(): for as
        many parts as the first gap has room for that takes the first, and at most `most` of `most_bytes` together, or a
        single longer one. []: call free_space() first."""
        with self.changed:
            segment = self._current
            found = None if segment is None else self._gap_for(segment, lengths[0])
            if segment is None or found is None:
                return []
            begin, gap_end = segment.gaps[found]
            extents, end = list[Extent](), begin
            for length in lengths[: min(most, self._log.most_records - segment.records)]:
                after = end + record_bytes(length)
                if after > gap_end or (extents and after - begin > most_bytes):
                    break
                extents.append(Extent(segment, end))
                end = after
            segment.gaps[found : found + 1] = [(end, gap_end)] if end < gap_end else []
            segment.records += len(extents)
            segment.writers += len(extents)
            return extents

    def _gap_for(self, segment: Segment, length: int) -> int | None:
        """The index of the first gap that takes a record of a part of this length; None: there is none."""
        if segment.records >= self._log.most_records:
            return None
        needed = record_bytes(length)
        sizes = [((end - begin) % needed, at) for at, (begin, end) in enumerate(segment.gaps) if begin + needed <= end]
        return min(sizes)[1] if sizes else None

    def put(self, written: Sequence[tuple[bytes, Record, Extent]]) -> None:
        """Adds parts that were written, with their keys, to the index first. The caller still has to call leave()."""
        rows = [
            (place_of(extent.segment.sequence, extent.offset), key, record.length, record.checksum, 0)
            for key, record, extent in written
        ]
        self._index.add_places(rows)
        with self.changed:
            for place, key, length, checksum, _ in reversed(rows):  # see use()
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
        """Frees space for a part. DONE: try take_run() again. LATE: the deadline has passed. FULL: no segment can be
        emptied as long as the caller and others write to extents that they have taken.

        Raises OSError, TierError.
        """
        while not self._freeing.acquire(timeout=LOOK_S):
            if deadline.is_over:
                return Outcome.LATE
        try:
            with self.changed:
                if self._current is not None and self._gap_for(self._current, length) is not None:
                    return Outcome.DONE  # another thread has freed space
                current, self._current = self._current, None
            started = None
            try:
                started = self._start_next(length)
            finally:
                with self.changed:
                    self._current = started or current
                    self.changed.notify_all()
            return Outcome.DONE if started else Outcome.FULL
        finally:
            self._freeing.release()

    def _start_next(self, length: int) -> Segment | None:
        """The next segment to fill, in which there is space for a part. None: there is none."""
        while True:
            fresh = self._log.start_segment()
            chosen = None if fresh else self._choose()
            if fresh is None and chosen is None:
                return None
            if started := fresh or (chosen and self._thinned(chosen, length)):
                with self.changed:
                    self._end_turn(started)
                return started

    def _choose(self) -> Segment | None:
        """The first of the next segments in turn of which enough goes that should go anyway, or else the one of which
        the oldest parts would go. The others have had their turn."""
        best, oldest = None, -1.0
        for _ in range(min(LOOKS, len(self._log.segments))):
            segment = self._next_in_turn()
            if segment is None:
                break
            self.read(segment)
            with self.changed:
                _, _, age = self._turn_of(segment, LEAST_FREED)
                self._end_turn(segment)
            if age > oldest:
                best, oldest = segment, age
            if age > 1:
                break
        return best

    def _end_turn(self, segment: Segment) -> None:
        """The caller holds `changed`."""
        self._turns += 1
        segment.turn = self._turns

    def _next_in_turn(self) -> Segment | None:
        """An empty segment, if there is one, else the one whose last turn is the longest ago. Segments that are being
        written are left out."""
        with self.changed:
            return min(
                (segment for segment in self._log.segments.values() if not segment.writers),
                key=lambda one: (not one.is_read or self._places.size_of(one.sequence) > 0, one.turn, one.sequence),
                default=None,
            )

    def _thinned(self, segment: Segment, length: int) -> Segment | None:
        """Evicts parts of the segment, so that it has a gap for a record of a part of this length, and waits until no
        thread reads what it may be overwritten. None: no part is left in it, so it was wiped.

        Raises OSError, TierError; then all parts are still in their place, unless the segment itself cannot be
        written: a full disk takes no change of the index either, and is read.
        """
        self.read(segment)
        with self.changed:
            gone, gaps = self._to_evict(segment, length)
        self._index.empty_gaps(segment.sequence, gaps)
        with self.changed:
            for key, place in gone:
                if (part := self._places.get(key)) is not None and part[0] == place:
                    self._places.evict(key)
                    self._dropped.append(key)
            left = segment.records = self._places.size_of(segment.sequence)
            segment.gaps = gaps
            self.changed.wait_for(lambda: not any(_is_within(gaps, offset) for offset in segment.readers))
        if left:
            return segment
        self._log.wipe(segment)
        return None

    def _to_evict(self, segment: Segment, length: int) -> tuple[list[tuple[bytes, int]], list[tuple[int, int]]]:
        """(key and place of what goes, the gaps that are there then). The caller holds `changed`."""
        freed = LEAST_FREED
        while True:
            gone, gaps, _ = self._turn_of(segment, freed)
            left = self._places.size_of(segment.sequence) - len(gone)
            longest = max((end - begin for begin, end in gaps), default=0)
            if not left or (longest >= record_bytes(length) and left < self._log.most_records):
                return gone, gaps
            freed *= 2

    def _turn_of(
        self, segment: Segment, freed: float
    ) -> tuple[list[tuple[bytes, int]], list[tuple[int, int]], float]:
        """As PartMap.turn(). `freed`: the least share that is free then. Of a segment of an earlier size everything
        goes. The caller holds `changed`."""
        size_bytes, usual_bytes = segment.size_bytes, self._log.segment_bytes
        left_bytes = int((1 - min(1.0, freed)) * size_bytes) if size_bytes == usual_bytes else 0
        return self._places.turn(segment.sequence, size_bytes, KEPT, left_bytes, usual_bytes // self._log.most_records)

    def uses(self) -> list[tuple[int, int, int]]:
        """(sequence, offset, a number for the index) of each part that was used, in the order of their uses."""
        used = sorted((e.used, e.segment.sequence, e.offset) for some in self.parts() for _, e in some if e.uses)
        first = FIRST_MOMENT - len(used)
        return [(sequence, offset, number) for number, (_, sequence, offset) in enumerate(used, first)]


def _is_within(gaps: Sequence[tuple[int, int]], offset: int) -> bool:
    at = bisect_right(gaps, offset, key=lambda gap: gap[0])
    return at > 0 and offset < gaps[at - 1][1]
