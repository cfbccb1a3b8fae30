"""The tier on Mooncake Store: each part is one object, which has the record's header and then the part's bytes.

The header is copied first, from or to the tier's own memory. So a peer that hangs is noticed before slots are used.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from time import monotonic
from typing import Final

from kvdock.tiers.notes import HEAD_BYTES, Change, Note, NoteError, name_of_note
from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.stores.mooncake import library as codes
from kvdock.tiers.stores.mooncake.library import INSTALL, TIER, Library, MooncakeSettings, Unended
from kvdock.tiers.stores.mooncake.workers import Call, Names, Workers
from kvdock.tiers.tier import (
    PAGE_BYTES,
    Deadline,
    Loaded,
    NoSpace,
    NotInstalled,
    Outcome,
    Store,
    TierError,
    ToLoad,
    ToStore,
    Usage,
    address_of,
)

_GROUP_PARTS: Final = 32
_GROUP_BYTES: Final = (2 << 20, 32 << 20)
"""The least and the most bytes of a group of parts, whose reads or writes begin with one call to the master and end
with one. Threads take groups in turn."""
_NAMES_AT_ONCE: Final = 1024
_PIECE_BYTES: Final = 4 << 20
"""A part that is copied through the tier's own memory is copied in pieces of this size."""
_RIVAL_S: Final = 1.0
"""How long a store waits for another process that is storing the same part."""
_NOTE_TRIES: Final = 100
_BEGINNINGS: Final = 3
"""How often a write is begun again while others store and delete the same part, or the store evicts it."""
_ABSENT: Final = frozenset({codes.ABSENT, codes.BEING_WRITTEN, codes.LEASE_OVER})


class Buffer:
    """A worker thread's memory: a page for headers and notes, and a piece of a part after it. Its pages take memory
    only once they are used."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, PAGE_BYTES + _PIECE_BYTES)
        self.view = memoryview(self.memory)
        self.address = address_of(self.view)
        self.piece, self.piece_address = self.view[PAGE_BYTES:], self.address + PAGE_BYTES


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One part of a load or store. `index`: its index in the batch. `key`: the object's name. `views`: the memory of
    its bytes."""

    index: int
    key: str
    length: int
    views: Sequence[memoryview]


class MooncakeTier:
    """It owns the client, and closes it. `patience_s`: how long a verb waits after its deadline until no copy uses its
    pages any more, before it raises StillRunning."""

    name = TIER
    gathers = True
    poll_s = 1.0
    recheck_s = 60.0

    def __init__(self, settings: MooncakeSettings, library: Library, patience_s: float) -> None:
        self._settings, self._library, self._patience_s = settings, library, patience_s
        self._names, self._lock = Names(), threading.Lock()
        self._stored: dict[int, int] = {}
        """The bytes of each part that this process has stored and has not found missing since, by the hash of the
        name."""
        self._registered: dict[int, int] = {}
        """The size in bytes of each registered segment, by its address."""
        self._workers: Workers[Buffer] = Workers(TIER, settings.threads, self._new_buffer, Unended)

    @classmethod
    def open(cls, settings: MooncakeSettings, deadline: Deadline, patience_s: float | None = None) -> MooncakeTier:
        """Raises TierError: there is no client library, no master, or no RDMA although it is wanted. May take a few
        times `master_s` longer than the deadline."""
        library = Library.open(settings, deadline)
        return cls(settings, library, 2.0 * settings.stall_s + 1 if patience_s is None else patience_s)

    # ------------------------------------------------------------------------------------------------- memory

    def register(self, address: int, length: int) -> None:
        """Registers a segment of the pool, over RDMA. Parts in memory that is not registered are then copied through
        the tier's own memory. Over TCP nothing is registered, because every host that reaches the client's port could
        read and write the memory, and copies do not need it. Raises TierError."""
        if not self._settings.registers_memory:
            return
        self._library.register(address, length)
        with self._lock:
            self._registered[address] = length

    def unregister(self, address: int) -> None:
        """See Registers."""
        with self._lock:
            is_registered = self._registered.pop(address, None) is not None
        if is_registered:
            self._library.unregister(address)

    def _new_buffer(self) -> Buffer:
        buffer = Buffer()
        if self._settings.registers_memory:
            self._library.register(buffer.address, len(buffer.view))
        return buffer

    def _is_direct(self, address: int, length: int) -> bool:
        """Whether bytes are copied directly from or to this memory."""
        if not (self._settings.direct and self._settings.registers_memory):
            return self._settings.direct
        end = address + length
        with self._lock:
            return any(begin <= address and end <= begin + size for begin, size in self._registered.items())

    # -------------------------------------------------------------------------------------------------- verbs

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        def ask(some: slice) -> Callable[[Call, Buffer], None]:
            def job(call: Call, buffer: Buffer) -> None:
                found[some] = [code == 1 for code in self._library.exist([name.text() for name in names[some]])]

            return job

        found = [False] * len(names)
        self._run([ask(some) for some in _slices(len(names))], deadline)
        return list(found)

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        answers: list[Loaded | None] = [None] * len(parts)

        def of(group: list[BatchEntry]) -> Callable[[Call, Buffer], None]:
            names = [parts[entry.index].name for entry in group]
            return lambda call, buffer: self._load_group(group, names, answers, call, buffer)

        self._run([of(group) for group in _groups(parts, self._settings.threads)], deadline)
        return [answer or Loaded(Outcome.LATE) for answer in answers]

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        answers: list[Outcome | None] = [None] * len(parts)

        def of(group: list[BatchEntry]) -> Callable[[Call, Buffer], None]:
            records = [parts[entry.index].record for entry in group]
            return lambda call, buffer: self._store_group(group, records, answers, call, buffer)

        wanted = [ToLoad(part.record.name, part.record.length, part.pages, part.others) for part in parts]
        self._run([of(group) for group in _groups(wanted, self._settings.threads)], deadline)
        return [answer or Outcome.LATE for answer in answers]

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        def remove(some: slice) -> Callable[[Call, Buffer], None]:
            def job(call: Call, buffer: Buffer) -> None:
                removed = self._remove([name.text() for name in names[some]])
                self._forget(names[some])
                answers[some] = [_REMOVED.get(code, Outcome.FAILED) for code in removed]

            return job

        answers: list[Outcome | None] = [None] * len(names)
        self._run([remove(some) for some in _slices(len(names))], deadline)
        return [answer or Outcome.LATE for answer in answers]

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        def ask(at: int, key: str) -> Callable[[Call, Buffer], None]:
            def job(call: Call, buffer: Buffer) -> None:
                with self._names.held([key], call):
                    found[at] = self._read_note(key, buffer)

            return job

        found: list[Note | Outcome | None] = [Outcome.LATE] * len(namespaces)
        self._run([ask(at, name_of_note(namespace)) for at, namespace in enumerate(namespaces)], deadline)
        return [_answered(one) for one in found]

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """The store has no call that replaces an object in one step. So the note is read again afterwards, and the
        change is made again if another server's note is there."""
        key = name_of_note(namespace)
        done: list[Note | Outcome | None] = [Outcome.LATE]

        def job(call: Call, buffer: Buffer) -> None:
            with self._names.held([key], call):
                for _ in range(_NOTE_TRIES):
                    call.check()
                    before = self._read_note(key, buffer)
                    after = change(before)
                    if after == before or (self._write_note(key, after, buffer, before is not None)
                                           and self._read_note(key, buffer) == after):
                        done[0] = after
                        return
                    call.pause(0.005)

        self._run([job], deadline)
        note = _answered(done[0])
        assert note is not None
        return note

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        """Returns an empty list, because the store cannot list its objects."""
        return []

    def _read_note(self, key: str, buffer: Buffer) -> Note | None:
        """None: there is no note, or the object is not a note, so change() makes one. Raises TierError if the object
        cannot be read."""
        (code,) = self._library.begin_reads([key])
        if code != codes.DONE:
            if code in _ABSENT:
                return None
            raise TierError(TIER, f"{key} cannot be read (code {code})")
        try:
            self._read_whole(key, buffer, HEAD_BYTES)
            length = Note.length(buffer.view)
            self._read_whole(key, buffer, length)
            return Note.read(buffer.view[:length])
        except NoteError:
            return None
        finally:
            self._library.end_reads([key])

    def _read_whole(self, key: str, buffer: Buffer, length: int) -> None:
        """Raises NoteError if the object is shorter, and TierError if its bytes do not come."""
        code = self._library.read(key, buffer.address, length, 0)
        if code == codes.INVALID:
            raise NoteError(f"an object of at least {length} bytes was wanted, found a shorter one")
        if code != length:
            raise TierError(TIER, f"{length} bytes of {key} cannot be read (code {code})")

    def _write_note(self, key: str, note: Note, buffer: Buffer, is_there: bool) -> bool:
        """Writes a note. False: another server has written one meanwhile, or the copy has failed. Raises TierError."""
        packed = note.packed()
        if is_there:
            self._remove([key])
        (code,) = self._library.begin_writes([key], [len(packed)])
        if code == codes.THERE:  # the object is damaged, or another server has written it
            self._remove([key])
            return False
        if code != codes.DONE:
            if code == codes.INVALID:
                self._library.revoke_writes([key])
                return False
            kind = NoSpace if _failed_write(code) is Outcome.FULL else TierError
            raise kind(TIER, f"{key} cannot be written (code {code})")
        buffer.view[: len(packed)] = packed
        if self._library.write(key, buffer.address, len(packed), 0) != len(packed):
            self._library.revoke_writes([key])
            return False
        return self._library.end_writes([key]) == [codes.DONE]

    def usage(self) -> Usage:
        """Counts the parts that this process has stored and has not found missing since. Other processes store, too,
        and the store evicts parts. Its storage is memory, so nothing wears out."""
        with self._lock:
            return Usage(len(self._stored), sum(self._stored.values()), 0, 0)

    def close(self, deadline: Deadline) -> None:
        """Closes the client. All clients lose the memory that this process contributed. If a call hangs, the client
        stays open."""
        if self._workers.close(deadline):
            self._library.close()

    def _run(self, jobs: Sequence[Callable[[Call, Buffer], None]], deadline: Deadline) -> None:
        if jobs and not deadline.is_over:
            self._workers.run(jobs, deadline, self._patience_s)

    # ------------------------------------------------------------------------------------------------- loading

    def _load_group(
        self, group: list[BatchEntry], names: list[PartName], answers: list[Loaded | None], call: Call, buffer: Buffer
    ) -> None:
        keys = [entry.key for entry in group]
        with self._names.held(keys, call):
            begun = self._library.begin_reads(keys)
            try:
                for entry, name, code in zip(group, names, begun, strict=True):
                    call.check()
                    answer = self._load(entry, name, call, buffer) if code == codes.DONE else _failed_read(code)
                    if answer.outcome is Outcome.DAMAGED:  # or evicted meanwhile, and other bytes are in its place
                        self._library.end_reads([entry.key])
                        (code,) = self._library.begin_reads([entry.key])
                        answer = self._load(entry, name, call, buffer) if code == codes.DONE else _failed_read(code)
                    if answer.outcome is Outcome.MISSING:
                        self._forget([name])
                    answers[entry.index] = answer
            finally:
                self._library.end_reads(keys)

    def _load(self, entry: BatchEntry, name: PartName, call: Call, buffer: Buffer) -> Loaded:
        code = self._library.read(entry.key, buffer.address, HEADER_BYTES, 0)
        if code != HEADER_BYTES:
            return _failed_read(code)
        try:
            record = Record.read_of(buffer.view[:HEADER_BYTES], name, entry.length)
        except RecordError:
            return Loaded(Outcome.DAMAGED)
        for begin, view, is_direct in self._pieces(entry):
            length = len(view)
            if is_direct:
                with call.touching():
                    code = self._library.read(entry.key, address_of(view), length, HEADER_BYTES + begin)
            else:
                code = self._library.read(entry.key, buffer.piece_address, length, HEADER_BYTES + begin)
                with call.touching():
                    view[:] = buffer.piece[:length]
            if code != length:
                return _failed_read(code)
        return Loaded(Outcome.DONE, record.checksum)

    def _pieces(self, entry: BatchEntry) -> Iterator[tuple[int, memoryview, bool]]:
        """(offset, memory, whether it is copied directly from or to that memory) of each piece of the part."""
        at = 0
        for view in entry.views:
            is_direct = self._is_direct(address_of(view), len(view)) if len(view) else True
            for begin in range(0, len(view), len(view) if is_direct else _PIECE_BYTES):
                yield at + begin, view[begin : begin + (len(view) if is_direct else _PIECE_BYTES)], is_direct
            at += len(view)

    # ------------------------------------------------------------------------------------------------- storing

    def _store_group(
        self, group: list[BatchEntry], records: list[Record], answers: list[Outcome | None], call: Call, buffer: Buffer
    ) -> None:
        keys = [entry.key for entry in group]
        with self._names.held(keys, call):
            begun = self._library.begin_writes(keys, [HEADER_BYTES + entry.length for entry in group])
            open_ = {key for key, code in zip(keys, begun, strict=True) if code == codes.DONE}
            written: list[tuple[BatchEntry, Record]] = []
            try:
                for entry, record, code in zip(group, records, begun, strict=True):
                    if code != codes.DONE:
                        answer = self._begin_anew(entry, record, code, call, buffer)
                        if answer is not None:
                            answers[entry.index] = answer
                            continue
                        open_.add(entry.key)
                    if self._write(entry, record, call, buffer):
                        written.append((entry, record))
                    else:
                        answers[entry.index] = Outcome.FAILED
                for entry, record, ended in self._end_writes(written):
                    if ended:
                        open_.discard(entry.key)
                        self._remember(record)
                    answers[entry.index] = Outcome.DONE if ended else Outcome.FAILED
            except Unended:
                open_.clear()  # others could write to revoked memory while this copy is still in progress
                raise
            finally:
                self._library.revoke_writes(sorted(open_))

    def _end_writes(self, written: list[tuple[BatchEntry, Record]]) -> list[tuple[BatchEntry, Record, bool]]:
        if not written:
            return []
        ended = self._library.end_writes([entry.key for entry, _ in written])
        return [(entry, record, code == codes.DONE) for (entry, record), code in zip(written, ended, strict=True)]

    def _begin_anew(self, entry: BatchEntry, record: Record, code: int, call: Call, buffer: Buffer) -> Outcome | None:
        """Begins a write again after begin_writes() has returned `code`. None: the write has begun now."""
        key = entry.key
        for _ in range(_BEGINNINGS):
            if code == codes.THERE:
                answer = self._existing(entry, record.name, call, buffer)
                if answer is not None:
                    return answer
            elif code == codes.INVALID:
                self._library.revoke_writes([key])  # an earlier write, whose end did not reach the master
            else:
                break
            (code,) = self._library.begin_writes([key], [HEADER_BYTES + entry.length])
            if code == codes.DONE:
                return None
        return _failed_write(code)

    def _existing(self, entry: BatchEntry, name: PartName, call: Call, buffer: Buffer) -> Outcome | None:
        """Looks at the object that another client has begun to store under the name. DONE: it is a record of this part.
        None: it was removed."""
        until = monotonic() + _RIVAL_S
        while True:
            (code,) = self._library.begin_reads([entry.key])
            if code == codes.DONE:
                break
            if code != codes.BEING_WRITTEN:
                return None if code == codes.ABSENT else Outcome.FAILED
            if monotonic() > until:
                return Outcome.FAILED
            call.pause(0.005)
        try:
            code = self._library.read(entry.key, buffer.address, HEADER_BYTES, 0)
        finally:
            self._library.end_reads([entry.key])
        if code == HEADER_BYTES:
            with suppress(RecordError):
                Record.read_of(buffer.view[:HEADER_BYTES], name, entry.length)
                return Outcome.DONE
        (code,) = self._remove([entry.key])
        return None if code in (codes.DONE, codes.ABSENT) else Outcome.FAILED  # ABSENT: the store has evicted it

    def _write(self, entry: BatchEntry, record: Record, call: Call, buffer: Buffer) -> bool:
        buffer.view[:HEADER_BYTES] = record.header()
        if self._library.write(entry.key, buffer.address, HEADER_BYTES, 0) != HEADER_BYTES:
            return False
        for begin, view, is_direct in self._pieces(entry):
            length = len(view)
            if is_direct:
                with call.touching():
                    code = self._library.write(entry.key, address_of(view), length, HEADER_BYTES + begin)
            else:
                with call.touching():
                    buffer.piece[:length] = view
                code = self._library.write(entry.key, buffer.piece_address, length, HEADER_BYTES + begin)
            if code != length:
                return False
        return True

    # ------------------------------------------------------------------------------------------------- objects

    def _remove(self, keys: list[str]) -> list[int]:
        """Removes objects, by force if a client has a lease: a client that is reading one then finds wrong bytes, which
        its checksum shows."""
        removed = self._library.remove(keys)
        leased = [at for at, code in enumerate(removed) if code == codes.LEASED]
        if leased:
            for at, code in zip(leased, self._library.remove([keys[at] for at in leased], force=True), strict=True):
                removed[at] = code
        return removed

    def _remember(self, record: Record) -> None:
        with self._lock:
            self._stored[hash(record.name)] = HEADER_BYTES + record.length

    def _forget(self, names: Sequence[PartName]) -> None:
        with self._lock:
            for name in names:
                self._stored.pop(hash(name), None)


def open_tier(url: str, deadline: Deadline) -> MooncakeTier:
    """`url`: docs/operate/tiers_mooncake.md. Raises TierUrlError, and TierError as MooncakeTier.open does."""
    return MooncakeTier.open(MooncakeSettings.parse(url), deadline)


def registers_memory(url: str) -> bool:
    """Whether the tier registers memory, which it does over RDMA. Raises TierUrlError."""
    return MooncakeSettings.parse(url).registers_memory


def check(url: str) -> None:
    """Raises TierUrlError, NotInstalled. Imports nothing of the library, which starts threads."""
    MooncakeSettings.parse(url)
    if find_spec("mooncake") is None:
        raise NotInstalled(TIER, f"its client is not installed, wanted: {INSTALL}")


STORE: Final = Store(open_tier, registers_memory, check)


_REMOVED: Final = {codes.DONE: Outcome.DONE, codes.ABSENT: Outcome.MISSING, codes.BEING_WRITTEN: Outcome.MISSING}


def _answered(found: Note | Outcome | None) -> Note | None:
    """The note that was read, if any. Raises TierError for an Outcome."""
    if isinstance(found, Outcome):
        raise TierError(TIER, "the note of a namespace is not known in time")
    return found


def _failed_read(code: int) -> Loaded:
    """The answer for a read that failed with `code`."""
    if code in _ABSENT:
        return Loaded(Outcome.MISSING)
    return Loaded(Outcome.DAMAGED if code == codes.INVALID else Outcome.FAILED)  # INVALID: the object is shorter


def _failed_write(code: int) -> Outcome:
    """The answer for a write that could not begin."""
    return Outcome.FULL if code == codes.NO_ROOM else Outcome.FAILED


def _groups(parts: Sequence[ToLoad], threads: int) -> list[list[BatchEntry]]:
    """Divides parts into groups in their order, for several threads. No group has a name
    twice."""
    least, most = _GROUP_BYTES
    share = min(most, max(least, sum(part.length for part in parts) // threads))
    groups: list[list[BatchEntry]] = []
    keys: set[str] = set()
    size = 0
    for index, part in enumerate(parts):
        key, length, views = part.name.text(), part.length, part.views()
        if (found := sum(map(len, views))) < length:
            raise ValueError(f"{key}: found {found} bytes of pages, wanted at least {length}")
        entry = BatchEntry(index, key, length, views)
        size += length
        if not groups or entry.key in keys or len(groups[-1]) == _GROUP_PARTS or size > share:
            groups.append([])
            keys, size = set(), length
        groups[-1].append(entry)
        keys.add(entry.key)
    return groups


def _slices(count: int) -> list[slice]:
    return [slice(begin, begin + _NAMES_AT_ONCE) for begin in range(0, count, _NAMES_AT_ONCE)]
