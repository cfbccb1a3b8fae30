"""What a scheduler connector knows of requests: their keys, what was looked up for them, and how far they are stored.

Nothing here starts a thread, and only withdraw_promise() calls the server. `Requests.lock` guards all entries; lookups
(kvdock/connectors/lookups.py) and stores (kvdock/connectors/stores.py) share them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvdock.connectors.session import Attachment, EngineSession, notify
from kvdock.connectors.waits import NOTHING, Expected
from kvdock.protocol.keys import KeyChain, beginnings_of
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.schemas import LookupAnswer
from kvdock.protocol.wire_types import MAX_KEYS

MISS = LookupAnswer(hit_tokens=0, lease=None, first_chunk=0, chunks=[])


class Chain(Protocol):
    """The keys of a request's chunks, from its first chunk on."""

    @property
    def keys(self) -> list[bytes]: ...

    @property
    def parent(self) -> bytes | None:
        """The key of the chunk before the first one, if the engine starts in the middle of a sequence. None: the first
        chunk starts the sequence. UNKNOWN_PARENT: the engine does not know the key."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Extends the chain to `tokens`: all tokens of the request that are known so far."""


ChainOf = Callable[[str, bytes, int], Chain]
"""Makes the chain of a request from its id, the namespace and the tokens of a chunk."""


def chain_of_tokens(request_id: str, namespace: bytes, chunk_tokens: int) -> Chain:
    return KeyChain(namespace, chunk_tokens)


class ChunkObserver:
    """Learns which chunks requests have, and which of them the server has. This base class ignores both."""

    def known(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Called before chunks of a request are looked up or stored. `keys`: their keys, from the request's first chunk
        on."""

    def asking(self, attachment: Attachment) -> Callable[[Sequence[bytes]], None]:
        """Called before a lookup or a reservation is sent. Returns a callback, to be called with the keys of the chunks
        that the server has by its answer."""
        return lambda keys: None

    def names(self, request_id: str, first: int, end: int) -> Sequence[BlockNames | None]:
        """The names by which routers know the request's chunks [first, end), as far as they are known; () if none is.
        Called in the engine's thread, when the request is about to store the chunks."""
        return ()


@dataclass(frozen=True)
class RequestCallbacks:
    """Facts that only the engine knows about its requests. Each callback gets a request's id."""

    chain_of: ChainOf = chain_of_tokens
    is_stored: Callable[[str], bool] = lambda request_id: True
    """Whether the chunks that the request computes may be stored."""
    traceparent_of: Callable[[str], str] = lambda request_id: ""
    """The trace context that the engine got with the request; empty: none."""
    observer: ChunkObserver = field(default_factory=ChunkObserver)
    has_tokens: bool = True
    """Whether lookups and stores get a prompt's tokens from its first one; else they get numbers in place of tokens."""


@dataclass
class LookupState:
    """The question that was sent for a request, and the answers to it."""

    asked: tuple[int, int] | None = None
    """(number of keys, local tokens) of the last question; None: there is none."""
    answer: LookupAnswer | None = None
    newer: LookupAnswer | None = None
    """The answer to the same question, sent again. The next lookup reads it."""
    verifying: LookupAnswer | None = None
    """The answer whose verification has started."""
    verified: LookupAnswer | None = None
    epoch: int = 0
    """The epoch of the question; 0: the next question takes a new one."""
    handed_out: str | None = None
    """The lease of the last plan, until the server has asked about it."""

    @property
    def newest(self) -> LookupAnswer | None:
        return self.newer if self.newer is not None else self.answer

    @property
    def lease(self) -> str | None:
        """The newest lease that the server has granted and that no rank has."""
        return self.newest.lease if self.newest is not None else None

    @property
    def expected(self) -> Expected:
        """The chunks that may still come, by the newest answer."""
        if self.newest is None:
            return NOTHING
        # If a limit cut the answer, chunks that others store are of no use.
        return Expected(self.newest.being_stored if self.newest.limited_by is None else None, self.newest.pending)

    def take_newer(self) -> None:
        """Makes the newest answer the one that counts, unless the verification of the older one has started."""
        if self.newer is not None and self.verifying is not self.answer:
            self.answer, self.newer = self.newer, None

    def forget_answer(self) -> None:
        self.asked = self.answer = self.newer = None

    def forget(self) -> None:
        self.forget_answer()
        self.epoch = 0


@dataclass
class StoreProgress:
    """How far a request is stored, in chunks from its first."""

    offered: int = 0
    """Chunks [0, offered) are stored, or were offered to the server."""
    reserved: int = 0
    """Chunks [0, reserved) are at the server, or being stored there. A chunk behind a gap is not reserved, because no
    lookup could find it."""
    promised: int = 0
    """Chunks [0, promised) were named by a lookup that promised that the request computes and stores the missing ones.
    """
    fell_short_at: int = 0
    """How many chunks were offered when some of them could not be stored. Those are offered again once the request has
    more chunks, or when it ends. 0: all were stored so far."""

    @property
    def has_pending_promise(self) -> bool:
        """Whether the request has promised chunks that it has not offered yet."""
        return self.offered < self.promised

    def falls_short(self, chunk: int) -> None:
        """The chunks from `chunk` on were offered, and could not be stored."""
        self.fell_short_at = max(self.offered, self.fell_short_at)
        self.offered, self.reserved = min(self.offered, chunk), min(self.reserved, chunk)

    def restart(self) -> None:
        """The engine has not computed the chunks that it has offered, or computes them again."""
        self.offered = self.reserved = self.fell_short_at = 0

    def loaded(self, chunks: int) -> None:
        """The first `chunks` chunks are loaded from the server: they are not offered to it."""
        self.offered, self.reserved = max(self.offered, chunks), max(self.reserved, chunks)

    def limit(self, chunks: int) -> None:
        """The chunks behind the first `chunks` chunks that were loaded are damaged."""
        self.offered, self.reserved = min(chunks, self.offered), min(chunks, self.reserved)
        self.fell_short_at = min(chunks, self.fell_short_at)


@dataclass
class RequestState:
    """The state of one request, from its first lookup or store until it is finished or preempted."""

    chain: Chain
    attachment: Attachment
    lookup: LookupState = field(default_factory=LookupState)
    store: StoreProgress = field(default_factory=StoreProgress)
    beginnings: str = ""
    """See beginnings_of() in kvdock/protocol/keys.py; empty: not known."""
    ceiling: int = MAX_KEYS
    """Chunks from here on are not looked up: one of them failed to load."""

    def keys_of(self, chunks: int) -> list[bytes]:
        """The keys of the request's first `chunks` chunks, as far as they are looked up."""
        return self.chain.keys[: min(chunks, self.ceiling)]

    def limit(self, chunks: int) -> None:
        """The chunks behind the first `chunks` chunks that were loaded are damaged."""
        self.ceiling = min(chunks, self.ceiling)
        self.store.limit(chunks)


class Requests(dict[str, RequestState]):
    """Requests by id. `lock` guards the dict and all states in it. `promises`: whether lookups promise to store the
    chunks that they do not find."""

    def __init__(self, session: EngineSession, callbacks: RequestCallbacks, *, promises: bool) -> None:
        super().__init__()
        self.session, self.callbacks, self.promises = session, callbacks, promises
        self.lock = threading.Lock()
        self._epoch = 0

    def known(self, request_id: str, tokens: Sequence[int]) -> RequestState | None:
        """Under `lock`: the request's entry with keys for all of `tokens`; None while the server is lost."""
        attachment = self.session.attachment
        if attachment is None:
            return None  # an existing entry stays: if the server comes back, its lease may still be valid
        request = self.get(request_id)
        if request is None or request.attachment is not attachment:  # an entry of another epoch is void
            chain = self.callbacks.chain_of(request_id, attachment.namespace, self.session.manifest.chunk_tokens)
            request = self[request_id] = RequestState(chain, attachment)
            if self.callbacks.has_tokens:
                request.beginnings = beginnings_of(tokens)
        request.chain.follow(tokens)
        return request

    def leased(self, request_id: str) -> RequestState | None:
        """Under `lock`: the request, if the answer to its lookup has a lease."""
        request = self.get(request_id)
        answer = request.lookup.answer if request is not None else None
        return request if answer is not None and answer.lease is not None else None

    def known_keys(self, request_id: str) -> tuple[Attachment, tuple[bytes, ...]] | None:
        """The keys of the request's chunks, from its first; None when it was neither looked up nor stored."""
        with self.lock:
            request = self.get(request_id)
            return (request.attachment, tuple(request.chain.keys)) if request is not None else None

    def next_epoch(self) -> int:
        """Under `lock`: an epoch for a lookup, higher than all before."""
        self._epoch += 1
        return self._epoch

    def withdraw_promise(self, attachment: Attachment, request_id: str, request: RequestState | None) -> None:
        """Background: reports to the server that the request stores no more of its promised chunks. Does nothing if
        the id has another entry by now: that request came back and has promised anew. `request` None: does nothing if
        the id has any entry."""
        if self.promises and self.get(request_id, request) is request:
            notify(self.session, attachment, self.session.client.withdraw, attachment.session, [request_id])
