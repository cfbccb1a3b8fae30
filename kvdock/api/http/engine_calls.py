"""Every call that engines make, in one table: its request, the scope that it needs, its work, and its description in
the OpenAPI document. Dispatch (kvdock/api/http/dispatch.py) answers them on both sockets.

An answer has the form of the request's body, unless the request accepts only the other form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from starlette.types import Receive

from kvdock.api.access.peer import Peer
from kvdock.api.http.limits import BodyCapacity, BodyShare
from kvdock.api.http.openapi import ID_CHARACTERS, About, Parameter
from kvdock.api.http.wire import read_all
from kvdock.api.service import CacheService
from kvdock.api.tokens import LONG_BODY_BYTES, cut_tokens
from kvdock.api.turns import next_slice
from kvdock.protocol import calls, peer_schemas as p, schemas as s
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import Codec, Form, form_of_answer, form_of_body
from kvdock.protocol.schemas import Hint
from kvdock.protocol.wire_types import Answer, Body

B = TypeVar("B", bound=Body)
Run = Callable[[CacheService, Peer, B, str, Form], Answer | Awaitable[Answer]]
"""(service, caller, body, the id in the path, form of the answer)."""
RunQuery = Callable[[CacheService, Peer, dict[str, str], str], Awaitable[None] | None]
"""(service, caller, values of the query's parameters, the id in the path)."""

DECODED_ALONE_BYTES = 20 << 10
"""After a body of this length was decoded, other calls have a turn before the call goes on."""
SHORT_BYTES = 256 << 10
"""The longest body of calls that carry neither tokens nor checksums: enough for the longest lists that they may
have."""


class Incoming(NamedTuple):
    """A call that has arrived: its caller, its headers ('' where one is missing), its query, and the source of its
    body. `capacity`: for long bodies."""

    peer: Peer
    content_type: str
    accept: str
    content_length: str
    query: str
    receive: Receive
    capacity: BodyCapacity
    body_limit_bytes: int


class Encoded(NamedTuple):
    """An answer. `media_type`: '' if it has no content. `traceparent`: the request's, '' if it had none."""

    content: bytes
    media_type: str
    traceparent: str = ""


class BodyCall(Generic[B]):
    """A call with a body and an answer, in JSON or MessagePack. `longest_bytes`: the most that a body may have; None:
    the limit that the server has for all bodies."""

    def __init__(
        self, name: str, call: Call[Any], body: type[B], run: Run[B], about: About, *, longest_bytes: int | None = None
    ) -> None:
        self.name, self.call, self.about = name, call, about
        self.body: type[Body] | None = body
        self.parameters: tuple[Parameter, ...] = ()
        self._longest_bytes = longest_bytes
        self._codec = Codec(body)
        self._run = run

    async def answer(self, service: CacheService, incoming: Incoming, id_in_path: str) -> Encoded:
        """Raises ApiError and TableError: refusals."""
        if incoming.query:
            read_query(incoming.query, self.parameters)
        sent = form_of_body(incoming.content_type)
        wanted = form_of_answer(incoming.accept, sent)
        limit = incoming.body_limit_bytes
        if self._longest_bytes is not None:
            limit = min(self._longest_bytes, limit)
        share = BodyShare(incoming.capacity, incoming.peer.tenant)
        try:
            raw = await read_all(incoming.receive, incoming.content_length, limit, share)
            tokens = None
            if len(raw) >= LONG_BODY_BYTES:
                await share.next_turn()
                if not sent.packed:
                    raw, tokens = await cut_tokens(raw)
            body = self._codec.decode(raw, sent)
            if tokens is not None and isinstance(body, s.Lookup | s.Reserve):
                body.tokens = tokens  # type: ignore[assignment]  # an array of them reads like a list
            if len(raw) >= DECODED_ALONE_BYTES:
                await next_slice()
            answer = self._run(service, incoming.peer, body, id_in_path, wanted)
            answered = answer if isinstance(answer, Answer) else await answer
            return Encoded(wanted.encode(answered), wanted.media_type, getattr(body, "traceparent", "") or "")
        finally:
            share.give_back()


class QueryCall:
    """A call without a body and without content in its answer: it ends something."""

    def __init__(
        self, name: str, call: Call[Any], parameters: Sequence[Parameter], run: RunQuery, about: About
    ) -> None:
        self.name, self.call, self.about, self.parameters = name, call, about, tuple(parameters)
        self.body: type[Body] | None = None
        self._run = run

    async def answer(self, service: CacheService, incoming: Incoming, id_in_path: str) -> Encoded:
        """Raises ApiError and TableError: refusals."""
        ends = self._run(service, incoming.peer, read_query(incoming.query, self.parameters), id_in_path)
        if ends is not None:
            await ends
        return Encoded(b"", "")


EngineCall = BodyCall[Any] | QueryCall


def read_query(query: str, parameters: Sequence[Parameter]) -> dict[str, str]:
    """The values by parameter. Raises ApiError: unknown_parameter, for one that the call does not have; bad_argument,
    for one that is missing, empty or too long."""
    values = dict(parse_qsl(query, keep_blank_values=True))
    wanted = sorted(parameter.name for parameter in parameters)
    for name in values:
        if name not in wanted:
            raise ApiError("unknown_parameter", "the call has no such parameter", found=name, wanted=wanted)
    for name in (parameter.name for parameter in parameters if parameter.is_required):
        where, value, length = f"query.{name}", values.get(name), f"1 to {ID_CHARACTERS} characters"
        if value is None:
            raise ApiError("bad_argument", f"{where}: Field required", found=where, wanted=length)
        if not 1 <= len(value) <= ID_CHARACTERS:
            raise ApiError(
                "bad_argument", f"{where}: found {len(value)}, wanted {length}", found=where, wanted=length
            )
    return values


_ASKER = ("unknown_session", "unknown_member", "member_suspect", "member_dead")
_GRANT = ("unknown_session", "unknown_grant", "grant_closed", "foreign_grant")

# ------------------------------------------------------------------ sessions

ATTACH = BodyCall(
    "attach", calls.ATTACH, s.AttachSession,
    lambda service, peer, body, _, form: service.attach(peer, body),
    About(
        "sessions", "Attach one process of an engine instance",
        "The member locks its byte of the lock file before this call, and keeps it as long as it may use the pool. "
        "`block_tokens` of a group divides the manifest's, which is the default: `skip_prefix_tokens` of lookups are "
        "then whole blocks in every group.",
        retry="`instance` and `member.id` are the ids. The same body gives the same session and member; the same "
        "member with other ranks is `id_reused`.",
        errors=("bad_argument", "pool_too_small", "layout_mismatch", "foreign_session", "id_reused", "rank_taken",
                "lock_not_visible", "member_dead", "table_full", "quota_exceeded", "not_ready"),
    ),
    longest_bytes=SHORT_BYTES,
)

WEIGHTS = BodyCall(
    "weights", calls.WEIGHTS, s.RunWeights,
    lambda service, peer, body, _, form: service.weights(peer, body),
    About(
        "sessions", "Report the weights that the engine runs from now on",
        "For engines whose weights change while they run. What the session looks up and stores afterwards is filed in "
        "the namespace `filed_in`, which it shares with engines of the same manifest that run weights of the same "
        "name. Grants from before stay as they are. The chunks of weights that no engine has run for `weights_grace_s` "
        "are evicted before all others.",
        retry="idempotent.",
        errors=("unknown_session", "unknown_member", "not_the_scheduler", "table_full", "quota_exceeded"),
    ),
    longest_bytes=SHORT_BYTES,
)

LEAVE = QueryCall(
    "leave", calls.LEAVE, [Parameter("member", is_required=False)],
    lambda service, peer, query, id_: service.leave(peer, id_, query.get("member")),
    About(
        "sessions", "Detach a member; everything it holds is released",
        "When the last member leaves, the session is closed.",
        retry="404 means that an earlier attempt succeeded.",
        errors=("unknown_session", "unknown_member", "ambiguous_member"),
    ),
)

HEARTBEAT = BodyCall(
    "heartbeat", calls.HEARTBEAT, s.Heartbeat,
    lambda service, peer, body, id_, form: service.heartbeat(peer, id_, body),
    About(
        "sessions", "Show that a member lives; get and answer questions about old grants",
        "Send one every `heartbeat_s` of the last answer. Unmap the segments in `retired`. `pinned_through`: how far "
        "segments are registered by now, for members that need it. `changes_since` asks which chunks lookups began and "
        "ceased to find, in order, for engines that inform routers; after an answer that is not `complete`, forget all "
        "chunks and start again. `outcomes` reports what became of requests: `GET /v1/requests` shows it.",
        retry="idempotent: `done`, `keep` and `outcomes` may be sent twice, and questions that were not answered are "
        "asked again.",
        errors=("unknown_session", "unknown_member", "member_dead", "foreign_grant", "not_the_asker", "not_a_holder"),
    ),
    longest_bytes=SHORT_BYTES,
)

# ------------------------------------------------------------------ reading

LOOKUP = BodyCall(
    "lookup", calls.LOOKUP, s.Lookup,
    lambda service, peer, body, _, form: service.lookup(peer, body, form),
    About(
        "reading", "The longest stored prefix, and a lease on it",
        "Keys form a chain: each names its chunk and all chunks before it. A lease is held by ranks, one bit each; a "
        "counter could not tell a repeated release from a second reader's. A client without ranks sends its number of "
        "`readers` and numbers them itself. `computes` lets lookups of others know, in `being_stored`, what this "
        "request is about to store, so that they can wait and ask again instead of computing the same. Such a promise "
        "holds no memory. It ends when nothing of it was stored for 30 s, or when a member of the session is not known "
        "to be alive. While the server drains, a lookup finds nothing, and `limited_by` says `draining`.",
        retry="(session, `request`, `epoch`) is the id. Within an epoch the same lease is renewed, so none is lost. "
        "Once a rank has released, the epoch is over: `stale_epoch`, ask again with the next one.",
        errors=(*_ASKER, "unknown_namespace", "stale_epoch", "id_reused", "skip_misaligned", "skip_exceeds_hit",
                "bad_argument", "table_full", "too_many_grants", "quota_exceeded"),
    ),
)

RELEASE = BodyCall(
    "release", calls.RELEASE, s.ReleaseLease,
    lambda service, peer, body, id_, form: service.release(peer, id_, body),
    About(
        "reading", "Reader ranks are done with a lease",
        retry="(lease, rank) is the id: releasing again changes nothing, and the answer is the same.",
        errors=(*_GRANT, "not_a_holder"),
    ),
    longest_bytes=SHORT_BYTES,
)

RELEASE_MANY = BodyCall(
    "release_many", calls.RELEASE_MANY, s.ReleaseMany,
    lambda service, peer, body, _, form: service.release_many(peer, body),
    About(
        "reading",
        "Releases of many leases of one session; lookups, reservations, commits and heartbeats carry them too",
        "`withdraws` takes back what lookups with `computes` have promised, when a request ends before it has stored "
        "it.",
        retry="(lease, rank) is the id, as for one release.",
        errors=("unknown_session",),
    ),
    longest_bytes=SHORT_BYTES,
)

CANCEL = QueryCall(
    "cancel", calls.CANCEL, [Parameter("session", is_required=True), Parameter("member", is_required=True)],
    lambda service, peer, query, id_: service.cancel(peer, id_, query["session"], query["member"]),
    About(
        "reading", "Cancel a lease whose plan was not handed to any rank",
        "For the member that asked, before any rank was handed the plan.",
        retry="idempotent: the second time nothing is left to cancel.",
        errors=(*_GRANT, "bad_argument", "unknown_member", "not_the_asker", "handed_out"),
    ),
)

MISMATCH = BodyCall(
    "mismatch", calls.MISMATCH, s.ReportMismatch,
    lambda service, peer, body, _, form: service.mismatch(peer, body),
    About(
        "reading", "Report chunks whose checksum is not the one in the lease",
        "The server hashes all parts of these chunks in shared memory itself, for at most a second. Damaged chunks are "
        "taken out of use; chunks whose bytes are right stay. A session may report 16 of these in an hour, and all "
        "sessions of one access token or user 256; then further reports are refused (`reports_refused`).",
        retry="idempotent: chunks already out of use are not counted again.",
        errors=(*_GRANT, "bad_argument", "reports_refused"),
    ),
    longest_bytes=SHORT_BYTES,
)

HINT = BodyCall(
    "hint", calls.HINT, Hint,
    lambda service, peer, body, _, form: service.hint(peer, body),
    About(
        "reading", "Hint how much a prompt's chunks are worth keeping",
        "A preference, not a promise: it says what is evicted first, and changes nothing that lookups find. Chunks "
        "that are retained (a priority above 0) go after all others until the duration ends. At most a quarter of the "
        "pool is retained, half of that for one tenant; the rest of a hint is `refused`. A priority of 0 or less, or "
        "`conversation_ended`, concerns the chunks at the end that no other prompt shares, as far as they are stored. "
        "A full quota evicts chunks whatever the hints are. A `label` is no hint: it names what prompts share, for "
        "`GET /v1/prefixes`. The last 512 labels are kept with the pool, 128 of each tenant.",
        retry="idempotent: the duration counts from the last call.",
        errors=("unknown_session", "unknown_member"),
    ),
)

HOLD = BodyCall(
    "hold", calls.HOLD, s.Hold,
    lambda service, peer, body, _, form: service.hold(peer, body, form),
    About(
        "reading", "Lease single chunks, wherever they stand in their chains",
        "For copies to lower tiers: the lease has all groups of each chunk, for one reader, and does not count "
        "as a use of the chunks.",
        retry="(session, `request`) is the id: the same keys have the same lease until it is released, and "
        "`grant_closed` then; others are `id_reused`.",
        errors=(*_ASKER, "id_reused", "grant_closed", "bad_argument", "table_full", "too_many_grants",
                "quota_exceeded"),
    ),
)

PREFETCH = BodyCall(
    "prefetch", calls.PREFETCH, s.Prefetch,
    lambda service, peer, body, _, form: service.prefetch(peer, body),
    About(
        "reading", "Load chunks from lower tiers that requests will ask for soon",
        "Answers at once, from what the server knows; tiers are asked afterwards, after the chunks that requests wait "
        "for. Chunks that come are ordinary ones that no engine holds. All prefetches together evict a quarter of the "
        "pool at most; chunks that came and were not asked for count for a minute.",
        retry="idempotent: what is stored, or on its way, is not loaded again.",
        errors=("unknown_session", "unknown_member"),
    ),
)

# ------------------------------------------------------------------ between nodes

PEER_NOTES = BodyCall(
    "peer_notes", calls.PEER_NOTES, p.PeerNotes,
    lambda service, peer, body, _, form: service.peer_notes(peer, body),
    About(
        "peers", "Tell and learn the generations of namespaces",
        "Clears and deletions at one node reach the pools of the others. A namespace whose generation is lower here is "
        "cleared.",
        retry="idempotent.",
        errors=("not_found", "not_ready"),
    ),
    longest_bytes=SHORT_BYTES,
)

PEER_READ = BodyCall(
    "peer_read", calls.PEER_READ, p.PeerRead,
    lambda service, peer, body, _, form: service.peer_read(peer, body),
    About(
        "peers", "Lease chunks for another node, or ask which are there",
        "The caller reads the chunks by a Transfer Engine, and compares their checksums. A lease ends when a later "
        "call `releases` it, or by itself.",
        retry="each call that succeeds makes a lease of its own; one whose answer was lost ends by itself.",
        errors=("not_found", "not_ready"),
    ),
    longest_bytes=SHORT_BYTES,
)

# ------------------------------------------------------------------ writing

RESERVE = BodyCall(
    "reserve", calls.RESERVE, s.Reserve,
    lambda service, peer, body, _, form: service.reserve(peer, body, form),
    About(
        "writing", "Get slots for the chunks that are missing",
        "If there is too little memory, or the tenant's quota is full, a prefix of the missing chunks is granted, and "
        "while the server drains, none; `limited_by` says why.",
        retry="(session, `store`) is the id. The same body gives the same answer while the reservation is open and "
        "`grant_closed` afterwards; another body is `id_reused`.",
        errors=(*_ASKER, "id_reused", "grant_closed", "chain_mismatch", "bad_argument", "table_full", "too_many_grants",
                "quota_exceeded"),
    ),
)

MAKE_RAW = BodyCall(
    "make_raw", calls.MAKE_RAW, s.MakeRaw,
    lambda service, peer, body, id_, form: service.make_raw(peer, id_, body),
    About(
        "writing", "Get slots for raw bytes, for parts that could not be packed",
        "In a group that is packed, slots have the length of packed parts. A part that does not fit, which is rare, is "
        "stored raw in a larger slot; the slot that it had is given back. When memory runs out, `limited_by` says why, "
        "and the parts that are left out cannot be committed: abort the rank.",
        retry="(reservation, rank, part) is the id: a part that has such a slot keeps it.",
        errors=(*_GRANT, "not_a_holder", "not_reserved", "already_committed"),
    ),
)

COMMIT = BodyCall(
    "commit", calls.COMMIT, s.Commit,
    lambda service, peer, body, id_, form: service.commit(peer, id_, body),
    About(
        "writing", "Publish the parts that a rank has written",
        "Send it when all copies of the rank under the reservation have ended. A late commit is `grant_closed`, which "
        "is final, and the rank counts as done with the whole reservation, whichever parts it names: slots that it "
        "still fills are given to others.",
        retry="(reservation, rank, part) is the id: equal checksums give the same answer, others `already_committed`.",
        errors=(*_GRANT, "not_a_holder", "not_reserved", "already_committed"),
    ),
)

ABORT = BodyCall(
    "abort", calls.ABORT, s.Abort,
    lambda service, peer, body, id_, form: service.abort(peer, id_, body),
    About(
        "writing", "Ranks end without committing; the reservation closes",
        "Chunks whose parts were all committed before stay stored.",
        retry="(reservation, rank) is the id: repeating it is harmless.",
        errors=(*_GRANT, "unknown_member", "not_the_asker", "handed_out", "not_a_holder"),
    ),
    longest_bytes=SHORT_BYTES,
)

ENGINE_CALLS: tuple[EngineCall, ...] = (
    ATTACH, WEIGHTS, LEAVE, HEARTBEAT, LOOKUP, RELEASE, RELEASE_MANY, CANCEL,
    MISMATCH, HINT, HOLD, PREFETCH, PEER_NOTES, PEER_READ, RESERVE, MAKE_RAW, COMMIT, ABORT,
)
_WITHOUT_ID = {(one.call.method, one.call.path): one for one in ENGINE_CALLS if "{" not in one.call.path}
_WITH_ID = {
    (one.call.method, kind, "".join(verb)): one for one in ENGINE_CALLS if "{" in one.call.path
    for _, _, kind, _, *verb in [one.call.path.split("/")]
}
_METHODS = frozenset(one.call.method for one in ENGINE_CALLS)


def find(method: str, path: str) -> tuple[EngineCall, str] | None:
    """The engine call of this method and path, and the id in the path; None: there is none."""
    found = _WITHOUT_ID.get((method, path))
    if found is not None:
        return found, ""
    match path.split("/"):
        case ["", "v1", kind, id_in_path, verb] if id_in_path and verb:
            found = _WITH_ID.get((method, kind, verb))
        case ["", "v1", kind, id_in_path] if id_in_path:
            found = _WITH_ID.get((method, kind, ""))
        case _:
            return None
    return None if found is None else (found, id_in_path)


def methods_at(path: str) -> set[str]:
    """The methods of engine calls with this path."""
    return {method for method in _METHODS if find(method, path) is not None}
