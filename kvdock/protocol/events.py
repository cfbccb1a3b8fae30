"""The events of a server. `GET /v1/events` sends them, and the server logs those that matter to operators
(kvdock/api/feeds/log.py). docs/operate/events.md lists them.

Each event is one of the structs below; its `kind` names the struct. Later versions may add fields; none is renamed.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from kvdock.protocol.wire_types import Answer, Hex64, Key


class Event(Answer, kw_only=True, tag_field="kind", gc=False):  # no event is part of a cycle
    """The fields of all events. The journal sets `seq` and `at`."""

    seq: int = 0
    """The number of the event: 1 for the first after the server's start."""
    at: float = 0.0
    """Unix seconds, for display only."""
    tenant: str | None = None
    """The tenant that the event concerns; "": the server's own user. None: it concerns the whole server."""

    of_requests: ClassVar[bool] = False
    """Whether requests cause this kind of event, so that there may be thousands a second."""


# ---------------------------------------------------------------- engines


class _OfSession(Event, kw_only=True):
    session: str
    label: str
    model: str = ""


class _OfMember(_OfSession, kw_only=True):
    member: str


class Attached(_OfMember, kw_only=True, tag="attached"):
    """A member of an engine has attached for the first time."""

    instance: str
    namespace: str
    ranks: list[int]


class Suspect(_OfMember, kw_only=True, tag="suspect"):
    """A member's heartbeats are missing: it gets no new grants until the next heartbeat."""

    silent_s: float


class Recovered(_OfMember, kw_only=True, tag="recovered"):
    """A suspect member has sent a heartbeat."""


class Dead(_OfMember, kw_only=True, tag="dead"):
    """A member's process has ended without detaching. Its grants are freed after a while."""


class Left(_OfMember, kw_only=True, tag="left"):
    """A member has detached."""


# ---------------------------------------------------------------- requests


class _OfRequest(_OfSession, kw_only=True):
    of_requests: ClassVar[bool] = True
    traceparent: str = ""
    """The W3C trace context that the engine sent with the lookup or store; empty: none."""


class LookedUp(_OfRequest, kw_only=True, tag="looked_up"):
    """The first lookup of a request in its epoch was answered."""

    request: str
    tokens: int
    """Tokens asked for, in whole chunks."""
    hit_tokens: int
    """Tokens found, counted from token 0."""
    why: str
    """Why no more was found, as in `GET /v1/requests/{request}/explain`; empty: everything was found."""
    took_us: int
    """Time in the server."""


class Leased(_OfRequest, kw_only=True, tag="leased"):
    """A lookup got a lease, or its lease has grown."""

    request: str
    lease: Hex64
    chunks: int
    """Chunks that this call added to the lease."""
    bytes: int
    """Bytes of these chunks, counted once per fetch."""


class Loaded(_OfRequest, kw_only=True, tag="loaded"):
    """All readers of a lease have released it."""

    request: str
    lease: Hex64
    chunks: int
    bytes: int
    took_us: int
    """Time from the lease to its last release."""


class Cancelled(_OfRequest, kw_only=True, tag="cancelled"):
    """A lease or reservation was given back by the member that had asked for it."""

    name: str
    """The id of the request or the store."""
    grant: Hex64
    is_store: bool
    """True: a reservation. False: a lease."""
    took_us: int
    """Time from the lease or reservation to this call."""


class Reserved(_OfRequest, kw_only=True, tag="reserved"):
    """A store asked for slots."""

    store: str
    reservation: Hex64 | None
    """None: the store got no reservation."""
    tokens: int
    present_tokens: int
    """Tokens among these whose chunks were stored already."""
    chunks: int
    """Chunks that the reservation has slots for."""
    bytes: int
    limited_by: str | None


class Stored(_OfRequest, kw_only=True, tag="stored"):
    """Chunks of a reservation were published: lookups find them from now on."""

    store: str
    reservation: Hex64
    chunks: int
    """Chunks that this call published."""
    took_us: int
    """Time from the reservation to this call."""


class Committed(_OfRequest, kw_only=True, tag="committed"):
    """All ranks of a reservation have finished."""

    store: str
    reservation: Hex64
    chunks: int
    """Chunks that were published."""
    bytes: int
    """Bytes that were reserved."""
    took_us: int
    """Time from the reservation to this call."""


class Aborted(_OfRequest, kw_only=True, tag="aborted"):
    """Ranks gave up the part of a reservation that they had not finished."""

    store: str
    reservation: Hex64
    ranks: list[int]
    chunks: int
    """Chunks of the reservation that are published by now."""
    is_over: bool
    """No rank stores more of the reservation."""
    took_us: int
    """Time from the reservation to this call."""


class RequestEnded(_OfRequest, kw_only=True, tag="request_ended"):
    """An engine has reported that a request has ended. `local_tokens`, the values of `loaded` and those of `computed`
    add up to `prompt_tokens`."""

    request: str
    prompt_tokens: int
    local_tokens: int
    """Tokens that the engine's own cache had."""
    loaded: dict[str, int]
    """By source: `memory`, `waited`, or the name of a tier."""
    computed: dict[str, int]
    """By reason, a key of COMPUTED in kvdock/protocol/hits.py."""
    reloaded_tokens: int
    """Loaded when it came back after preemptions."""
    saved_s: float | None


class Refused(Event, kw_only=True, tag="refused"):
    """A call was answered with a problem."""

    of_requests: ClassVar[bool] = True
    code: str
    route: str
    """The method and the template of the path; empty if no route was recognised."""
    detail: str
    """The `detail` of the answer."""


# ---------------------------------------------------------------- memory


class Evicted(Event, kw_only=True, tag="evicted"):
    """Chunks were evicted since the last event of this kind."""

    of_requests: ClassVar[bool] = True
    chunks: int
    by_operator: int
    """How many of them an operator has evicted; the others made room for what was stored."""
    total: int
    """The total since the server's start."""


class Mismatched(_OfSession, kw_only=True, tag="mismatched"):
    """A reader found that chunks had other bytes than were stored: lookups no longer find these chunks."""

    lease: Hex64
    chunks: int


class MismatchRefuted(_OfSession, kw_only=True, tag="mismatch_refuted"):
    """A reader reported chunks as damaged whose bytes in shared memory are right: they stay. What is damaged is the
    reader's own memory, or its copies."""

    lease: Hex64
    chunks: int
    is_refused: bool
    """Whether it was so often that the session's reports are refused now."""


class Quarantined(Event, kw_only=True, tag="quarantined"):
    """More memory than at the last event of this kind or `freed` waits for engines that still read or write it."""

    of_requests: ClassVar[bool] = True
    bytes: int
    """Bytes that wait now."""


class Freed(Event, kw_only=True, tag="freed"):
    """Memory that waited for engines is free again."""

    of_requests: ClassVar[bool] = True
    bytes: int
    """Bytes that still wait."""


class Grown(Event, kw_only=True, tag="grown"):
    """The pool has one segment more."""

    segment: int
    bytes: int
    allocated_bytes: int
    """Bytes of the whole pool."""


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
    """The namespace's generation in the pool from now on."""


class TiersPending(Event, kw_only=True, tag="tiers_pending"):
    """Chunks were cleared or deleted, and some lower tiers have not done so yet. They are not used for the
    namespace until they have."""

    tiers: list[str]


class LimitsChanged(Event, kw_only=True, tag="limits_changed"):
    """An operator has changed limits, or the settings file has when it was read again."""

    changed: dict[str, list[str | int | float]]
    """By name: the value before, and the value from now on."""
    source: Literal["call", "settings"]


# ---------------------------------------------------------------- the server


class Adopted(Event, kw_only=True, tag="adopted"):
    """The server has taken over the pool of the server before it."""

    pool: Hex64
    chunks: int
    sessions: int
    leases: int
    aborted: int
    """Chunks that were dropped, because they were still being stored."""
    dropped: int
    """Damaged chunks: lookups no longer find them."""


class Ready(Event, kw_only=True, tag="ready"):
    """Engines can attach."""

    address: str
    pool_bytes: int
    """How large the pool may become."""


class Reread(Event, kw_only=True, tag="reread"):
    """Settings and access tokens were read again."""

    needs_restart: list[str]
    """Changed settings that take effect at the next start."""


class Draining(Event, kw_only=True, tag="draining"):
    """The server accepts no new session, gives no new grant, and ends soon."""

    is_takeover: bool
    """True: the pool stays for the next server."""
    leases: int
    reservations: int


class Ended(Event, kw_only=True, tag="ended"):
    """The last event, for the log: streams have ended by then."""

    pool: Hex64
    keeps_pool: bool


class Gap(Event, kw_only=True, tag="gap"):
    """Only in the stream: stands for events that the reader does not get. `seq` is that of the last of them."""

    lost: int
    """How many events; 0: not known."""
    why: Literal["too_slow", "another_server"]
    """The reader was away or slow for too long; or its `Last-Event-ID` is not of this server."""


EVENTS: tuple[type[Event], ...] = (
    Attached, Suspect, Recovered, Dead, Left,
    LookedUp, Leased, Loaded, Cancelled, Reserved, Stored, Committed, Aborted, RequestEnded, Refused,
    Evicted, Mismatched, MismatchRefuted, Quarantined, Freed, Grown, GrowthFailed, Shrunk, GenerationRaised,
    TiersPending, LimitsChanged,
    Adopted, Ready, Reread, Draining, Ended,
)


def kind_of(event: type[Event]) -> str:
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


KINDS: dict[str, type[Event]] = {kind_of(event): event for event in EVENTS}
"""The events by `kind`."""
