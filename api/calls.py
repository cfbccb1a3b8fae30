"""Every call that a client can make, once: its method, path and answer; and the releases that calls carry.

The three clients (client.py, http_client.py) differ in how bytes travel, not in what they say. Imports neither
FastAPI nor httpx.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from types import NoneType
from typing import Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from kvdock.api import admin_schemas as a, schemas as s
from kvdock.api.errors import ApiError

A = TypeVar("A")
C = TypeVar("C", bound=s.Carrier)

_HOLE = re.compile(r"\{\w+\}")
_LEASE = re.compile(r"[0-9a-f]{16}")


class Call(Generic[A]):
    """One route. `answer`: NoneType when there is none. `packed`: whether it takes MessagePack beside JSON."""

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
RENEW = Call("POST", "/v1/leases/{lease}/renew", s.LeaseView)
CANCEL = Call("DELETE", "/v1/leases/{lease}", NoneType)
MISMATCH = Call("POST", "/v1/mismatches", s.MismatchAnswer)
LEASES = Call("GET", "/v1/leases", s.Leases)
RESERVE = Call("POST", "/v1/reservations", s.ReserveAnswer)
COMMIT = Call("POST", "/v1/reservations/{reservation}/commit", s.CommitAnswer)
ABORT = Call("POST", "/v1/reservations/{reservation}/abort", s.ReleaseAnswer)
SEGMENTS = Call("GET", "/v1/segments", s.Segments)
STATUS = Call("GET", "/v1/status", s.Status)
STATS = Call("GET", "/v1/stats", s.Stats)
REQUESTS = Call("GET", "/v1/requests", s.Requests)
CLEAR = Call("POST", "/v1/cache/clear", a.Cleared, packed=False)
DELETE = Call("DELETE", "/v1/chunks", a.Deleted, packed=False)
PIN = Call("POST", "/v1/pins", a.Pinned, packed=False)
CONFIG = Call("GET", "/v1/config", a.Config)
CONFIGURE = Call("PATCH", "/v1/config", a.Config, packed=False)
NAMESPACES = Call("GET", "/v1/namespaces", a.Namespaces)


class ReleaseQueue:
    """Releases waiting for a call of their session to carry them. Thread-safe.

    A release may be sent any number of times: grant ids are never used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, set[int]]] = {}

    def add(self, session: str, lease: str, ranks: Collection[int]) -> None:
        """ValueError for what no server would take: it would fail the call that carries it."""
        if not _LEASE.fullmatch(lease):
            raise ValueError(f"lease found {lease!r}, wanted 16 lower-case hex digits")
        if not all(0 <= rank < 128 for rank in ranks):
            raise ValueError(f"ranks found {sorted(ranks)}, wanted 0..127")
        with self._lock:
            self._waiting.setdefault(session, {}).setdefault(lease, set()).update(ranks)

    def take(self, session: str, at_most: int = s.MAX_RELEASES) -> list[s.Released]:
        """The oldest first; the caller sends them or puts them back."""
        if not self._waiting:
            return []
        with self._lock:
            leases = self._waiting.get(session, {})
            taken = [s.Released(lease, sorted(leases.pop(lease))) for lease in list(leases)[:at_most]]
            if not leases:
                self._waiting.pop(session, None)
        return taken

    def put_back(self, session: str, releases: list[s.Released], error: BaseException) -> None:
        """They may not have arrived. What a lost session held is its server's to clear up."""
        if isinstance(error, ApiError) and error.code == "unknown_session":
            return
        for said in releases:
            self.add(session, said.lease, said.ranks)

    def sessions(self) -> list[str]:
        with self._lock:
            return list(self._waiting)

    def load(self, session: str | None, body: C) -> tuple[C, list[s.Released]]:
        """The body with what waits for its session, and what was taken for it."""
        taken = self.take(session, s.MAX_RELEASES - len(body.releases)) if session is not None else []
        return (msgspec.structs.replace(body, releases=[*body.releases, *taken]) if taken else body), taken


class SyncCalls(ABC):
    """One method per call. Each takes `timeout_s`; None means the client's own.

    Raises ServerUnavailable when there is no answer and ApiError when the answer is a refusal; nothing else.
    """

    def __init__(self) -> None:
        self._releases = ReleaseQueue()

    @property
    @abstractmethod
    def address(self) -> str:
        """`unix:/path` or `http://host:port`."""

    @abstractmethod
    def _do(
        self, call: Call[A], body: s.Body | None, timeout_s: float | None, *ids: str,
        query: dict[str, str] | None = None,
    ) -> A: ...

    def _carrying(
        self, call: Call[A], body: s.Carrier, timeout_s: float | None, session: str | None, *ids: str
    ) -> A:
        loaded, taken = self._releases.load(session, body)
        try:
            return self._do(call, loaded, timeout_s, *ids)
        except BaseException as error:
            if taken and session is not None:
                self._releases.put_back(session, taken, error)
            raise

    # ---------------------------------------------------------------- sessions

    def attach(self, body: s.AttachSession, *, timeout_s: float | None = None) -> s.SessionAttached:
        return self._do(ATTACH, body, timeout_s)

    def heartbeat(self, session: str, body: s.Heartbeat, *, timeout_s: float | None = None) -> s.HeartbeatAnswer:
        return self._carrying(HEARTBEAT, body, timeout_s, session, session)

    def leave(self, session: str, member: str, *, timeout_s: float | None = None) -> None:
        """The member's word on everything it holds, and so on what it has queued."""
        self._do(LEAVE, None, timeout_s, session, query={"member": member})

    def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Sessions:
        return self._do(SESSIONS, None, timeout_s, query=page(limit, cursor))

    def session(
        self, session: str, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> a.SessionDetail:
        """With its members and a page of its grants."""
        return self._do(SESSION, None, timeout_s, session, query=page(limit, cursor))

    # ---------------------------------------------------------------- reading

    def lookup(self, body: s.Lookup, *, timeout_s: float | None = None) -> s.LookupAnswer:
        return self._carrying(LOOKUP, body, timeout_s, body.session)

    def release(self, lease: str, body: s.ReleaseLease, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        return self._do(RELEASE, body, timeout_s, lease)

    def release_later(self, lease: str, session: str, ranks: Collection[int]) -> None:
        """Queued: the next lookup, reserve, commit or heartbeat of the session carries it. Raises ValueError.

        The ranks' word is given now, so their copies have ended. A session that beats is never late by more than
        a heartbeat; one that does not is flushed by `flush` and `close`.
        """
        self._releases.add(session, lease, ranks)

    def flush(self, session: str, *, timeout_s: float | None = None) -> list[s.ReleaseRefused]:
        """Sends what release_later queued for the session; returns what was refused."""
        refused: list[s.ReleaseRefused] = []
        while taken := self._releases.take(session):
            try:
                answer = self._do(RELEASE_MANY, s.ReleaseMany(session=session, releases=taken), timeout_s)
            except BaseException as error:
                self._releases.put_back(session, taken, error)
                raise
            refused += answer.refused_releases
        return refused

    def renew(self, lease: str, body: s.RenewLease, *, timeout_s: float | None = None) -> s.LeaseView:
        return self._do(RENEW, body, timeout_s, lease)

    def cancel(self, lease: str, body: s.CancelLease, *, timeout_s: float | None = None) -> None:
        """By the member that asked, when no rank was or will be handed the plan."""
        self._do(CANCEL, body, timeout_s, lease)

    def mismatch(self, body: s.ReportMismatch, *, timeout_s: float | None = None) -> s.MismatchAnswer:
        return self._do(MISMATCH, body, timeout_s)

    def leases(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Leases:
        return self._do(LEASES, None, timeout_s, query=page(limit, cursor))

    # ---------------------------------------------------------------- writing

    def reserve(self, body: s.Reserve, *, timeout_s: float | None = None) -> s.ReserveAnswer:
        return self._carrying(RESERVE, body, timeout_s, body.session)

    def commit(self, reservation: str, body: s.Commit, *, timeout_s: float | None = None) -> s.CommitAnswer:
        return self._carrying(COMMIT, body, timeout_s, body.session, reservation)

    def abort(self, reservation: str, body: s.Abort, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        return self._do(ABORT, body, timeout_s, reservation)

    # ---------------------------------------------------------------- the pool, and what people read

    def segments(self, *, timeout_s: float | None = None) -> s.Segments:
        """All of them, however many pages they fill."""
        found = self._do(SEGMENTS, None, timeout_s)
        while found.next is not None:
            more = self._do(SEGMENTS, None, timeout_s, query=page(None, found.next))
            found = msgspec.structs.replace(more, segments=[*found.segments, *more.segments])
        return found

    def status(self, *, timeout_s: float | None = None) -> s.Status:
        return self._do(STATUS, None, timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> s.Stats:
        return self._do(STATS, None, timeout_s)

    def requests(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Requests:
        return self._do(REQUESTS, None, timeout_s, query=page(limit, cursor))

    # ---------------------------------------------------------------- administration

    def clear(self, body: a.ClearCache, *, timeout_s: float | None = None) -> a.Cleared:
        """Walks the whole table: give it time."""
        return self._do(CLEAR, body, timeout_s)

    def delete(self, body: a.DeleteChunks, *, timeout_s: float | None = None) -> a.Deleted:
        return self._do(DELETE, body, timeout_s)

    def pin(self, body: a.PinChunks, *, timeout_s: float | None = None) -> a.Pinned:
        """`duration_s` 0 unpins."""
        return self._do(PIN, body, timeout_s)

    def config(self, *, timeout_s: float | None = None) -> a.Config:
        return self._do(CONFIG, None, timeout_s)

    def configure(self, body: a.PatchConfig, *, timeout_s: float | None = None) -> a.Config:
        return self._do(CONFIGURE, body, timeout_s)

    def namespaces(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> a.Namespaces:
        return self._do(NAMESPACES, None, timeout_s, query=page(limit, cursor))
