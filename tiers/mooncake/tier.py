"""The tier on Mooncake Store: each part is one object, its header before its bytes.

The header goes first, from or to memory of the tier's own: a peer that hangs is felt there, before it gets at slots.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvdock.tiers.mooncake import library as codes
from kvdock.tiers.mooncake.library import TIER, Library, Unended
from kvdock.tiers.mooncake.settings import MooncakeSettings
from kvdock.tiers.mooncake.workers import Names, Verb, Workers
from kvdock.tiers.notes import HEAD_BYTES, Change, Note, NoteError, name_of_note
from kvdock.tiers.record import HEADER_BYTES, PartName, Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Loaded, Outcome, TierError, ToLoad, ToStore, Usage

_GROUP_PARTS: Final = 32
_GROUP_BYTES: Final = (2 << 20, 32 << 20)
"""At least and at most, in parts whose beginnings and ends are asked of the master in one call. Threads take such
groups in turn."""
_NAMES_AT_ONCE: Final = 1024
_PIECE_BYTES: Final = 4 << 20
"""A part that goes through memory of the tier's own goes in such pieces."""
_RIVAL_S: Final = 1.0
"""How long a store waits for another process that stores the same part."""
_NOTE_TRIES: Final = 100
_BEGINNINGS: Final = 3
"""How often a store tries to begin anew, where others store and delete the same part, or the store evicts it."""
_ABSENT: Final = frozenset({codes.ABSENT, codes.BEING_WRITTEN, codes.LEASE_OVER})


class Own:
    """What a thread has for itself: a header, and a piece of a part behind it. Memory is used once it is touched."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, PAGE_BYTES + _PIECE_BYTES)
        self.view = memoryview(self.memory)
        self.address = _address(self.view)
        self.piece, self.piece_address = self.view[PAGE_BYTES:], self.address + PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a verb, and where its answer goes."""

    index: int
    key: str
    length: int
    pages: memoryview
    address: int


class MooncakeTier:
    """Takes the client over, and closes it. `patience_s`: how long a verb waits for a copy from or to its pages that
    its deadline has overtaken, before it raises StillRunning."""

    name = TIER
    poll_s = 1.0

    def __init__(self, settings: MooncakeSettings, library: Library, patience_s: float) -> None:
        self._settings, self._library, self._patience_s = settings, library, patience_s
        self._names, self._lock = Names(), threading.Lock()
        self._stored: dict[int, int] = {}  # hashes of names and bytes of what this process knows to be there
        self._registered: dict[int, int] = {}
        self._workers: Workers[Own] = Workers(TIER, settings.threads, self._own, Unended)

    @classmethod
    def open(cls, settings: MooncakeSettings, deadline: Deadline, patience_s: float | None = None) -> MooncakeTier:
        """Raises TierError: no client library, no master, no RDMA where it is wanted. May take some `master_s` longer
        than the deadline."""
        library = Library.open(settings, deadline)
        return cls(settings, library, 2.0 * settings.stall_s + 1 if patience_s is None else patience_s)

    # ------------------------------------------------------------------------------------------------- memory

    def register(self, address: int, length: int) -> None:
        """Segments of the pool, before their slots are given to verbs. Raises TierError.

        Over TCP nothing is registered and no copy is saved by it: there, whoever reaches the client's port can read
        and write all memory that is registered. Over RDMA what is not registered goes through memory of the tier.
        """
        if self._settings.protocol == "rdma":
            self._library.register(address, length)
        with self._lock:
            self._registered[address] = length

    def unregister(self, address: int) -> None:
        """No verb may be at work there."""
        with self._lock:
            if self._registered.pop(address, None) is None:
                return
        if self._settings.protocol == "rdma":
            self._library.unregister(address)

    def _own(self) -> Own:
        own = Own()
        if self._settings.protocol == "rdma":
            self._library.register(own.address, len(own.view))
        return own

    def _is_direct(self, place: Place) -> bool:
        if not self._settings.direct or self._settings.protocol == "tcp":
            return self._settings.direct
        end = place.address + place.length
        with self._lock:
            return any(begin <= place.address and end <= begin + size for begin, size in self._registered.items())

    # -------------------------------------------------------------------------------------------------- verbs

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        def ask(some: slice) -> Callable[[Verb, Own], None]:
            def job(verb: Verb, own: Own) -> None:
                found[some] = [code == 1 for code in self._library.exist([name.text() for name in names[some]])]

            return job

        found = [False] * len(names)
        self._run([ask(some) for some in _slices(len(names))], deadline)
        return list(found)

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        answers: list[Loaded | None] = [None] * len(parts)

        def of(group: list[Place]) -> Callable[[Verb, Own], None]:
            names = [parts[place.index].name for place in group]
            return lambda verb, own: self._load_group(group, names, answers, verb, own)

        self._run([of(group) for group in _groups(parts, self._settings.threads)], deadline)
        return [answer or Loaded(Outcome.LATE) for answer in answers]

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        answers: list[Outcome | None] = [None] * len(parts)

        def of(group: list[Place]) -> Callable[[Verb, Own], None]:
            records = [parts[place.index].record for place in group]
            return lambda verb, own: self._store_group(group, records, answers, verb, own)

        wanted = [(part.record.name, part.record.length, part.pages) for part in parts]
        self._run([of(group) for group in _groups(wanted, self._settings.threads)], deadline)
        return [answer or Outcome.LATE for answer in answers]

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        def remove(some: slice) -> Callable[[Verb, Own], None]:
            def job(verb: Verb, own: Own) -> None:
                gone = self._remove([name.text() for name in names[some]])
                self._forget(names[some])
                answers[some] = [_REMOVED.get(code, Outcome.FAILED) for code in gone]

            return job

        answers: list[Outcome | None] = [None] * len(names)
        self._run([remove(some) for some in _slices(len(names))], deadline)
        return [answer or Outcome.LATE for answer in answers]

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        def ask(at: int, key: str) -> Callable[[Verb, Own], None]:
            def job(verb: Verb, own: Own) -> None:
                with self._names.held([key], verb):
                    found[at] = self._read_note(key, own)

            return job

        found: list[Note | Outcome | None] = [Outcome.LATE] * len(namespaces)
        self._run([ask(at, name_of_note(namespace)) for at, namespace in enumerate(namespaces)], deadline)
        return [self._said(one) for one in found]

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """The store has no call that replaces an object in one step: of two servers that change a note at the same
        moment one may find that the other's stayed, and changes that."""
        key = name_of_note(namespace)
        done: list[Note | Outcome | None] = [Outcome.LATE]

        def job(verb: Verb, own: Own) -> None:
            with self._names.held([key], verb):
                for _ in range(_NOTE_TRIES):
                    verb.check()
                    before = self._read_note(key, own)
                    after = change(before)
                    if after == before or (self._write_note(key, after, own, before is not None)
                                           and self._read_note(key, own) == after):
                        done[0] = after
                        return
                    verb.pause(0.005)

        self._run([job], deadline)
        note = self._said(done[0])
        assert note is not None
        return note

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        """The store does not say."""
        return []

    def _said(self, found: Note | Outcome | None) -> Note | None:
        if isinstance(found, Outcome):
            raise TierError(TIER, "a question about a namespace was not answered in time")
        return found

    def _read_note(self, key: str, own: Own) -> Note | None:
        """None: there is no note, so change() begins one. Raises TierError if what is there cannot be read."""
        (code,) = self._library.begin_reads([key])
        if code != codes.DONE:
            if code in _ABSENT:
                return None
            raise TierError(TIER, f"{key} cannot be read (code {code})")
        try:
            self._read_whole(key, own, HEAD_BYTES)
            length = Note.length(own.view)
            self._read_whole(key, own, length)
            return Note.read(own.view[:length])
        except NoteError:
            return None
        finally:
            self._library.end_reads([key])

    def _read_whole(self, key: str, own: Own, length: int) -> None:
        """Raises NoteError if the object is shorter, and TierError if its bytes do not come."""
        code = self._library.read(key, own.address, length, 0)
        if code == codes.INVALID:
            raise NoteError(f"an object of at least {length} bytes was wanted, found a shorter one")
        if code != length:
            raise TierError(TIER, f"{length} bytes of {key} cannot be read (code {code})")

    def _write_note(self, key: str, note: Note, own: Own, is_there: bool) -> bool:
        packed = note.packed()
        if is_there:
            self._remove([key])
        (code,) = self._library.begin_writes([key], [len(packed)])
        if code == codes.THERE:  # damaged, or another server's
            self._remove([key])
            return False
        if code != codes.DONE:
            if code == codes.INVALID:
                self._library.revoke_writes([key])
                return False
            raise TierError(TIER, f"{key} cannot be written (code {code})")
        own.view[: len(packed)] = packed
        if self._library.write(key, own.address, len(packed), 0) != len(packed):
            self._library.revoke_writes([key])
            return False
        return self._library.end_writes([key]) == [codes.DONE]

    def usage(self) -> Usage:
        """Counts what this process has stored and not seen go: others store there too, and the store evicts. It is
        memory, so nothing wears."""
        with self._lock:
            return Usage(len(self._stored), sum(self._stored.values()), 0, 0)

    def close(self, deadline: Deadline) -> None:
        """What this process contributed is gone for all. A call that hangs keeps the client open behind it."""
        if self._workers.close(deadline):
            self._library.close()

    def _run(self, jobs: Sequence[Callable[[Verb, Own], None]], deadline: Deadline) -> None:
        if jobs and not deadline.is_over:
            self._workers.run(jobs, deadline, self._patience_s)

    # ------------------------------------------------------------------------------------------------- loading

    def _load_group(
        self, group: list[Place], names: list[PartName], answers: list[Loaded | None], verb: Verb, own: Own
    ) -> None:
        keys = [place.key for place in group]
        with self._names.held(keys, verb):
            begun = self._library.begin_reads(keys)
            try:
                for place, name, code in zip(group, names, begun, strict=True):
                    verb.check()
                    answer = self._load(place, name, verb, own) if code == codes.DONE else _loss(code)
                    if answer.outcome is Outcome.MISSING:
                        self._forget([name])
                    answers[place.index] = answer
            finally:
                self._library.end_reads(keys)

    def _load(self, place: Place, name: PartName, verb: Verb, own: Own) -> Loaded:
        code = self._library.read(place.key, own.address, HEADER_BYTES, 0)
        if code != HEADER_BYTES:
            return _loss(code)
        try:
            record = Record.read_of(own.view[:HEADER_BYTES], name, place.length)
        except RecordError:
            return Loaded(Outcome.DAMAGED)
        for begin, length, is_direct in self._pieces(place):
            if is_direct:
                with verb.touching():
                    code = self._library.read(place.key, place.address, length, HEADER_BYTES)
            else:
                code = self._library.read(place.key, own.piece_address, length, HEADER_BYTES + begin)
                with verb.touching():
                    place.pages[begin : begin + length] = own.piece[:length]
            if code != length:
                return _loss(code)
        return Loaded(Outcome.DONE, record.checksum)

    def _pieces(self, place: Place) -> Iterator[tuple[int, int, bool]]:
        """Where each begins, its length, and whether it goes straight from or to the pages."""
        if self._is_direct(place):
            yield 0, place.length, True
            return
        for begin in range(0, place.length, _PIECE_BYTES):
            yield begin, min(_PIECE_BYTES, place.length - begin), False

    # ------------------------------------------------------------------------------------------------- storing

    def _store_group(
        self, group: list[Place], records: list[Record], answers: list[Outcome | None], verb: Verb, own: Own
    ) -> None:
        keys = [place.key for place in group]
        with self._names.held(keys, verb):
            begun = self._library.begin_writes(keys, [HEADER_BYTES + place.length for place in group])
            open_ = {key for key, code in zip(keys, begun, strict=True) if code == codes.DONE}
            written: list[tuple[Place, Record]] = []
            try:
                for place, record, code in zip(group, records, begun, strict=True):
                    if code != codes.DONE:
                        answer = self._begin_again(place, record, code, verb, own)
                        if answer is not None:
                            answers[place.index] = answer
                            continue
                        open_.add(place.key)
                    if self._write(place, record, verb, own):
                        written.append((place, record))
                    else:
                        answers[place.index] = Outcome.FAILED
                for place, record, ended in self._end_writes(written):
                    if ended:
                        open_.discard(place.key)
                        self._remember(record)
                    answers[place.index] = Outcome.DONE if ended else Outcome.FAILED
            except Unended:
                open_.clear()  # what is revoked can be written by others, while this copy goes on
                raise
            finally:
                self._library.revoke_writes(sorted(open_))

    def _end_writes(self, written: list[tuple[Place, Record]]) -> list[tuple[Place, Record, bool]]:
        if not written:
            return []
        ended = self._library.end_writes([place.key for place, _ in written])
        return [(place, record, code == codes.DONE) for (place, record), code in zip(written, ended, strict=True)]

    def _begin_again(self, place: Place, record: Record, code: int, verb: Verb, own: Own) -> Outcome | None:
        """After a beginning that was refused. None: this process has begun to write it now."""
        key = place.key
        for _ in range(_BEGINNINGS):
            if code == codes.THERE:
                answer = self._settle(place, record.name, verb, own)
                if answer is not None:
                    return answer
            elif code == codes.INVALID:
                self._library.revoke_writes([key])  # a write of before, whose end the master did not hear
            else:
                break
            (code,) = self._library.begin_writes([key], [HEADER_BYTES + place.length])
            if code == codes.DONE:
                return None
        return _refusal(code)

    def _settle(self, place: Place, name: PartName, verb: Verb, own: Own) -> Outcome | None:
        """What somebody else has begun to store under the name. DONE: it is a record of this part. None: it is gone."""
        until = monotonic() + _RIVAL_S
        while True:
            (code,) = self._library.begin_reads([place.key])
            if code == codes.DONE:
                break
            if code != codes.BEING_WRITTEN:
                return None if code == codes.ABSENT else Outcome.FAILED
            if monotonic() > until:
                return Outcome.FAILED
            verb.pause(0.005)
        try:
            code = self._library.read(place.key, own.address, HEADER_BYTES, 0)
        finally:
            self._library.end_reads([place.key])
        if code == HEADER_BYTES:
            with suppress(RecordError):
                Record.read_of(own.view[:HEADER_BYTES], name, place.length)
                return Outcome.DONE
        (code,) = self._remove([place.key])
        return None if code in (codes.DONE, codes.ABSENT) else Outcome.FAILED  # ABSENT: the store has evicted it

    def _write(self, place: Place, record: Record, verb: Verb, own: Own) -> bool:
        own.view[:HEADER_BYTES] = record.header()
        if self._library.write(place.key, own.address, HEADER_BYTES, 0) != HEADER_BYTES:
            return False
        for begin, length, is_direct in self._pieces(place):
            if is_direct:
                with verb.touching():
                    code = self._library.write(place.key, place.address, length, HEADER_BYTES)
            else:
                with verb.touching():
                    own.piece[:length] = place.pages[begin : begin + length]
                code = self._library.write(place.key, own.piece_address, length, HEADER_BYTES + begin)
            if code != length:
                return False
        return True

    # ---------------------------------------------------------------------------------------------- what is there

    def _remove(self, keys: list[str]) -> list[int]:
        """By force where somebody has a lease: who reads it then finds wrong bytes, which its checksum tells."""
        gone = self._library.remove(keys)
        leased = [at for at, code in enumerate(gone) if code == codes.LEASED]
        if leased:
            for at, code in zip(leased, self._library.remove([keys[at] for at in leased], force=True), strict=True):
                gone[at] = code
        return gone

    def _remember(self, record: Record) -> None:
        with self._lock:
            self._stored[hash(record.name)] = HEADER_BYTES + record.length

    def _forget(self, names: Sequence[PartName]) -> None:
        with self._lock:
            for name in names:
                self._stored.pop(hash(name), None)


def open_tier(url: str, deadline: Deadline) -> MooncakeTier:
    """`url`: docs/tiers.md#mooncake-store. Raises TierUrlError, and TierError as MooncakeTier.open does."""
    return MooncakeTier.open(MooncakeSettings.parse(url), deadline)


_REMOVED: Final = {codes.DONE: Outcome.DONE, codes.ABSENT: Outcome.MISSING, codes.BEING_WRITTEN: Outcome.MISSING}


def _loss(code: int) -> Loaded:
    """What a code of a read says that is no success."""
    if code in _ABSENT:
        return Loaded(Outcome.MISSING)
    return Loaded(Outcome.DAMAGED if code == codes.INVALID else Outcome.FAILED)  # INVALID: it is shorter


def _refusal(code: int) -> Outcome:
    """What a code says of a write that could not begin."""
    return Outcome.FULL if code == codes.NO_ROOM else Outcome.FAILED


def _groups(parts: Sequence[tuple[PartName, int, memoryview]], threads: int) -> list[list[Place]]:
    """Names, lengths and pages in their order, some for each thread. No group has a name twice."""
    least, most = _GROUP_BYTES
    share = min(most, max(least, sum(length for _, length, _ in parts) // threads))
    groups: list[list[Place]] = []
    keys: set[str] = set()
    size = 0
    for index, (name, length, pages) in enumerate(parts):
        if len(pages) < length:
            raise ValueError(f"{name.text()}: found {len(pages)} bytes of pages, wanted at least {length}")
        place = Place(index, name.text(), length, pages, _address(pages))
        size += length
        if not groups or place.key in keys or len(groups[-1]) == _GROUP_PARTS or size > share:
            groups.append([])
            keys, size = set(), length
        groups[-1].append(place)
        keys.add(place.key)
    return groups


def _slices(count: int) -> list[slice]:
    return [slice(begin, begin + _NAMES_AT_ONCE) for begin in range(0, count, _NAMES_AT_ONCE)]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
