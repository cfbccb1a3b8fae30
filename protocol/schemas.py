"""The bodies of the calls that engines make, and their answers.

Struct fields are the wire names. Unknown fields are refused. 64-bit values that JSON readers in browsers would round
(grant ids, checksums) travel as 16 lower-case hex digits; keys as 64. Every body may be MessagePack instead, where
keys travel as one bin and checksums as integers. Sizes are bytes, durations seconds: the server's clock never leaves
the server. Calls of operators are in protocol/admin_schemas.py, answers that people read in protocol/reports.py, the
scalars in protocol/wire_types.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.wire_types import (
    MAX_GROUPS,
    MAX_KEYS,
    Answer,
    Body,
    Carried,
    Carrier,
    Checksum,
    ChunkIndex,
    Hex64,
    Identity,
    Key,
    Keys,
    Name,
    Rank,
    Readers,
    Tokens,
    checksum_value,
)

# --------------------------------------------------------------------------- identity


Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Group(Identity, frozen=True, kw_only=True):
    """One KV group of the model: what a hit must hold of it, and how large one writer's part is."""

    kind: Literal["full", "window"] = "full"
    window_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    part_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    block_tokens: BlockTokens | msgspec.UnsetType = msgspec.UNSET
    """A divisor of the manifest's; absent: the manifest's."""


class Manifest(Identity, frozen=True, kw_only=True):
    """Everything that changes the stored bytes. Equal manifests share a namespace; others never meet."""

    model: Name
    revision: str = ""
    adapter: str = ""
    kv_dtype: Name
    scale_mode: str = ""
    layers: Count
    kv_heads: Count
    head_size: Count
    token_order: str = "NHD"
    """Order of the elements inside a block of a plane; two engines that differ in it cannot share bytes."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    block_tokens: BlockTokens
    """Skips are multiples of it, chunk_tokens too: the least common multiple of the groups' block sizes."""
    tensor_parallel: Readers = 1
    writers: Readers = 1
    """Parts per group: the tensor-parallel size for MHA/GQA, 1 for MLA."""
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    hash_function: str = HASH_FUNCTION
    """Another one: the engine hashes its sequences itself, and keys are made from its hashes, never from `tokens`."""
    hash_seed: str = ""
    cache_salt: str = ""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, per group."""
        return tuple(
            self.block_tokens if group.block_tokens is msgspec.UNSET else group.block_tokens for group in self.groups
        )


# --------------------------------------------------------------------------- sessions


PinnedThrough = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class Member(Body, kw_only=True):
    """One process of an engine instance, and the byte of the pool's lock file that proves it lives."""

    id: Name
    """Chosen by the client, random: presenting it again re-attaches the same member."""
    ranks: Annotated[list[Rank], msgspec.Meta(max_length=128)] = msgspec.field(default_factory=list)
    scheduler: bool = False
    lock_offset: Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
    pinned_through: PinnedThrough | None = None
    """Every segment with an id below it is pinned here: no grant names another. None: this member needs no pinning."""


class AttachSession(Body, kw_only=True):
    instance: Name
    """Client-chosen nonce of the engine instance: its members present the same one."""
    manifest: Manifest
    member: Member
    label: str = ""
    """Free text for people: shown by the status page and the CLI."""


class Segment(Answer, kw_only=True):
    id: int
    name: str
    """POSIX shared-memory name, e.g. /kvdock-…-0001."""
    bytes: int
    data_offset: int
    prefaulted_bytes: int
    used_bytes: int
    retiring: bool = False
    """Nothing new goes in; it is removed as soon as nobody holds any of it."""


class Segments(Answer, kw_only=True):
    pool_id: Hex64
    lock_file: str
    segments: list[Segment]
    next: str | None = None
    """Cursor of the next page; None after the last."""


class SessionAttached(Answer, kw_only=True):
    session: str
    member: str
    namespace: Key
    pool_id: Hex64
    incarnation: int
    segments: list[Segment]
    part_bytes: list[int]
    chunk_tokens: int
    heartbeat_s: float
    changes_next: int = 0
    """For the first heartbeat's `changes_since`, of who wants to hear."""


class GrantRanks(Body, kw_only=True):
    grant: Hex64
    ranks: list[Rank] = msgspec.field(default_factory=list)
    """Empty: the asker's own word on a grant it asked for."""


class Heartbeat(Carrier, kw_only=True, omit_defaults=True):
    member: Name
    done: list[GrantRanks] = msgspec.field(default_factory=list)
    """Answers to questions: "done" is a promise to refuse any later work that names the grant."""
    keep: list[Hex64] = msgspec.field(default_factory=list)
    pinned_through: PinnedThrough | None = None
    """As the member's, by now; None: as last said."""
    changes_since: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None
    """Asks what has changed since the answer whose `changes.next` this is, or since attaching (`changes_next`). None:
    do not tell."""


class Change(Answer, array_like=True, gc=False):
    """`[key, is_there]`: lookups find the chunk from now on, or do not any more."""

    key: Key
    is_there: bool


class Changes(Answer, kw_only=True):
    """Of the session's namespace, by any session, oldest first, MAX_KEYS of them at most."""

    changes: list[Change]
    next: int
    """The next heartbeat's `changes_since`."""
    complete: bool
    """False: some came and went before `changes_since` or are forgotten. Whoever followed starts again with nothing."""


class HeartbeatAnswer(Carried, kw_only=True):
    heartbeat_s: float
    questions: list[GrantRanks]
    segments: int
    """How many segments the pool has: a member that knows fewer asks GET /v1/segments."""
    retired: list[int] = msgspec.field(default_factory=list)
    """Segments removed since the member attached: nobody holds any of them, so unmap them. Ids are not reused."""
    changes: Changes | None = None
    """None unless asked for."""


MemberState = Literal["live", "suspect", "dead", "gone"]


class MemberView(Answer, kw_only=True):
    id: str
    ranks: list[int]
    scheduler: bool
    state: MemberState
    heartbeat_age_s: float
    pinned_through: int | None = None


class SessionView(Answer, kw_only=True):
    session: str
    instance: str
    label: str
    model: str
    namespace: Key
    members: list[MemberView]
    leases: int
    reservations: int
    held_bytes: int
    age_s: float


class Sessions(Answer, kw_only=True):
    sessions: list[SessionView]
    next: str | None = None
    """Cursor of the next page; None after the last."""


# --------------------------------------------------------------------------- lookups and leases


class Part(Answer, array_like=True, gc=False):  # thousands in one answer, and no cycle can form
    """Where one writer's part of one group lies, and what it must hash to: `[group, writer, …]`."""

    group: int
    writer: int
    segment: int
    offset: int
    length: int
    checksum: Checksum

    @property
    def checksum_value(self) -> int:
        return checksum_value(self.checksum)


class Lookup(Carrier, kw_only=True):
    """Give `keys`, or `tokens` to be hashed by the server. Without a session the answer is a length only."""

    session: str | None = None
    member: str = ""
    namespace: Key | None = None
    """Only without a session."""
    request: Name = "-"
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0
    keys: Keys | None = None
    tokens: Tokens | None = None
    readers: Readers = 1
    skip_prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEYS << 16)] = 0


class LookupHead(Carried, kw_only=True):
    """A lookup's answer without `chunks`, which the table encodes itself (protocol/forms.py)."""

    hit_tokens: int
    """Length of the longest prefix that can be served, from token 0, skipped tokens included."""
    lease: Hex64 | None
    first_chunk: int
    """Index of the first chunk in `chunks`: those wholly before the skip are neither locked nor returned."""
    limited_by: Literal["held_bytes", "pinning"] | None = None


class LookupAnswer(LookupHead, kw_only=True):
    chunks: list[list[Part]]


class ReleaseLease(Body, kw_only=True):
    session: str
    ranks: list[Rank]
    """The reader ranks that say done. Repeating it is harmless."""


class CancelLease(Body, kw_only=True):
    """By the member that asked, when no rank was or will be handed the plan."""

    session: str
    member: Name


class ReleaseAnswer(Answer, kw_only=True):
    remaining: list[int]


class ReleaseMany(Carrier, kw_only=True):
    """Releases with no call to carry them."""

    session: str


class ReleaseManyAnswer(Carried, kw_only=True):
    """Each release that is not refused is done."""


# --------------------------------------------------------------------------- reservations


class Reserve(Carrier, kw_only=True):
    session: str
    member: Name
    store: Name
    """Client-chosen id: repeating the call with the same body gives the same answer."""
    parent: Key | None = None
    """Key before keys[0]; None when keys[0] starts the sequence."""
    keys: Keys | None = None
    tokens: Tokens | None = None
    groups: list[int] | None = None
    """Indices of the groups whose bytes this store has, for every chunk; None: all."""
    temporary: bool = False
    """Vanishes with its last reader unless a second request hits it."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0


class WritePart(Answer, array_like=True, gc=False):
    group: int
    writer: int
    segment: int
    offset: int
    length: int


class GrantedChunk(Answer, kw_only=True):
    index: int
    """Into the keys of the call."""
    parts: list[WritePart]


class ReserveHead(Carried, kw_only=True):
    """A reservation's answer without `chunks`, as LookupHead."""

    reservation: Hex64 | None
    """None when nothing was granted."""
    deadline_s: float
    present: list[int]
    busy: list[int]
    """Being written by someone else now."""
    limited_by: Literal["held_bytes", "no_space", "pinning"] | None = None


class ReserveAnswer(ReserveHead, kw_only=True):
    chunks: list[GrantedChunk]


class PartDone(Body, array_like=True, gc=False):
    """`[index, group, checksum]`: a part of the caller's rank is complete."""

    index: ChunkIndex
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    checksum: Checksum

    @property
    def checksum_value(self) -> int:
        return checksum_value(self.checksum)


class Commit(Carrier, kw_only=True):
    session: str
    rank: Rank
    parts: Annotated[list[PartDone], msgspec.Meta(max_length=MAX_KEYS * MAX_GROUPS)]


class CommitAnswer(Carried, kw_only=True):
    ready: int
    """Chunks of this reservation that are published by now."""
    remaining: list[int]


class Abort(Body, kw_only=True):
    session: str
    ranks: list[Rank] | None = None
    """The ranks that say done; None: all, by the member that asked (nothing was handed out)."""
    member: str = ""


class ReportMismatch(Body, kw_only=True):
    """A loaded part did not hash to what the lease promised: the chunk is taken out of use."""

    session: str
    lease: Hex64
    chunks: Annotated[list[ChunkIndex], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    """Indices of the chunks, counted from token 0 as in the lookup's keys."""


class MismatchAnswer(Answer, kw_only=True):
    quarantined: int
