"""Every call of the API, once: its method, its path and the type of its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import NoneType
from typing import Generic, TypeVar
from urllib.parse import quote, urlencode

from kvdock.protocol import admin_schemas as a, schemas as s
from kvdock.protocol.reports import Leases, LeaseView, Requests, Stats, Status

A = TypeVar("A")

_HOLE = re.compile(r"\{\w+\}")


class Call(Generic[A]):
    """One route. `answer`: NoneType when there is no body. `packed`: it accepts MessagePack as well as JSON."""

    def __init__(self, method: str, path: str, answer: type[A], *, packed: bool = True) -> None:
        self.method, self.path, self.answer, self.packed = method, path, answer, packed
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


ATTACH = Call("POST", "/v1/sessions", s.SessionAttached)
HEARTBEAT = Call("POST", "/v1/sessions/{session}/heartbeat", s.HeartbeatAnswer)
LEAVE = Call("DELETE", "/v1/sessions/{session}", NoneType)
SESSIONS = Call("GET", "/v1/sessions", s.Sessions)
SESSION = Call("GET", "/v1/sessions/{session}", a.SessionDetail)
LOOKUP = Call("POST", "/v1/lookups", s.LookupAnswer)
RELEASE = Call("POST", "/v1/leases/{lease}/release", s.ReleaseAnswer)
RELEASE_MANY = Call("POST", "/v1/releases", s.ReleaseManyAnswer)
LEASE = Call("GET", "/v1/leases/{lease}", LeaseView)
CANCEL = Call("DELETE", "/v1/leases/{lease}", NoneType)
MISMATCH = Call("POST", "/v1/mismatches", s.MismatchAnswer)
LEASES = Call("GET", "/v1/leases", Leases)
RESERVE = Call("POST", "/v1/reservations", s.ReserveAnswer)
COMMIT = Call("POST", "/v1/reservations/{reservation}/commit", s.CommitAnswer)
ABORT = Call("POST", "/v1/reservations/{reservation}/abort", s.ReleaseAnswer)
SEGMENTS = Call("GET", "/v1/segments", s.Segments)
STATUS = Call("GET", "/v1/status", Status)
STATS = Call("GET", "/v1/stats", Stats)
REQUESTS = Call("GET", "/v1/requests", Requests)
CLEAR = Call("POST", "/v1/cache/clear", a.Cleared, packed=False)
DELETE = Call("DELETE", "/v1/chunks", a.Deleted, packed=False)
PIN = Call("POST", "/v1/pins", a.Pinned, packed=False)
CONFIG = Call("GET", "/v1/config", a.Config)
CONFIGURE = Call("PATCH", "/v1/config", a.Config, packed=False)
NAMESPACES = Call("GET", "/v1/namespaces", a.Namespaces)
