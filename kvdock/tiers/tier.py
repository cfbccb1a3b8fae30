"""What a lower tier is: a place below the shared pool that keeps parts of chunks, on storage or at a store.

The process that moves bytes between the pool and the tiers (it is neither the server nor an engine) calls these verbs.
They work on slots in place: what is stored is read from shared memory, and what is loaded is written there.

Thread safety: any number of threads may call the verbs at the same time, but for close(), which comes last and alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName, Record

PAGE_BYTES: Final = 4096
"""What direct input and output want addresses, lengths and offsets to be multiples of."""


def pages_bytes(length: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


class TierError(Exception):
    """A tier as a whole does not work now: it is lost, refuses, or its storage fails. `why`: for people."""

    def __init__(self, tier: str, why: str) -> None:
        super().__init__(f"{tier}: {why}")
        self.tier, self.why = tier, why


class ReadOnly(TierError):
    """A tier works, and nothing in it can be changed."""


class StillRunning(TierError):
    """A verb has failed, and something of it may still write to a slot. Only the end of the process ends that."""


class Deadline:
    """When a verb has to return, and whether anybody still wants what it does. `seconds`: from now on."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._cancelled = clock, threading.Event()
        self._until_s = clock() + seconds

    def cancel(self) -> None:
        """From any thread."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def left_s(self) -> float:
        """Never negative; 0 once it is over or cancelled."""
        return 0.0 if self._cancelled.is_set() else max(0.0, self._until_s - self._clock())

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0.0


class Outcome(Enum):
    DONE = "done"
    MISSING = "missing"
    """The tier does not have it."""
    LATE = "late"
    """The deadline was over, or nobody wanted it any more, before it was done."""
    FULL = "full"
    """There is no room for it, and none can be made."""
    DAMAGED = "damaged"
    """What the tier has under this name is not a whole record of it."""
    FAILED = "failed"
    """The tier or its storage failed at this one."""


class Loaded(NamedTuple):
    outcome: Outcome
    checksum: int = 0
    """DONE: what the record says of its bytes, which the caller compares with the bytes (W3)."""


@dataclass(frozen=True)
class Usage:
    """`bytes_limit`: 0 where the tier knows none. `wear_bytes`: written to storage since the tier was opened, all of
    its own work counted."""

    objects: int
    bytes_used: int
    bytes_limit: int
    wear_bytes: int


class ToLoad(NamedTuple):
    """A part and where its bytes go. `pages`: writable memory that begins at a multiple of PAGE_BYTES, of `length`
    bytes rounded up to whole pages; what lies behind `length` has no meaning."""

    name: PartName
    length: int
    pages: memoryview


class ToStore(NamedTuple):
    """A part and where its bytes are. `pages`: as in ToLoad."""

    record: Record
    pages: memoryview


@runtime_checkable
class Lists(Protocol):
    """What a tier may be beside a Tier: one that knows at once all that it has."""

    def listed(self) -> Iterator[PartName]:
        """All that could be loaded now."""


@runtime_checkable
class Sweeps(Protocol):
    """A tier that has to be asked to remove what its notes do not name any more."""

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        """Removes parts of the namespace that `note` does not name, as many as the deadline lets it; returns how many.
        0: there is none left. Raises TierError."""


@runtime_checkable
class Registers(Protocol):
    """A tier whose library wants to know memory beforehand. Whoever maps segments of the pool tells such a tier."""

    def register(self, address: int, length: int) -> None:
        """Before slots there are given to verbs. Slots in memory that is not registered cost a copy. Raises
        TierError."""

    def unregister(self, address: int) -> None:
        """Before the memory is unmapped. No verb may be at work there."""


class Tier(Protocol):
    """Batched verbs: each answers for every one of its arguments, in their order. They return when they are done or
    soon after the deadline is over, whichever comes first; what was not begun by then is LATE.

    Raises TierError where the tier as a whole does not work. Once a verb has returned, or raised anything but
    StillRunning, nothing of it touches memory that it was given any more (docs/lifetime_protocol.md, W1). What load()
    has written to the pages is undefined after anything but DONE.
    """

    name: str
    """One word: "disk"."""
    poll_s: float
    """How often its notes are asked for, because other servers may have changed them; 0: nobody else uses its storage.
    """

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        """False also where the answer is not known by the deadline."""

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        """DONE: the pages have the record of that name and length, written whole as far as the tier can see without
        hashing it."""

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        """DONE: the part can be loaded from now on. What the tier has under the name already stays, or is replaced."""

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        """MISSING is as good as DONE: it is not there."""

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        """What the tier has noted of each (kvdock/tiers/notes.py); None: nothing. Raises TierError also where it is not
        known by the deadline."""

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """Changes the namespace's note in one step, and returns it. Raises TierError where that is not known to have
        been done (it may have been all the same), ReadOnly where it cannot be."""

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        """Those that have a note, as far as the tier can say. Raises TierError."""

    def usage(self) -> Usage:
        """At once: nothing is asked of others."""

    def close(self, deadline: Deadline) -> None:
        """Ends what runs by itself, and makes durable what a tier promises to be."""
