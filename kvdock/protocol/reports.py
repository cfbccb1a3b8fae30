"""Answers that people and probes read, and the shape of every error."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.usage import Saved
from kvdock.protocol.version import API_VERSION
from kvdock.protocol.wire_types import Answer, Hex64


class Health(Answer, kw_only=True):
    status: Literal["ok", "not ready"]
    reasons: list[str] = msgspec.field(default_factory=list)


class LeaseView(Answer, kw_only=True):
    grant: Hex64
    kind: Literal["lease", "reservation"]
    session: str
    request: str
    epoch: int
    readers: int
    remaining: list[int]
    chunks: int
    bytes: int
    age_s: float
    closed: bool


class Leases(Answer, kw_only=True):
    leases: list[LeaseView]
    next: str | None = None
    """Cursor of the next page; None after the last."""


class RequestView(Answer, kw_only=True):
    """One recent call: what it asked for and what it got. Or a request that its engine told of when it had ended, and
    that looked up nothing here."""

    at: float
    """Unix seconds, for display only."""
    kind: Literal["lookup", "store", "ended"]
    session: str
    label: str
    request: str
    tokens: int
    hit_tokens: int
    chunks: int
    bytes: int
    took_us: int
    outcome: OutcomeView | None = None
    """What became of the request, once its engine has told it."""


class Requests(Answer, kw_only=True):
    requests: list[RequestView]
    next: str | None = None
    """Cursor of the next page; None after the last."""


Over = Literal["minutes", "hours", "days"]


class Series(Answer, kw_only=True):
    name: str
    title: str
    unit: Literal["bytes", "chunks", "tokens", "ratio", "per_s", "bytes_per_s"]
    chart: str
    """Series with one chart name are drawn together: the page knows no series by name."""
    values: list[float | None]


class Stats(Answer, kw_only=True):
    """Bounded history: one value per series and interval, oldest first, ending `age_s` ago."""

    interval_s: float
    age_s: float
    series: list[Series]


class PoolView(Answer, kw_only=True):
    limit_bytes: int
    allocated_bytes: int
    prefaulted_bytes: int
    free_bytes: int
    reserved_bytes: int
    ready_bytes: int
    quarantined_bytes: int
    held_bytes: int
    retained_bytes: int = 0
    """In chunks that hints of engines retain."""
    segments: int


class ChunkCounts(Answer, kw_only=True):
    reserved: int
    ready: int
    quarantined: int


class TierView(Answer, kw_only=True):
    """A lower tier. Totals count from when it was opened."""

    name: str
    state: Literal["open", "off"]
    """'off': it fails or is slow, and is tried again later; until it works no request waits for it."""
    why: str = ""
    """Why it is off."""
    error: str = ""
    """The last error of the tier or its storage. Only for callers with the scope `read`: it may name hosts and
    paths."""
    objects: int = 0
    """Parts of chunks."""
    bytes_used: int = 0
    bytes_limit: int = 0
    """0: the tier knows no limit."""
    wear_bytes: int = 0
    """Written to its storage, its own copying included; 0 where it is not known."""
    queued_bytes: int = 0
    """Chunks that wait to be written."""
    pending_orders: int = 0
    """Clears and deletions that it has not carried out yet. It is not used for their namespaces until then."""
    load_bytes_per_s: float = 0.0
    """How fast loads are expected to go, as learned from earlier ones; 0 until the tier is open."""
    load_latency_s: float = 0.0
    fetches: int = 0
    """Loads of a request's chunks from it, each of one batch or several."""
    fetch_s: float = 0.0
    """How long the fetches took, in sum."""
    counters: dict[str, int] = msgspec.field(default_factory=dict)


WAIT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MoverView(Answer, kw_only=True):
    """What the server itself knows of its mover. Totals count from the server's start."""

    silent_s: float
    """Since the mover last reported on its tiers. It does so twice a second."""
    restarts: int
    lost_lookups: int
    """Lookups that were not sent to it, because too many waited."""
    declined: int
    """Requests that did not wait, because computing was expected to be quicker than every tier."""
    waiting: int
    """Requests that wait for tiers now."""
    waits: dict[str, int]
    """Requests that have waited, by how the wait ended. 'fulfilled': all that was promised came. 'shortened': less
    came. 'expired': the time was over. 'withdrawn': the request went on, or ended."""
    wait_s: dict[str, float]
    """How long they waited, in sum, by how the wait ended."""
    wait_counts: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """How many waits lay between each two of WAIT_BOUNDS_S: the first below all bounds, the last above them."""


class Status(Answer, kw_only=True):
    status: Literal["ok", "not ready"]
    reasons: list[str]
    version: str
    api_version: int = API_VERSION
    pool_id: Hex64
    incarnation: int
    uptime_s: float
    now: float
    """Unix seconds at the server, for display only."""
    pool: PoolView
    chunks: ChunkCounts
    sessions: int
    leases: int
    reservations: int
    counters: dict[str, int]
    """Totals since start; kvdock/api/record/counters.py explains each. What benchmarks do is left out."""
    saved: Saved = msgspec.field(default_factory=Saved)
    oldest_s: float | None = None
    """How long the chunk was unused that was unused longest, of those that no engine holds: what is evicted has been
    unused about so long. None: there is none."""
    full_in_s: float | None = None
    """When the pool is full, at the rate at which it has filled in the last minutes. None: it does not fill, or is
    full."""
    host: str = ""
    """The machine's name; only for callers with the scope `read`."""
    tiers: list[TierView] = msgspec.field(default_factory=list)
    """Lower tiers, in the order in which they are asked."""
    mover: MoverView | None = None
    """None: the server has no lower tiers."""


class Problem(Answer, kw_only=True):
    """RFC 9457 problem details: the one shape of every error."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str = ""
    found: Any = None
    wanted: Any = None
