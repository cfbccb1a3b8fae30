"""Bodies and answers of the calls that operators make, and of lists that only people read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvdock.protocol.readable import LogLevel
from kvdock.protocol.reports import LeaseView, TierContents, UseTotals
from kvdock.protocol.schemas import Manifest, MemberView, SessionView
from kvdock.protocol.wire_types import MAX_KEYS, Answer, Body, Hex64, Identity, Key, Name, PrefixLabel, Tenant

MAX_PIN_S = 366 * 86400.0
_Keys = Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Mark = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_SizeText = Annotated[str, msgspec.Meta(max_length=32)]
_Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Eviction = Literal["adaptive", "lru"]
TierKeep = Literal["shared", "always"]
MAX_QUOTAS = 128
"""The most tenants that may have a quota by calls, beside those of the access file."""


class Limits(Answer, kw_only=True):
    """The settings that `PATCH /v1/config` changes. A change of them lasts until the server ends."""

    pool_bytes: int
    session_cap: float
    """The share of the pool that one session may hold."""
    total_cap: float
    """The share of the pool that all sessions together may hold."""
    grow_water: float
    low_water: float
    high_water: float
    session_grants: int
    """Leases and reservations that one session may have open."""
    eviction: Eviction
    """The policy that chooses what is evicted when capacity is needed."""
    tier_keep: TierKeep = "shared"
    """Which chunks that lower tiers loaded for a request stay in the pool after it."""
    log_level: LogLevel = "info"
    """The least severe messages that the server logs. The mover's log keeps the level of the server's start."""


class ClearCache(Body, kw_only=True):
    """Takes every chunk that is READY now out of use, and what is being stored. Raises the namespace's generation, in
    the pool and in lower tiers. Memory that engines still read is freed when they are done."""

    namespace: Key | None = None
    """None: all namespaces, also those that only lower tiers have."""
    tenant: Tenant | None = None
    """In place of `namespace`: all namespaces of this tenant; "" is the server's own user. A tenant may have none."""


class Cleared(Answer, kw_only=True):
    chunks: int
    """How many chunks this call took out of use in the pool."""
    namespaces: int = 0
    """How many namespaces of the pool it cleared, with chunks or without."""
    pending_tiers: list[Name] = msgspec.field(default_factory=list)
    """Lower tiers that have not carried out the clear yet. They are not used for what was cleared until they have, also
    by the next server at the same socket."""


class DeleteChunks(Body, kw_only=True):
    namespace: Key
    keys: _Keys


class Deleted(Answer, kw_only=True):
    chunks: int
    """How many chunks this call took out of use in the pool; the other keys were not READY."""
    tier_chunks: int = 0
    """How many chunks were deleted from lower tiers; a chunk counts once for each tier that had it."""
    pending_tiers: list[Name] = msgspec.field(default_factory=list)
    """As in `Cleared`."""
    is_cleared: bool = False
    """More keys were deleted than tiers can name, so the whole namespace was cleared instead."""


class EvictChunks(Body, kw_only=True):
    """Evicts the chunks that are worth least until `free_bytes` are free, but no more than was missing when the call
    began. Chunks that are leased, being written or pinned stay."""

    free_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
    """The bytes by which the pool may still grow count as free. At most the pool's limit."""


class Evicted(Answer, kw_only=True):
    chunks: int
    """How many chunks this call evicted."""
    bytes: int
    """How many bytes this call freed."""
    free_bytes: int
    """The bytes that are free now, counted as in the call. If fewer than asked for, nothing more may be evicted."""


class TierList(Answer, kw_only=True):
    tiers: list[TierContents]


class EmptyTier(Body, kw_only=True):
    """Removes all that one lower tier has of some namespaces. What the pool and other tiers have stays."""

    tier: Name
    namespaces: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=128)]


class TierEmptied(Answer, kw_only=True):
    objects: int
    """How many records this call removed."""
    left_objects: int
    """How many the tier still has of these namespaces: repeat the call, until there are none."""
    error: str = ""
    """Why the tier has not carried it out; "": it has."""


class PinChunks(Body, kw_only=True):
    """Keeps chunks from being evicted for a while. Clear, delete, mismatches and a full quota of their tenant still
    take them out of use."""

    namespace: Key
    keys: _Keys
    duration_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_PIN_S)]
    """Seconds from now, in place of the duration of an earlier call. 0 unpins, and forgets the names of these chunks.
    """
    name: PrefixLabel | msgspec.UnsetType = msgspec.UNSET
    """The label, in lists of prefixes, of the prefix up to the last of the keys that is READY. A prefix of the
    namespace that has the same name loses it. Names are kept with the pool. Absent: names stay as they are."""


class Pinned(Answer, kw_only=True):
    chunks: int
    """How many of these keys are READY chunks."""


class Quota(Identity, frozen=True, kw_only=True):
    """How much one tenant may use at a time. None: no limit."""

    bytes: _Size | None = None
    """Bytes of slots. Above this, the tenant's own least valuable chunks are evicted, pinned ones last."""
    chunks: _Size | None = None
    namespaces: _Amount | None = None
    """Namespaces that have a session or a chunk."""
    sessions: _Amount | None = None
    members: _Amount | None = None
    """Processes of all its sessions."""
    grants: _Amount | None = None
    """Open leases and reservations of all its sessions."""


class AskedQuota(Quota, frozen=True, kw_only=True):
    """A quota as a call puts it."""

    bytes: _Size | _SizeText | None = None  # type: ignore[assignment]  # the server makes a Quota of it
    """A number, or a text as `8GiB`, `64M`, or `50%` of `pool_bytes`."""


class Amounts(Answer, kw_only=True):
    """What a tenant uses or may use, as in its quota."""

    bytes: int | None
    chunks: int | None
    namespaces: int | None
    sessions: int | None
    members: int | None
    grants: int | None


class TenantView(Answer, kw_only=True):
    used: Amounts
    quota: Amounts
    """None: no limit."""


class Acknowledge(Body, kw_only=True):
    """Nothing: all that has happened so far is meant."""


class Acknowledged(Answer, kw_only=True):
    troubles: int
    """How many engines that died, and finds of damaged chunks, are no findings of the verdict from now on."""


class DrainServer(Body, kw_only=True):
    """Whether the server is drained: it gives out no new leases and reservations, and lookups find nothing. What is
    open may finish. It lasts until another call, or until the server ends."""

    is_drained: bool


class Drained(Answer, kw_only=True):
    is_drained: bool
    """True also while the server ends."""
    leases: int
    """Leases that are still open, those of the mover too."""
    reservations: int


class PatchConfig(Body, kw_only=True):
    """Absolute values; fields that are absent stay as they are. All changes take effect, or none."""

    pool_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, lt=1 << 60)] | None = None
    """Below what is allocated, whole segments are drained and given back as engines release them."""
    session_cap: _Share | None = None
    total_cap: _Share | None = None
    grow_water: _Mark | None = None
    low_water: _Mark | None = None
    high_water: _Mark | None = None
    session_grants: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    eviction: Eviction | None = None
    """A new policy starts with the present chunks, but has learned nothing about them."""
    tier_keep: TierKeep | None = None
    """Applies to chunks that are loaded from now on."""
    log_level: LogLevel | None = None
    tenants: Annotated[dict[Tenant, AskedQuota | None], msgspec.Meta(max_length=MAX_QUOTAS)] | None = None
    """Quotas by tenant; each replaces the tenant's earlier one. null: what the access file says, or the default. The
    tenant "" is the server's own user. Other tenants keep theirs. Quotas are kept with the pool."""


class Config(Answer, kw_only=True):
    limits: Limits
    """The limits that are in effect now; PATCH changes them."""
    settings: dict[str, Any]
    """All settings by name, with the values that the server was started with."""
    retiring: list[int]
    """Ids of segments that are being drained because the limit was lowered."""
    tenants: dict[str, TenantView]
    """Tenants that have a namespace or a quota of their own, by name; "" is the server's own user. A tenant that has
    not attached since a restart is named by 32 hex digits."""


class NamespaceView(Answer, kw_only=True):
    namespace: Key
    tenant: str = ""
    """Empty: the server's own user."""
    model: str
    """The name that the model's users know; the manifest's, if no engine has told it."""
    manifest: Manifest
    """The manifest with `hidden` in place of its secrets."""
    weights: str | None = ""
    """The weights of the engines whose chunks are here. Empty: those that they started with. None: not known since the
    server was started again."""
    base: Key
    """The namespace of the same manifest and tenant for the weights that engines start with."""
    left_s: float | None = None
    """For how long no engine has run these weights; after `weights_grace_s` the namespace's chunks are evicted first.
    None: an engine runs the weights, or the chunks are evicted like any others."""
    chunk_bytes: int
    """The size of a chunk with the parts of all groups and writers."""
    sessions: int
    """How many sessions of engines are attached now; the mover's do not count."""
    is_bench: bool = False
    """Only benchmarks have used the namespace: totals leave it out, and it is removed when the last of them leaves."""
    chunks: int = 0
    """READY chunks. This and the next three fields were counted some seconds ago."""
    bytes: int = 0
    oldest_s: float | None = None
    """The time since the last use of the chunk that was unused longest. None: there is none, or it is not known."""
    unused_s: float | None = None
    """Seconds since a request last named one of its chunks."""
    totals: UseTotals = msgspec.field(default_factory=UseTotals)


class Namespaces(Answer, kw_only=True):
    namespaces: list[NamespaceView]
    next: str | None = None


class MemberDetail(MemberView, kw_only=True):
    grants: list[Hex64]
    """The grants that one of this member's ranks still holds."""


class SessionDetail(SessionView, kw_only=True):
    """One session, with its members and grants."""

    members: list[MemberDetail]  # type: ignore[assignment]  # narrower, and an answer is only read
    grants: list[LeaseView]
    """A page of its open leases and reservations, oldest first."""
    next: str | None = None
