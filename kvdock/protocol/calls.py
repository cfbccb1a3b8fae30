"""Every call of the API, once: its method, its path, the type of its answer and the scope that it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import NoneType
from typing import Final, Generic, TypeVar
from urllib.parse import quote, urlencode

from kvdock.protocol import admin_schemas as a, peer_schemas as p, schemas as s
from kvdock.protocol.reports import (
    Caller,
    Curve,
    Explanation,
    HitDays,
    Leases,
    LeaseView,
    Prefixes,
    Requests,
    Stats,
    Status,
    Verdict,
)
from kvdock.protocol.schemas import HintAnswer
from kvdock.protocol.wire_types import Scope

A = TypeVar("A")

INCLUDED: Final[dict[Scope, frozenset[Scope]]] = {
    "health": frozenset({"health"}),
    "read": frozenset({"health", "read"}),
    "engine": frozenset({"health", "read", "engine"}),
    "admin": frozenset({"health", "read", "admin"}),
    "peer": frozenset({"health", "peer"}),
}
"""The calls that a caller with a scope may make. health: probes and totals; read: lists of its own tenant; engine: the
calls of engines; admin: the calls of operators, and lists of all tenants; peer: the calls of other nodes' movers."""

_HOLE = re.compile(r"\{\w+\}")


class Call(Generic[A]):
    """One route. `answer`: NoneType when there is no body. `scope`: what a caller needs. `packed`: it accepts
    MessagePack as well as JSON."""

    def __init__(self, method: str, path: str, answer: type[A], scope: Scope, *, packed: bool = True) -> None:
        self.method, self.path, self.answer, self.scope, self.packed = method, path, answer, scope, packed
        self._pieces = _HOLE.split(path)

    def target(self, ids: Sequence[str], query: dict[str, str] | None = None) -> str:
        """The path with its ids filled in, percent-encoded."""
        pieces = self._pieces
        if ids:
            filled = [piece for at, id_ in enumerate(ids) for piece in (pieces[at], _quoted(id_))]
            path = "".join([*filled, *pieces[len(ids) :]])
        else:
            path = self.path
        return f"{path}?{urlencode(query)}" if query else path


def page(limit: int | None, cursor: str | None) -> dict[str, str]:
    """The query of one page of a list: at most `limit` items, from the `next` of the page before."""
    query = {} if limit is None else {"limit": str(limit)}
    return query if cursor is None else {**query, "cursor": cursor}


def _quoted(part: str) -> str:
    return part if part.isascii() and part.isalnum() else quote(part, safe="")


ATTACH = Call("POST", "/v1/sessions", s.SessionAttached, "engine")
WEIGHTS = Call("POST", "/v1/weights", s.WeightsAnswer, "engine")
HEARTBEAT = Call("POST", "/v1/sessions/{session}/heartbeat", s.HeartbeatAnswer, "engine")
LEAVE = Call("DELETE", "/v1/sessions/{session}", NoneType, "engine")
SESSIONS = Call("GET", "/v1/sessions", s.Sessions, "read")
SESSION = Call("GET", "/v1/sessions/{session}", a.SessionDetail, "read")
LOOKUP = Call("POST", "/v1/lookups", s.LookupAnswer, "engine")
RELEASE = Call("POST", "/v1/leases/{lease}/release", s.ReleaseAnswer, "engine")
RELEASE_MANY = Call("POST", "/v1/releases", s.ReleaseManyAnswer, "engine")
LEASE = Call("GET", "/v1/leases/{lease}", LeaseView, "read")
CANCEL = Call("DELETE", "/v1/leases/{lease}", NoneType, "engine")
MISMATCH = Call("POST", "/v1/mismatches", s.MismatchAnswer, "engine")
HINT = Call("POST", "/v1/hints", HintAnswer, "engine")
LEASES = Call("GET", "/v1/leases", Leases, "read")
RESERVE = Call("POST", "/v1/reservations", s.ReserveAnswer, "engine")
MAKE_RAW = Call("POST", "/v1/reservations/{reservation}/raw", s.RawAnswer, "engine")
COMMIT = Call("POST", "/v1/reservations/{reservation}/commit", s.CommitAnswer, "engine")
ABORT = Call("POST", "/v1/reservations/{reservation}/abort", s.ReleaseAnswer, "engine")
HOLD = Call("POST", "/v1/holds", s.HoldAnswer, "engine")
PREFETCH = Call("POST", "/v1/prefetches", s.PrefetchAnswer, "engine")
PEER_NOTES = Call("POST", "/v1/peers/notes", p.PeerNotesAnswer, "peer")
PEER_READ = Call("POST", "/v1/peers/reads", p.PeerReadAnswer, "peer")
SEGMENTS = Call("GET", "/v1/segments", s.Segments, "read")
STATUS = Call("GET", "/v1/status", Status, "health")
WHOAMI = Call("GET", "/v1/whoami", Caller, "health")
STATS = Call("GET", "/v1/stats", Stats, "health")
PREFIXES = Call("GET", "/v1/prefixes", Prefixes, "read")
VERDICT = Call("GET", "/v1/verdict", Verdict, "health")
ACKNOWLEDGE = Call("POST", "/v1/acknowledge", a.Acknowledged, "admin", packed=False)
HITS = Call("GET", "/v1/hits", HitDays, "read")
CURVE = Call("GET", "/v1/curve", Curve, "read")
EVENTS = Call("GET", "/v1/events", str, "read")
KV_EVENTS = Call("GET", "/v1/kv-events", str, "read")
REQUESTS = Call("GET", "/v1/requests", Requests, "read")
EXPLAIN = Call("GET", "/v1/requests/{request}/explain", Explanation, "read")
CLEAR = Call("POST", "/v1/cache/clear", a.Cleared, "admin", packed=False)
DELETE = Call("POST", "/v1/chunks/delete", a.Deleted, "admin", packed=False)
EVICT = Call("POST", "/v1/cache/evict", a.Evicted, "admin", packed=False)
PIN = Call("POST", "/v1/pins", a.Pinned, "admin", packed=False)
DRAIN = Call("POST", "/v1/drain", a.Drained, "admin", packed=False)
TIERS = Call("GET", "/v1/tiers", a.TierList, "admin")
EMPTY_TIER = Call("POST", "/v1/tiers/clear", a.TierEmptied, "admin", packed=False)
CONFIG = Call("GET", "/v1/config", a.Config, "admin")
CONFIGURE = Call("PATCH", "/v1/config", a.Config, "admin", packed=False)
NAMESPACES = Call("GET", "/v1/namespaces", a.Namespaces, "read")
