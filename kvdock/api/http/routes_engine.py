"""The routes that engines call: sessions, lookups, leases, reservations. Bodies are JSON or MessagePack."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from kvdock.api.http import endpoints
from kvdock.api.http.endpoints import Endpoint, Incoming
from kvdock.api.http.handlers import handlers_of, peer_of_call
from kvdock.api.http.openapi import route
from kvdock.api.http.wire import NO_STORE, no_content
from kvdock.protocol import calls as c

_ASKER = ("unknown_session", "unknown_member", "member_suspect", "member_dead")
_GRANT = ("unknown_session", "unknown_grant", "grant_closed", "foreign_grant")

Id = Annotated[str, Query(min_length=1, max_length=256)]

router = APIRouter()
_route = partial(route, router)


def _add(name: str, endpoint: Endpoint[Any], tag: str, summary: str, note: str = "", **more: Any) -> None:
    """The route of an endpoint; its path has one id at most. `more`: as openapi.route has it."""
    call = endpoint.call
    ids = [
        {"name": id_, "in": "path", "required": True, "schema": {"type": "string", "title": id_.title()}}
        for id_ in re.findall(r"{(\w+)}", call.path)
    ]

    async def respond(request: Request) -> Response:
        """The endpoint's answer, in the form that the caller sent or, if it says so, accepts."""
        handlers, header = handlers_of(request), request.headers.get
        incoming = Incoming(
            peer_of_call(request), header("content-type", ""), header("accept", ""), header("content-length", ""),
            request.receive,
        )
        id_in_path = "".join(request.path_params.values())
        content, media_type = await endpoint.answer(
            handlers.service, incoming, handlers.body_limit_bytes, handlers.body_room, id_in_path
        )
        return Response(content, media_type=media_type, headers=NO_STORE)

    _route(call, tag, summary, note, body=endpoint.body, name=name, parameters=ids, **more)(respond)


# ------------------------------------------------------------------ sessions


_add(
    "attach", endpoints.ATTACH, "sessions", "Attach one process of an engine instance",
    "The member locks its byte of the lock file before this call, and keeps it as long as it may use the pool. "
    "`block_tokens` of a group divides the manifest's, which is the default: `skip_prefix_tokens` of lookups are then "
    "whole blocks in every group.",
    retry="`instance` and `member.id` are the ids. The same body gives the same session and member; the same member "
    "with other ranks is `id_reused`.",
    errors=("bad_argument", "pool_too_small", "layout_mismatch", "id_reused", "rank_taken", "lock_not_visible",
            "member_dead", "table_full", "quota_exceeded", "not_ready"),
)


_add(
    "weights", endpoints.WEIGHTS, "sessions", "Say which weights the engine runs from now on",
    "For engines whose weights change while they run. What the session looks up and stores afterwards is filed in the "
    "namespace `filed_in`, which it shares with engines of the same manifest that run weights of the same name. Grants "
    "from before stay as they are. The chunks of weights that no engine has run for `weights_grace_s` are evicted "
    "before all others.",
    retry="idempotent.",
    errors=("unknown_session", "unknown_member", "not_the_scheduler", "table_full", "quota_exceeded"),
)


@_route(
    c.LEAVE, "sessions", "Detach a member; everything it holds is released",
    "When the last member leaves, the session is closed.", retry="404 means that an earlier attempt succeeded.",
    errors=("unknown_session", "unknown_member", "ambiguous_member"),
)
async def leave(request: Request, session: str, member: str | None = None) -> Response:
    handlers_of(request).service.leave(peer_of_call(request), session, member)
    return no_content()


_add(
    "heartbeat", endpoints.HEARTBEAT, "sessions",
    "Show that a member lives; get and answer questions about old grants",
    "Send one every `heartbeat_s` of the last answer. Unmap the segments in `retired`. `pinned_through`: how far "
    "segments are registered by now, for members that need it. `changes_since` asks which chunks lookups began and "
    "ceased to find, in order, for engines that inform routers; after an answer that is not `complete`, forget all "
    "chunks and start again. `outcomes` tells people what became of requests: `GET /v1/requests` shows it.",
    retry="idempotent: `done`, `keep` and `outcomes` may be sent twice, and questions that were not answered are asked "
    "again.",
    errors=("unknown_session", "unknown_member", "member_dead", "foreign_grant", "not_the_asker", "not_a_holder"),
)

# ------------------------------------------------------------------ reading

_add(
    "lookup", endpoints.LOOKUP, "reading", "The longest stored prefix, and a lease on it",
    "Keys form a chain: each names its chunk and all chunks before it. A lease is held by ranks, one bit each; a "
    "counter could not tell a repeated release from a second reader's. A client without ranks sends its number of "
    "`readers` and numbers them itself. `computes` lets lookups of others know, in `being_stored`, what this request "
    "is about to store, so that they can wait and ask again instead of computing the same. Such a promise holds no "
    "memory. It ends when nothing of it was stored for 30 s, or when a member of the session is not known to be alive.",
    retry="(session, `request`, `epoch`) is the id. Within an epoch the same lease is renewed, so none is lost. Once a "
    "rank has released, the epoch is over: `stale_epoch`, ask again with the next one.",
    errors=(*_ASKER, "unknown_namespace", "stale_epoch", "id_reused", "skip_misaligned", "skip_exceeds_hit",
            "bad_argument", "table_full", "too_many_grants", "quota_exceeded", "not_ready"),
)
_add(
    "release", endpoints.RELEASE, "reading", "Reader ranks are done with a lease",
    retry="(lease, rank) is the id: releasing again changes nothing, and the answer is the same.",
    errors=(*_GRANT, "not_a_holder"),
)
_add(
    "release_many", endpoints.RELEASE_MANY, "reading",
    "Releases of many leases of one session; lookups, reservations, commits and heartbeats carry them too",
    "`withdraws` takes back what lookups with `computes` have promised, when a request ends before it has stored it.",
    retry="(lease, rank) is the id, as for one release.", errors=("unknown_session",),
)


@_route(
    c.CANCEL, "reading", "Cancel a lease whose plan was not handed to any rank",
    "For the member that asked, before any rank was handed the plan.",
    retry="idempotent: the second time nothing is left to cancel.",
    errors=(*_GRANT, "bad_argument", "unknown_member", "not_the_asker", "handed_out"),
)
async def cancel(request: Request, lease: str, session: Id, member: Id) -> Response:
    handlers_of(request).service.cancel(peer_of_call(request), lease, session, member)
    return no_content()


_add(
    "mismatch", endpoints.MISMATCH, "reading", "Report chunks whose checksum is not the one in the lease",
    retry="idempotent: chunks already out of use are not counted again.", errors=(*_GRANT, "bad_argument"),
)

_add(
    "hint", endpoints.HINT, "reading", "Say how much a prompt's chunks are worth keeping",
    "A preference, not a promise: it says what is evicted first, and changes nothing that lookups find. Chunks that "
    "are retained (a priority above 0) go after all others until the duration ends. At most a quarter of the pool is "
    "retained; what a wish has beyond that is `refused`. A priority of 0 or less, or `conversation_ended`, concerns "
    "the chunks at the end that no other prompt shares, as far as they are stored. A quota evicts whatever is wished.",
    retry="idempotent: the duration counts from the last call.",
    errors=("unknown_session", "unknown_member"),
)

_add(
    "hold", endpoints.HOLD, "reading", "Lease single chunks, wherever they stand in their chains",
    "For copies to lower tiers: the lease has all groups of each chunk, for one reader, and is no use of the chunks.",
    retry="(session, `request`) is the id: the same keys have the same lease until it is released, and `grant_closed` "
    "then; others are `id_reused`.",
    errors=(*_ASKER, "id_reused", "grant_closed", "bad_argument", "table_full", "too_many_grants", "quota_exceeded",
            "not_ready"),
)
_add(
    "prefetch", endpoints.PREFETCH, "reading", "Load from lower tiers what will be asked for soon",
    "Answers at once, from what the server knows; tiers are asked afterwards, behind what requests wait for. What "
    "comes is an ordinary chunk that nobody holds. All prefetches together push out a quarter of the pool at most; "
    "what came and was not asked for counts for a minute.",
    retry="idempotent: what is stored, or on its way, is not loaded again.",
    errors=("unknown_session", "unknown_member"),
)

# ------------------------------------------------------------------ writing

_add(
    "reserve", endpoints.RESERVE, "writing", "Get slots for the chunks that are missing",
    "If there is too little memory, or the tenant's quota is full, a prefix of the missing chunks is granted; "
    "`limited_by` says why.",
    retry="(session, `store`) is the id. The same body gives the same answer while the reservation is open and "
    "`grant_closed` afterwards; another body is `id_reused`.",
    errors=(*_ASKER, "id_reused", "grant_closed", "chain_mismatch", "bad_argument", "table_full", "too_many_grants",
            "quota_exceeded", "not_ready"),
)
_add(
    "commit", endpoints.COMMIT, "writing", "Publish the parts that a rank has written",
    "Send it when all copies of the rank under the reservation have ended. A late commit is `grant_closed`, which is "
    "final, and the rank counts as done with the whole reservation, whichever parts it names: slots that it still "
    "fills are given to others.",
    retry="(reservation, rank, part) is the id: equal checksums give the same answer, others `already_committed`.",
    errors=(*_GRANT, "not_a_holder", "not_reserved", "already_committed"),
)
_add(
    "abort", endpoints.ABORT, "writing", "Ranks end without committing; the reservation closes",
    "Chunks whose parts were all committed before stay stored.",
    retry="(reservation, rank) is the id: repeating it is harmless.",
    errors=(*_GRANT, "unknown_member", "not_the_asker", "handed_out", "not_a_holder"),
)
