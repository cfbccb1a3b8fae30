"""The interface of a lower tier. A tier keeps parts of chunks below the shared pool: on a disk or in a store.

The mover calls its verbs. They work on slots in place: store() reads the bytes from shared memory, and load() writes
them there.

Thread safety: any number of threads may call the verbs at the same time, except close(), which is called last and
alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvdock.shm.checksum import checksum
from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName, Record

PAGE_BYTES: Final = 4096
"""Direct I/O needs addresses, lengths and offsets that are multiples of this size."""


def pages_bytes(length: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


class TierError(Exception):
    """A tier as a whole does not work now: it cannot be reached, refuses calls, or its storage fails. `why`: the
    reason, in words."""

    def __init__(self, tier: str, why: str) -> None:
        super().__init__(f"{tier}: {why}")
        self.tier, self.why = tier, why


def require_own(tier: str, folder: Path) -> None:
    """Raises TierError if another user than root could put files of its own in the place of those in the folder: who
    can write both bytes and checksums can store anything. The group may write, as in volumes of Kubernetes."""
    try:
        found = folder.stat()
    except OSError as error:
        raise TierError(tier, f"{folder} cannot be used: {error.strerror}") from error
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & stat.S_IWOTH:
        wanted = f"a folder of user {os.geteuid()} or root that others cannot write to"
        raise TierError(tier, f"{folder}: found {stat.filemode(found.st_mode)} of user {found.st_uid}, wanted {wanted}")


class TierUrlError(ValueError):
    """The tier cannot use its URL, or what the URL points to. The message names the value found and the value wanted,
    and contains no password."""


class NotInstalled(TierError):
    """A package that the tier needs cannot be imported. Only another start with the package can mend this."""


class ReadOnly(TierError):
    """The tier works, but nothing in it can be changed."""


class NotEverywhere(TierError):
    """A deletion holds here: its keys are not read. Some of the nodes that share their pools do not know it yet. Those
    are not read until they do."""


class NotAll(TierError):
    """Some of the notes that were asked for are not known, as where one server of a cluster is lost. `known`: the
    others, by namespace."""

    def __init__(self, tier: str, why: str, known: Mapping[bytes, Note | None]) -> None:
        super().__init__(tier, why)
        self.known = known


class NoSpace(ReadOnly):
    """Nothing can be changed because there is no space."""


class StillRunning(TierError):
    """A verb has failed, and may still use a slot. Only the end of the process stops it."""


class Deadline:
    """The time by which a verb has to return, and whether its caller has cancelled the verb. `seconds`: the time from
    now on."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._cancelled = clock, threading.Event()
        self._until_s = clock() + seconds

    def cancel(self) -> None:
        """May be called from any thread."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def left_s(self) -> float:
        """The seconds that are left; 0 once the deadline has passed or was cancelled."""
        return 0.0 if self._cancelled.is_set() else max(0.0, self._until_s - self._clock())

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0


class Outcome(Enum):
    DONE = "done"
    MISSING = "missing"
    """The tier does not have the part."""
    LATE = "late"
    """The deadline passed, or was cancelled, before the part was done."""
    FULL = "full"
    """There is no space for the part, and none can be freed."""
    TOO_LARGE = "too_large"
    """The tier takes no record of that length, however much space there is."""
    DAMAGED = "damaged"
    """The tier has something under this name that is not a whole record of the part."""
    FAILED = "failed"
    """The tier or its storage failed for this part."""


def known_notes(tier: str, namespaces: Sequence[bytes], found: Sequence[Note | Outcome | None]) -> list[Note | None]:
    """The notes found. `found`: for each namespace its note, or why that is not known. Raises NotAll, TierError."""
    why = next((f"the note of a namespace is not known: {one.value}" for one in found if isinstance(one, Outcome)), "")
    known = {at: one for at, one in zip(namespaces, found, strict=True) if not isinstance(one, Outcome)}
    if why:
        raise NotAll(tier, why, known) if known else TierError(tier, why)
    return [known[namespace] for namespace in namespaces]


class Loaded(NamedTuple):
    outcome: Outcome
    checksum: int = 0
    """DONE: the checksum in the record, which the caller compares with the bytes (W3 in
    docs/understand/lifetime_protocol.md)."""
    hashed: Sequence[int] = ()
    """DONE: the checksum of each piece of ToLoad.views(), where the tier hashes in the pass that copies.
    Empty: the caller hashes them."""


@dataclass(frozen=True)
class Usage:
    """`bytes_limit`: 0 where the tier knows no limit. `wear_bytes`: the bytes written to storage since the tier was
    opened, including the tier's own copies."""

    objects: int
    bytes_used: int
    bytes_limit: int
    wear_bytes: int


class OwnUsage:
    """Counts what one instance of a tier has stored, less what it has deleted. Other processes may store and delete,
    too. `wears_out`: whether the storage wears out, so that written bytes are counted. Thread-safe."""

    def __init__(self, *, wears_out: bool) -> None:
        self._wears_out, self._lock = wears_out, threading.Lock()
        self._objects = self._bytes = self._written_bytes = 0

    def stored(self, size_bytes: int) -> None:
        with self._lock:
            self._objects += 1
            self._bytes += size_bytes
            self._written_bytes += size_bytes

    def deleted(self, objects: int, size_bytes: int) -> None:
        with self._lock:
            self._objects -= objects
            self._bytes -= size_bytes

    def view(self) -> Usage:
        with self._lock:
            wear_bytes = self._written_bytes if self._wears_out else 0
            return Usage(max(0, self._objects), max(0, self._bytes), 0, wear_bytes)


class ToLoad(NamedTuple):
    """A part to load, and the memory for its bytes. `pages`: writable memory that begins at a multiple of PAGE_BYTES
    and has `length` bytes, rounded up to whole pages; the bytes after `length` have no meaning. `others`: see
    Gathers."""

    name: PartName
    length: int
    pages: memoryview
    others: Sequence[memoryview] = ()

    def views(self) -> list[memoryview]:
        """The memory of the bytes, in their order."""
        return _views(self.pages, self.others, self.length)


class ToStore(NamedTuple):
    """A part to store, and the memory that has its bytes. `pages`, `others`: see ToLoad."""

    record: Record
    pages: memoryview
    others: Sequence[memoryview] = ()

    def views(self) -> list[memoryview]:
        """The memory of the bytes, in their order."""
        return _views(self.pages, self.others, self.record.length)


def _views(pages: memoryview, others: Sequence[memoryview], length: int) -> list[memoryview]:
    return [pages[: length - sum(map(len, others))], *(other[:] for other in others)]


def sum_of(part: ToLoad, loaded: Loaded) -> int:
    """The checksum of the bytes that a load has brought, which are DONE."""
    return loaded.hashed[0] if loaded.hashed else checksum(part.pages[: part.length])


def cut(views: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """The memory of the bytes [begin, end) of all these bytes in a row."""
    found, at = [], 0
    for view in views:
        some = view[max(0, begin - at) : max(0, end - at)]
        if len(some):
            found.append(some)
        at += len(view)
    return found


def address_of(memory: memoryview) -> int:
    """Where writable memory begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@runtime_checkable
class Gathers(Protocol):
    """A tier whose records may have the parts of all writers, because each request takes a while. `pages` of what it
    loads and stores has only the first bytes of such a record, and `others` the rest, in pieces of exactly their
    lengths. All of this memory may begin at any address."""

    gathers: bool


@runtime_checkable
class Bounds(Protocol):
    """A tier that takes no record whose part is longer than `longest_part`, in bytes."""

    @property
    def longest_part(self) -> int: ...


@runtime_checkable
class LoadsMany(Protocol):
    """A tier of which each load takes long, however small it is. `loads_at_once`: how many calls of load() it wants."""

    loads_at_once: int


@runtime_checkable
class Lists(Protocol):
    """A tier that lists what it had when it was opened."""

    def take_listed(self) -> Sequence[tuple[bytes, bytes]] | None:
        """(namespace, key) of some chunks of which it has the first group's part of the first writer, and which were
        not listed before. None: there are none for now. Returns soon."""

    @property
    def is_listed(self) -> bool:
        """Whether all were listed."""


@runtime_checkable
class TellsGone(Protocol):
    """A tier that knows which parts it has no more: it has evicted them, they were cleared or deleted, or damaged."""

    def gone(self) -> Sequence[PartName]:
        """The parts that went since the last call, and have not come back. To be called every few seconds."""


@runtime_checkable
class TellsFaults(Protocol):
    """A tier that knows what its storage said when a part failed."""

    @property
    def fault(self) -> str:
        """The last error, with the file and the name of the error; "": there was none."""


@runtime_checkable
class CountsRequests(Protocol):
    """A tier whose store may bill each request."""

    def requests(self) -> Mapping[str, int]:
        """How many requests there were since it was opened, by verb. Returns at once, without one."""

    @property
    def dollars(self) -> float:
        """What they have cost, by the prices in its URL; 0: it has none."""


@runtime_checkable
class OnlyRead(Protocol):
    """A tier whose URL says whether it can be written."""

    @property
    def is_only_read(self) -> bool:
        """Whether nothing can be stored in it or changed."""


@runtime_checkable
class Sweeps(Protocol):
    """A tier that removes parts of former generations only when it is asked to."""

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        """Removes parts of the namespace that `note` does not name, as many as it can before the deadline. Returns how
        many were removed; 0: none is left. Raises TierError."""


class Limits(NamedTuple):
    """What a store may have of this project, for all servers that use it. 0: there is no limit."""

    bytes: int = 0
    tenant_bytes: int = 0
    unused_s: float = 0.0
    """How long a namespace is kept after its last use."""


NO_LIMITS: Final = Limits()


class Holding(NamedTuple):
    """What a tier has of one namespace. `label`: what was last passed to Owned.mark(); b"": nothing. `objects`,
    `bytes`: of its parts, in all generations. `unused_s`: since it was last marked; infinite if that is not known.
    `by_age`: the bytes, by how many AGE_S ago they were stored or, where the tier can tell, used. Times are those of
    the storage's clock."""

    namespace: bytes
    label: bytes
    objects: int
    bytes: int
    unused_s: float
    by_age: Mapping[int, int]


AGE_S: Final = 600.0


@runtime_checkable
class Owned(Protocol):
    """A tier that can list and remove what it has of each namespace."""

    limits: Limits

    def mark(self, namespace: bytes, label: bytes, deadline: Deadline) -> None:
        """The namespace is used now. Raises TierError."""

    def holdings(self, deadline: Deadline) -> list[Holding]:
        """Raises TierError, also if they are not all known by the deadline."""

    def empty(self, namespace: bytes, older_s: float, deadline: Deadline) -> int:
        """Removes some of what is older, as in Holding.by_age, or with 0 all parts; returns how many: 0 if none is
        left. Notes stay. Raises TierError."""

    def forget(self, namespace: bytes, deadline: Deadline) -> None:
        """Removes the note and the mark of a namespace that was emptied. Raises TierError."""


@runtime_checkable
class Registers(Protocol):
    """A tier whose library must know the pool's memory before it is used. The mover registers each segment of the pool
    that it maps (kvdock/tiers/mover/namespaces.py, PoolMemory)."""

    def register(self, address: int, length: int) -> None:
        """Called before slots in this memory are passed to verbs. A slot in memory that is not registered costs one
        more copy. Raises TierError."""

    def unregister(self, address: int) -> None:
        """Called before the memory is unmapped, when no verb uses it. It is no error if the memory is not
        registered."""


class Coming(NamedTuple):
    """Which of some chunks another node has and loads. `there`: how many of them, from the first, its pool has; `lease`
    holds them there. `expected`: how many, from the first, it is loading for itself."""

    there: int
    expected: int
    lease: int


class Place(NamedTuple):
    """A node's place among those that want one prefix. `source`: the node that it reads it from; "": it loads it from a
    store itself. `depth`: how many nodes what it reads has passed before. `nodes`: how many want the prefix so far."""

    source: str
    depth: int
    nodes: int = 1


AT_STORE: Final = Place("", 0)


@runtime_checkable
class SharesPool(Protocol):
    """A tier that is the pools of other nodes: nothing is written to it. They read this node's pool by its engine.
    `node`: the name of this node among them. `are_many`: whether to ask all of them costs more than to ask one before.
    """

    node: str
    are_many: bool

    def admit(self, address: str) -> str:
        """The engine at this address may read registered memory. Returns the name of this node's engine. Raises
        ValueError: it is no IP address."""

    def claimed(self, namespace: bytes, generation: int, key: bytes, claimer: str) -> Place:
        """The node `claimer` is about to load the chunk and those after it from a store. Returns its place."""

    def claim(self, name: PartName, deadline: Deadline) -> Place:
        """This node is about to load the part's chunk and those after it from a store. Returns its place."""

    def coming(self, at: Place, names: Sequence[PartName], lease: int, deadline: Deadline) -> Coming | None:
        """What the source has, and what comes there, of some chunks, each with the name of one part, all of one
        namespace. Waits for the first of them while it is coming there. Ends the `lease` of an earlier call; 0: there
        is none. None: the source does not answer."""

    def lag_s(self, node: str) -> float:
        """How long the node has taken to answer lately, without the time for which it was asked to wait."""

    def release(self, node: str, lease: int, name: PartName) -> None:
        """Ends a lease of coming(). `name`: of one of its parts."""


class Tier(Protocol):
    """Verbs on batches of names or parts give one answer for each item, in order. A verb returns when it is done or
    soon after the deadline, whichever comes first; items that it has not begun by then are LATE.

    Each verb raises TierError where the tier as a whole does not work. Once a verb has returned, or has raised anything
    except StillRunning, it does not use the memory that it was given any more (W1,
    docs/understand/lifetime_protocol.md). The bytes of pages are undefined after a load that is not DONE.
    """

    name: str
    """One word, such as "disk"."""
    poll_s: float
    """How often its notes are read, because other servers may have changed them; 0: no other server uses its
    storage."""
    recheck_s: float
    """How long a part that was found there is taken to be there still. While prompts ask for it, the tier is then asked
    again: the part may have been evicted, or have expired, without a word."""

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        """For each name, whether the tier has the part; also False if the answer is not known by the deadline. A tier
        that evicts what was not used for long counts this as a use."""

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        """DONE: the pages have the part of that name and length, whole as far as the tier can see without hashing
        it."""

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        """DONE: the part can be loaded from now on. If the tier has the part already, it stays or is replaced."""

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        """Deletes parts. After DONE and after MISSING the tier does not have the part."""

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        """The tier's note of each namespace (kvdock/tiers/notes.py); None: it has none. Raises TierError also if the
        deadline passes before all are known; NotAll if some are."""

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """Changes the namespace's note in one step, and returns the new one. Raises TierError if it is not known
        whether the note has changed, NotEverywhere if it has to be told again, ReadOnly if notes cannot be changed.
        """

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        """The namespaces that have a note, as far as the tier can list them. Raises TierError."""

    def usage(self) -> Usage:
        """The tier's usage. Returns at once, without a call to storage or to a server."""

    def close(self, deadline: Deadline) -> None:
        """Stops the tier's own threads, and makes durable what the tier promises to keep."""


def registers_nothing(url: str) -> bool:
    """Returns False: for stores whose tiers need not know the pool's memory."""
    return False


def refuses_nothing(url: str) -> None:
    """For stores that know only once they are opened whether they can be used."""


class Store(NamedTuple):
    """A kind of storage that other machines can reach. A package adds one by an entry point of the group
    `kvdock.tiers`, which names an object of this class (docs/understand/add_a_store.md).

    `open_tier`: takes the URL from the server's settings, and a deadline. It raises TierUrlError if the URL can never
    be used, and TierError if it cannot be used now; then it is called again some seconds later. The tier's `name` is
    the entry point's. `registers_memory`: takes the URL, and returns whether its tier is one that Registers. It is
    called before the tier is opened, and raises TierUrlError. `check`: takes the URL, and raises what `open_tier` would
    raise for it whatever the store does: TierUrlError, or NotInstalled. The server calls it before it starts."""

    open_tier: Callable[[str, Deadline], Tier]
    registers_memory: Callable[[str], bool] = registers_nothing
    check: Callable[[str], object] = refuses_nothing
