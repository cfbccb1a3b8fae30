"""The engine's client of the server: one method per call, with the wire structs as arguments and answers.

    client = Client("unix:/run/user/1000/kvdock.sock")
    attached = client.attach(AttachSession(instance=…, manifest=…, member=…))
    found = client.lookup(Lookup(session=attached.session, member=…, request="r1", keys=b"…"))

Thread-safe, synchronous and lean: MessagePack over a persistent connection; it needs only msgspec and the standard
library. kvdock/client/http_client.py offers the same calls through httpx.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from kvdock.client.transport import Address, Answers, Transport
from kvdock.protocol import admin_schemas as a, calls as c, peer_schemas as p, schemas as s
from kvdock.protocol.access import NOBODY, PrivateFileError, authorization, read_token
from kvdock.protocol.calls import Call, page
from kvdock.protocol.errors import CODES, ApiError, ServerUnavailable
from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.reports import (
    Caller,
    Curve,
    Explanation,
    HitDays,
    Leases,
    LeaseView,
    Over,
    Prefixes,
    Requests,
    Stats,
    Status,
    Verdict,
)
from kvdock.protocol.wire_types import (
    API_VERSION,
    KEY_BYTES,
    MAX_RANKS,
    MAX_RELEASES,
    VERSION_HEADER,
    Body,
    Carrier,
    RefusedRelease,
    Released,
)

A = TypeVar("A")
C = TypeVar("C", bound=Carrier)
FLUSH_S = 1.0
"""How long close() may take to send queued releases. The server asks about releases that do not arrive."""
_JSON_TYPE = JSON.media_type.encode()
UNAUTHENTICATED = CODES["unauthenticated"].status
_LEASE = re.compile(r"[0-9a-f]{16}")


class ReleaseQueue:
    """Releases waiting for a call of their session to carry them. Thread-safe.

    A release may be sent any number of times: grant ids are never used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, set[int]]] = {}

    def add(self, session: str, lease: str, ranks: Collection[int]) -> None:
        """Raises ValueError for values that every server refuses, because the call that carries them would fail."""
        if not _LEASE.fullmatch(lease):
            raise ValueError(f"lease found {lease!r}, wanted 16 lower-case hex digits")
        if not all(0 <= rank < MAX_RANKS for rank in ranks):
            raise ValueError(f"ranks found {sorted(ranks)}, wanted 0..{MAX_RANKS - 1}")
        with self._lock:
            self._waiting.setdefault(session, {}).setdefault(lease, set()).update(ranks)

    def sessions(self) -> list[str]:
        """The sessions that have releases waiting."""
        with self._lock:
            return list(self._waiting)

    def waits(self, session: str) -> bool:
        """Whether a release of the session waits."""
        return session in self._waiting

    def load(self, session: str | None, body: C) -> tuple[C, list[Released]]:
        """The body with the session's oldest releases, as many as fit, and these releases: see `put_back`."""
        if session is None or session not in self._waiting:
            return body, []
        taken = self._take(session, MAX_RELEASES - len(body.releases))
        return msgspec.structs.replace(body, releases=[*body.releases, *taken]), taken

    def _take(self, session: str, at_most: int) -> list[Released]:
        with self._lock:
            leases = self._waiting.get(session, {})
            taken = [Released(lease, sorted(leases.pop(lease))) for lease in list(leases)[:at_most]]
            if not leases:
                self._waiting.pop(session, None)
        return taken

    def put_back(self, session: str, releases: list[Released], error: BaseException) -> None:
        """Queues the releases of a failed call again, because they may not have arrived. After `unknown_session` it
        does not: a server without the session holds nothing that they release."""
        if isinstance(error, ApiError) and error.code == "unknown_session":
            return
        for released in releases:
            self.add(session, released.lease, released.ranks)


class Client:
    """Calls to one server, one method each. Each takes `timeout_s`; None means the client's default.

    Raises ServerUnavailable if there is no answer and ApiError if the answer is a refusal; nothing else.
    """

    def __init__(
        self, address: str, *, timeout_s: float = 5.0, packed: bool = True, access_token: str = "",
        access_token_file: str = "", trusts_service: bool = False, trusted_uid: int = NOBODY,
    ) -> None:
        """`address`: `unix:/path` or `http://host:port`; raises ValueError otherwise. Connects on the first call.

        `packed`: MessagePack bodies; otherwise JSON, which people can read. `access_token`: a token of the server's
        access file; over the Unix socket the server's own user needs none. `access_token_file`: a file with the token,
        which is read again when the server refuses the one that was read before: so a token can be replaced while its
        users go on. Raises PrivateFileError if the file cannot be read now.
        `trusts_service`, `trusted_uid`: as in protocol.access.require_trusted_server.
        """
        self._releases = ReleaseQueue()
        self._token_file = access_token_file
        self._token = access_token or read_token(access_token_file)
        at = Address.parse(address, trusts_service=trusts_service, trusted_uid=trusted_uid)
        self._transport = Transport(at, _headers(self._token))
        self.timeout_s, self.trusted_uid = timeout_s, trusted_uid
        self._form = PACKED if packed else JSON
        self._media_type = self._form.media_type.encode()
        self._answers = Answers(self.address)

    @property
    def address(self) -> str:
        """`unix:/path` or `http://host:port`."""
        return self._transport.address.text

    def close(self) -> None:
        """Sends what release_later queued, if the server answers."""
        for session in self._releases.sessions():
            with suppress(ApiError, ServerUnavailable):
                self.flush(session, timeout_s=FLUSH_S)
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _do(
        self, call: Call[A], body: Body | None, timeout_s: float | None, *ids: str,
        query: dict[str, str] | None = None,
    ) -> A:
        form = self._form if body is not None and call.packed else JSON
        sent = None if body is None else form.encode(_with_key_bytes(body) if form.packed else body)
        asked = (
            call.method, call.target(ids, query), sent, self.timeout_s if timeout_s is None else timeout_s,
            self._media_type if form is self._form else _JSON_TYPE,
        )
        token = self._token
        status, raw = self._transport.call(*asked)
        if status == UNAUTHENTICATED and self._has_another_token(token):
            status, raw = self._transport.call(*asked)
        return self._answers.decoded(call, status, raw, packed=form.packed)

    def _has_another_token(self, refused: str) -> bool:
        """Whether the token's file has another one than the server refused: it is sent from now on."""
        with suppress(PrivateFileError):
            if self._token == refused and self._token_file:
                self._token = read_token(self._token_file)
                self._transport.send(_headers(self._token))
        return self._token != refused

    def _carrying(
        self, call: Call[A], body: Carrier, timeout_s: float | None, session: str | None, *ids: str
    ) -> A:
        loaded, taken = self._releases.load(session, body)
        try:
            return self._do(call, loaded, timeout_s, *ids)
        except BaseException as error:
            if session is not None:
                self._releases.put_back(session, taken, error)
            raise

    # ---------------------------------------------------------------- sessions

    def attach(self, body: s.AttachSession, *, timeout_s: float | None = None) -> s.SessionAttached:
        """Attaches a member to its session, and begins the session with the first one. Attaching again is harmless."""
        return self._do(c.ATTACH, body, timeout_s)

    def heartbeat(self, session: str, body: s.Heartbeat, *, timeout_s: float | None = None) -> s.HeartbeatAnswer:
        """Shows that the member is well; carries its answers and reports, and brings the server's questions. Send one
        every `heartbeat_s` of the answer."""
        return self._carrying(c.HEARTBEAT, body, timeout_s, session, session)

    def leave(self, session: str, member: str, *, timeout_s: float | None = None) -> None:
        """Releases everything that the member holds, so the releases that it has queued need not be sent."""
        return self._do(c.LEAVE, None, timeout_s, session, query={"member": member})

    def weights(self, body: s.RunWeights, *, timeout_s: float | None = None) -> s.WeightsAnswer:
        """From now on the session looks up and stores in the namespace of these weights."""
        return self._do(c.WEIGHTS, body, timeout_s)

    def sessions(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> s.Sessions:
        """A page of the attached sessions, the oldest first."""
        return self._do(c.SESSIONS, None, timeout_s, query=page(limit, cursor))

    def session(
        self, session: str, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> a.SessionDetail:
        """The session with its members and a page of its grants."""
        return self._do(c.SESSION, None, timeout_s, session, query=page(limit, cursor))

    # ---------------------------------------------------------------- reading

    def lookup(self, body: s.Lookup, *, timeout_s: float | None = None) -> s.LookupAnswer:
        """The longest stored prefix of the keys, and a lease on it for all reader ranks; without a session its
        length alone."""
        return self._carrying(c.LOOKUP, body, timeout_s, body.session)

    def release(self, lease: str, body: s.ReleaseLease, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        """These ranks have ended their copies under the lease. `release_later` costs no call of its own."""
        return self._do(c.RELEASE, body, timeout_s, lease)

    def release_later(self, lease: str, session: str, ranks: Collection[int]) -> None:
        """Queues a release, which the session's next lookup, reserve, commit or heartbeat carries. Raises ValueError.

        Call it when the copies of these ranks have ended. A session that sends heartbeats sends the release at the
        latest with the next one; for other sessions `flush` and `close` send it.
        """
        self._releases.add(session, lease, ranks)

    def flush(self, session: str, *, timeout_s: float | None = None) -> list[RefusedRelease]:
        """Sends the releases that are queued for the session; returns those that were refused."""
        refused: list[RefusedRelease] = []
        while self._releases.waits(session):
            answer = self._carrying(c.RELEASE_MANY, s.ReleaseMany(session=session), timeout_s, session)
            refused += answer.refused_releases
        return refused

    def withdraw(
        self, session: str, requests: Sequence[str], *, timeout_s: float | None = None
    ) -> s.ReleaseManyAnswer:
        """Withdraws the promises that lookups with `computes` made for these requests, which store no more of the
        chunks."""
        body = s.ReleaseMany(session=session, withdraws=list(requests))
        return self._carrying(c.RELEASE_MANY, body, timeout_s, session)

    def cancel(self, lease: str, session: str, member: str, *, timeout_s: float | None = None) -> None:
        """Gives back a lease or reservation. For the member that asked for it, if no rank has been or will be handed
        the plan."""
        return self._do(c.CANCEL, None, timeout_s, lease, query={"session": session, "member": member})

    def mismatch(self, body: s.ReportMismatch, *, timeout_s: float | None = None) -> s.MismatchAnswer:
        """Reports loaded chunks whose bytes do not have the checksums of the lease."""
        return self._do(c.MISMATCH, body, timeout_s)

    def hint(self, body: s.Hint, *, timeout_s: float | None = None) -> s.HintAnswer:
        """Says for how long chunks are worth keeping, or that their conversation has ended."""
        return self._do(c.HINT, body, timeout_s)

    def hold(self, body: s.Hold, *, timeout_s: float | None = None) -> s.HoldAnswer:
        """Leases single chunks to rank 0, wherever they are in their chains, without counting a use."""
        return self._carrying(c.HOLD, body, timeout_s, body.session)

    def prefetch(self, body: s.Prefetch, *, timeout_s: float | None = None) -> s.PrefetchAnswer:
        """Asks lower tiers to load chunks that requests will ask for soon. The answer comes before they have come."""
        return self._do(c.PREFETCH, body, timeout_s)

    def lease(self, lease: str, *, timeout_s: float | None = None) -> LeaseView:
        """The chunks and ranks that a lease or reservation still holds."""
        return self._do(c.LEASE, None, timeout_s, lease)

    def leases(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> Leases:
        """A page of the open leases and reservations, the oldest first."""
        return self._do(c.LEASES, None, timeout_s, query=page(limit, cursor))

    # ---------------------------------------------------------------- writing

    def reserve(self, body: s.Reserve, *, timeout_s: float | None = None) -> s.ReserveAnswer:
        """Slots for those chunks that the server lacks, to copy into until the deadline."""
        return self._carrying(c.RESERVE, body, timeout_s, body.session)

    def commit(self, reservation: str, body: s.Commit, *, timeout_s: float | None = None) -> s.CommitAnswer:
        """Parts that a rank has copied, with their checksums. The last part of a chunk publishes it."""
        return self._carrying(c.COMMIT, body, timeout_s, body.session, reservation)

    def make_raw(self, reservation: str, body: s.MakeRaw, *, timeout_s: float | None = None) -> s.RawAnswer:
        """Slots for raw bytes, for parts that a rank could not pack."""
        return self._do(c.MAKE_RAW, body, timeout_s, reservation)

    def abort(self, reservation: str, body: s.Abort, *, timeout_s: float | None = None) -> s.ReleaseAnswer:
        """These ranks will store no more under the reservation; what is not published never will be."""
        return self._do(c.ABORT, body, timeout_s, reservation)

    # ---------------------------------------------------------------- between nodes

    def peer_notes(self, body: p.PeerNotes, *, timeout_s: float | None = None) -> p.PeerNotesAnswer:
        """Tells the generations of namespaces at another node, which the server's pool follows; returns its own."""
        return self._do(c.PEER_NOTES, body, timeout_s)

    def peer_read(self, body: p.PeerRead, *, timeout_s: float | None = None) -> p.PeerReadAnswer:
        """Leases chunks, so that another node's Transfer Engine can read them; or asks which are there."""
        return self._do(c.PEER_READ, body, timeout_s)

    # ---------------------------------------------------------------- the pool, and what people read

    def segments(self, *, timeout_s: float | None = None) -> s.Segments:
        """All segments, however many pages their list fills."""
        found = self._do(c.SEGMENTS, None, timeout_s)
        while found.next is not None:
            more = self._do(c.SEGMENTS, None, timeout_s, query=page(None, found.next))
            found = msgspec.structs.replace(more, segments=[*found.segments, *more.segments])
        return found

    def status(self, *, timeout_s: float | None = None) -> Status:
        """The state and the totals of the server."""
        return self._do(c.STATUS, None, timeout_s)

    def whoami(self, *, timeout_s: float | None = None) -> Caller:
        """What this client may do."""
        return self._do(c.WHOAMI, None, timeout_s)

    def stats(self, over: Over = "minutes", *, timeout_s: float | None = None) -> Stats:
        """Series of figures over the last minutes, hours or days."""
        return self._do(c.STATS, None, timeout_s, query={} if over == "minutes" else {"over": over})

    def verdict(self, *, timeout_s: float | None = None) -> Verdict:
        """Whether the server helps, and what goes wrong."""
        return self._do(c.VERDICT, None, timeout_s)

    def hits(self, *, timeout_s: float | None = None) -> HitDays:
        """Where prompts' tokens came from, by day, tenant and model."""
        return self._do(c.HITS, None, timeout_s)

    def prefixes(
        self, limit: int | None = None, *, cursor: str | None = None, search: str = "", namespace: str = "",
        below: str = "", timeout_s: float | None = None,
    ) -> Prefixes:
        """The cached prefixes, the most used first. `search`: part of a label, model or tenant, or the beginning of a
        key. `namespace` and `below`: the branches that go on from the chunk with that key."""
        asked = {"search": search, "namespace": namespace, "below": below}
        query = {**page(limit, cursor), **{name: text for name, text in asked.items() if text}}
        return self._do(c.PREFIXES, None, timeout_s, query=query)

    def curve(self, *, timeout_s: float | None = None) -> Curve:
        """The share of tokens that pools of other sizes would find."""
        return self._do(c.CURVE, None, timeout_s)

    def requests(
        self, *, limit: int | None = None, cursor: str | None = None, request: str = "", timeout_s: float | None = None
    ) -> Requests:
        """Recent requests whose ids begin with `request`."""
        query = {"request": request} if request else {}
        return self._do(c.REQUESTS, None, timeout_s, query=page(limit, cursor) | query)

    def explain(self, request: str, *, session: str = "", timeout_s: float | None = None) -> Explanation:
        """Explains why the latest request of that id, or the session's latest, found no more than it did."""
        return self._do(c.EXPLAIN, None, timeout_s, request, query={"session": session} if session else {})

    # ---------------------------------------------------------------- administration

    def acknowledge(self, *, timeout_s: float | None = None) -> a.Acknowledged:
        """Findings of the verdict that have happened so far are seen."""
        return self._do(c.ACKNOWLEDGE, a.Acknowledge(), timeout_s)

    def drain(self, body: a.DrainServer, *, timeout_s: float | None = None) -> a.Drained:
        """Drains the server, so that it gives out nothing new, or ends that."""
        return self._do(c.DRAIN, body, timeout_s)

    def clear(self, body: a.ClearCache, *, timeout_s: float | None = None) -> a.Cleared:
        """The server walks its whole table, so allow it time."""
        return self._do(c.CLEAR, body, timeout_s)

    def delete(self, body: a.DeleteChunks, *, timeout_s: float | None = None) -> a.Deleted:
        """Takes the chunks with these keys out of use, in the pool and in every lower tier."""
        return self._do(c.DELETE, body, timeout_s)

    def evict(self, body: a.EvictChunks, *, timeout_s: float | None = None) -> a.Evicted:
        """The server evicts the chunks one after the other, so allow it time."""
        return self._do(c.EVICT, body, timeout_s)

    def tiers(self, *, timeout_s: float | None = None) -> a.TierList:
        """What lower tiers have of each namespace. They list it now, so allow them time."""
        return self._do(c.TIERS, None, timeout_s)

    def empty_tier(self, body: a.EmptyTier, *, timeout_s: float | None = None) -> a.TierEmptied:
        """Removes what one tier has of some namespaces, for up to 15 s. Repeat it until nothing is left."""
        return self._do(c.EMPTY_TIER, body, timeout_s)

    def pin(self, body: a.PinChunks, *, timeout_s: float | None = None) -> a.Pinned:
        """`duration_s` 0 unpins. `name` labels the prefix up to the last key that is stored."""
        return self._do(c.PIN, body, timeout_s)

    def config(self, *, timeout_s: float | None = None) -> a.Config:
        """The settings of the server, its limits, and what each tenant uses."""
        return self._do(c.CONFIG, None, timeout_s)

    def configure(self, body: a.PatchConfig, *, timeout_s: float | None = None) -> a.Config:
        """Changes limits and quotas: all that the body names, or nothing."""
        return self._do(c.CONFIGURE, body, timeout_s)

    def namespaces(
        self, *, limit: int | None = None, cursor: str | None = None, timeout_s: float | None = None
    ) -> a.Namespaces:
        """A page of the namespaces with what they hold."""
        return self._do(c.NAMESPACES, None, timeout_s, query=page(limit, cursor))


def _headers(access_token: str) -> bytes:
    headers = {VERSION_HEADER: str(API_VERSION), **authorization(access_token)}
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


def _with_key_bytes(body: Body) -> Body:
    """The body with hex keys as concatenated bytes. Strings that are no keys stay, and the server refuses them."""
    if not isinstance(body, s.Lookup | s.Reserve | s.Hint) or not isinstance(body.keys, list):
        return body
    if set(map(len, body.keys)) - {2 * KEY_BYTES}:
        return body
    try:
        keys = bytes.fromhex("".join(body.keys))
    except ValueError:
        return body
    return msgspec.structs.replace(body, keys=keys) if len(keys) == KEY_BYTES * len(body.keys) else body
