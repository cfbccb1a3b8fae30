"""What the scheduler connector knows of one request, and what it hands to the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Protocol

from kvdock.connectors.interface import BlocksRead
from kvdock.connectors.plans import StoreBatch
from kvdock.connectors.session import Attachment
from kvdock.protocol.keys import KeyChain
from kvdock.protocol.schemas import BeingStored, Lookup, LookupAnswer
from kvdock.protocol.wire_types import MAX_KEYS


class Chain(Protocol):
    """The keys of a request's chunks, from its first."""

    @property
    def keys(self) -> list[bytes]: ...

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
    """Chunks [0, offered) are stored, being stored, or were refused."""
    is_told: bool = False
    """The server knows that the engine has these chunks in its own memory while the request runs."""
    ceiling: int = MAX_KEYS
    """Chunks from here on are not asked for: one of them failed to load."""
    promised: int = 0
    """Chunks [0, promised) were named by a lookup that said that the request computes what is missing."""
    fell_short_at: int = 0
    """How many chunks were offered when a store found no room for some of them. They are offered again once there are
    more, or when the request ends; until then nothing is, for nobody could find it behind the gap. 0: none did."""

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

    def take_newer(self) -> None:
        """The newest answer is the one that counts, but for one whose verification has begun."""
        if self.newer is not None and self.verifying is not self.answer:
            self.answer, self.newer = self.newer, None

    def forget_answer(self) -> None:
        self.asked = self.answer = self.newer = None

    def forget_lookup(self) -> None:
        self.forget_answer()
        self.epoch = 0


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
    """Chunks to reserve and store; `reads` are all blocks of it, per group of the manifest. `duplicate`: as Reserve has
    it."""

    request_id: str
    attachment: Attachment
    batches: tuple[StoreBatch, ...]
    reads: BlocksRead
    duplicate: bool = False
    fell_short: Event = field(default_factory=Event)
    """Set once one of its stores found no room."""
