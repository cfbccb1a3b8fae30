"""The messages between the server and its mover, the process that moves bytes between the pool and lower tiers.

The server starts the mover and writes to its stdin: a MoverConfig first, then ServerUpdates. The mover writes
MoverReports to its stdout. Each message is one frame of MessagePack. In everything else the mover is a client like any
other.
"""

from __future__ import annotations

import struct
from collections.abc import Container

import msgspec

from kvdock.protocol.peer_schemas import PeerRead, PeerReadAnswer
from kvdock.protocol.readable import LogFormat, LogLevel
from kvdock.protocol.reports import TierContents, TierView
from kvdock.protocol.schemas import Manifest
from kvdock.protocol.wire_types import KEY_BYTES, Answer, Body, Key, Name


def split_keys(keys: bytes) -> list[bytes]:
    """`keys`: several keys in a row, KEY_BYTES each."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def worth_chunks(
    most: int, *, chunk_bytes: int, chunk_tokens: int, latency_s: float, bytes_per_s: float, wait_s: float,
    tokens_per_s: float,
) -> int:
    """How many of `most` chunks a tier loads within `wait_s`, and sooner than an engine computes them at `tokens_per_s`
    (0: the speed is not known). 0: it is not worth waiting. The longer the prefix, the less the latency counts, so the
    longest prefix that can come in time decides.

    The mover decides, with the chunks that a tier has and the time that is left (kvdock/tiers/mover/fetches.py). The
    engine passes on its terms: how long the request may wait, and how fast it computes. The server
    (kvdock/api/tiers/mover_client.py) asks the same with the speed that the mover reported last and as if the tier had
    every chunk, only in order to refuse at once: where nothing is worth it for all chunks, nothing is for fewer.
    Without that, a request that no tier can serve in time would wait for a round trip through the mover, and for the
    step of its engine in which it is looked up again.
    """
    chunk_s = chunk_bytes / bytes_per_s
    count = min(most, int((wait_s - latency_s) / chunk_s))
    is_too_slow = tokens_per_s > 0 and latency_s + count * chunk_s > count * chunk_tokens / tokens_per_s
    return 0 if is_too_slow else max(0, count)


class Promise(Body, array_like=True):
    """`[ticket, chunks, tier, by_s]`: the tier has those of the request's first `chunks` chunks that the pool lacks.
    They are expected to be in the pool in `by_s` seconds."""

    ticket: int
    chunks: int
    tier: Name
    by_s: float


KNOWN_BYTES = 8
"""How many bytes of each key `KnownKeys` carries at least: enough to know that a tier certainly lacks a chunk."""


class KnownKeys(Body, array_like=True):
    """`[namespace, keys, is_there, tier]`: whether the tier has these chunks from now on. `keys`: the first
    MoverConfig.known_bytes of each key, in a row."""

    namespace: Key
    keys: bytes
    is_there: bool
    tier: Name

    def without(self, deleted: Container[bytes], known_bytes: int) -> KnownKeys:
        """`deleted`: the first `known_bytes` of each key."""
        keys = (self.keys[at : at + known_bytes] for at in range(0, len(self.keys), known_bytes))
        return msgspec.structs.replace(self, keys=b"".join(key for key in keys if key not in deleted))


class PrefetchResult(Body, array_like=True):
    """`[number, chunks, was_dropped]`: a prefetch has ended, after `chunks` chunks were loaded. `was_dropped`: its
    deadline passed before it was complete, or no tier worked."""

    number: int
    chunks: int
    was_dropped: bool


class NoteChange(Body, array_like=True):
    """`[number, tier, namespace, generation, keys, is_shared]`: the tier's note of the namespace has another generation
    than the pool, or other servers have deleted `keys` (32 bytes each) in the tier. The tier is not used for the
    namespace until the server lists `number` in ServerUpdate.followed. `is_shared`: other servers use the tier too and
    may have changed the note, so chunks in the pool may be older than the note."""

    number: int
    tier: Name
    namespace: Key
    generation: int
    keys: bytes
    is_shared: bool


class OrderDone(Body, array_like=True):
    """`[number, tier, generation, chunks]`: the tier has carried out an order. `generation`: the namespace's from then
    on; 0 where the order was for all namespaces. `chunks`: how many chunks were deleted from the tier."""

    number: int
    tier: Name
    generation: int
    chunks: int


class ContentsAnswer(Body, array_like=True):
    """`[number, contents]`: the answer to a question about what a tier has."""

    number: int
    contents: TierContents


class PeerAnswer(Body, array_like=True):
    """`[number, answer]`: the answer to a peer's call."""

    number: int
    answer: PeerReadAnswer


class MoverReport(Body, kw_only=True):
    """The mover sends one whenever it has something to report."""

    promises: list[Promise] = msgspec.field(default_factory=list)
    ended_tickets: list[int] = msgspec.field(default_factory=list)
    """Tickets for which nothing more comes."""
    prefetch_results: list[PrefetchResult] = msgspec.field(default_factory=list)
    tiers: list[TierView] | None = None
    """None: unchanged since the last report that had them."""
    known: list[KnownKeys] = msgspec.field(default_factory=list)
    note_changes: list[NoteChange] = msgspec.field(default_factory=list)
    orders_done: list[OrderDone] = msgspec.field(default_factory=list)
    contents: list[ContentsAnswer] = msgspec.field(default_factory=list)
    peers: list[PeerAnswer] = msgspec.field(default_factory=list)
    lists_all: bool = False
    """Every tier in use reports all that it has in `known`, so no tier has a chunk that is not known."""
    is_drained: bool = False
    """The server drains, and no chunk waits to be written any more."""


class LookupNotice(Answer, kw_only=True):
    """An engine has looked up a prompt. `ticket` 0: no request waits for what the pool lacks."""

    namespace: Key
    keys: bytes
    """The keys of the prompt's chunks from the first on, in a row."""
    hit_chunks: int
    """How many of the first chunks the pool has."""
    ticket: int = 0
    wait_s: float = 0.0
    """The longest that the request may wait."""
    tokens_per_s: float = 0.0
    """How fast the engine computes; 0: not known."""


class PrefetchRequest(Answer, kw_only=True):
    """Chunks to load ahead of requests."""

    number: int
    namespace: Key
    keys: bytes
    """The keys of the prompt's chunks from the first on, in a row."""
    hit_chunks: int
    wait_s: float


class ServedNamespace(Answer, kw_only=True):
    namespace: Key
    manifest: Manifest
    weights: str = ""
    """The name of the weights that the engines run. A session with this manifest and this name is in that namespace."""


class Generation(Answer, array_like=True):
    """`[namespace, generation, edition]`: the pool's. `edition`: a number that rises whenever chunks of the namespace
    are cleared or deleted; the mover's reservations name it."""

    namespace: Key
    generation: int
    edition: int


class Order(Answer, kw_only=True):
    """What tiers have to carry out: a namespace was cleared, or `keys` were deleted in it. A tier is not used for the
    namespace until it has carried the order out."""

    number: int
    namespace: str
    """A key. "": all namespaces that the tier knows, except those that `keys` names."""
    tiers: list[Name]
    """The tiers that have not carried it out yet."""
    least: int
    """The pool's generation of the namespace; the tier's is at least that from then on."""
    keys: bytes = b""
    """32 bytes each; empty: all of the namespace."""
    groups: int = 0
    """A chunk has `groups` * `writers` parts."""
    writers: int = 0


class EvictingSoon(Answer, array_like=True):
    """`[namespace, keys]`: the pool will soon evict these chunks, and no tier is known to have them."""

    namespace: Key
    keys: bytes


class ContentsQuestion(Answer, array_like=True):
    """`[number, tier, remove]`: an operator asks what a tier has, after all that it has of the namespaces in `remove`
    was removed."""

    number: int
    tier: Name
    remove: list[Key] = msgspec.field(default_factory=list)


class PeerQuestion(Answer, array_like=True):
    """`[number, read]`: another node asks for chunks of the pool."""

    number: int
    read: PeerRead


class ServerUpdate(Answer, kw_only=True):
    """The server sends one whenever something has changed."""

    namespaces: list[ServedNamespace] | None = None
    """The namespaces in which engines have a session now; None: unchanged."""
    abandoned: list[Key] = msgspec.field(default_factory=list)
    """Namespaces of weights that no engine runs any more: their chunks that wait to be written are not written."""
    generations: list[Generation] | None = None
    """The generations of all namespaces that tiers serve, including those in which no engine has a session. None:
    unchanged."""
    lookups: list[LookupNotice] = msgspec.field(default_factory=list)
    prefetches: list[PrefetchRequest] = msgspec.field(default_factory=list)
    ended_tickets: list[int] = msgspec.field(default_factory=list)
    """Tickets whose requests no longer wait."""
    evicting_soon: list[EvictingSoon] = msgspec.field(default_factory=list)
    orders: list[Order] = msgspec.field(default_factory=list)
    """Each order is sent once to each mover process, before anything else that concerns its namespace."""
    followed: list[int] = msgspec.field(default_factory=list)
    """Numbers of note changes that the pool has followed; `generations` has the result."""
    questions: list[ContentsQuestion] = msgspec.field(default_factory=list)
    peers: list[PeerQuestion] = msgspec.field(default_factory=list)
    is_draining: bool = False
    """The server ends soon: chunks that wait to be written are written now."""
    log_level: LogLevel | None = None
    """The level of the mover's log from now on; None: unchanged."""


BATCH_BYTES = 32 << 20


class MoverConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The first frame on the mover's stdin."""

    address: str
    instance_prefix: str
    """The instance names under which the mover attaches begin with it."""
    disk_path: str = ""
    disk_bytes: int = 0
    disk_day_bytes: int = 0
    """The most that may be written to the disk in a day; 0: there is no limit."""
    stores: dict[str, str] = {}
    """The URLs of stores by their names, in the order in which they are asked."""
    asks: int = 0
    """A chunk is written once prompts have asked for it this often; 0: once or twice, whichever pays."""
    pool_bytes: int = 1 << 30
    queue_bytes: int = 1 << 30
    """The most that may wait to be written to one tier."""
    batch_bytes: int = BATCH_BYTES
    """The size of a batch of loads; a batch of stores has four times as much."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    known_bytes: int = KNOWN_BYTES
    """How many bytes of each key the server wants to know: KNOWN_BYTES, or all of them for the sake of routers."""
    drain_s: float = 5.0
    """How long the mover keeps writing when the server drains."""


FRAME_HEAD = struct.Struct("<I")
"""Precedes each frame: its length in bytes."""


def frame(body: msgspec.Struct) -> bytes:
    """The bytes of one message: head and body."""
    packed = msgspec.msgpack.encode(body)
    return FRAME_HEAD.pack(len(packed)) + packed
