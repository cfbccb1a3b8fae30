"""What the server and its mover say to each other. The mover is the process that moves bytes between the pool and lower
tiers. The server starts it: its stdin brings news, its stdout takes its words, each as frames of MessagePack. For the
rest it is a client like any other.
"""

from __future__ import annotations

import struct

import msgspec

from kvdock.protocol.log_format import LogFormat, LogLevel
from kvdock.protocol.reports import TierView
from kvdock.protocol.schemas import Manifest
from kvdock.protocol.wire_types import Answer, Body, Key, Name


class Promised(Body, array_like=True):
    """`[ticket, chunks, tier, by_s]`: the tier has the request's first `chunks`, as far as the pool lacks them, and
    they are expected to be in the pool by then."""

    ticket: int
    chunks: int
    tier: Name
    by_s: float


KNOWN_BYTES = 8
"""So much of a key stands in `known`: enough to say that a tier surely lacks a chunk."""


class KnownKeys(Body, array_like=True):
    """`[namespace, keys]`: tiers have these chunks. `keys`: the first KNOWN_BYTES of each, in a row."""

    namespace: Key
    keys: bytes


class Prefetched(Body, array_like=True):
    """`[number, chunks, was_dropped]`: no more comes for a prefetch. `chunks`: so many were loaded. `was_dropped`: its
    time was over before it was done, or no tier worked."""

    number: int
    chunks: int
    was_dropped: bool


class Learned(Body, array_like=True):
    """`[number, tier, namespace, generation, keys, is_shared]`: a tier has another generation than the pool, or other
    servers have deleted keys. The tier is not used for the namespace until the server has said that it heard it.
    `keys`: 32 bytes each. `is_shared`: other servers may have raised it, so what the pool has may be older."""

    number: int
    tier: Name
    namespace: Key
    generation: int
    keys: bytes
    is_shared: bool


class Told(Body, array_like=True):
    """`[number, tier, generation, chunks]`: a tier was told of an order. `generation`: the namespace's, from then on;
    0: of several. `chunks`: so many were deleted from it."""

    number: int
    tier: Name
    generation: int
    chunks: int


class MoverWords(Body, kw_only=True):
    """From the mover, whenever it has something to say."""

    promised: list[Promised] = msgspec.field(default_factory=list)
    ended: list[int] = msgspec.field(default_factory=list)
    """Tickets for which nothing more comes."""
    prefetched: list[Prefetched] = msgspec.field(default_factory=list)
    tiers: list[TierView] | None = None
    """None: as before."""
    known: list[KnownKeys] = msgspec.field(default_factory=list)
    learned: list[Learned] = msgspec.field(default_factory=list)
    told: list[Told] = msgspec.field(default_factory=list)
    lists_all: bool = False
    """Every tier that is used says in `known` what it has: what is not known there need not be asked for."""


class Asked(Answer, kw_only=True):
    """A lookup of an engine. `ticket` 0: nobody waits for what the pool lacks."""

    namespace: Key
    keys: bytes
    """Those of the request's chunks from its first on, in a row."""
    hit_chunks: int
    ticket: int = 0
    wait_s: float = 0.0
    """How long the request may wait at most."""
    tokens_per_s: float = 0.0
    """How fast the engine computes; 0: it has not said."""


class Wanted(Answer, kw_only=True):
    """A prefetch: what is loaded ahead of requests."""

    number: int
    namespace: Key
    keys: bytes
    """As in Asked."""
    hit_chunks: int
    wait_s: float


class ServedNamespace(Answer, kw_only=True):
    namespace: Key
    manifest: Manifest
    weights: str = ""
    """That the engines run: with both, who attaches is in that namespace."""


class Generation(Answer, array_like=True):
    """`[namespace, generation, edition]`: what the pool has. `edition`: rises whenever chunks of the namespace were
    cleared or deleted; the mover's reservations name it."""

    namespace: Key
    generation: int
    edition: int


class Order(Answer, kw_only=True):
    """What tiers have to be told: a namespace was cleared, or `keys` of it were deleted. A tier is not used for the
    namespace until it was told."""

    number: int
    namespace: str
    """A key; "": all that the tier knows, but for those that `keys` names."""
    tiers: list[Name]
    least: int
    """The generation that the pool has."""
    keys: bytes = b""
    """32 bytes each; empty: all of the namespace."""
    groups: int = 0
    """How many parts each chunk has: of so many groups, by so many writers."""
    writers: int = 0


class Leaving(Answer, array_like=True):
    """`[namespace, keys]`: the pool will soon let go of these chunks, and no tier is known to have them."""

    namespace: Key
    keys: bytes


class MoverNews(Answer, kw_only=True):
    """From the server, whenever there is something."""

    namespaces: list[ServedNamespace] | None = None
    """Those in which engines have a session now; None: as before."""
    left: list[Key] = msgspec.field(default_factory=list)
    """Namespaces of weights that no engine runs any more: what waits to be written of them is not written."""
    generations: list[Generation] | None = None
    """The generations of all namespaces that tiers serve, also of those in which no engine has a session. None: as
    before."""
    asked: list[Asked] = msgspec.field(default_factory=list)
    wanted: list[Wanted] = msgspec.field(default_factory=list)
    ended: list[int] = msgspec.field(default_factory=list)
    """Tickets for which nobody waits any more."""
    leaving: list[Leaving] = msgspec.field(default_factory=list)
    orders: list[Order] = msgspec.field(default_factory=list)
    """Each is sent once to each mover, before anything that it might concern."""
    heard: list[int] = msgspec.field(default_factory=list)
    """Numbers of what was learned: the pool has followed, and `generations` says how."""
    is_draining: bool = False
    """The server ends soon: what waits to be written is written now."""


BATCH_BYTES = 32 << 20


class MoverConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The first frame on the mover's stdin."""

    address: str
    instance_prefix: str
    """With it begin the instances as which it attaches."""
    disk_path: str = ""
    disk_bytes: int = 0
    redis_url: str = ""
    objects_url: str = ""
    mooncake_url: str = ""
    asks: int = 0
    """A chunk is written once it was asked for so often; 0: once or twice, whichever pays."""
    queue_bytes: int = 1 << 30
    """So much may wait to be written to one tier."""
    batch_bytes: int = BATCH_BYTES
    """So much is loaded at a time; four times as much is written at a time."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    drain_s: float = 5.0
    """How long the mover goes on writing when the server has ended."""


FRAME_HEAD = struct.Struct("<I")
"""Before each frame: its length in bytes."""


def frame(body: msgspec.Struct) -> bytes:
    """What is written for it."""
    packed = msgspec.msgpack.encode(body)
    return FRAME_HEAD.pack(len(packed)) + packed
