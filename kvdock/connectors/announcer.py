"""Announces chunks to a router: the chunks that this instance can load instead of computing them.

The server reports with each heartbeat which chunks of the namespace its lookups find from then on, and which they no
longer find, whichever engine stored them. A router knows blocks by the engine's hashes and their tokens. This instance
knows hashes and tokens only of chunks that it looked up or computed, so only these chunks are announced. Chunks that
were stored before this instance attached are announced when a lookup or store next meets them.

Invariants: stored and removed events alternate for each chunk; a lookup's result is dropped if a later heartbeat
reported the eviction, for evictions are reported once. Thread-safe: one lock.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvdock.connectors.requests import ChunkObserver
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.schemas import Changes

UNANNOUNCED_CHUNKS = 1 << 14
"""The most chunks that are remembered while they are not announced, because the server does not have them or because
that was not reported yet. The oldest ones are forgotten. Each takes some 1.5 KB."""
STEP_CHUNKS = 1024
"""The most chunks that are announced in one step of the engine, which takes some 15 us for each."""


@dataclass(frozen=True)
class Chunk:
    """`hashes`: the engine's hashes of its blocks; `parent`: the hash of the block before; `tokens`: unsigned 32-bit
    integers."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]


ChunkOf = Callable[[int], Chunk | None]
"""Makes a chunk of a request from its number; None: the engine has not hashed all of it."""
NameOf = Callable[[int], BlockNames | None]
"""Makes the names by which routers know a chunk of a request, from its number; None: as for ChunkOf."""


@dataclass(frozen=True)
class ChunkChange:
    chunk: Chunk
    is_there: bool


class Announcer:
    """`session`: that of the scheduler's process, not started yet."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._announced: dict[bytes, Chunk] = {}
        self._unannounced: OrderedDict[bytes, Chunk] = OrderedDict()
        self._changes: dict[bytes, bool] = {}
        """Changes since the last take(), by key: whether the server has the chunk."""
        self._gone: dict[bytes, int] = {}
        """By key of a known chunk that was removed, the number of the heartbeat that last reported the removal."""
        self._left: set[bytes] = set()
        """Announced chunks of earlier weights: once they were announced as removed, they are forgotten."""
        self._beats = self._all_gone = 0
        self._attachment: Attachment | None = None
        self._lock = threading.Lock()

    def know(self, keys: Sequence[bytes], chunk_of: ChunkOf) -> None:
        """Remembers the chunks of a request. `keys`: their keys, from the request's first chunk."""
        with self._lock:
            for at, key in enumerate(keys):
                if key in self._unannounced:
                    self._unannounced.move_to_end(key)
                elif key not in self._announced and (chunk := chunk_of(at)) is not None:
                    self._add(key, chunk)

    def asking(self, attachment: Attachment) -> Callable[[Sequence[bytes]], None]:
        """See ChunkObserver."""
        with self._lock:
            self._followed()
            asked = self._beats

        def found(keys: Sequence[bytes]) -> None:
            with self._lock:
                if attachment is self._followed() and asked >= self._all_gone:
                    known = [key for key in keys if key in self._announced or key in self._unannounced]
                    self._changes.update(
                        (key, True) for key in known if key not in self._left and self._gone.get(key, 0) <= asked
                    )

        return found

    def changed(self, attachment: Attachment, changes: Changes) -> None:
        """A heartbeat has reported `changes`."""
        with self._lock:
            self._beats += 1
            if attachment is not self._followed():
                return
            if not changes.complete:
                self._forget_all()
            for change in changes.changes:
                key = bytes.fromhex(change.key)
                if key not in self._left and (key in self._announced or key in self._unannounced):
                    self._changes[key] = change.is_there
                    self._gone.pop(key, None)
                    if not change.is_there:
                        self._gone[key] = self._beats

    def weights_changed(self) -> None:
        """This instance no longer loads chunks of earlier weights."""
        with self._lock:
            self._forget_all()
            self._left |= self._announced.keys()
            self._unannounced.clear()

    def announce_again(self) -> None:
        """Whoever reads the announcements has forgotten all chunks."""
        with self._lock:
            for key, chunk in self._announced.items():
                if key not in self._left:
                    self._unannounced[key] = chunk
                    self._changes.setdefault(key, True)
            self._announced.clear()
            self._left.clear()

    def take(self) -> list[ChunkChange]:
        """The changes since the last call: STEP_CHUNKS at most, the rest next time."""
        out = []
        with self._lock:
            self._followed()
            for key in list(islice(self._changes, STEP_CHUNKS)):
                is_there = self._changes.pop(key)
                chunk = (self._unannounced if is_there else self._announced).pop(key, None)
                if chunk is not None:
                    out.append(ChunkChange(chunk, is_there))
                    if is_there:
                        self._announced[key] = chunk
                    elif key in self._left:
                        self._left.discard(key)
                    else:
                        self._add(key, chunk)
        return out

    def _followed(self) -> Attachment | None:
        """Returns the present attachment. If it is a new one, drops the reports of the earlier one."""
        if self._attachment is not self._session.attachment:
            self._attachment = self._session.attachment
            self._forget_all()
        return self._attachment

    def _forget_all(self) -> None:
        self._changes = dict.fromkeys(self._announced, False)
        self._gone.clear()
        self._all_gone = self._beats

    def _add(self, key: bytes, chunk: Chunk) -> None:
        self._unannounced[key] = chunk
        if len(self._unannounced) > UNANNOUNCED_CHUNKS:
            oldest, _ = self._unannounced.popitem(last=False)
            self._gone.pop(oldest, None)


class Announcing(ChunkObserver):
    """Reports the chunks of requests to `announcer`, if there is one, and their names to a server that publishes events
    for routers itself. `chunks_of`, `names_of`: these of a request, by its id. None: there are none, or the chunks
    depend on more than tokens. Those are not announced: a router that hashes tokens alone would send other requests to
    them."""

    def __init__(
        self, announcer: Announcer | None, chunks_of: Callable[[str], ChunkOf | None],
        names_of: Callable[[str], NameOf | None],
    ) -> None:
        self._announcer, self._chunks_of, self._names_of = announcer, chunks_of, names_of

    def asking(self, attachment: Attachment) -> Callable[[Sequence[bytes]], None]:
        return self._announcer.asking(attachment) if self._announcer is not None else super().asking(attachment)

    def known(self, request_id: str, keys: Sequence[bytes]) -> None:
        if self._announcer is not None and (chunk_of := self._chunks_of(request_id)) is not None:
            self._announcer.know(keys, chunk_of)

    def names(self, request_id: str, first: int, end: int) -> Sequence[BlockNames | None]:
        name_of = self._names_of(request_id)
        return () if name_of is None else [name_of(at) for at in range(first, end)]
