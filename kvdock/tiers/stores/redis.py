"""Redis or Valkey as a lower tier: a record is one value, with the header and then the part's bytes
(docs/operate/tiers_redis.md).

Commands are pipelined in runs: all commands of a run are sent over one connection, then their replies are read. So
small parts do not need a round trip each, and the bytes in flight are bounded.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from kvdock.tiers.notes import HEAD_BYTES, Change, Note, NoteError, name_of_note
from kvdock.tiers.record import HEADER_BYTES, VERSION, PartName, Record, RecordError, folder_of, namespace_of
from kvdock.tiers.stores.redis_nodes import NAME, Address, Nodes, Settings, read_settings
from kvdock.tiers.stores.resp import ErrorReply, OutOfTime, Reply, Wire, WireError, command
from kvdock.tiers.tier import (
    Deadline,
    Loaded,
    NoSpace,
    NotInstalled,
    Outcome,
    OwnUsage,
    ReadOnly,
    Store,
    TierError,
    ToLoad,
    ToStore,
    Usage,
    cut,
    known_notes,
)

RUN_BYTES: Final = 8 << 20
RUN_JOBS: Final = 128
PIECE_BYTES: Final = 4 << 20
"""A value that is larger than a run is loaded in pieces, two at a time: the server serves other clients between them,
and answers three times as fast, because its allocator returns the memory of replies of 8 MiB and more at once."""
LONGEST_VALUE: Final = 512 << 20
"""The longest value that Redis takes, with the header."""
RECHECK_S: Final = 60.0

NAMESPACES: Final = f"kvdock/{VERSION}/namespaces".encode()
"""The key of the set of all namespaces that have a note."""
_SWEPT_AT_ONCE: Final = 512

_READ_ONLY: Final = frozenset({"READONLY", "MISCONF", "NOREPLICAS"})
"""The codes of errors of a server that answers reads, and changes nothing: it is a replica since a failover, cannot
save, or lacks replicas."""
REPLICA: Final = "READONLY"
"""The code of a replica: another server is the master now, and may be found at the same address."""
_REFUSALS: Final = _READ_ONLY | {"NOPERM"}

T = TypeVar("T")


@dataclass(frozen=True)
class _Job(Generic[T]):
    """Commands for one key. `at`: the index of the job's answer. `pieces`: the bytes to send. `size`: how many bytes
    the job moves. `read`: reads the replies, and returns the answer or an ErrorReply."""

    at: int
    key: bytes
    pieces: list[bytes | memoryview]
    size: int
    read: Callable[[Wire, Deadline], T | ErrorReply]


@dataclass
class _Answers(Generic[T]):
    """`by_job`: by the job's `at`; LATE for a job that was not begun or not answered in time. `why`: the first
    failure."""

    by_job: dict[int, T | Outcome]
    why: str = ""
    codes: set[str] = field(default_factory=set)
    """The codes of all errors with which a server refused a job; "": a failure of another kind."""
    is_any_answered: bool = False
    """Whether some job got an answer other than a failure."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, jobs: Sequence[_Job[T]], why: str, code: str = "") -> None:
        with self.lock:
            self.why = self.why or why
            self.codes.add(code)
            self.by_job.update((job.at, Outcome.FAILED) for job in jobs)


def open_tier(url: str, deadline: Deadline, environment: Mapping[str, str] = os.environ) -> RedisTier:
    """`url`: docs/operate/tiers_redis.md. `environment`: where password_env is looked up. Raises TierUrlError, and
    TierError where the server does not answer or refuses, or redis-py is not installed."""
    settings, client = _read(url, environment)
    tier = RedisTier(settings, Nodes(settings, client))
    try:
        tier.check(deadline)
    except BaseException:
        tier.close(deadline)
        raise
    return tier


def _read(url: str, environment: Mapping[str, str] = os.environ) -> tuple[Settings, ModuleType]:
    """The settings, and the module redis. Raises TierUrlError, NotInstalled."""
    settings = read_settings(url, environment)
    try:
        return settings, importlib.import_module("redis")
    except ImportError as error:
        raise NotInstalled(NAME, f"redis-py is not installed ({error}): pip install 'kvdock[redis]'") from error


class RedisTier:
    """See Tier for the verbs. usage() counts what was stored and deleted through this instance."""

    name = NAME
    gathers = True
    longest_part = LONGEST_VALUE - HEADER_BYTES
    poll_s = 1.0

    def __init__(self, settings: Settings, nodes: Nodes) -> None:
        self._settings, self._nodes = settings, nodes
        self.recheck_s = min(RECHECK_S, settings.ttl_s / 4) if settings.ttl_s else RECHECK_S
        self._threads = ThreadPoolExecutor(settings.connections, thread_name_prefix="kvdock-redis")
        self._usage = OwnUsage(wears_out=False)
        self._cached_notes: dict[bytes, tuple[bytes, Note]] = {}
        """Notes as they were last read, with their packed heads."""
        self._listed_s: dict[bytes, float] = {}
        """When each namespace was last put into the set of namespaces."""
        self._sweeping: dict[tuple[bytes, Address], bytes] = {}
        """The SCAN cursor from which sweep() continues, by namespace and server."""

    def check(self, deadline: Deadline) -> None:
        """Raises TierError if the server cannot be used."""
        try:
            self._nodes.ask(self._settings.address, command(b"PING"), deadline)
        except OutOfTime:
            raise TierError(NAME, "the server did not answer in time") from None

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        keys = [_key(name) for name in names]
        jobs = [_Job(at, key, self._use(key), 0, self._read_use) for at, key in enumerate(keys)]
        answers = self._execute(jobs, deadline)
        return [answers[at] == 1 for at in range(len(keys))]

    def _use(self, key: bytes) -> list[bytes | memoryview]:
        """Counts as a use of the value, and asks whether it is there."""
        lifetime, touch = self._settings.ttl_s, command(b"TOUCH", key)
        return [*command(b"EXPIRE", key, b"%d" % lifetime), *touch] if lifetime else touch

    def _read_use(self, wire: Wire, deadline: Deadline) -> Reply:
        """The answer to _use(). A server that changes nothing says whether the value is there all the same."""
        lengthened = wire.reply(deadline) if self._settings.ttl_s else None
        is_there = wire.reply(deadline)
        is_refused = isinstance(lengthened, ErrorReply) and lengthened.code not in _REFUSALS
        return lengthened if is_refused else is_there

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        jobs = []
        for at, part in enumerate(parts):
            key = _key(part.name)
            size = HEADER_BYTES + part.length
            value: _Value | _Pieces = _Value(part) if size <= RUN_BYTES else _Pieces(part, key)
            pieces, read = value.commands(), value.read
            if self._settings.ttl_s:  # to read a value does not make it live longer
                pieces, read = self._use(key) + pieces, partial(self._read_used, value)
            jobs.append(_Job(at, key, pieces, size, read))
        answers = self._execute(jobs, deadline)
        loaded = [answers[at] for at in range(len(parts))]
        return [Loaded(found) if isinstance(found, Outcome) else found for found in loaded]

    def _read_used(self, value: _Value | _Pieces, wire: Wire, deadline: Deadline) -> Loaded | ErrorReply:
        self._read_use(wire, deadline)
        return value.read(wire, deadline)

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        outcomes = [Outcome.TOO_LARGE] * len(parts)
        wanted = [at for at, part in enumerate(parts) if part.record.length <= self.longest_part]
        there = self._set(parts, wanted, outcomes, deadline, (b"NX",))
        if there:
            checks = [_check(at, parts[at].record) for at in there]
            fits = self._execute(checks, deadline)
            for at in there:
                found = fits[at]
                outcomes[at] = found if isinstance(found, Outcome) else Outcome.DONE
            spoilt = [at for at in there if fits[at] is False]
            self._set(parts, spoilt, outcomes, deadline, ())
        return outcomes

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        keys = [_key(name) for name in names]
        jobs = [
            _Job(at, key, command(b"STRLEN", key) + command(b"UNLINK", key), 0, _read_deleted)
            for at, key in enumerate(keys)
        ]
        answers = self._execute(jobs, deadline, changes=True)
        outcomes = []
        for at in range(len(keys)):
            found = answers[at]
            if isinstance(found, Outcome):
                outcomes.append(found)
                continue
            outcomes.append(Outcome.MISSING if found is None else Outcome.DONE)
            if found is not None:
                self._usage.deleted(1, found)
        return outcomes

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        """Reads the heads first: a note whose head is unchanged is unchanged."""
        keys = [name_of_note(namespace).encode() for namespace in namespaces]
        heads = self._execute(
            [_Job(at, key, command(b"GETRANGE", key, b"0", b"%d" % (HEAD_BYTES - 1)), HEAD_BYTES, _read_reply)
             for at, key in enumerate(keys)], deadline,
        )
        found: list[Note | Outcome | None] = [None] * len(keys)
        changed = []
        for at, namespace in enumerate(namespaces):
            known_head, known = self._cached_notes.get(namespace, (b"", None))
            if isinstance(head := heads[at], Outcome):
                found[at] = head
            elif head and head == known_head:
                found[at] = known
            elif head:
                changed.append(at)
        values = self._execute(
            [_Job(at, keys[at], command(b"GET", keys[at]), 0, _read_reply) for at in changed], deadline
        )
        for at in changed:
            value: Any = values[at]
            found[at] = note = value if isinstance(value, Outcome) else _note_of(value)
            if isinstance(note, Note):
                self._cached_notes[namespaces[at]] = value[:HEAD_BYTES], note
        self._list([name for name, note in zip(namespaces, found, strict=True) if isinstance(note, Note)], deadline)
        return known_notes(NAME, namespaces, found)

    def _list(self, namespaces: Sequence[bytes], deadline: Deadline) -> None:
        """Now and then, puts them into the set of those that have a note: the server may have evicted it."""
        now_s = time.monotonic()
        due = [one for one in namespaces if now_s - self._listed_s.get(one, -RECHECK_S) >= RECHECK_S]
        self._listed_s.update(dict.fromkeys(due, now_s))
        with suppress(TierError):  # a server that can only be read has it as it is
            self._execute([_listing(at, one) for at, one in enumerate(due)], deadline)

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        key = name_of_note(namespace).encode()
        try:
            while not deadline.is_over:
                note = self._try_to_change(namespace, key, change, deadline)
                if note is not None:
                    return note
        except OutOfTime:
            pass
        except WireError as error:
            raise TierError(NAME, str(error)) from error
        raise TierError(NAME, "the note of a namespace was not changed in time")

    def _try_to_change(self, namespace: bytes, key: bytes, change: Change, deadline: Deadline) -> Note | None:
        """None: another server has changed the note meanwhile."""
        address = self._nodes.address_of(key, deadline)
        wire = self._nodes.borrow(address, deadline)
        try:
            wire.send([*command(b"WATCH", key), *command(b"GET", key)], deadline)
            _checked(wire.reply(deadline))
            before = _note_of(_checked(wire.reply(deadline)))
            after = change(before)
            if after == before:
                wire.send(command(b"UNWATCH"), deadline)
                _checked(wire.reply(deadline))
                done: Reply = []
            else:
                wire.send([*command(b"MULTI"), *command(b"SET", key, after.packed()), *command(b"EXEC")], deadline)
                replies = [wire.reply(deadline) for _ in range(3)]
                done = [_checked(reply) for reply in replies][-1]
        except BaseException:
            wire.close()
            self._nodes.lost(address)
            raise
        self._nodes.give_back(address, wire)
        if done is None:
            return None
        if before is None:
            self._values([_listing(0, namespace)], deadline)
        return after

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        (found,) = self._values([_Job(0, NAMESPACES, command(b"SMEMBERS", NAMESPACES), 0, _read_reply)], deadline)
        members = found if isinstance(found, list) else []
        names = (namespace_of(member.decode(errors="replace")) for member in members if isinstance(member, bytes))
        return [name for name in names if name is not None]

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        """Deletes keys of former generations as each server's SCAN returns them. If the deadline interrupts a scan, the
        next call continues it, and this call does not return 0."""
        current = f"{folder_of(namespace)}{note.birth:016x}.{note.generation}/".encode()
        kept = name_of_note(namespace).encode()
        removed = 0
        for address in self._nodes.addresses(deadline):
            cursor = self._sweeping.get((namespace, address), b"0")
            while not deadline.is_over:
                match = folder_of(namespace).encode() + b"*"
                try:
                    reply: Any = self._nodes.ask(
                        address, command(b"SCAN", cursor, b"MATCH", match, b"COUNT", b"%d" % _SWEPT_AT_ONCE), deadline
                    )
                    cursor, keys = reply
                    old = [key for key in keys if key != kept and not key.startswith(current)]
                    if old:
                        pieces = [piece for key in old for piece in command(b"UNLINK", key)]
                        removed += self._unlink(address, pieces, len(old), deadline)
                except OutOfTime:
                    cursor = b"0"
                    break
                if cursor == b"0":
                    break
            self._sweeping[namespace, address] = cursor
            removed += cursor != b"0"
        return removed

    def _unlink(self, address: Address, pieces: list[bytes | memoryview], count: int, deadline: Deadline) -> int:
        wire = self._nodes.borrow(address, deadline)
        try:
            wire.send(pieces, deadline)
            done = sum(wire.reply(deadline) == 1 for _ in range(count))
        except WireError as error:
            wire.close()
            raise TierError(NAME, str(error)) from error
        except BaseException:
            wire.close()
            raise
        self._nodes.give_back(address, wire)
        return done

    def _values(self, jobs: Sequence[_Job[Any]], deadline: Deadline) -> list[Any]:
        """The answers to the jobs. Raises TierError unless all were answered."""
        answers = self._execute(jobs, deadline)
        for job in jobs:
            if isinstance(found := answers[job.at], Outcome):
                raise TierError(NAME, f"the note of a namespace is not known: {found.value}")
        return [answers[job.at] for job in jobs]

    def usage(self) -> Usage:
        return self._usage.view()

    def close(self, deadline: Deadline) -> None:
        self._threads.shutdown()
        self._nodes.close()

    def _set(
        self, parts: Sequence[ToStore], which: Sequence[int], outcomes: list[Outcome], deadline: Deadline,
        condition: tuple[bytes, ...],
    ) -> list[int]:  # fmt: skip
        """Sets the parts with the indices `which`, and fills in their `outcomes`. With the condition NX, returns the
        indices of the parts whose keys existed already."""
        lifetime = (b"EX", b"%d" % self._settings.ttl_s) if self._settings.ttl_s else ()
        jobs = []
        for at in which:
            record = parts[at].record
            key = _key(record.name)
            value: list[bytes | memoryview] = [record.header(), *parts[at].views()]
            pieces = command(b"SET", key, value, *condition, *lifetime)
            jobs.append(_Job(at, key, pieces, HEADER_BYTES + record.length, _read_reply))
        answers = self._execute(jobs, deadline, changes=True)
        for job in jobs:
            found = answers[job.at]
            outcomes[job.at] = found if isinstance(found, Outcome) else Outcome.DONE
            if outcomes[job.at] is Outcome.DONE and found is not None and condition:
                self._usage.stored(job.size)
        return [at for at in which if answers[at] is None]

    def _execute(
        self, jobs: Sequence[_Job[T]], deadline: Deadline, *, changes: bool = False
    ) -> dict[int, T | Outcome]:
        """The answer to each job by its `at`, or LATE, FULL, DAMAGED or FAILED. `changes`: whether the jobs change
        values. Raises TierError if no server answered any job, or all refused; ReadOnly if they refuse changes."""
        answers = _Answers[T]({job.at: Outcome.LATE for job in jobs})
        runs = deque(self._runs(jobs, answers, deadline))
        others = [
            self._threads.submit(self._work, runs, answers, deadline)
            for _ in range(min(self._settings.connections, len(runs)) - 1)
        ]
        try:
            self._work(runs, answers, deadline)
        finally:
            # Nothing may use the pages after this. Threads that have begun end at the deadline by themselves.
            wait([other for other in others if not other.cancel()])
        for other in others:
            if not other.cancelled():
                other.result()
        if answers.why and not answers.is_any_answered:
            raise (ReadOnly if changes and answers.codes <= _REFUSALS else TierError)(NAME, answers.why)
        return answers.by_job

    def _runs(
        self, jobs: Sequence[_Job[T]], answers: _Answers[T], deadline: Deadline
    ) -> list[tuple[Address, list[_Job[T]]]]:
        """Groups the jobs into runs. A run is for one server, and has at most RUN_JOBS jobs and RUN_BYTES bytes, or one
        larger job."""
        open_runs: dict[Address, list[_Job[T]]] = {}
        runs = []
        for job in jobs:
            try:
                address = self._nodes.address_of(job.key, deadline)
            except OutOfTime:
                break
            except TierError as error:
                answers.failed([job], error.why)
                continue
            run = open_runs.get(address)
            if run is None or len(run) == RUN_JOBS or sum(other.size for other in run) + job.size > RUN_BYTES:
                run = open_runs[address] = []
                runs.append((address, run))
            run.append(job)
        return runs

    def _work(self, runs: deque[tuple[Address, list[_Job[T]]]], answers: _Answers[T], deadline: Deadline) -> None:
        """Takes runs and carries them out until none is left; several threads do so at the same time."""
        while not deadline.is_over:
            try:
                address, jobs = runs.popleft()
            except IndexError:
                return
            self._run(address, jobs, answers, deadline)

    def _run(self, address: Address, jobs: list[_Job[T]], answers: _Answers[T], deadline: Deadline) -> None:
        try:
            wire = self._nodes.borrow(address, deadline)
        except OutOfTime:
            return
        except TierError as error:
            self._nodes.lost(address)
            answers.failed(jobs, error.why)
            return
        done = 0
        try:
            wire.send((piece for job in jobs for piece in job.pieces), deadline)
            for job in jobs:
                self._record(job, job.read(wire, deadline), answers)
                done += 1
        except OutOfTime:
            wire.close()
        except WireError as error:
            wire.close()
            self._nodes.lost(address)
            answers.failed(jobs[done:], str(error))
        except BaseException:
            wire.close()
            raise
        else:
            if REPLICA in answers.codes:
                wire.close()
                self._nodes.lost(address)
            else:
                self._nodes.give_back(address, wire)

    def _record(self, job: _Job[T], reply: T | ErrorReply, answers: _Answers[T]) -> None:
        judged: T | Outcome
        if not isinstance(reply, ErrorReply):
            judged = reply
        elif reply.code == "OOM":
            judged = Outcome.FULL
        elif reply.code == "WRONGTYPE":
            judged = Outcome.DAMAGED
        else:
            if reply.code in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"):
                self._nodes.forget_slots()
            hint = "; the server belongs to a cluster: set cluster=yes" if reply.code == "MOVED" else ""
            answers.failed([job], reply.text + ("" if self._settings.cluster else hint), reply.code)
            return
        with answers.lock:
            answers.by_job[job.at], answers.is_any_answered = judged, True


@dataclass(frozen=True)
class _Value:
    """Loads a part in one reply, received into its pages."""

    part: ToLoad

    def commands(self) -> list[bytes | memoryview]:
        return command(b"GET", _key(self.part.name))

    def read(self, wire: Wire, deadline: Deadline) -> Loaded | ErrorReply:
        length, header = self.part.length, bytearray(HEADER_BYTES)
        found = wire.value_into([memoryview(header), *self.part.views()], deadline)
        if isinstance(found, ErrorReply):
            return found
        if found is None:
            return Loaded(Outcome.MISSING)
        return _judged(header, self.part) if found == HEADER_BYTES + length else Loaded(Outcome.DAMAGED)


@dataclass(frozen=True)
class _Pieces:
    """Loads a part that is larger than a run, in pieces. If the value is replaced between two pieces, the checksum does
    not match."""

    part: ToLoad
    key: bytes

    def commands(self) -> list[bytes | memoryview]:
        return command(b"STRLEN", self.key) + self._piece(0) + self._piece(PIECE_BYTES)

    def _piece(self, begin: int) -> list[bytes | memoryview]:
        return command(b"GETRANGE", self.key, b"%d" % begin, b"%d" % (begin + PIECE_BYTES - 1))

    def read(self, wire: Wire, deadline: Deadline) -> Loaded | ErrorReply:
        name, length, views = self.part.name, self.part.length, self.part.views()
        total, found = HEADER_BYTES + length, wire.reply(deadline)
        if found != total:
            wire.reply(deadline), wire.reply(deadline)
            if isinstance(found, ErrorReply):
                return found
            return Loaded(Outcome.MISSING if found == 0 else Outcome.DAMAGED)
        header = memoryview(bytearray(HEADER_BYTES))
        for begin in range(0, total, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, total)
            if begin + 2 * PIECE_BYTES < total:
                wire.send(self._piece(begin + 2 * PIECE_BYTES), deadline)
            body = cut(views, max(0, begin - HEADER_BYTES), end - HEADER_BYTES)
            if wire.value_into([header[begin:HEADER_BYTES], *body], deadline) != end - begin:
                raise WireError(f"{name.text()} was replaced while it was read")
        return _judged(header, self.part)


def _judged(header: bytearray | memoryview, part: ToLoad) -> Loaded:
    try:
        return Loaded(Outcome.DONE, Record.read_of(bytes(header), part.name, part.length).checksum)
    except RecordError:
        return Loaded(Outcome.DAMAGED)


def _check(at: int, record: Record) -> _Job[bool]:
    """Asks whether the value that exists already is a whole record of this part."""
    key = _key(record.name)

    def read(wire: Wire, deadline: Deadline) -> bool | ErrorReply:
        header, length = wire.reply(deadline), wire.reply(deadline)
        for reply in (header, length):
            if isinstance(reply, ErrorReply):
                return False if reply.code == "WRONGTYPE" else reply
        try:
            Record.read_of(header if isinstance(header, bytes) else b"", record.name, record.length)
        except RecordError:
            return False
        return length == HEADER_BYTES + record.length

    pieces = command(b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1)) + command(b"STRLEN", key)
    return _Job(at, key, pieces, HEADER_BYTES, read)


def _listing(at: int, namespace: bytes) -> _Job[Any]:
    """Puts a namespace into the set of those that have a note."""
    return _Job(at, NAMESPACES, command(b"SADD", NAMESPACES, namespace.hex().encode()), 0, _read_reply)


def _read_deleted(wire: Wire, deadline: Deadline) -> int | ErrorReply | None:
    """The length of the value that was deleted; None: there was none."""
    length, removed = wire.reply(deadline), wire.reply(deadline)
    if isinstance(removed, ErrorReply):
        return removed
    return (length if isinstance(length, int) else 0) if removed == 1 else None


def _note_of(value: Any) -> Note | None:
    """The note in a value. A value that is not a note counts as no note, so change() makes a new one."""
    try:
        return Note.read(value) if isinstance(value, bytes) else None
    except NoteError:
        return None


def _checked(reply: Reply) -> Reply:
    """Returns the reply. Raises TierError if it is an error, ReadOnly if the server changes nothing."""
    if isinstance(reply, ErrorReply):
        kind = NoSpace if reply.code == "OOM" else ReadOnly if reply.code in _REFUSALS else TierError
        raise kind(NAME, reply.text)
    return reply


def _read_reply(wire: Wire, deadline: Deadline) -> Reply | Any:
    return wire.reply(deadline)


def _key(name: PartName) -> bytes:
    return name.text().encode()


STORE: Final = Store(open_tier, check=_read)
