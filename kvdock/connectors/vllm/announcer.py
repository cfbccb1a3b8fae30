"""Announces chunks to a router: the chunks that this instance can load instead of computing them.

The server reports with each heartbeat which chunks of the namespace its lookups find from then on, and which they no
longer find, whichever engine stored them. A router knows blocks by vLLM's hashes and their tokens. This instance knows
hashes and tokens only of chunks that it looked up or computed, so only these chunks are announced. Chunks that were
stored before this instance attached are announced when a lookup or store next meets them.

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
from typing import Any

from kvdock.connectors.requests import ChunkObserver
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.connectors.vllm.request_tag import is_plain
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.schemas import Changes

UNANNOUNCED_CHUNKS = 1 << 14
"""The most chunks that are remembered while they are not announced, because the server does not have them or because
that was not reported yet. The oldest ones are forgotten. Each takes some 1.5 KB."""
STEP_CHUNKS = 1024
"""The most chunks that are announced in one step of the engine: vLLM takes some 15 us for each."""


@dataclass(frozen=True)
class Chunk:
    """`hashes`: vLLM's hashes of its blocks; `parent`: the hash of the block before; `tokens`: unsigned 32-bit
    integers."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]


Namer = Callable[[Any, int], BlockNames | None]
"""Makes the names by which routers know a chunk of a request, from its number; None: vLLM has not hashed all of it."""


def chunk_of(request: Any, at: int, hashes: int, chunk_tokens: int) -> Chunk | None:
    """The request's chunk number `at`. `hashes`: how many hashes a chunk has. None: vLLM has not hashed all of it."""
    first = at * hashes
    found = tuple(request.block_hashes[first : first + hashes])
    if len(found) < hashes:
        return None
    parent = request.block_hashes[first - 1] if first else None
    return Chunk(found, parent, array("I", request.all_token_ids[at * chunk_tokens : (at + 1) * chunk_tokens]))


@dataclass(frozen=True)
class ChunkChange:
    chunk: Chunk
    is_there: bool


class Announcer:
    """`session`: that of the scheduler's process, not started yet; `hash_tokens`: how many tokens each of vLLM's hashes
    adds."""

    def __init__(self, session: EngineSession, chunk_tokens: int, hash_tokens: int) -> None:
        self._session, self._chunk_tokens, self._hashes = session, chunk_tokens, chunk_tokens // hash_tokens
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

    def know(self, request: Any, keys: Sequence[bytes]) -> None:
        """Remembers the names of the request's chunks. `keys`: their keys, from the request's first chunk."""
        with self._lock:
            for at, key in enumerate(keys):
                if key in self._unannounced:
                    self._unannounced.move_to_end(key)
                elif key not in self._announced and (
                    chunk := chunk_of(request, at, self._hashes, self._chunk_tokens)
                ) is not None:
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
    """Reports the chunks of requests to the announcer, and the names that `namer` makes to a server that publishes
    events for routers itself. `request_of`: finds a request by its id. Chunks that depend on more than tokens are not
    announced: a router that hashes tokens alone would send other requests to them."""

    def __init__(self, announcer: Announcer | None, namer: Namer | None, request_of: Callable[[str], Any]) -> None:
        self._announcer, self._namer, self._request_of = announcer, namer, request_of

    def asking(self, attachment: Attachment) -> Callable[[Sequence[bytes]], None]:
        return self._announcer.asking(attachment) if self._announcer is not None else super().asking(attachment)

    def known(self, request_id: str, keys: Sequence[bytes]) -> None:
        request = self._request_of(request_id)
        if self._announcer is not None and is_plain(request):
            self._announcer.know(request, keys)

    def names(self, request_id: str, first: int, end: int) -> Sequence[BlockNames | None]:
        request = self._request_of(request_id)
        if self._namer is None or not is_plain(request):
            return ()
        return [self._namer(request, at) for at in range(first, end)]
