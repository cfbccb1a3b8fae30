"""Bodies and answers of the calls that operators make, and of lists that only people read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvdock.protocol.reports import LeaseView
from kvdock.protocol.schemas import Manifest, MemberView, SessionView
from kvdock.protocol.wire_types import MAX_KEYS, Answer, Body, Hex64, Key

MAX_PIN_S = 366 * 86400.0
_Keys = Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Mark = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Limits(Answer, kw_only=True):
    """The settings that `PATCH /v1/config` changes. A change lasts until the server ends."""

    pool_bytes: int
    session_cap: float
    """Share of the pool that one session may hold."""
    total_cap: float
    """Share of the pool that all sessions together may hold."""
    low_water: float
    high_water: float
    session_grants: int
    """Leases and reservations that one session may have open."""


class ClearCache(Body, kw_only=True):
    """Takes every chunk that is READY now out of use. Memory that engines still read is freed when they are done."""

    namespace: Key | None = None
    """None: all namespaces."""


class Cleared(Answer, kw_only=True):
    chunks: int
    """Taken out of use by this call."""


class DeleteChunks(Body, kw_only=True):
    namespace: Key
    keys: _Keys


class Deleted(Answer, kw_only=True):
    chunks: int
    """Taken out of use by this call; the other keys were not READY."""


class PinChunks(Body, kw_only=True):
    """Keeps chunks from being evicted for a while. Clear, delete and mismatches still take them out of use."""

    namespace: Key
    keys: _Keys
    duration_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_PIN_S)]
    """Counted from now; it replaces the duration of an earlier call. 0 unpins."""


class Pinned(Answer, kw_only=True):
    chunks: int
    """How many of these keys are READY chunks."""


class PatchConfig(Body, kw_only=True):
    """Absolute values; fields that are absent stay as they are. All changes take effect, or none."""

    pool_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, lt=1 << 60)] | None = None
    """Below what is allocated, whole segments are drained and given back as engines release them."""
    session_cap: _Share | None = None
    total_cap: _Share | None = None
    low_water: _Mark | None = None
    high_water: _Mark | None = None
    session_grants: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None


class Config(Answer, kw_only=True):
    limits: Limits
    """In effect now; PATCH changes them."""
    settings: dict[str, Any]
    """All settings by name, as the server was started."""
    retiring: list[int]
    """Ids of segments that are being drained because the limit was lowered."""


class NamespaceView(Answer, kw_only=True):
    namespace: Key
    manifest: Manifest
    chunk_bytes: int
    """Size of a chunk with the parts of all groups and writers."""
    sessions: int
    """How many are attached now."""


class Namespaces(Answer, kw_only=True):
    namespaces: list[NamespaceView]
    next: str | None = None


class MemberDetail(MemberView, kw_only=True):
    grants: list[Hex64]
    """Those of `grants` that one of this member's ranks still holds."""


class SessionDetail(SessionView, kw_only=True):
    """One session, with its members and grants."""

    members: list[MemberDetail]  # type: ignore[assignment]  # narrower, and an answer is only read
    grants: list[LeaseView]
    """Open leases and reservations, oldest first; a page of them."""
    next: str | None = None
