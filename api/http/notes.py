"""What the OpenAPI document says about each call besides its types: how it behaves, and what repeating it does.

Keys are (method, path) as in the document; a test requires an entry for every call.
"""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    text: str = ""
    retry: str = "reads only, so it may be repeated."


_PAGED = Note("A page of at most `limit`; `next` is the `cursor` of the following one, null after the last.")
_IDEMPOTENT = "idempotent: a repeat finds less or nothing to do, and leaves the same state."

NOTES: dict[tuple[str, str], Note] = {
    ("POST", "/v1/sessions"): Note(
        "The member locks its byte of the lock file before this call, and keeps it as long as it may use the pool. "
        "`block_tokens` of a group divides the manifest's, which is the default: `skip_prefix_tokens` of lookups are "
        "then whole blocks in every group.",
        "`instance` and `member.id` are the ids. The same body gives the same session and member; the same "
        "member with other ranks is `id_reused`.",
    ),
    ("GET", "/v1/sessions"): _PAGED,
    ("GET", "/v1/sessions/{session}"): Note(
        "All members, the bytes that the session holds, and a page of its open leases and reservations, chosen by "
        "`limit` and `cursor`."
    ),
    ("DELETE", "/v1/sessions/{session}"): Note(
        "When the last member leaves, the session is closed.",
        "404 means that an earlier attempt succeeded.",
    ),
    ("POST", "/v1/sessions/{session}/heartbeat"): Note(
        "Send one every `heartbeat_s` of the last answer. Unmap the segments in `retired`. `pinned_through`: how far "
        "segments are registered by now, for members that need it. `changes_since` asks which chunks lookups began "
        "and ceased to find, in order, for engines that inform routers; after an answer that is not `complete`, forget "
        "all chunks and start again.",
        "idempotent: done and keep may be sent twice, and questions that were not answered are asked again.",
    ),
    ("POST", "/v1/lookups"): Note(
        "Keys form a chain: each names its chunk and all chunks before it. A lease is held by ranks, one bit each; a "
        "counter could not tell a repeated release from a second reader's. A client without ranks sends its number of "
        "`readers` and numbers them itself.",
        "(session, `request`, `epoch`) is the id. Within an epoch the same lease is renewed, so none is lost. "
        "Once a rank has released, the epoch is over: `stale_epoch`, ask again with the next one.",
    ),
    ("GET", "/v1/leases"): _PAGED,
    ("POST", "/v1/leases/{lease}/release"): Note(
        "", "(lease, rank) is the id: releasing again changes nothing, and the answer is the same."
    ),
    ("POST", "/v1/releases"): Note("", "(lease, rank) is the id, as for one release."),
    ("GET", "/v1/leases/{lease}"): Note("A heartbeat renews the leases of its session; this call changes nothing."),
    ("DELETE", "/v1/leases/{lease}"): Note(
        "For the member that asked, before any rank was handed the plan. `session` and `member` are in the body or "
        "in the query.",
        "idempotent: the second time nothing is left to cancel.",
    ),
    ("POST", "/v1/mismatches"): Note(
        "", "idempotent: chunks already out of use are not counted again."
    ),
    ("POST", "/v1/reservations"): Note(
        "If there is too little memory, a prefix of the missing chunks is granted; `limited_by` says why.",
        "(session, `store`) is the id. The same body gives the same answer while the reservation is open and "
        "`grant_closed` afterwards; another body is `id_reused`.",
    ),
    ("POST", "/v1/reservations/{reservation}/commit"): Note(
        "A late commit is `grant_closed`, which is final; the rank still counts as done.",
        "(reservation, rank, part) is the id: equal checksums give the same answer, others `already_committed`.",
    ),
    ("POST", "/v1/reservations/{reservation}/abort"): Note(
        "Chunks whose parts were all committed before stay stored.",
        "(reservation, rank) is the id: repeating it is harmless.",
    ),
    ("POST", "/v1/cache/clear"): Note(
        "Lookups stop finding the chunks at once; memory that engines are reading is freed when they are done. Chunks "
        "stored while the call runs may stay.",
        _IDEMPOTENT,
    ),
    ("DELETE", "/v1/chunks"): Note("Like clear, for some keys.", _IDEMPOTENT),
    ("POST", "/v1/pins"): Note(
        "Clear, delete and mismatches take pinned chunks out of use like all others. Pins can fill the pool: then "
        "reservations answer `no_space`, and `/readyz` says so.",
        "idempotent: the duration counts from the last call.",
    ),
    ("GET", "/v1/config"): Note(),
    ("PATCH", "/v1/config"): Note(
        "Changes last until the server ends. A smaller `pool_bytes` drains whole segments: nothing new is stored "
        "in them, what nobody holds is evicted, and a segment is removed once nobody holds any of it.",
        "idempotent: values are absolute.",
    ),
    ("GET", "/v1/namespaces"): _PAGED,
    ("GET", "/v1/segments"): _PAGED,
    ("GET", "/v1/requests"): _PAGED,
    ("GET", "/v1/status"): Note(),
    ("GET", "/v1/stats"): Note(),
    ("GET", "/livez"): Note("503 with reasons when the server is stuck: restart it."),
    ("GET", "/startupz"): Note("503 until the first segment is allocated."),
    ("GET", "/readyz"): Note("503 with reasons when no slot can be given out now."),
    ("GET", "/healthz"): Note("503 with reasons when no slot can be given out now."),
    ("GET", "/metrics"): Note("Base units; counters end in `_total`."),
}
