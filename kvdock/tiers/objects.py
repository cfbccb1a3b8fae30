"""Object stores as a lower tier, through obstore: a record is one object, its header and then its bytes
(docs/tiers.md#object-stores).

All requests run on one event loop in a thread of the tier's own, because only there can obstore give one up when its
deadline is over. A large load is asked for in ranges: while one is copied into the pages, the next ones arrive. A store
is sent from the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvdock.tiers.notes import Change, Note, NoteError, name_of_note
from kvdock.tiers.objects_url import Place, read_place
from kvdock.tiers.record import HEADER_BYTES, VERSION, PartName, Record, RecordError, folder_of
from kvdock.tiers.tier import (
    Deadline,
    Loaded,
    Outcome,
    ReadOnly,
    StillRunning,
    TierError,
    ToLoad,
    ToStore,
    Usage,
)

log = logging.getLogger("kvdock.tiers")

NAME: Final = "objects"
SLICE_S: Final = 0.02
"""How long a verb waits before it looks at its deadline again."""
RELEASE_S: Final = 10.0
"""How long a request that was given up may hold the pages that it reads."""
RANGE_BYTES: Final = 8 << 20
"""A larger object is asked for in several requests at once."""
CHUNK_BYTES: Final = 16 << 20
"""How much one request of an upload in pieces carries."""
UPLOADS: Final = 4
DELETE_AT_ONCE: Final = 1000
NOTE_FRESH_S: Final = 6 * 3600.0
"""A note that is older is written again: rules of buckets count days, and delete a note like anything else."""
NOTE_RETRY_S: Final = 600.0
"""After a note could not be written again, the next try comes so much later."""
NOTE_WRITE_S: Final = 0.5
"""How long whoever reads a note waits for it to be written again."""
_FULL: Final = (
    "os error 28", "os error 27", "os error 122", "507 ", "QuotaExceeded", "StorageFull", "InsufficientStorage",
)  # fmt: skip
"""No space, too large a file and quota, of Linux; what servers say."""

_NAMESPACE_BYTES: Final = 32

T = TypeVar("T")


def open_tier(url: str, deadline: Deadline) -> ObjectTier:
    """`url`: docs/tiers.md#object-stores. Raises TierUrlError; TierError where the store does not answer or refuses,
    or obstore is not installed."""
    try:
        obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise TierError(NAME, f"obstore is not installed ({error}): pip install 'kvdock[objects]'") from error
    tier = ObjectTier(read_place(url, stores), obstore)
    try:
        tier.ask_for_life(deadline)
    except BaseException:
        tier.close(deadline)
        raise
    return tier


class ObjectTier:
    """See Tier for the verbs. usage() counts what was stored and deleted through this object."""

    name = NAME
    poll_s = 5.0

    def __init__(self, place: Place, obstore: Any, clock: Callable[[], float] = time.time) -> None:
        """`obstore`: the module. `clock`: seconds since 1970, to which the ages of notes are compared."""
        self._place, self._store, self._obstore, self._clock = place, place.store, obstore, clock
        self._can_create = place.can_create
        self._loop = asyncio.new_event_loop()
        self._loading, self._storing, self._asking = (asyncio.Semaphore(place.connections) for _ in range(3))
        self._lock = threading.Lock()
        self._objects = self._bytes = self._wear = 0
        self._can_update = place.can_create
        self._noted: dict[bytes, _Noted] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvdock-objects", daemon=True)
        self._thread.start()

    def ask_for_life(self, deadline: Deadline) -> None:
        """Raises TierError."""
        if self._talk([self._answers], deadline) == [Outcome.LATE]:
            raise TierError(NAME, "the store did not answer in time")

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        def ask(name: PartName) -> Callable[[], Awaitable[int | None]]:
            return lambda: self._size(name.text())

        return [isinstance(found, int) for found in self._talk([ask(name) for name in names], deadline)]

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        def ask(part: ToLoad) -> Callable[[], Awaitable[Loaded]]:
            return lambda: self._load(part)

        found = self._talk([ask(part) for part in parts], deadline)
        return [Loaded(one) if isinstance(one, Outcome) else one for one in found]

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        if self._place.read_only:
            raise TierError(NAME, "it is read over HTTP, which stores nothing")
        views = [part.pages[: part.record.length] for part in parts]

        def ask(record: Record, view: memoryview) -> Callable[[], Awaitable[Outcome]]:
            return lambda: self._put(record, view)

        try:
            asked = [ask(part.record, view) for part, view in zip(parts, views, strict=True)]
            return self._talk(asked, deadline)
        finally:
            _release(views)

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        if self._place.read_only:
            raise TierError(NAME, "it is read over HTTP, which deletes nothing")

        def ask(some: Sequence[PartName]) -> Callable[[], Awaitable[list[Outcome]]]:
            return lambda: self._delete([name.text() for name in some])

        asked = [names[at : at + DELETE_AT_ONCE] for at in range(0, len(names), DELETE_AT_ONCE)]
        outcomes: list[Outcome] = []
        for some, found in zip(asked, self._talk([ask(some) for some in asked], deadline), strict=True):
            outcomes += [found] * len(some) if isinstance(found, Outcome) else found
        return outcomes

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        """One GET each; a note that has not changed is not sent."""
        def ask(namespace: bytes) -> Callable[[], Awaitable[tuple[Note | None, Any]]]:
            return lambda: self._fresh_note(namespace)

        found = self._talk([ask(namespace) for namespace in namespaces], deadline)
        return [_known(one)[0] for one in found]

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        if self._place.read_only:
            raise ReadOnly(NAME, "it is read over HTTP, which changes nothing")
        while not deadline.is_over:
            with self._locked(deadline):
                (found,) = self._talk([lambda: self._try_to_change(namespace, change)], deadline)
            if isinstance(found, Note):
                return found
            if isinstance(found, Outcome):
                break
        raise TierError(NAME, "the note of a namespace was not changed in time")

    @contextlib.contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        """A folder cannot refuse to replace a file, so whoever changes notes there holds a lock."""
        if self._place.folder is None:
            yield
            return
        try:
            fd = os.open(self._place.folder / "kvdock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(NAME, f"its lock cannot be opened: {error}") from error
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.is_over:
                        raise TierError(NAME, "another server holds its lock") from None
                    time.sleep(0.005)  # nothing tells when it is free
            yield
        finally:
            os.close(fd)

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        if self._place.read_only:
            raise ReadOnly(NAME, "it is read over HTTP, which lists nothing")
        (found,) = self._talk([self._folders(f"kvdock/{VERSION}")], deadline)
        if isinstance(found, Outcome):
            raise TierError(NAME, "its namespaces were not listed in time")
        names = [folder.rstrip("/").rpartition("/")[2] for folder in found]
        return [bytes.fromhex(name) for name in names if len(name) == 2 * _NAMESPACE_BYTES]

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        """Deletes of each former generation the objects that one page of a list names."""
        kept = f"{note.birth:016x}.{note.generation}"
        (folders,) = self._talk([self._folders(folder_of(namespace).rstrip("/"))], deadline)
        removed = 0
        for folder in [] if isinstance(folders, Outcome) else folders:
            if folder.rstrip("/").rpartition("/")[2] == kept:
                continue
            while not deadline.is_over:
                (gone,) = self._talk([self._page_removed(folder)], deadline)
                if not isinstance(gone, int) or not gone:
                    break
                removed += gone
        return removed

    def _folders(self, path: str) -> Callable[[], Awaitable[list[str]]]:
        async def listed() -> list[str]:
            async with self._asking:
                found = await self._obstore.list_with_delimiter_async(self._store, path)
                return [str(folder) for folder in found["common_prefixes"]]

        return listed

    def _page_removed(self, folder: str) -> Callable[[], Awaitable[int]]:
        async def removed() -> int:
            async with self._asking:
                async for page in self._obstore.list(self._store, folder, chunk_size=DELETE_AT_ONCE):
                    paths = [str(one["path"]) for one in page]
                    try:
                        await self._obstore.delete_async(self._store, paths)
                    except FileNotFoundError:
                        await asyncio.gather(*(self._delete_one(path) for path in paths))
                    return len(paths)
                return 0

        return removed

    def usage(self) -> Usage:
        with self._lock:
            return Usage(max(0, self._objects), max(0, self._bytes), 0, self._wear)

    def close(self, deadline: Deadline) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _talk(self, asked: Sequence[Callable[[], Awaitable[T]]], deadline: Deadline) -> list[T | Outcome]:
        """What each was answered; LATE, FULL, FAILED. Raises TierError where the store answered none of them."""
        if deadline.left_s <= 0 or not asked:
            return [Outcome.LATE] * len(asked)
        tasks: list[asyncio.Task[T]] = []
        given_up = False

        async def run() -> list[T | BaseException]:
            tasks.extend(asyncio.ensure_future(_awaited(one)) for one in asked)
            if given_up:  # before there was a task to cancel
                give_up()
            return await asyncio.gather(*tasks, return_exceptions=True)

        def give_up() -> None:
            for task in tasks:
                task.cancel()

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        while not running.done():
            wait([running], min(SLICE_S, deadline.left_s) if not given_up else SLICE_S)
            if deadline.is_over and not given_up:
                given_up = True
                self._loop.call_soon_threadsafe(give_up)
        found = running.result()
        judged: list[T | Outcome] = [_judge(one) if isinstance(one, BaseException) else one for one in found]
        errors: list[BaseException] = [one for one in found if isinstance(one, Exception)]
        if errors and all(one is Outcome.FAILED or one is Outcome.LATE for one in judged):
            raise TierError(NAME, _brief(errors[0]))
        return judged

    async def _answers(self) -> bool:
        """Whether the store does: it is asked for what is not there, in a way that fails where it cannot be used."""
        async with self._asking:
            if self._place.read_only:
                await self._size("kvdock/0")
            else:
                async for _ in self._obstore.list(self._store, "kvdock/0", chunk_size=1):
                    break
        return True

    async def _size(self, path: str) -> int | None:
        """The length of the object, in bytes; None where there is none."""
        async with self._asking:
            try:
                return int((await self._obstore.head_async(self._store, path))["size"])
            except FileNotFoundError:
                return None

    async def _note(self, namespace: bytes, *, is_asked_anew: bool = False) -> tuple[Note | None, Any]:
        """The note, and what its object is told apart by when it is replaced."""
        noted = None if is_asked_anew else self._noted.get(namespace)
        errors = self._obstore.exceptions
        try:
            async with self._asking:
                options = {"if_none_match": noted.mark} if noted is not None and noted.mark else None
                found = await self._obstore.get_async(self._store, name_of_note(namespace), options=options)
                data = bytes(await found.bytes_async())
        except FileNotFoundError:
            return None, None
        except errors.NotModifiedError:
            assert noted is not None
            return noted.note, {"e_tag": noted.mark}
        mark = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}
        try:
            note = Note.read(data)
        except NoteError:  # it is begun anew
            self._noted.pop(namespace, None)
            return None, mark
        self._noted[namespace] = _Noted(note, found.meta["e_tag"], found.meta["last_modified"].timestamp())
        return note, mark

    async def _fresh_note(self, namespace: bytes) -> tuple[Note | None, Any]:
        note, mark = await self._note(namespace)
        noted = self._noted.get(namespace)
        is_old = noted is not None and self._clock() - noted.written_s > NOTE_FRESH_S
        may_write = self._can_update and self._place.folder is None and not self._place.read_only
        if note is None or not is_old or not may_write:
            return note, mark
        await self._write_again(namespace)
        return await self._note(namespace)

    async def _write_again(self, namespace: bytes) -> None:
        """Writes the note as it is. A store that takes no writes now is read all the same."""
        note, mark = await self._note(namespace, is_asked_anew=True)
        errors, written_s = self._obstore.exceptions, self._clock()
        if note is None:
            return
        try:
            async with asyncio.timeout(NOTE_WRITE_S), self._asking:
                await self._obstore.put_async(
                    self._store, name_of_note(namespace), note.packed(), use_multipart=False, mode=mark
                )
        except (errors.NotSupportedError, NotImplementedError):
            self._can_update = False  # a write without a condition could undo another server's deletion
        except errors.PreconditionError:
            return  # another server has written it just now
        except (TimeoutError, errors.BaseError) as error:
            log.info("the note of namespace %s is not written again yet: %s", namespace.hex()[:12], error)
            written_s += NOTE_RETRY_S - NOTE_FRESH_S
        self._noted[namespace] = _Noted(note, mark.get("e_tag"), written_s)

    async def _try_to_change(self, namespace: bytes, change: Change) -> Note | None:
        """None: somebody else has changed it meanwhile."""
        before, mark = await self._note(namespace, is_asked_anew=True)
        if (after := change(before)) == before:
            return after
        path, errors = name_of_note(namespace), self._obstore.exceptions
        async with self._asking:
            try:
                if mark is None and self._can_create:
                    await self._obstore.put_async(
                        self._store, path, after.packed(), use_multipart=False, mode="create"
                    )
                    return after
                if mark is not None and self._can_update:
                    await self._obstore.put_async(self._store, path, after.packed(), use_multipart=False, mode=mark)
                    return after
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return None
            except (errors.NotSupportedError, NotImplementedError):
                self._can_update = False
            await self._obstore.put_async(self._store, path, after.packed(), use_multipart=False)
        # It could not refuse: of two who change it at the same moment the last one stays, and the other does it again.
        return after if (await self._note(namespace, is_asked_anew=True))[0] == after else None

    async def _load(self, part: ToLoad) -> Loaded:
        name, length, pages = part
        record = _Sink(pages[:length])
        total = HEADER_BYTES + length
        first = min(total, RANGE_BYTES) if self._place.ranges else total
        options = None if first == total else {"range": (0, first)}
        others: list[asyncio.Task[None]] = []
        try:
            async with self._loading:
                found = await self._obstore.get_async(self._store, name.text(), options=options)
                if found.meta["size"] != total:
                    return Loaded(Outcome.DAMAGED)
                mark = found.meta["e_tag"]
                others = [
                    asyncio.ensure_future(self._range(name.text(), mark, at, min(at + RANGE_BYTES, total), record))
                    for at in range(first, total, RANGE_BYTES)
                ]
                await record.take(found, 0, first)
            await asyncio.gather(*others)
            return Loaded(Outcome.DONE, Record.read_of(bytes(record.header), name, length).checksum)
        except FileNotFoundError:
            return Loaded(Outcome.MISSING)
        except (RecordError, self._obstore.exceptions.PreconditionError):
            return Loaded(Outcome.DAMAGED)
        except self._obstore.exceptions.BaseError as error:
            if options is not None and "416 " in str(error):  # it has not even that range
                return Loaded(Outcome.DAMAGED)
            raise
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            record.close()

    async def _range(self, path: str, mark: str | None, begin: int, end: int, record: _Sink) -> None:
        """Part of the object that is marked so, not of one that has replaced it meanwhile."""
        options = {"range": (begin, end)} | ({"if_match": mark} if mark else {})
        async with self._loading:
            found = await self._obstore.get_async(self._store, path, options=options)
            await record.take(found, begin, end)

    async def _put(self, record: Record, view: memoryview) -> Outcome:
        path, value = record.name.text(), [record.header(), view]
        size = HEADER_BYTES + record.length
        async with self._storing:
            if size > self._place.multipart_bytes:
                await self._obstore.put_async(
                    self._store, path, value, use_multipart=True, chunk_size=CHUNK_BYTES, max_concurrency=UPLOADS
                )
            elif not await self._create(path, value):
                if self._can_create and await self._is_whole(record):
                    return Outcome.DONE
                await self._obstore.put_async(self._store, path, value, use_multipart=False)
            self._count(1, size)
            return Outcome.DONE

    async def _create(self, path: str, value: list[Any]) -> bool:
        """False where it is there already, or where the store cannot refuse to overwrite."""
        errors = self._obstore.exceptions
        if not self._can_create:
            return False
        try:
            await self._obstore.put_async(self._store, path, value, use_multipart=False, mode="create")
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return False
        except (errors.NotSupportedError, NotImplementedError):
            self._can_create = False
            return False
        return True

    async def _is_whole(self, record: Record) -> bool:
        """Whether what is there already is a whole record of that part."""
        try:
            found = await self._obstore.get_async(
                self._store, record.name.text(), options={"range": (0, HEADER_BYTES)}
            )
            header = bytes(await found.bytes_async())
            Record.read_of(header, record.name, record.length)
        except (FileNotFoundError, RecordError, self._obstore.exceptions.BaseError):
            return False
        return bool(found.meta["size"] == HEADER_BYTES + record.length)

    async def _delete(self, paths: Sequence[str]) -> list[Outcome]:
        sizes = await asyncio.gather(*(self._size(path) for path in paths))
        there = [path for path, size in zip(paths, sizes, strict=True) if size is not None]
        outcomes = [Outcome.MISSING if size is None else Outcome.DONE for size in sizes]
        if there:
            async with self._asking:
                try:
                    await self._obstore.delete_async(self._store, there)
                except FileNotFoundError:
                    # Somebody else deletes the same: then each has to be asked for by itself.
                    await asyncio.gather(*(self._delete_one(path) for path in there))
        self._count(-len(there), -sum(size for size in sizes if size is not None))
        return outcomes

    async def _delete_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._obstore.delete_async(self._store, path)

    def _count(self, objects: int, size: int) -> None:
        with self._lock:
            self._objects += objects
            self._bytes += size
            self._wear += max(0, size)


class _Sink:
    """A record that arrives: where the bytes of the object go."""

    def __init__(self, body: memoryview) -> None:
        self.header = bytearray(HEADER_BYTES)
        self._body = body

    async def take(self, found: Any, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of the object. Raises RecordError if the store sends fewer or others."""
        if tuple(found.range) != (begin, end):
            raise RecordError(f"bytes {begin} to {end} were wanted, found {found.range}")
        data = memoryview(await found.bytes_async())
        if len(data) != end - begin:
            raise RecordError(f"{end - begin} bytes were wanted, found {len(data)}")
        of_header = max(0, HEADER_BYTES - begin)
        if of_header:
            self.header[begin:] = data[:of_header]
        self._body[begin + of_header - HEADER_BYTES : end - HEADER_BYTES] = data[of_header:]

    def close(self) -> None:
        self._body.release()


async def _awaited(asked: Callable[[], Awaitable[T]]) -> T:
    return await asked()


def _release(views: Sequence[memoryview]) -> None:
    """Waits until nobody reads the pages: a view that obstore still has cannot be released. Raises StillRunning."""
    until_s = time.monotonic() + RELEASE_S
    for view in views:
        while True:
            try:
                view.release()
                break
            except BufferError:
                if time.monotonic() > until_s:
                    raise StillRunning(NAME, "obstore still reads pages of a store that was given up") from None
                time.sleep(0.001)  # obstore says to nobody when it lets go of a buffer


@dataclass(frozen=True, slots=True)
class _Noted:
    """A note as it was read last. `mark`: its object's ETag. `written_s`: when the object was written, in seconds since
    1970."""

    note: Note
    mark: str | None
    written_s: float


def _known(found: tuple[Note | None, Any] | Outcome) -> tuple[Note | None, Any]:
    if isinstance(found, Outcome):
        raise TierError(NAME, f"a question about a namespace was answered with {found.value!r}")
    return found


def _judge(error: BaseException) -> Outcome:
    if isinstance(error, asyncio.CancelledError):
        return Outcome.LATE
    if any(mark in str(error) for mark in _FULL):
        return Outcome.FULL
    return Outcome.FAILED


def _brief(error: BaseException) -> str:
    """Without what obstore adds for its own developers."""
    return f"{type(error).__name__}: {' '.join(str(error).partition('Debug source')[0].split())[:800]}"
