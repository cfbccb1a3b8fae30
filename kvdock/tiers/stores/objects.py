"""Object stores as a lower tier, through obstore: a record is one object, with the header and then the part's bytes
(docs/operate/tiers_objects.md).

All requests run on one event loop in a thread of the tier's own, because obstore can cancel a request at its deadline
only there. A large object is requested in ranges: while one range is copied into the pages, the next ones arrive
(kvdock/tiers/stores/objects_loads.py). A store is sent from the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from kvdock.tiers.notes import Change, Note, NoteError, name_of_note
from kvdock.tiers.record import HEADER_BYTES, VERSION, PartName, Record, RecordError, folder_of, namespace_of
from kvdock.tiers.stores.objects_loads import Sink, ranges_of
from kvdock.tiers.stores.objects_owned import OwnedObjects
from kvdock.tiers.stores.objects_receive import SILENCE_S, Receiver
from kvdock.tiers.stores.objects_requests import NO_PRICES, Prices, Requests
from kvdock.tiers.stores.urls import TierUrl, existing_file, price, read_url, some_bytes, some_text, whole, yes_or_no
from kvdock.tiers.tier import (
    NO_LIMITS,
    Deadline,
    Holding,
    Limits,
    Loaded,
    NoSpace,
    NotInstalled,
    Outcome,
    OwnUsage,
    ReadOnly,
    StillRunning,
    Store,
    TierError,
    TierUrlError,
    ToLoad,
    ToStore,
    Usage,
    known_notes,
    require_own,
)

log = logging.getLogger("kvdock.tiers")

NAME: Final = "objects"
SLICE_S: Final = 0.02
"""How often a verb that waits looks at its deadline."""
RELEASE_S: Final = 10.0
"""How long a cancelled request may still hold the pages that it reads."""
CHUNK_BYTES: Final = 16 << 20
"""The bytes of each request of a multipart upload."""
UPLOADS: Final = 4
DELETE_AT_ONCE: Final = 1000
NOTE_FRESH_S: Final = 6 * 3600.0
"""A note that is older is written again, because the lifecycle rules of a bucket delete old objects, notes too."""
NOTE_RETRY_S: Final = 600.0
"""After a failed try to write a note again, how long until the next one."""
NOTE_WRITE_S: Final = 0.5
"""How long the read of a note may wait for writing it again."""
_FULL: Final = (
    "os error 28", "os error 27", "os error 122", "507 ", "QuotaExceeded", "StorageFull", "InsufficientStorage",
)  # fmt: skip
"""Linux's codes for no space, too large a file and an exceeded quota, and the texts of servers."""
_REFUSED: Final = ("PermissionDenied", "os error 30", "os error 13")
"""The error of keys that may only read, and Linux's codes for a read-only file system and a folder that may not be
written to."""
T = TypeVar("T")


def open_tier(url: str, deadline: Deadline) -> ObjectTier:
    """`url`: docs/operate/tiers_objects.md. Raises TierUrlError, and TierError where the store does not answer or
    refuses, or obstore is not installed."""
    tier = ObjectTier(*_locate(url))
    try:
        tier.check(deadline)
    except BaseException:
        tier.close(deadline)
        raise
    return tier


def _locate(url: str) -> tuple[StoreLocation, ModuleType]:
    """The store, and the module obstore. Raises TierUrlError, NotInstalled."""
    try:
        obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise NotInstalled(NAME, f"obstore is not installed ({error}): pip install 'kvdock[objects]'") from error
    return open_location(url, stores), obstore


class ObjectTier:
    """See Tier for the verbs. usage() counts what was stored and deleted through this instance."""

    name = NAME
    gathers = True
    loads_at_once = 16
    poll_s = 5.0
    recheck_s = 3600.0  # each question costs money

    def __init__(self, location: StoreLocation, obstore: Any, clock: Callable[[], float] = time.time) -> None:
        """`obstore`: the module. `clock`: Unix seconds, with which the ages of notes are computed."""
        self._location, self._store, self._clock = location, location.store, clock
        self._obstore = Requests(obstore, location.prices)
        self._can_create = self._can_update = location.can_create
        self._loop = asyncio.new_event_loop()
        self._storing, self._asking = (asyncio.Semaphore(location.connections) for _ in range(2))
        self._receiver = Receiver(location.store, self._obstore, location.connections, location.authority)
        self._usage = OwnUsage(wears_out=True)
        self.limits, self._owned = location.limits, OwnedObjects(location.store, self._obstore, location.folder)
        self._notes: dict[bytes, _CachedNote] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvdock-objects", daemon=True)
        self._thread.start()

    @property
    def is_only_read(self) -> bool:
        """See OnlyRead."""
        return self._location.read_only

    def requests(self) -> Mapping[str, int]:
        return self._obstore.counts()

    @property
    def dollars(self) -> float:
        return self._obstore.dollars

    def check(self, deadline: Deadline) -> None:
        """Raises TierError if the store cannot be used."""
        if self._location.folder is not None:
            require_own(NAME, self._location.folder)
        if self._run_all([self._ping], deadline) == [Outcome.LATE]:
            raise TierError(NAME, "the store did not answer in time")

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        def ask(name: PartName) -> Callable[[], Awaitable[int | None]]:
            return lambda: self._size(name.text(), is_use=True)

        return [isinstance(found, int) for found in self._run_all([ask(name) for name in names], deadline)]

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        sinks = [Sink(part.views()) for part in parts]

        def ask(part: ToLoad, sink: Sink, url: str | None) -> Callable[[], Awaitable[Loaded]]:
            return lambda: self._load(part, sink, url)

        try:
            urls = self._urls([part.name.text() for part in parts], deadline)
            found = self._run_all([ask(*one) for one in zip(parts, sinks, urls, strict=True)], deadline)
        finally:
            have_ended = [sink.close(RELEASE_S) for sink in sinks]
            if not all(have_ended):
                raise StillRunning(NAME, "pages are still written to by a load that was cancelled")
        return [Loaded(one) if isinstance(one, Outcome) else one for one in found]

    def _urls(self, paths: Sequence[str], deadline: Deadline) -> Sequence[str | None]:
        """As Receiver.signed(), for all at once, which costs little more than one."""
        found = self._run_all([lambda: self._receiver.signed(paths)] if self._location.signs else [], deadline)
        return [None] * len(paths) if not found or isinstance(found[0], Outcome) else found[0]

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        if self._location.read_only:
            raise ReadOnly(NAME, "it is a web server, which can only be read")
        views = [part.views() for part in parts]

        def ask(record: Record, some: Sequence[memoryview]) -> Callable[[], Awaitable[Outcome]]:
            return lambda: self._put(record, some)

        try:
            requests = [ask(part.record, some) for part, some in zip(parts, views, strict=True)]
            return self._run_all(requests, deadline, changes=True)
        finally:
            _release(list(itertools.chain.from_iterable(views)))

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        if self._location.read_only:
            raise ReadOnly(NAME, "it is a web server, which can only be read")

        def ask(some: Sequence[PartName]) -> Callable[[], Awaitable[list[Outcome]]]:
            return lambda: self._delete([name.text() for name in some])

        slices = [names[at : at + DELETE_AT_ONCE] for at in range(0, len(names), DELETE_AT_ONCE)]
        requests, outcomes = [ask(some) for some in slices], list[Outcome]()
        for some, found in zip(slices, self._run_all(requests, deadline, changes=True), strict=True):
            outcomes += [found] * len(some) if isinstance(found, Outcome) else found
        return outcomes

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        """Makes one GET for each namespace; the store does not send a note that has not changed."""

        def ask(namespace: bytes) -> Callable[[], Awaitable[tuple[Note | None, Any]]]:
            return lambda: self._fresh_note(namespace)

        found = self._run_all([ask(namespace) for namespace in namespaces], deadline)
        return known_notes(NAME, namespaces, [one if isinstance(one, Outcome) else one[0] for one in found])

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        if self._location.read_only:
            raise ReadOnly(NAME, "it is a web server, which can only be read")
        while not deadline.is_over:
            with self._locked(deadline):
                (found,) = self._run_all([lambda: self._try_to_change(namespace, change)], deadline, changes=True)
            if isinstance(found, Note):
                return found
            if found is Outcome.FULL:
                raise NoSpace(NAME, "it has no space for the note of a namespace")
            if isinstance(found, Outcome):
                break
        raise TierError(NAME, "the note of a namespace was not changed in time")

    @contextlib.contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        """A folder cannot refuse to replace a file, so servers that change notes there hold a lock."""
        if self._location.folder is None:
            yield
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._location.folder / "kvdock.lock", flags, 0o600)
        except OSError as error:
            is_refused = error.errno in (errno.EROFS, errno.EACCES)
            raise (ReadOnly if is_refused else TierError)(NAME, f"its lock cannot be opened: {error}") from error
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.is_over:
                        raise TierError(NAME, "another server holds its lock") from None
                    time.sleep(0.005)  # the lock cannot be waited for with a deadline
            yield
        finally:
            os.close(fd)

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        if self._location.read_only:
            raise ReadOnly(NAME, "it is a web server, which cannot be listed")
        (found,) = self._run_all([self._folders(f"kvdock/{VERSION}")], deadline)
        if isinstance(found, Outcome):
            raise TierError(NAME, "its namespaces were not listed in time")
        names = (namespace_of(folder.rstrip("/").rpartition("/")[2]) for folder in found)
        return [name for name in names if name is not None]

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        """Deletes the objects of former generations, one page of a list at a time."""
        kept = f"{note.birth:016x}.{note.generation}"
        (folders,) = self._run_all([self._folders(folder_of(namespace).rstrip("/"))], deadline)
        removed = 0
        for folder in [] if isinstance(folders, Outcome) else folders:
            if folder.rstrip("/").rpartition("/")[2] == kept:
                continue
            while not deadline.is_over:
                (count,) = self._run_all([self._remove_page(folder)], deadline)
                if not isinstance(count, int) or not count:
                    break
                removed += count
        return removed

    def mark(self, namespace: bytes, label: bytes, deadline: Deadline) -> None:
        self._one(lambda: self._owned.mark(namespace, label), deadline)

    def holdings(self, deadline: Deadline) -> list[Holding]:
        return self._one(self._owned.holdings, deadline)

    def empty(self, namespace: bytes, older_s: float, deadline: Deadline) -> int:
        return self._one(lambda: self._owned.empty(namespace, older_s), deadline)

    def forget(self, namespace: bytes, deadline: Deadline) -> None:
        self._one(lambda: self._owned.forget(namespace), deadline)

    def _one(self, request: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        """Raises TierError."""
        if self._location.read_only:
            raise ReadOnly(NAME, "it is a web server, which cannot be listed")
        (found,) = self._run_all([request], deadline)
        if isinstance(found, Outcome):
            raise TierError(NAME, f"what it has is not known: {found.value}")
        return found

    def _folders(self, path: str) -> Callable[[], Awaitable[list[str]]]:
        async def list_() -> list[str]:
            async with self._asking:
                found = await self._obstore.list_with_delimiter_async(self._store, path)
                return [str(folder) for folder in found["common_prefixes"]]

        return list_

    def _remove_page(self, folder: str) -> Callable[[], Awaitable[int]]:
        async def remove() -> int:
            async with self._asking:
                async for page in self._obstore.list(self._store, folder, chunk_size=DELETE_AT_ONCE):
                    paths = [str(one["path"]) for one in page]
                    try:
                        await self._obstore.delete_async(self._store, paths)
                    except FileNotFoundError:
                        await asyncio.gather(*(self._delete_one(path) for path in paths))
                    return len(paths)
                return 0

        return remove

    def usage(self) -> Usage:
        return self._usage.view()

    def close(self, deadline: Deadline) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._receiver.close()

    def _run_all(
        self, requests: Sequence[Callable[[], Awaitable[T]]], deadline: Deadline, *, changes: bool = False
    ) -> list[T | Outcome]:
        """The answer to each request, or LATE, FULL or FAILED. `changes`: whether the requests change objects. Raises
        TierError if every request failed or was late, and not only because of the deadline; ReadOnly if the store
        refuses changes."""
        if deadline.left_s <= 0 or not requests:
            return [Outcome.LATE] * len(requests)
        tasks: list[asyncio.Task[T]] = []
        is_cancelled = False

        async def run() -> list[T | BaseException]:
            tasks.extend(asyncio.ensure_future(_awaited(one)) for one in requests)
            if is_cancelled:  # before there was a task to cancel
                cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        while not running.done():
            with contextlib.suppress(TimeoutError):
                running.exception(min(SLICE_S, deadline.left_s) if not is_cancelled else SLICE_S)
            if deadline.is_over and not is_cancelled:
                is_cancelled = True
                self._loop.call_soon_threadsafe(cancel)
        found = running.result()
        judged: list[T | Outcome] = [_judge(one) if isinstance(one, BaseException) else one for one in found]
        errors: list[BaseException] = [one for one in found if isinstance(one, Exception)]
        if errors and all(one is Outcome.FAILED or one is Outcome.LATE for one in judged):
            is_refused = changes and any(mark in _brief(errors[0]) for mark in _REFUSED)
            raise (ReadOnly if is_refused else TierError)(NAME, _brief(errors[0]))
        return judged

    async def _ping(self) -> bool:
        """Asks for something that does not exist, in a way that fails if the store cannot be used."""
        async with self._asking:
            if self._location.read_only:
                await self._size("kvdock/0")
            else:
                async for _ in self._obstore.list(self._store, "kvdock/0", chunk_size=1):
                    break
        return True

    async def _size(self, path: str, *, is_use: bool = False) -> int | None:
        """The length of the object in bytes; None: there is none."""
        async with self._asking:
            try:
                size = int((await self._obstore.head_async(self._store, path))["size"])
            except FileNotFoundError:
                return None
        if is_use:
            self._owned.used(path)
        return size

    async def _note(self, namespace: bytes, *, use_cached: bool = True) -> tuple[Note | None, Any]:
        """The note, and the version of its object, which is the condition for replacing it. None, None: there is no
        object."""
        cached = self._notes.get(namespace) if use_cached else None
        errors = self._obstore.exceptions
        try:
            async with self._asking:
                options = {"if_none_match": cached.e_tag} if cached is not None and cached.e_tag else None
                found = await self._obstore.get_async(self._store, name_of_note(namespace), options=options)
                data = bytes(await found.bytes_async())
        except FileNotFoundError:
            return None, None
        except errors.NotModifiedError:
            assert cached is not None
            return cached.note, {"e_tag": cached.e_tag}
        version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}
        try:
            note = Note.read(data)
        except NoteError:  # change() makes a new one
            self._notes.pop(namespace, None)
            return None, version
        before, written_s = self._notes.get(namespace), float(found.meta["last_modified"].timestamp())
        if before is not None:  # the store's clock may be far behind this one
            written_s = max(written_s, before.written_s)
        self._notes[namespace] = _CachedNote(note, found.meta["e_tag"], written_s)
        return note, version

    async def _fresh_note(self, namespace: bytes) -> tuple[Note | None, Any]:
        """The note, which is written again if it is old."""
        note, version = await self._note(namespace)
        cached = self._notes.get(namespace)
        is_old = cached is not None and self._clock() - cached.written_s > NOTE_FRESH_S
        may_write = self._can_update and self._location.folder is None and not self._location.read_only
        if note is None or not is_old or not may_write:
            return note, version
        await self._write_again(namespace)
        return await self._note(namespace)

    async def _write_again(self, namespace: bytes) -> None:
        """Writes the note unchanged, on condition that nobody else has changed it meanwhile. If the store does not
        support such conditions, notes are not written again any more; if it accepts no write now, the next try is after
        NOTE_RETRY_S."""
        note, version = await self._note(namespace, use_cached=False)
        errors, written_s = self._obstore.exceptions, self._clock()
        if note is None:
            return
        try:
            async with asyncio.timeout(NOTE_WRITE_S), self._asking:
                await self._obstore.put_async(
                    self._store, name_of_note(namespace), note.packed(), use_multipart=False, mode=version
                )
        except (errors.NotSupportedError, NotImplementedError):
            self._can_update = False  # a write without a condition could undo another server's deletion
        except errors.PreconditionError:
            return  # it was written just now
        except (TimeoutError, errors.BaseError) as error:
            log.info("the note of namespace %s is not written again yet: %s", namespace.hex()[:12], error)
            written_s += NOTE_RETRY_S - NOTE_FRESH_S
        self._notes[namespace] = _CachedNote(note, version.get("e_tag"), written_s)

    async def _try_to_change(self, namespace: bytes, change: Change) -> Note | None:
        """None: another server has changed the note meanwhile."""
        before, version = await self._note(namespace, use_cached=False)
        if (after := change(before)) == before:
            return after
        path, errors = name_of_note(namespace), self._obstore.exceptions
        async with self._asking:
            try:
                if version is None and self._can_create:
                    await self._obstore.put_async(
                        self._store, path, after.packed(), use_multipart=False, mode="create"
                    )
                    return after
                if version is not None and self._can_update:
                    await self._obstore.put_async(
                        self._store, path, after.packed(), use_multipart=False, mode=version
                    )
                    return after
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return None
            except (errors.NotSupportedError, NotImplementedError):
                self._can_update = False
            await self._obstore.put_async(self._store, path, after.packed(), use_multipart=False)
        # The write had no condition: of two servers that change the note at the same moment, the first one tries again.
        return after if (await self._note(namespace, use_cached=False))[0] == after else None

    async def _load(self, part: ToLoad, sink: Sink, url: str | None) -> Loaded:
        name = part.name
        ranges = [
            asyncio.ensure_future(self._receiver.load(name.text(), url, wanted, sink))
            for wanted in ranges_of(part.length, one=not self._location.ranges)
        ]
        try:
            if len(set(await asyncio.gather(*ranges))) > 1:
                return Loaded(Outcome.DAMAGED)  # another object has replaced it meanwhile
            self._owned.used(name.text())
            wanted = Record.read_of(bytes(sink.header), name, part.length).checksum
            return Loaded(Outcome.DONE, wanted, sink.sums)
        except FileNotFoundError:
            return Loaded(Outcome.MISSING)
        except RecordError:
            return Loaded(Outcome.DAMAGED)
        except self._obstore.exceptions.BaseError as error:
            if len(ranges) > 1 and "416 " in str(error):  # the object ends before the range
                return Loaded(Outcome.DAMAGED)
            raise
        finally:
            for one in ranges:
                one.cancel()
            await asyncio.gather(*ranges, return_exceptions=True)

    async def _put(self, record: Record, views: Sequence[memoryview]) -> Outcome:
        path, value = record.name.text(), [record.header(), *views]
        size = HEADER_BYTES + record.length
        async with self._storing:
            if size > self._location.multipart_bytes:
                await self._obstore.put_async(
                    self._store, path, value, use_multipart=True, chunk_size=CHUNK_BYTES, max_concurrency=UPLOADS
                )
            elif not await self._create(path, value):
                if self._can_create and await self._is_whole(record):
                    return Outcome.DONE
                await self._obstore.put_async(self._store, path, value, use_multipart=False)
            self._usage.stored(size)
            return Outcome.DONE

    async def _create(self, path: str, value: list[Any]) -> bool:
        """False: the object exists already, or the store cannot refuse to overwrite it."""
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
        """Whether the object that exists already is a whole record of this part."""
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
                    # Another server deletes the same objects, so each is deleted by itself.
                    await asyncio.gather(*(self._delete_one(path) for path in there))
        self._usage.deleted(len(there), sum(size for size in sizes if size is not None))
        return outcomes

    async def _delete_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._obstore.delete_async(self._store, path)


async def _awaited(request: Callable[[], Awaitable[T]]) -> T:
    return await request()


def _release(views: Sequence[memoryview]) -> None:
    """Waits until nothing reads the pages: a view that obstore still holds cannot be released. Raises StillRunning."""
    until_s = time.monotonic() + RELEASE_S
    for view in views:
        while True:
            try:
                view.release()
                break
            except BufferError:
                if time.monotonic() > until_s:
                    raise StillRunning(NAME, "obstore still reads pages of a store that was cancelled") from None
                time.sleep(0.001)  # obstore does not report when it releases a buffer


@dataclass(frozen=True, slots=True)
class _CachedNote:
    """A note as it was last read. `e_tag`: that of its object. `written_s`: when the object was written, in Unix
    seconds, or when this server has last written an earlier version again."""

    note: Note
    e_tag: str | None
    written_s: float


def _judge(error: BaseException) -> Outcome:
    if isinstance(error, asyncio.CancelledError):
        return Outcome.LATE
    if any(mark in str(error) for mark in _FULL):
        return Outcome.FULL
    return Outcome.FAILED


def _brief(error: BaseException) -> str:
    """The error without the details that obstore adds for its own developers."""
    return f"{type(error).__name__}: {' '.join(str(error).partition('Debug source')[0].split())[:800]}"


STORE: Final = Store(open_tier, check=_locate)


# --------------------------------------------------------------------------- the URL

# Reads the URL of an object store, and opens the store with obstore.

MIB: Final = 1 << 20
DAY_S: Final = 86400.0
UNUSED_DAYS: Final = 30
"""A namespace that no server has served for so long is removed, unless the URL says otherwise: an upgrade or other
weights have left it."""
CONNECT_S: Final = 5
REQUEST_S: Final = 3600
"""Longer than any deadline, so that the deadline ends a request."""

_ANY: Final = {"connections": whole(1, 256)}
_LIMITS: Final = {"bytes": some_bytes, "tenant_bytes": some_bytes, "unused_days": whole(0, 36500)}
_PRICES: Final = {"read_price": price, "write_price": price}
_REMOTE: Final = {**_ANY, "ca_file": existing_file, "retries": whole(0, 10)}
_CLOUD: Final = {
    **_REMOTE, **_LIMITS, **_PRICES, "endpoint": some_text, "machine_role": yes_or_no, "multipart_mib": whole(5, 5120),
    "skip_signature": yes_or_no,
}  # fmt: skip
_S3: Final = {
    **_CLOUD, "region": some_text, "unsigned_payload": yes_or_no, "virtual_hosted": yes_or_no, "create": yes_or_no,
}  # fmt: skip
_AZURE: Final = {**_CLOUD, "account": some_text}
_OPTIONS: Final[Mapping[str, Mapping[str, Callable[[str], Any]]]] = {
    "az": _AZURE, "file": {**_ANY, **_LIMITS}, "gs": _CLOUD, "http": _REMOTE, "https": _REMOTE, "s3": _S3,
}  # fmt: skip
_NAMES: Final = {  # obstore's names of the parameters
    "account": "account_name", "endpoint": "endpoint", "region": "region", "skip_signature": "skip_signature",
    "unsigned_payload": "unsigned_payload", "virtual_hosted": "virtual_hosted_style_request",
}  # fmt: skip

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE", "AZURE_USE_AZURE_CLI", "AZURE_SKIP_SIGNATURE",
    ),
}  # fmt: skip
"""The environment variables, by scheme, with one of which obstore asks no metadata service of a cloud."""
_GOOGLE_FILE: Final = Path(".config/gcloud/application_default_credentials.json")
"""Where obstore finds Google's credentials too, in the user's home."""


@dataclass(frozen=True)
class StoreLocation:
    """`store`: obstore's object. `connections`: how many loads, how many stores, and how many other requests may be in
    progress at once. `can_create`: whether the store can refuse to overwrite an object. `ranges`: whether ranges of an
    object can be requested. `multipart_bytes`: larger objects are uploaded in several requests at once. `folder`: set
    if the store is a folder of this machine. `limits`: what it may have. `prices`: what its requests cost. `signs`:
    whether obstore signs URLs of the objects, and needs no request for it. `authority`: see Receiver."""

    store: Any
    read_only: bool
    can_create: bool
    ranges: bool
    connections: int
    multipart_bytes: int
    folder: Path | None = None
    limits: Limits = NO_LIMITS
    prices: Prices = NO_PRICES
    signs: bool = False
    authority: bytes | None = None


def open_location(url: str, stores: Any) -> StoreLocation:
    """`stores`: the module obstore.store. Raises TierUrlError."""
    found = read_url(url, tuple(_OPTIONS), _OPTIONS.get(url.partition(":")[0], {}))
    scheme, options = found.parts.scheme, found.options
    if found.user is not None:
        raise TierUrlError(f"{scheme}: found a user in the URL, wanted credentials in the environment")
    folder = Path(unquote(found.parts.path)) if scheme == "file" else None
    connections, create = options.pop("connections", 64), options.pop("create", True)
    multipart_bytes = options.pop("multipart_mib", 64) * MIB
    is_http = scheme in ("http", "https")
    limits = NO_LIMITS if is_http else Limits(
        options.pop("bytes", 0), options.pop("tenant_bytes", 0), options.pop("unused_days", UNUSED_DAYS) * DAY_S
    )
    prices = Prices(options.pop("write_price", 0.0), options.pop("read_price", 0.0))
    authority = options["ca_file"].read_bytes() if "ca_file" in options else None
    is_signed = not options.get("skip_signature") and not os.environ.get("AWS_SKIP_SIGNATURE")
    try:
        store = _local(found, stores) if scheme == "file" else _remote(found, stores)
    except TierUrlError:
        raise
    except Exception as error:  # obstore raises errors of its own and of Python
        raise TierUrlError(f"{scheme}: wanted a URL that obstore can use: {error}") from error
    return StoreLocation(
        store, is_http, create, not is_http, connections, multipart_bytes, folder, limits, prices,
        # For Google's and Azure's, obstore may ask another service to sign, even with skip_signature.
        signs=scheme == "s3" and is_signed, authority=authority,
    )


def _local(found: TierUrl, stores: Any) -> Any:
    path = Path(unquote(found.parts.path))
    if found.parts.netloc or not path.is_absolute() or not path.is_dir():
        raise TierUrlError(f"file: found {found.parts.netloc}{path}, wanted file:///PATH of a folder that exists")
    return stores.LocalStore(prefix=path)


def _remote(found: TierUrl, stores: Any) -> Any:
    parts, options = found
    if not parts.hostname:
        raise TierUrlError(f"{parts.scheme}: found no name of a bucket, container or host, wanted one")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S), "read_timeout": timedelta(seconds=SILENCE_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }  # fmt: skip
    if (authority := options.pop("ca_file", None)) is not None:
        client["root_certificate"] = authority.read_bytes()
    if parts.scheme == "http" or str(options.get("endpoint", "")).startswith("http://"):
        client["allow_http"] = True
    retry = {
        "max_retries": options.pop("retries", 2), "retry_timeout": timedelta(seconds=SILENCE_S),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
    }  # fmt: skip
    arguments: dict[str, Any] = {"client_options": client, "retry_config": retry}
    if parts.scheme in ("http", "https"):
        return stores.HTTPStore(f"{parts.scheme}://{parts.netloc}{parts.path}", **arguments)
    may_lack_keys = options.pop("machine_role", False) or options.get("skip_signature", False)
    arguments |= {_NAMES[name]: value for name, value in options.items()}
    if parts.scheme == "gs" and "endpoint" in arguments:
        arguments["base_url"] = arguments.pop("endpoint")
    kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[parts.scheme]
    store = kind(parts.netloc, prefix=unquote(parts.path).strip("/") or None, **arguments)
    if not may_lack_keys:
        _require_keys(parts.scheme)
    return store


def _require_keys(scheme: str) -> None:
    """Without credentials obstore would ask the cloud's metadata service for them, at an address that may be anybody's
    on another network, and again with each request. Raises TierUrlError."""
    if any(os.environ.get(name) for name in _KEYS[scheme]):
        return
    if scheme == "gs" and (Path.home() / _GOOGLE_FILE).is_file():
        return
    raise TierUrlError(
        f"{scheme}: found no credentials in the environment, wanted {_KEYS[scheme][0]} or another variable of "
        "docs/operate/tiers_objects.md, machine_role=yes in the URL to ask the cloud's metadata service for the "
        "machine's role, or skip_signature=yes to use none"
    )
