"""What the scheduler connector knows of requests, and what it hands to the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType

from kvdock.connectors.interface import BlocksRead
from kvdock.connectors.plans import StoreBatch
from kvdock.connectors.session import Attachment, EngineSession, tell
from kvdock.protocol.keys import KeyChain
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.schemas import BeingStored, Hint, Lookup, LookupAnswer, PendingTokens, Prefetch
from kvdock.protocol.wire_types import MAX_KEYS


class Chain(Protocol):
    """The keys of a request's chunks, from its first."""

    @property
    def keys(self) -> list[bytes]: ...

    @property
    def parent(self) -> bytes | None:
        """The key before the first, where an engine begins in the midst of a sequence; None: there is none;
        UNKNOWN_PARENT: it does not know."""

    def follow(self, tokens: Sequence[int]) -> None:
        """`tokens`: all that are known so far."""


ChainOf = Callable[[str, bytes, int], Chain]
"""Makes the chain of a request from its id, the namespace and the tokens of a chunk."""


def chain_of_tokens(request_id: str, namespace: bytes, chunk_tokens: int) -> Chain:
    return KeyChain(namespace, chunk_tokens)


MISS = LookupAnswer(hit_tokens=0, lease=None, first_chunk=0, chunks=[])


@dataclass
class RequestState:
    """What is known of one request, from its first lookup until it is finished or preempted."""

    chain: Chain
    attachment: Attachment
    asked: tuple[int, int] | None = None
    """(keys, local tokens) of the lookup under way or answered."""
    answer: LookupAnswer | None = None
    newer: LookupAnswer | None = None
    """The answer to the same question asked once more, which the next lookup sees."""
    verifying: LookupAnswer | None = None
    """The answer whose verification has begun."""
    verified: LookupAnswer | None = None
    epoch: int = 0
    handed_out: str | None = None
    """The lease of the last plan, until the server has asked about it."""
    offered: int = 0
    """Chunks [0, offered) are stored, or offered to be."""
    reserved: int = 0
    """Chunks [0, reserved) are at the server, or on their way to it. Nobody could find another one behind a gap."""
    ceiling: int = MAX_KEYS
    """Chunks from here on are not asked for: one of them failed to load."""
    promised: int = 0
    """Chunks [0, promised) were named by a lookup that said that the request computes what is missing."""
    fell_short_at: int = 0
    """How many chunks were offered when some of them could not be stored. These are offered again once there are more,
    or when the request ends. 0: all were stored so far."""

    @property
    def lease(self) -> str | None:
        """What the server leased it and nobody has been given."""
        last = self.newer if self.newer is not None else self.answer
        return last.lease if last is not None else None

    @property
    def being_stored(self) -> BeingStored | None:
        """What the newest answer says that others store; None as well where a limit cut it: waiting is of no use then.
        """
        last = self.newer if self.newer is not None else self.answer
        return last.being_stored if last is not None and last.limited_by is None else None

    @property
    def pending(self) -> PendingTokens | None:
        """What the newest answer says that lower tiers may bring."""
        last = self.newer if self.newer is not None else self.answer
        return last.pending if last is not None else None

    def take_newer(self) -> None:
        """The newest answer is the one that counts, but for one whose verification has begun."""
        if self.newer is not None and self.verifying is not self.answer:
            self.answer, self.newer = self.newer, None

    def forget_answer(self) -> None:
        self.asked = self.answer = self.newer = None

    def forget_lookup(self) -> None:
        self.forget_answer()
        self.epoch = 0

    def falls_short(self, chunk: int) -> None:
        """What was offered from `chunk` on is not stored."""
        self.fell_short_at = max(self.offered, self.fell_short_at)
        self.offered, self.reserved = min(self.offered, chunk), min(self.reserved, chunk)

    def offer_anew(self) -> None:
        """The engine has not computed what it has offered, or computes it again."""
        self.offered = self.reserved = self.fell_short_at = 0

    def is_valid_to(self, chunks: int) -> None:
        """Behind these, what was loaded is damaged."""
        self.ceiling, self.offered, self.reserved, self.fell_short_at = (
            min(chunks, of) for of in (self.ceiling, self.offered, self.reserved, self.fell_short_at)
        )


class ChunkObserver:
    """Learns which chunks requests have, and which of them the server says are present. This one does not care."""

    def known(self, request_id: str, keys: Sequence[bytes]) -> None:
        """The engine's thread is about to look up or store the first chunks of a request, which have these keys."""

    def asking(self, attachment: Attachment) -> Callable[[Sequence[bytes]], None]:
        """Called before the request is sent; returns a callback that gets the keys the server says are present."""
        return lambda keys: None

    def names(self, request_id: str, first: int, end: int) -> Sequence[BlockNames | None]:
        """What routers know the request's chunks [first, end) by, as far as it is known; () if nothing of it is.
        Called in the engine's thread, when the request is about to store them."""
        return ()


class Requests(dict[str, RequestState]):
    """By id; `lock` guards them all, and their states."""

    def __init__(self, session: EngineSession, chain_of: ChainOf) -> None:
        super().__init__()
        self.session, self.lock, self._chain_of = session, threading.Lock(), chain_of

    def known(self, request_id: str, tokens: Sequence[int]) -> RequestState | None:
        """Under `lock`: the request's entry with keys for all of `tokens`; None while the server is lost."""
        attachment = self.session.attachment
        if attachment is None:
            return None  # it may come back: what we know, a lease above all, may still hold
        request = self.get(request_id)
        if request is None or request.attachment is not attachment:  # nothing holds that we knew of another epoch
            chain = self._chain_of(request_id, attachment.namespace, self.session.manifest.chunk_tokens)
            request = RequestState(chain, attachment)
            self[request_id] = request
        request.chain.follow(tokens)
        return request


@dataclass(frozen=True)
class Fetch:
    """A lookup to be sent by a background thread."""

    request_id: str
    attachment: Attachment
    keys: tuple[bytes, ...]
    body: Lookup
    renews: str | None = None
    """The lease that the request has already, if it is asked about once more."""
    replaces: str | None = None
    """A lease to be cancelled first: of an earlier question, with more keys."""

    @property
    def asked(self) -> tuple[int, int]:
        """As RequestState has it."""
        return len(self.keys), self.body.skip_prefix_tokens


@dataclass(frozen=True)
class StoreOffer:
    """Chunks to reserve and store; `reads` are all blocks of it, per group of the manifest. `traceparent`: as Reserve
    has it."""

    request_id: str
    request: RequestState
    batches: tuple[StoreBatch, ...]
    reads: BlocksRead
    traceparent: str = ""
    names: Sequence[BlockNames | None] = ()
    """What routers know these chunks by, from the first batch's first on."""

    def names_of(self, batch: StoreBatch) -> list[BlockNames] | UnsetType:
        """Those of all chunks of the batch, or none."""
        start = batch.first - self.batches[0].first
        known = [name for name in self.names[start : start + len(batch.keys)] if name is not None]
        return known if len(known) == len(batch.keys) else UNSET

    @property
    def attachment(self) -> Attachment:
        return self.request.attachment


# --------------------------------------------------------------------------------
# What an engine was told to wish for a request's chunks, and how the server hears of it.

@dataclass(frozen=True)
class Wish:
    """For a request's chunks once it has ended. `tokens`: for its first ones; None: for all. `prefetch_after_s`: lower
    tiers load then what the pool lacks of them; None: this is a hint, and the other fields are those of schemas.Hint.
    """

    priority: int = 0
    duration_s: float | None = None
    tokens: int | None = None
    conversation_ended: bool = False
    prefetch_after_s: float | None = None


def tell_wishes(
    session: EngineSession, attachment: Attachment, keys: Sequence[bytes], wishes: Sequence[Wish]
) -> None:
    """Background. `keys`: a request's, from its first. Where they are more than one call may name, the first are
    retained or loaded, and the last are let go."""
    chunk_tokens = session.manifest.chunk_tokens
    for wish in wishes:
        meant = keys if wish.tokens is None else keys[: -(-wish.tokens // chunk_tokens)]
        is_from_first = wish.priority > 0 or wish.prefetch_after_s is not None
        meant = meant[:MAX_KEYS] if is_from_first else meant[-MAX_KEYS:]
        if not meant:
            continue
        if wish.prefetch_after_s is not None:
            tell(session, attachment, session.client.prefetch, Prefetch(
                session=attachment.session, member=attachment.member, keys=b"".join(meant),
                after_s=wish.prefetch_after_s,
            ))
            continue
        body = Hint(
            session=attachment.session, member=attachment.member, keys=b"".join(meant), priority=wish.priority,
            duration_s=wish.duration_s, conversation_ended=wish.conversation_ended,
        )
        tell(session, attachment, session.client.hint, body)
