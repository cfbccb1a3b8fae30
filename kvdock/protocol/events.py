"""What happens in a server, event by event: `GET /v1/events` sends them, the log has a sentence for those that
operators want to know of. docs/events.md lists them.

Every event is one of the structs below. `kind` names it. Fields may be added to them; none is renamed.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from kvdock.protocol.wire_types import Answer, Hex64, Key


class Event(Answer, kw_only=True, tag_field="kind", gc=False):  # no event is part of a cycle
    """What all events have. The journal sets `seq` and `at`."""

    seq: int = 0
    """From 1 on at the server's start, one more with each event."""
    at: float = 0.0
    """Unix seconds, for display only."""
    tenant: str | None = None
    """The tenant that it concerns: "" is the server's own user. None: it concerns the whole server."""

    of_requests: ClassVar[bool] = False
    """Whether requests cause it, so that there may be thousands a second."""


# ---------------------------------------------------------------- engines


class _OfSession(Event, kw_only=True):
    session: str
    label: str


class _OfMember(_OfSession, kw_only=True):
    member: str


class Attached(_OfMember, kw_only=True, tag="attached"):
    """A member of an engine has attached for the first time."""

    instance: str
    namespace: str
    model: str
    ranks: list[int]


class Suspect(_OfMember, kw_only=True, tag="suspect"):
    """Its heartbeats are missing: it gets nothing new until the next one."""

    silent_s: float


class Recovered(_OfMember, kw_only=True, tag="recovered"):
    """The next heartbeat of a suspect member has come."""


class Dead(_OfMember, kw_only=True, tag="dead"):
    """Its process has ended without leaving. What it held is freed after a while."""


class Left(_OfMember, kw_only=True, tag="left"):
    """It has detached."""


# ---------------------------------------------------------------- requests


class _OfRequest(_OfSession, kw_only=True):
    of_requests: ClassVar[bool] = True
    traceparent: str = ""
    """The W3C trace context that the engine sent with the lookup or store; empty: none."""


class LookedUp(_OfRequest, kw_only=True, tag="looked_up"):
    """The first lookup of a request in its epoch was answered."""

    request: str
    tokens: int
    """Asked for, in whole chunks."""
    hit_tokens: int
    """Found, from token 0 on."""
    why: str
    """Why not more was found, as `GET /v1/requests/{request}/explain` has it; empty: all was."""
    took_us: int
    """In the server."""


class Leased(_OfRequest, kw_only=True, tag="leased"):
    """A lookup got a lease, or a lease that it had has grown."""

    request: str
    lease: Hex64
    chunks: int
    """Those that this call added."""
    bytes: int
    """How large those are, counted once per fetch."""


class Loaded(_OfRequest, kw_only=True, tag="loaded"):
    """All readers of a lease have released it: they have read what they wanted."""

    request: str
    lease: Hex64
    chunks: int
    bytes: int
    took_us: int
    """From the lease to its last release."""


class Cancelled(_OfRequest, kw_only=True, tag="cancelled"):
    """A lease or reservation was given back by the member that had asked for it."""

    name: str
    """The request's or the store's."""
    grant: Hex64
    is_store: bool
    """It was a reservation."""
    took_us: int
    """From the lease or reservation to this call."""


class Reserved(_OfRequest, kw_only=True, tag="reserved"):
    """A store asked for slots."""

    store: str
    reservation: Hex64 | None
    """None: it got none."""
    tokens: int
    present_tokens: int
    """What was stored already."""
    chunks: int
    """Granted."""
    bytes: int
    limited_by: str | None


class Stored(_OfRequest, kw_only=True, tag="stored"):
    """Chunks of a reservation were published: lookups find them from now on."""

    store: str
    reservation: Hex64
    chunks: int
    """Those that this call published."""
    took_us: int
    """From the reservation to this call."""


class Committed(_OfRequest, kw_only=True, tag="committed"):
    """All ranks of a reservation have finished."""

    store: str
    reservation: Hex64
    chunks: int
    """Published."""
    bytes: int
    """Reserved."""
    took_us: int
    """From the reservation to this call."""


class Aborted(_OfRequest, kw_only=True, tag="aborted"):
    """Ranks gave up what they had not finished of a reservation."""

    store: str
    reservation: Hex64
    ranks: list[int]
    chunks: int
    """Published by now."""
    is_over: bool
    """No rank is left that stores more of it."""
    took_us: int
    """From the reservation to this call."""


class Refused(Event, kw_only=True, tag="refused"):
    """A call was answered with a problem."""

    of_requests: ClassVar[bool] = True
    code: str
    route: str
    """Method and path's template; empty where none was recognised."""
    detail: str
    """As the answer has it."""


# ---------------------------------------------------------------- memory


class Evicted(Event, kw_only=True, tag="evicted"):
    """Chunks were evicted for others, since the last event of this kind."""

    of_requests: ClassVar[bool] = True
    chunks: int
    total: int
    """Since the server's start."""


class Mismatched(_OfSession, kw_only=True, tag="mismatched"):
    """A reader found other bytes than were stored: the chunks are no longer found."""

    lease: Hex64
    chunks: int


class Quarantined(Event, kw_only=True, tag="quarantined"):
    """More memory waits, since the last event of this kind or `freed`, for engines that still read or write it."""

    of_requests: ClassVar[bool] = True
    bytes: int
    """That wait now."""


class Freed(Event, kw_only=True, tag="freed"):
    """Memory that waited for engines is free again."""

    of_requests: ClassVar[bool] = True
    bytes: int
    """That still wait."""


class Grown(Event, kw_only=True, tag="grown"):
    """The pool has one segment more."""

    segment: int
    bytes: int
    allocated_bytes: int
    """The whole pool's."""


class GrowthFailed(Event, kw_only=True, tag="growth_failed"):
    """The pool could not grow. It is tried again."""

    why: str
    allocated_bytes: int
    retry_s: float


class Shrunk(Event, kw_only=True, tag="shrunk"):
    """A segment was given back to the system."""

    segment: int
    allocated_bytes: int


class GenerationRaised(Event, kw_only=True, tag="generation_raised"):
    """A namespace was cleared, by a call here or at another server that shares a lower tier. Nothing that was stored in
    it before is found from now on."""

    namespace: Key
    generation: int
    """The pool's, from now on."""


class TiersPending(Event, kw_only=True, tag="tiers_pending"):
    """Chunks were cleared or deleted, and lower tiers have not carried that out yet. They are not used for the
    namespace until they have."""

    tiers: list[str]


class LimitsChanged(Event, kw_only=True, tag="limits_changed"):
    """An operator has changed limits, or a settings file that was read again has."""

    changed: dict[str, list[str | int | float]]
    """By name: the value before, and the one that counts now."""
    source: Literal["call", "settings"]


# ---------------------------------------------------------------- the server


class Adopted(Event, kw_only=True, tag="adopted"):
    """The server goes on with the pool of the one before it."""

    pool: Hex64
    chunks: int
    sessions: int
    leases: int
    aborted: int
    """Chunks that were being stored, and are dropped."""
    dropped: int
    """Chunks that were damaged, and are no longer found."""


class Ready(Event, kw_only=True, tag="ready"):
    """Engines can attach."""

    address: str
    pool_bytes: int
    """How large the pool may become."""


class Reread(Event, kw_only=True, tag="reread"):
    """Settings and access tokens were read again."""

    needs_restart: list[str]
    """Settings that have changed and count from the next start only."""


class Draining(Event, kw_only=True, tag="draining"):
    """The server accepts no new session, gives no new grant, and ends soon."""

    is_takeover: bool
    """Another server goes on with the pool."""
    leases: int
    reservations: int


class Ended(Event, kw_only=True, tag="ended"):
    """The last event, for the log: streams have ended by then."""

    pool: Hex64
    keeps_pool: bool


class Gap(Event, kw_only=True, tag="gap"):
    """Only in the stream: events that its reader does not get. Its number is that of the last of them."""

    lost: int
    """How many; 0: that is not known."""
    why: Literal["too_slow", "another_server"]
    """The reader was away or slow for too long; or its `Last-Event-ID` is not of this server."""


EVENTS: tuple[type[Event], ...] = (
    Attached, Suspect, Recovered, Dead, Left,
    LookedUp, Leased, Loaded, Cancelled, Reserved, Stored, Committed, Aborted, Refused,
    Evicted, Mismatched, Quarantined, Freed, Grown, GrowthFailed, Shrunk, GenerationRaised, TiersPending, LimitsChanged,
    Adopted, Ready, Reread, Draining, Ended,
)


def kind_of(event: type[Event]) -> str:
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


KINDS: dict[str, type[Event]] = {kind_of(event): event for event in EVENTS}
"""The events by `kind`."""
