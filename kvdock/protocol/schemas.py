"""The bodies of the calls that engines make, and their answers.

Struct fields are the wire names. Unknown fields are refused. 64-bit values that JSON readers in browsers would round
(grant ids, checksums) travel as 16 lower-case hex digits; keys as 64. Every body may be MessagePack instead, where
keys travel as one bin and checksums as integers. Sizes are bytes, durations seconds: the server's clock never leaves
the server. Calls of operators are in kvdock/protocol/admin_schemas.py, answers that people read in
kvdock/protocol/reports.py, the scalars in kvdock/protocol/wire_types.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from kvdock._core import SEGMENT_IDS
from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.kv_events import Naming
from kvdock.protocol.outcomes import Reporting
from kvdock.protocol.reports import Used
from kvdock.protocol.wire_types import (
    MAX_ANSWERS,
    MAX_ENTRIES,
    MAX_GROUPS,
    MAX_HINT_S,
    MAX_KEYS,
    MAX_RANKS,
    MAX_RELEASES,
    MOST_PRIORITY,
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
    Label,
    Name,
    PrefixLabel,
    Rank,
    Ranks,
    Readers,
    StoreKeys,
    Text,
    Tokens,
    Traced,
    Weights,
    checksum_value,
)

# --------------------------------------------------------------------------- identity

Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


PartBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class Packed(Identity, frozen=True, kw_only=True, gc=False):
    """How the parts of a group are packed (docs/understand/packing.md), and how large a packed part is."""

    format: Literal["kvp1"] = "kvp1"
    planes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    """Into how many planes, each with a book, a part is divided."""
    marks: Annotated[int, msgspec.Meta(ge=16, le=496)]
    """The reserve of marks of each tile, in all planes."""
    units: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """The units of a part's spill."""
    bytes: PartBytes


class Group(Identity, frozen=True, kw_only=True, gc=False):
    """One KV group of the model: which of its chunks a hit needs, and how large one writer's part is."""

    kind: Literal["full", "window"] = "full"
    window_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    part_bytes: PartBytes
    """The bytes of a raw part: of every part, unless the group is packed."""
    block_tokens: BlockTokens | msgspec.UnsetType = msgspec.UNSET
    """A divisor of the manifest's; absent: the manifest's."""
    packed: Packed | msgspec.UnsetType = msgspec.UNSET
    """Parts are packed if they can be, and raw otherwise: a part's length tells which it is. Absent: all are raw."""

    @property
    def slot_bytes(self) -> int:
        """The bytes of a part that is stored as the group's parts usually are."""
        return self.part_bytes if self.packed is msgspec.UNSET else self.packed.bytes


SECRET_FIELDS: Final = ("hash_seed", "cache_salt")
"""The fields of a manifest that only keep engines apart. No answer shows them."""


class Manifest(Identity, frozen=True, kw_only=True, gc=False):
    """Everything that changes the stored bytes. Engines share chunks exactly if their manifests are equal."""

    model: Name
    revision: Text = ""
    adapter: Text = ""
    kv_dtype: Name
    layers: Count
    kv_heads: Count
    head_size: Count
    token_order: Text = "NHD"
    """The order of the elements inside a block of a plane; two engines that differ in it cannot share bytes."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    block_tokens: BlockTokens
    """The least common multiple of the groups' block sizes. Skips and chunk_tokens are multiples of it."""
    tensor_parallel: Readers = 1
    writers: Readers = 1
    """Parts per group: the tensor-parallel size for MHA/GQA, 1 for MLA."""
    any_tensor_parallel: bool | msgspec.UnsetType = msgspec.UNSET
    """True: a part has a fixed range of heads whatever the tensor-parallel size of the engine, so engines of different
    sizes share the namespace, and `tensor_parallel` is the number of parts. Absent: they do not."""
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    hash_function: Text = HASH_FUNCTION
    """Any other value: the engine hashes its sequences itself, and keys are made from its hashes, not from `tokens`."""
    hash_seed: Text = ""
    """A secret (SECRET_FIELDS)."""
    cache_salt: Text = ""
    """A secret (SECRET_FIELDS)."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each group."""
        return tuple(
            self.block_tokens if group.block_tokens is msgspec.UNSET else group.block_tokens for group in self.groups
        )


# --------------------------------------------------------------------------- sessions

PinnedThrough = Annotated[int, msgspec.Meta(ge=0, le=SEGMENT_IDS)]


class Member(Body, kw_only=True):
    """One process of an engine instance, and the byte of the pool's lock file that proves that it is alive."""

    id: Name
    """Chosen by the client at random: sending it again re-attaches the same member."""
    ranks: Annotated[list[Rank], msgspec.Meta(max_length=MAX_RANKS)] = msgspec.field(default_factory=list)
    scheduler: bool = False
    lock_offset: Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
    pinned_through: PinnedThrough | None = None
    """Every segment with an id below it is registered with this member's GPU, and grants name only those. None: no
    registration is needed."""


class Purpose(Body, kw_only=True, omit_defaults=True):
    """What an engine attaches for."""

    is_bench: bool = False
    """The session is a benchmark or a demonstration. The server's totals leave it out. When the last such session of a
    namespace has ended, and no other session has used the namespace, its chunks are removed."""


class AttachSession(Purpose, kw_only=True):
    """A member of an engine instance, and the manifest of the instance's KV."""

    instance: Name
    """The id of the engine instance, chosen by the client at random: all its members send the same one."""
    manifest: Manifest
    member: Member
    label: Label = ""
    """Free text, shown by the status page and the command line."""
    served_model_name: Label = ""
    """The name by which the engine's users ask for the model. Lists, metrics and KV events name the model so; empty: as
    the manifest does. Engines that differ in nothing else share chunks."""
    weights: Weights = ""
    """The weights that the engine runs now. Only the scheduler's member has to name them: the others join their
    session, whatever it runs."""


class Segment(Answer, kw_only=True):
    """A shared-memory object of the pool. Sizes and offsets are in bytes."""

    id: int
    name: str
    """POSIX shared-memory name, e.g. /kvdock-…-0001."""
    bytes: int
    data_offset: int
    prefaulted_bytes: int
    used_bytes: int
    retiring: bool = False
    """Nothing new is stored in it; it is removed as soon as no engine holds any of it."""


class Segments(Answer, kw_only=True):
    """A page of the pool's segments, and the pool's lock file."""

    pool_id: Hex64
    lock_file: str
    segments: list[Segment]
    next: str | None = None
    """Cursor of the next page; None after the last."""


class SessionAttached(Answer, kw_only=True):
    """The session to which the member belongs now, and where the pool's memory is."""

    session: str
    member: str
    namespace: Key
    """The digest of the manifest and the tenant: keys are made of it."""
    filed_in: Key
    """The namespace in which the session looks up and stores now: that of its weights. Calls that name a namespace mean
    one of these."""
    pool_id: Hex64
    incarnation: int
    segments: list[Segment]
    part_bytes: list[int]
    chunk_tokens: int
    heartbeat_s: float
    changes_next: int = 0
    """The `changes_since` of the first heartbeat, for members that follow changes."""
    wants_blocks: bool = False
    """Reservations are to have `blocks`, the names by which routers know the chunks."""


class RunWeights(Body, kw_only=True):
    """From now on the engine runs these weights: what it looks up and stores is in a namespace of their own."""

    session: Name
    member: Name
    """The id of the scheduler's member."""
    weights: Weights


class WeightsAnswer(Answer, kw_only=True):
    """Where the session's chunks are from now on."""

    filed_in: Key
    """The namespace in which the session looks up and stores from now on, as in SessionAttached."""


class GrantRanks(Body, kw_only=True):
    """Ranks of a lease or reservation."""

    grant: Hex64
    ranks: Ranks = msgspec.field(default_factory=list)
    """Empty: the question or answer is for the member that asked for the grant."""


class Heartbeat(Reporting, kw_only=True, omit_defaults=True):
    """A member's sign of life, with its answers to the server's questions, and reports."""

    member: Name
    done: Annotated[list[GrantRanks], msgspec.Meta(max_length=MAX_ANSWERS)] = msgspec.field(default_factory=list)
    """Answers to questions: these ranks are done, and promise to refuse later work that names the grant."""
    keep: Annotated[list[Hex64], msgspec.Meta(max_length=MAX_ANSWERS)] = msgspec.field(default_factory=list)
    pinned_through: PinnedThrough | None = None
    """The new value of `Member.pinned_through`; None: unchanged."""
    changes_since: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None
    """Asks for the changes since the answer whose `changes.next` this is, or since attaching (`changes_next`). None:
    does not ask."""


class Change(Answer, array_like=True, gc=False):
    """`[key, is_there]`: lookups began to find the chunk, or ceased to."""

    key: Key
    is_there: bool


class Changes(Answer, kw_only=True):
    """Changes in the session's namespace, made by any session, oldest first, at most MAX_ENTRIES."""

    changes: list[Change]
    next: int
    """The next heartbeat's `changes_since`."""
    complete: bool
    """False: earlier changes are missing. Forget all chunks and start again with this answer."""


class HeartbeatAnswer(Carried, kw_only=True):
    """The server's questions about grants, and what has changed in the pool."""

    heartbeat_s: float
    questions: list[GrantRanks]
    segments: int
    """How many segments the pool has: a member that maps another number asks GET /v1/segments."""
    retired: list[int] = msgspec.field(default_factory=list)
    """Segments that were removed since the member attached, the latest 4,096 at most: unmap them. Ids rise and are
    never used again."""
    changes: Changes | None = None
    """None unless `changes_since` was sent."""


class MemberView(Answer, kw_only=True):
    """A member as lists show it."""

    id: str
    ranks: list[int]
    scheduler: bool
    state: Literal["live", "suspect", "dead", "gone"]
    heartbeat_age_s: float
    pinned_through: int | None = None


def listed_id(session: str) -> str:
    """A session's id as lists and logs show it: without its last part, the secret that the session's calls need."""
    return session.rpartition("-")[0]


class SessionView(Used, kw_only=True):
    """A session as lists show it."""

    session: str
    """The id without its secret part, as listed_id() returns it."""
    tenant: str = ""
    """Empty: the server's own user."""
    instance: str
    label: str
    model: str
    namespace: Key
    """The namespace in which it looks up and stores now: that of its weights."""
    weights: str | None = ""
    """Empty: those that the engine started with. None: not known since the server was started again."""
    members: list[MemberView]
    leases: int
    reservations: int
    held_bytes: int
    age_s: float


class Sessions(Answer, kw_only=True):
    """A page of sessions."""

    sessions: list[SessionView]
    next: str | None = None
    """Cursor of the next page; None after the last."""


# --------------------------------------------------------------------------- lookups and leases

class Part(Answer, array_like=True, gc=False):  # thousands in one answer, and no cycle can form
    """Where one writer's part of one group is stored, and its checksum: `[group, writer, …]`."""

    group: int
    writer: int
    segment: int
    offset: int
    length: int
    checksum: Checksum

    @property
    def checksum_value(self) -> int:
        """The checksum as an integer of 64 bits."""
        return checksum_value(self.checksum)


class BeingStored(Answer):
    """Other sessions, all of whose members are live, store the prefix up to `tokens`, or have promised to.
    `committed` of these tokens are stored. No limit on `hit_tokens` counts here."""

    tokens: int
    committed: int


class PendingTokens(Answer):
    """Lower tiers are asked for chunks behind the hit, or are loading them for this request."""

    tokens: int
    """How long the hit will be, counted from token 0. While tiers are asked: how long it may become at most."""
    tier: str
    """The tier that loads them; empty while tiers are asked."""
    by_s: float
    """When they are expected to be in the pool, in seconds from now. They may come later, or not at all."""


class Lookup(Traced, kw_only=True):
    """Give `keys`, or `tokens` for the server to hash. Without a session the answer is only a length."""

    session: Name | None = None
    member: Label = ""
    namespace: Key | None = None
    """The namespace to look in; only for a lookup without a session."""
    request: Name = "-"
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0
    keys: Keys | None = None
    tokens: Tokens | None = None
    readers: Readers = 1
    skip_prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_KEYS << 16)] = 0
    computes: bool = False
    """The request promises to compute and store what is not found, unless others do; `withdraws` takes that back."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """How long the request may wait for what lower tiers have; 0: nothing is loaded for it. `withdraws` ends it."""
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    """How fast the engine computes: nothing is loaded that would come later than it is computed. 0: not known."""


class LookupHead(Carried, kw_only=True):
    """A lookup's answer without `chunks`, which the table encodes itself (kvdock/protocol/forms.py)."""

    hit_tokens: int
    """The length of the longest stored prefix, counted from token 0, skipped tokens included."""
    lease: Hex64 | None
    first_chunk: int
    """The index of the first chunk in `chunks`: chunks wholly inside the skip are neither locked nor returned."""
    limited_by: Literal["held_bytes", "pinning", "draining"] | None = None
    being_stored: BeingStored | None = None
    """None: no other session stores what follows the stored prefix."""
    pending: PendingTokens | None = None
    """None: no lower tier is asked for this request."""


class LookupAnswer(LookupHead, kw_only=True):
    """How long the stored prefix is, the lease on it, and where each chunk's parts are."""

    chunks: Sequence[Sequence[Part]]


class ReleaseLease(Body, kw_only=True):
    """Reader ranks that have ended their copies under a lease."""

    session: Name
    ranks: Ranks
    """The reader ranks that are done. Repeating it is harmless."""


class ReleaseAnswer(Answer, kw_only=True):
    """The ranks that still hold the grant."""

    remaining: list[int]


class ReleaseMany(Carrier, kw_only=True):
    """Releases on their own, without another call that carries them."""

    session: Name
    withdraws: Annotated[list[Name], msgspec.Meta(max_length=MAX_RELEASES)] = msgspec.field(default_factory=list)
    """Requests that store no more of what they promised by `computes`, and wait for nothing. Repeating it is harmless.
    """


class ReleaseManyAnswer(Carried, kw_only=True):
    """Each release that is not refused is done."""


# --------------------------------------------------------------------------- reservations

class Reserve(Naming, kw_only=True):
    """Chunks to store: by their `keys`, or `tokens` for the server to hash."""

    session: Name
    member: Name
    store: Name
    """Client-chosen id: repeating the call with the same body gives the same answer."""
    parent: Key | None = None
    """The key before keys[0]; None if keys[0] starts the sequence; ff…ff if the engine does not know it."""
    keys: StoreKeys | None = None
    tokens: Tokens | None = None
    chunks_before: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """With `beginnings`: how many chunks of the prompt come before keys[0]."""
    groups: Annotated[list[int], msgspec.Meta(max_length=MAX_GROUPS)] | None = None
    """Indices of the groups that this store has bytes of, for every chunk; None: all."""
    temporary: bool = False
    """The chunks are removed with their last reader, unless a second request has hit them."""
    tier: Label = ""
    """Set by the server's mover alone: the tier from which it fills the slots."""
    edition: int | None = None
    """Set by the server's mover alone: it fills the slots with what was stored before, which may be cleared
    meanwhile."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0


class WritePart(Answer, array_like=True, gc=False):
    """Where a writer copies its part of one group to: `[group, writer, …]`; offset and length in bytes."""

    group: int
    writer: int
    segment: int
    offset: int
    length: int


class GrantedChunk(Answer, kw_only=True):
    """A chunk to write, and where each part of it belongs."""

    index: int
    """The index of the chunk's key in the call."""
    parts: list[WritePart]


class ReserveHead(Carried, kw_only=True):
    """A reservation's answer without `chunks`, as LookupHead."""

    reservation: Hex64 | None
    """None if nothing was granted."""
    deadline_s: float
    present: list[int]
    busy: list[int]
    """Chunks that another reservation is writing now."""
    limited_by: Literal["held_bytes", "no_space", "pinning", "quota", "draining"] | None = None


class ReserveAnswer(ReserveHead, kw_only=True):
    """The reservation, and where its chunks' parts belong. `present`: indices of the keys that are stored already."""

    chunks: list[GrantedChunk]


class PartDone(Body, array_like=True, gc=False):
    """`[index, group, checksum]`: a part of the caller's rank is complete."""

    index: ChunkIndex
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    checksum: Checksum

    @property
    def checksum_value(self) -> int:
        """The checksum as an integer of 64 bits."""
        return checksum_value(self.checksum)


class Commit(Carrier, kw_only=True):
    """Parts that one rank has copied completely."""

    session: Name
    rank: Rank
    parts: Annotated[list[PartDone], msgspec.Meta(max_length=MAX_ENTRIES)]
    """The parts to commit. A rank with more parts commits them in several calls."""


class CommitAnswer(Carried, kw_only=True):
    """How far the reservation has come. `remaining`: the ranks that have not ended."""

    ready: int
    """How many chunks of this reservation are published by now."""
    remaining: list[int]


class RawPart(Body, array_like=True, gc=False):
    """`[index, group]`: a part of the caller's rank."""

    index: ChunkIndex
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]


class MakeRaw(Body, kw_only=True):
    """Parts that one rank could not pack. It has ended its copies into their slots."""

    session: Name
    rank: Rank
    parts: Annotated[list[RawPart], msgspec.Meta(max_length=MAX_ENTRIES)]


class RawSlot(Answer, array_like=True, gc=False):
    """Where the raw bytes of a part belong: `[index, group, …]`; offset and length in bytes."""

    index: int
    group: int
    segment: int
    offset: int
    length: int


class RawAnswer(Answer, kw_only=True):
    """The parts that have slots for raw bytes now, in the order of the call. `limited_by`: why the others have none."""

    parts: list[RawSlot]
    limited_by: Literal["held_bytes", "no_space", "pinning", "quota"] | None = None


class Abort(Body, kw_only=True):
    """Ranks that store no more under a reservation."""

    session: Name
    ranks: Ranks | None = None
    """The ranks that are done; None: all of them, sent by the member that asked (no rank was handed the plan)."""
    member: Label = ""


class ReportMismatch(Body, kw_only=True):
    """A loaded part does not have the checksum that the lease names. The server hashes the chunk in shared memory; it
    is taken out of use if its bytes are damaged there, and stays otherwise."""

    session: Name
    lease: Hex64
    chunks: Annotated[list[ChunkIndex], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
    """Indices of the chunks, counted from token 0 as in the lookup's keys."""


class MismatchAnswer(Answer, kw_only=True):
    """Chunks in neither count were out of use already, or were not judged in time: report them again."""

    quarantined: int
    """Chunks that were damaged in shared memory, and are out of use now."""
    whole: int = 0
    """Chunks whose bytes in shared memory are right. They stay; the reader's own memory or copies are damaged."""


# --------------------------------------------------------------------------- hints


class Hint(Body, kw_only=True):
    """How long a prompt's chunks are worth keeping, or that no request is expected to ask for them again."""

    session: Name
    member: Name
    keys: Keys
    """The keys of a prompt's chunks, in order. A priority above 0 applies from the first chunk on, any other one
    from the last chunk back."""
    priority: Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    """Chunks of lower priority are evicted first. Above 0: they are retained. 0: an earlier hint no longer
    counts."""
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_HINT_S)] | None = None
    """None, for priorities below 0: until another request names the chunk."""
    conversation_ended: bool = False
    """No request is expected to ask for the chunks again: they are evicted before those of any priority."""
    label: PrefixLabel | msgspec.UnsetType = msgspec.UNSET
    """A label for lists of prefixes, in place of a hint: it names the chunks, at most 256, that the prompts with this
    label begin with."""


class HintAnswer(Answer, kw_only=True):
    """What the hint did."""

    chunks: int
    """How many chunks the hint took effect for."""
    refused: int = 0
    """How many were not retained, because hints retain as much of the pool as they may."""


# --------------------------------------------------------------------------- lower tiers

MOVER_LABEL: Final = "lower tiers"
"""The label of the mover's own sessions. It is only shown to people: an engine may have the same."""
MOVER_NAME: Final = "mover"
"""The names of the mover's instances and members begin with it and a hyphen."""
MAX_AFTER_S = 3600.0
MAX_PREFETCH_S = 600.0


class Hold(Carrier, kw_only=True):
    """Leases to rank 0 those chunks of `keys` that are stored, with all their groups, wherever they are in their
    chains. It does not count as a use: the order of eviction stays the same."""

    session: Name
    member: Name
    request: Name
    """A different id for each call."""
    keys: StoreKeys


class HoldHead(Carried, kw_only=True):
    """The answer to a hold without `chunks`, like LookupHead."""

    lease: Hex64 | None
    is_limited: bool
    """Some chunks are stored but not leased, because the session, or all sessions, hold as much as they may, or because
    the server drains."""


class HoldAnswer(HoldHead, kw_only=True):
    """The lease on the chunks that are stored, and where their parts are."""

    chunks: Sequence[Sequence[Part]]
    """The parts of each key's chunk; empty where it is not leased."""


class Prefetch(Body, kw_only=True):
    """Chunks that requests will ask for soon: lower tiers load those that the pool lacks, ahead of the requests."""

    session: Name
    member: Name
    keys: Keys
    """The keys of a prompt's chunks, from the first on."""
    after_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_AFTER_S)] = 0.0
    """Seconds until loading begins. For a conversation that comes back later, whose chunks may be evicted until
    then."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_PREFETCH_S)] = 30.0
    """How long loading may take; chunks that have not come by then are not loaded."""


Why = Literal["", "stored", "later", "limited", "absent", "tiers_off", "not_served", "no_tiers", "draining"]


class PrefetchAnswer(Answer, kw_only=True):
    """The answer comes at once, before any tier is asked."""

    stored_tokens: int
    """How many of the prompt's first tokens the pool has."""
    coming_tokens: int
    """How many of the next tokens may be loaded now, as far as a tier has them."""
    why: Why
    """Why not more tokens come. '': all may come. 'stored': the pool has all of them. 'later': `after_s` has not
    passed. 'limited': as much is loaded ahead of requests as is allowed. 'absent': no tier has the next chunk.
    'tiers_off': no tier works. 'not_served': tiers do not serve the tenant. 'no_tiers': the server has none.
    'draining': the server drains."""
