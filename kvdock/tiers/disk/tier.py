"""The disk tier: keeps parts in a log of kvdock's own format, on any local file system.

Bytes go directly between the pages and storage. A part can be found once its record was written and the index has it.
So when the process is killed, parts that were stored are found again, and others are misses.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kvdock._core import match_record_heads, write_record_heads
from kvdock.tiers.disk.folder import TIER, DiskNotes, FolderLock
from kvdock.tiers.disk.index import ROW_BYTES, Index
from kvdock.tiers.disk.io import (
    FULL_ERRORS,
    LOST_ERRORS,
    MOST_RUN,
    PIECE_BYTES,
    THREADS,
    Io,
    Transfer,
    raise_if_lost,
    takes_direct,
)
from kvdock.tiers.disk.log import (
    NAMESPACE_BYTES,
    Entry,
    Extent,
    Kind,
    Log,
    chunk_of,
    follows,
    is_first,
    key_of,
    name_of,
    read_record,
    record_bytes,
)
from kvdock.tiers.disk.reader import Reader
from kvdock.tiers.disk.space import Space
from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName, Record, RecordError
from kvdock.tiers.tier import (
    NO_LIMITS,
    PAGE_BYTES,
    Deadline,
    Holding,
    Loaded,
    Outcome,
    TierError,
    ToLoad,
    ToStore,
    Usage,
    pages_bytes,
)

_log: Final = logging.getLogger(__name__)

MIB: Final = 1 << 20
LEAST_LIMIT_BYTES: Final = 4 * MIB
MOST_SEGMENT_BYTES: Final = 256 << 20
_EMPTIED_AT_ONCE: Final = 512
RECORD_SHARE_BYTES: Final = 64 << 10
"""A segment takes at most one record for each of these bytes, which bounds the index and the memory for lookups."""


class Sizes(NamedTuple):
    """How the limit of a tier is divided."""

    segment_bytes: int
    segments_bytes: int
    """The most that all segments take."""
    most_records: int
    """The most records of a segment."""
    wal_bytes: int
    """The size at which SQLite empties its own log, which may take twice as much."""

    @staticmethod
    def of(limit_bytes: int) -> Sizes:
        """Raises TierError."""
        if limit_bytes < LEAST_LIMIT_BYTES:
            wanted = f"at least {LEAST_LIMIT_BYTES:,} ({LEAST_LIMIT_BYTES // MIB} MiB)"
            raise TierError(TIER, f"found a limit of {limit_bytes:,} bytes, wanted {wanted}")
        wal_bytes = (256 << 10) if limit_bytes < (1 << 30) else (4 << 20)
        segments_bytes = limit_bytes - 2 * wal_bytes - limit_bytes // RECORD_SHARE_BYTES * ROW_BYTES
        segment_bytes = min(MOST_SEGMENT_BYTES, segments_bytes // 4 // PAGE_BYTES * PAGE_BYTES)
        return Sizes(segment_bytes, segments_bytes, segment_bytes // RECORD_SHARE_BYTES, wal_bytes)


class Held(NamedTuple):
    """A part to load, whose segment is held. `at`: its index in the batch."""

    at: int
    key: bytes
    entry: Entry
    part: ToLoad


class Reading(NamedTuple):
    """Records that are being read by one call: they follow one another in a segment. `headers`: a page for each."""

    run: list[Held]
    headers: memoryview
    transfer: Transfer


class DiskTier:
    """`wear_bytes` of usage() counts all that is written to segments, but not the index: some hundred bytes for each
    part. `bytes_used` are the bytes allocated to files."""

    name = TIER
    poll_s = 0.0
    recheck_s = 2.0

    def __init__(
        self, lock: FolderLock, io: Io, log: Log, index: Index, notes: DiskNotes, limit_bytes: int
    ) -> None:
        self._lock, self._io, self._log, self._index, self._limit_bytes = lock, io, log, index, limit_bytes
        self._notes, self.limits = notes, NO_LIMITS
        self._labels: dict[bytes, tuple[bytes, float]] = {}
        self._space = Space(log, index, io)
        self._reader = Reader(self._space, log, index, self._is_named)

    @classmethod
    def open(cls, folder: Path, limit_bytes: int, *, threads: int = THREADS) -> DiskTier:
        """Makes the folder if it is missing. Segments beyond `limit_bytes`, of a former limit, are removed.

        Raises TierError, and FolderInUse if another process uses the folder.
        """
        sizes = Sizes.of(limit_bytes)
        try:
            with ExitStack() as undo:
                lock = FolderLock(folder)
                undo.callback(lock.close)
                direct = takes_direct(folder)
                if not direct:
                    _log.warning("%s has no direct input and output: the disk tier uses the page cache", folder)
                io = Io(direct=direct, threads=threads)
                undo.callback(io.close)
                log = Log(folder, io, sizes.segment_bytes, sizes.segments_bytes, sizes.most_records)
                undo.callback(log.close)
                index, why = Index.open(folder / "index.db", sizes.wal_bytes)
                undo.callback(index.close)
                tier = cls(lock, io, log, index, DiskNotes(folder), limit_bytes)
                tier._reader.start(why)
                undo.pop_all()
                return tier
        except OSError as error:
            raise TierError(TIER, f"{folder} cannot be opened: {error}") from error

    # ------------------------------------------------------------------ verbs

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        self._lock.require()
        if deadline.is_over:
            return [False] * len(names)
        return self._space.use([key_of(name) for name in names])

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        self._lock.require()
        answers = [Loaded(Outcome.LATE)] * len(parts)
        if deadline.is_over:
            return answers
        keys = [key_of(one.name) for one in parts]
        held: list[Held] = []
        for at, entry in enumerate(self._space.hold_all(list(zip(keys, (one.length for one in parts), strict=True)))):
            if entry is None:
                answers[at] = Loaded(Outcome.MISSING)
            else:
                held.append(Held(at, keys[at], entry, parts[at]))
        runs = deque(runs_of(held))
        in_progress: deque[Reading] = deque()
        pieces = 0
        try:
            while runs and not deadline.is_over:
                in_progress.append(self._begin_load(runs[0]))
                runs.popleft()
                pieces += len(in_progress[-1].transfer)
                while pieces > self._io.most_pieces:
                    pieces -= len(in_progress[0].transfer)
                    self._end_load(in_progress.popleft(), answers)
        finally:
            for reading in in_progress:
                self._end_load(reading, answers)
            self._space.release(*(one.entry for run in runs for one in run))
        return answers

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        self._lock.require()
        return StoreBatch(self._space, self._log, self._io, parts, deadline).run()

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        self._lock.require()
        outcomes = [Outcome.LATE] * len(names)
        left = list(range(len(names)))
        self._reader.wait(deadline)  # what is not known yet cannot be deleted
        while left and not deadline.is_over:
            keys = [key_of(names[at]) for at in left]
            entries, claimed = self._space.hold_to_delete(keys, deadline)
            for at, key in zip(left, keys, strict=True):
                outcomes[at] = Outcome.LATE if key in claimed else Outcome.MISSING
            for key, outcome in self._delete(entries, deadline).items():
                outcomes[left[keys.index(key)]] = outcome
            left = [at for at, key in zip(left, keys, strict=True) if key in claimed]
        return outcomes

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        self._lock.require()
        return [self._notes.of(namespace) for namespace in namespaces]

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """Parts that the note does not name any more are not found from now on; their bytes are freed with their
        segments."""
        self._lock.require()
        before = self._notes.of(namespace)
        note = self._notes.change(namespace, change)
        if note != before:
            self._space.drop_where(lambda key: key.startswith(namespace) and not note.names(name_of(key)))
        return note

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        return self._notes.namespaces()

    def _is_named(self, key: bytes) -> bool:
        """Whether the part can be found under the namespace's note. Without a note, every part counts as named."""
        note = self._notes.of(key[:NAMESPACE_BYTES])
        return note is None or note.names(name_of(key))

    def take_listed(self) -> list[tuple[bytes, bytes]] | None:
        keys = self._space.take_listed()
        return None if keys is None else [chunk_of(key) for key in keys if is_first(key)]

    @property
    def is_listed(self) -> bool:
        return self._reader.has_ended and self._space.is_listed

    def mark(self, namespace: bytes, label: bytes, deadline: Deadline) -> None:
        """A disk has its limit, and evicts by itself: labels last as long as the mover."""
        self._labels[namespace] = label, time.monotonic()

    def holdings(self, deadline: Deadline) -> list[Holding]:
        self._wait_until_read(deadline)
        objects, size = Counter[bytes](), Counter[bytes]()
        for some in self._space.parts():
            for key, entry in some:
                objects[key[:NAMESPACE_BYTES]] += 1
                size[key[:NAMESPACE_BYTES]] += entry.length
        now_s, unmarked = time.monotonic(), (b"", -math.inf)
        found = []
        for namespace, count in objects.items():
            label, marked_s = self._labels.get(namespace, unmarked)
            found.append(Holding(namespace, label, count, size[namespace], now_s - marked_s, {}))
        return found

    def empty(self, namespace: bytes, older_s: float, deadline: Deadline) -> int:
        self._wait_until_read(deadline)
        keys = (key for some in self._space.parts() for key, _ in some if key.startswith(namespace))
        names = list(map(name_of, islice(keys, _EMPTIED_AT_ONCE)))
        return self.delete(names, deadline).count(Outcome.DONE)

    def _wait_until_read(self, deadline: Deadline) -> None:
        if not self._reader.wait(deadline):
            raise TierError(TIER, "its index was not read in time")

    def forget(self, namespace: bytes, deadline: Deadline) -> None:
        """The note stays: it is small."""
        self._labels.pop(namespace, None)

    def gone(self) -> Sequence[PartName]:
        return [name for name in map(name_of, self._space.take_dropped()) if not self._has(name)]

    def _has(self, name: PartName) -> bool:
        """Under the note's present name, whichever the note was when `name` was given."""
        note = self._notes.of(name.namespace)
        now = name if note is None else note.name(name.namespace, name.key, name.group, name.writer)
        return self._space.has(key_of(now))

    @property
    def fault(self) -> str:
        return self._io.fault

    @property
    def longest_part(self) -> int:
        return self._space.longest_part

    def usage(self) -> Usage:
        used = self._log.bytes_used + self._index.bytes_used
        return Usage(self._space.count, used, self._limit_bytes, self._io.wear_bytes)

    def close(self, deadline: Deadline) -> None:
        """Makes all parts durable, whatever the deadline. Raises TierError if that fails; the folder is released
        anyway."""
        with ExitStack() as end:
            end.callback(self._lock.close)
            end.callback(self._log.close)
            end.callback(self._index.close)
            self._reader.stop()
            self._io.close()
            try:
                self._log.sync()
                with suppress(OSError):  # a full disk: it only changes which parts are dropped first
                    self._index.remember_use(self._space.uses())
            except OSError as error:
                raise TierError(TIER, f"not all of it is durable: {error}") from error

    # ------------------------------------------------------------------ one part

    def _begin_load(self, run: list[Held]) -> Reading:
        headers, first = self._io.run_headers.take(), run[0].entry
        buffers = buffers_of([(one.part.pages, one.entry.length) for one in run], headers)
        return Reading(run, headers, self._io.begin(self._io.read, first.segment.file, buffers, first.offset))

    def _end_load(self, reading: Reading, answers: list[Loaded]) -> None:
        """Waits for the records."""
        try:
            try:
                is_whole = reading.transfer.end()
            except OSError as error:
                is_whole = False
                if len(reading.run) == 1 and not isinstance(error, FileNotFoundError):
                    answers[reading.run[0].at] = Loaded(Outcome.FAILED)
                    return
            first = reading.run[0].entry
            records = [(one.key, one.entry.length, one.entry.checksum) for one in reading.run]
            is_there = match_record_heads(reading.headers, records, first.segment.mark, first.offset)
            for one, matches in zip(reading.run, is_there, strict=True):
                if is_whole and matches:
                    answers[one.at] = Loaded(Outcome.DONE, one.entry.checksum)
                else:
                    wanted = Record(one.part.name, one.entry.length, one.entry.checksum)
                    answers[one.at] = self._load_alone(one, wanted)
        finally:
            self._io.run_headers.give_back(reading.headers)
            self._space.release(*(one.entry for one in reading.run))

    def _load_alone(self, one: Held, wanted: Record) -> Loaded:
        """Once more, to tell what of a run is there. If it is not a whole record of the part, the part is removed from
        the map."""
        entry, header = one.entry, self._io.headers.take()
        try:
            is_whole = self._io.read(
                entry.segment.file, [header, one.part.pages[: pages_bytes(entry.length)]], entry.offset
            )
            kind, record = read_record(header, entry.segment.mark, entry.offset)
            if is_whole and record == wanted and kind is Kind.PART:
                return Loaded(Outcome.DONE, record.checksum)
            self._space.forget(one.key, entry)
            return Loaded(Outcome.DAMAGED if kind is Kind.PART else Outcome.MISSING)
        except RecordError:
            self._space.forget(one.key, entry)
            return Loaded(Outcome.DAMAGED)
        except FileNotFoundError:  # somebody has removed the segment's file
            self._space.forget(one.key, entry)
            return Loaded(Outcome.MISSING)
        except OSError:
            return Loaded(Outcome.FAILED)
        finally:
            self._io.headers.give_back(header)

    def _delete(self, entries: dict[bytes, Entry], deadline: Deadline) -> dict[bytes, Outcome]:
        """Deletes parts that the maps do not have any more. The log is marked first, so that they do not come back when
        it is scanned."""
        outcomes: dict[bytes, Outcome] = {}
        try:
            for key, entry in entries.items():
                record = Record(name_of(key), entry.length, entry.checksum)
                try:
                    self._log.mark_deleted(entry.segment, entry.offset, record)
                    outcomes[key] = Outcome.DONE
                except OSError as error:
                    raise_if_lost(error)
                    outcomes[key] = Outcome.FAILED
            places = [(entry.segment.sequence, entry.offset) for entry in entries.values()]
            try:
                self._log.sync({entry.segment for entry in entries.values()})
                self._index.remove(places)
            except OSError as error:
                raise_if_lost(error)
                return dict.fromkeys(entries, Outcome.FAILED)
            return outcomes
        finally:
            for entry in entries.values():
                self._space.release(entry)


# --------------------------------------------------------------------------- runs

# Records that follow one another in a segment are read or written by one call.


def runs_of(held: list[Held]) -> list[list[Held]]:
    runs: list[list[Held]] = []
    size = 0
    for one in sorted(held, key=lambda one: (one.entry.segment.sequence, one.entry.offset)):
        size += record_bytes(one.entry.length)
        last = runs[-1][-1].entry if runs else None
        if last and follows(one.entry, last, last.length) and size <= PIECE_BYTES and len(runs[-1]) < MOST_RUN:
            runs[-1].append(one)
        else:
            runs.append([one])
            size = record_bytes(one.entry.length)
    return runs


def buffers_of(parts: Iterable[tuple[memoryview, int]], headers: memoryview) -> list[memoryview]:
    """The memory of a run. `parts`: pages and length of each. `headers`: a page for each."""
    buffers: list[memoryview] = []
    for number, (pages, length) in enumerate(parts):
        buffers += headers[number * PAGE_BYTES : (number + 1) * PAGE_BYTES], pages[: pages_bytes(length)]
    return buffers


# --------------------------------------------------------------------------- a batch of stores

# Carries out a batch of stores: finds the parts that are new, writes them, and adds them to the maps.
#
# If a batch finds no space, it adds the parts that it has written to the maps before it waits for other batches. So it
# holds no extent while it waits, and the segments may be emptied.



class Writing(NamedTuple):
    """A record to write. `at`: its index in the batch."""

    at: int
    record: Record
    extent: Extent


class WritingRun(NamedTuple):
    """Records that are being written by one call: they follow one another in a segment."""

    run: list[Writing]
    headers: memoryview
    buffers: list[memoryview]
    transfer: Transfer


class StoreBatch:
    def __init__(self, space: Space, log: Log, io: Io, parts: Sequence[ToStore], deadline: Deadline) -> None:
        self._space, self._log, self._io, self._parts, self._deadline = space, log, io, parts, deadline
        self._outcomes = [Outcome.LATE] * len(parts)
        self._keys = [key_of(part.record.name) for part in parts]
        self._claims: set[bytes] = set()
        self._in_progress: deque[WritingRun] = deque()
        self._pieces = 0
        self._written: list[Writing] = []
        self._lost: OSError | None = None

    def run(self) -> list[Outcome]:
        """Returns one outcome for each part. When it returns or raises TierError, nothing reads the pages any more."""
        left = list(range(len(self._parts)))
        while left and not self._deadline.is_over:
            self._claims, others = self._space.claim([self._keys[at] for at in left], self._deadline)
            new, mine, later = set(self._claims), list[int](), []
            for at in left:
                key = self._keys[at]
                if key in new:
                    new.discard(key)
                    mine.append(at)
                elif key in others or key in self._claims:  # of two equal parts in one batch, the second is found later
                    later.append(at)
                else:
                    self._outcomes[at] = Outcome.DONE
            try:
                while mine and not self._deadline.is_over:
                    mine = mine[self._begin(mine):]
            finally:
                self._finish()
                self._unclaim(set(self._claims))
            if self._lost:
                raise_if_lost(self._lost)
            left = later
        return self._outcomes

    def _begin(self, left: list[int]) -> int:
        """Starts to write a run of the first parts of `left`. Returns how many of these are done with: one where there
        is no space for it."""
        extents = self._extents(left)
        if extents:
            self._write([Writing(at, self._parts[at].record, to) for at, to in zip(left, extents, strict=False)])
        return len(extents) or 1

    def _write(self, run: list[Writing]) -> None:
        first, headers = run[0].extent, self._io.run_headers.take()
        records = [(self._keys[at], record.length, record.checksum) for at, record, _ in run]
        write_record_heads(headers, records, first.segment.mark, first.offset)
        buffers = buffers_of([(self._parts[one.at].pages, one.record.length) for one in run], headers)
        transfer = self._io.begin(self._io.write, first.segment.file, buffers, first.offset)
        self._in_progress.append(WritingRun(run, headers, buffers, transfer))
        self._pieces += len(transfer)
        while self._pieces > self._io.most_pieces:
            self._end_first()

    def _extents(self, left: list[int]) -> list[Extent]:
        """Space for a run of the first parts of `left`. []: there is no space, and the outcome of the first is set."""
        first, outcome = left[0], Outcome.TOO_LARGE
        length = self._parts[first].record.length
        while length <= self._space.longest_part:
            extents = self._space.take_run(
                [self._parts[at].record.length for at in left[:MOST_RUN]], PIECE_BYTES, MOST_RUN
            )
            if extents:
                return extents
            try:
                outcome = self._space.free_space(length, self._deadline)
            except OSError as error:
                raise_if_lost(error)
                outcome = _outcome_of(error)
            if outcome is Outcome.FULL and (self._in_progress or self._written):
                self._finish()
            elif outcome is Outcome.FULL and self._space.wait_for_writers(self._deadline):
                continue
            elif outcome is not Outcome.DONE:
                break
        self._outcomes[first] = outcome
        return []

    def _end_first(self) -> None:
        run, headers, buffers, transfer = self._in_progress.popleft()
        self._pieces -= len(transfer)
        try:
            try:
                transfer.end()
                self._written += run
            except OSError as error:
                if len(run) == 1:
                    self._give_up(run, error)
                else:
                    self._write_alone(run, buffers)
        finally:
            self._io.run_headers.give_back(headers)

    def _write_alone(self, run: list[Writing], buffers: list[memoryview]) -> None:
        """Once more, so that what can be stored of a run is."""
        for number, writing in enumerate(run):
            extent = writing.extent
            try:
                self._io.write(extent.segment.file, buffers[2 * number : 2 * number + 2], extent.offset)
            except OSError as error:
                self._give_up([writing], error)
            else:
                self._written.append(writing)

    def _finish(self) -> None:
        """Waits for all writes in progress, and adds their parts to the index and the maps. Raises TierError after
        that."""
        while self._in_progress:
            self._end_first()
        written, self._written = self._written, []
        if not written:
            return
        try:
            self._space.put([(self._keys[writing.at], writing.record, writing.extent) for writing in written])
        except OSError as error:
            self._give_up(written, error)
        except BaseException as error:
            self._give_up(written, OSError(error))
            raise
        else:
            for writing in written:
                self._outcomes[writing.at] = Outcome.DONE
            self._unclaim({self._keys[writing.at] for writing in written})
            self._space.leave([writing.extent for writing in written])

    def _give_up(self, writings: Sequence[Writing], error: OSError) -> None:
        """Gives up records. Their extents stay unused until the segment is wiped; the bytes there must not be taken for
        a part."""
        if error.errno in LOST_ERRORS:
            self._lost = error
        for writing in writings:
            self._outcomes[writing.at] = _outcome_of(error)
            with suppress(OSError):
                self._log.mark_deleted(writing.extent.segment, writing.extent.offset, writing.record)
        self._space.leave([writing.extent for writing in writings])

    def _unclaim(self, keys: set[bytes]) -> None:
        self._claims -= keys
        self._space.unclaim(keys)


def _outcome_of(error: OSError) -> Outcome:
    return Outcome.FULL if error.errno in FULL_ERRORS else Outcome.FAILED
