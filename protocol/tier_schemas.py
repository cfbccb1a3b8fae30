"""What the server and its mover say to each other. The mover is the process that moves bytes between the pool and lower
tiers; the server starts it and gives it a secret, which proves that a call comes from it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvdock.protocol.schemas import Manifest, Part
from kvdock.protocol.wire_types import MAX_ENTRIES, Answer, Body, Carried, Carrier, Hex64, Key, Name, StoreKeys

MAX_TURN_S = 30.0
"""The longest that a turn waits for news."""


class Hold(Carrier, kw_only=True):
    """Leases the chunks of `keys` that are stored, wherever they stand in their chains, with all their groups, to rank
    0. It is no use of them: what is evicted first does not change."""

    session: Name
    member: Name
    request: Name
    """An id of its own for each call."""
    keys: StoreKeys


class HoldHead(Carried, kw_only=True):
    """A hold's answer without `chunks`, as LookupHead."""

    lease: Hex64 | None
    is_limited: bool
    """Some are stored and not leased, because as much is held as may be."""


class HoldAnswer(HoldHead, kw_only=True):
    chunks: list[list[Part]]
    """For each key; empty: it is not leased."""


class Promised(Body, array_like=True):
    """`[ticket, chunks, tier, by_s]`: the tier has the request's first `chunks`, as far as the pool lacks them, and
    they are expected to be in the pool by then."""

    ticket: int
    chunks: int
    tier: Name
    by_s: float


class TierReport(Body, kw_only=True):
    """A tier as the mover sees it. Totals count from the mover's start."""

    name: Name
    state: str
    """'open': it is used. 'off': it failed or was slow, and is tried again."""
    why: str = ""
    objects: int = 0
    bytes_used: int = 0
    bytes_limit: int = 0
    wear_bytes: int = 0
    queued_bytes: int = 0
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class MoverTurn(Body, kw_only=True):
    """The mover's words since its last turn; the answer comes when there is news, or after `wait_s`."""

    secret: Name
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TURN_S)] = 0.0
    promised: Annotated[list[Promised], msgspec.Meta(max_length=MAX_ENTRIES)] = msgspec.field(default_factory=list)
    ended: Annotated[list[int], msgspec.Meta(max_length=MAX_ENTRIES)] = msgspec.field(default_factory=list)
    """Tickets for which nothing more comes."""
    tiers: list[TierReport] | None = None
    """None: as before."""


class Asked(Answer, kw_only=True):
    """A lookup of an engine. `ticket` 0: nobody waits for what the pool lacks."""

    namespace: Key
    keys: bytes
    """Of the request's chunks from its first on, in a row."""
    hit_chunks: int
    ticket: int = 0
    wait_s: float = 0.0
    """How long the request may wait at most."""
    tokens_per_s: float = 0.0
    """How fast the engine computes; 0: it has not said."""


class ServedNamespace(Answer, kw_only=True):
    namespace: Key
    manifest: Manifest


class MoverNews(Answer, kw_only=True):
    namespaces: list[ServedNamespace] | None = None
    """Those in which engines have a session now; None: as in the last answer."""
    asked: list[Asked]
    ended: list[int]
    """Tickets for which nobody waits any more."""
    lost: int
    """Lookups that the mover was not told of, since it was behind; since the server's start."""


class MoverConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of JSON on the mover's stdin, which stays open while the server lives."""

    address: str
    secret: str
    instance_prefix: str
    """Of the instances as which it attaches."""
    disk_path: str = ""
    disk_bytes: int = 0
    redis_url: str = ""
    objects_url: str = ""
    mooncake_url: str = ""
    asks: int = 2
    """A chunk is written once it was asked for so often."""
    queue_bytes: int = 1 << 30
    """Of chunks that wait to be written to one tier."""
    drain_s: float = 5.0
    """How long the mover goes on writing when the server has ended."""
