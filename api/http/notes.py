"""What the OpenAPI document says of each call beside its types: how it behaves, and how it is repeated.

Keys are (method, path) as in the document; a test wants an entry for every call.
"""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    text: str = ""
    retry: str = "reads only; repeat it at will."


_PAGED = Note("A page of at most `limit`; `next` is the `cursor` of the following one, null after the last.")
_NATURAL = "idempotent by nature; a repeat finds less or nothing left to do, and the same state afterwards."

NOTES: dict[tuple[str, str], Note] = {
    ("POST", "/v1/sessions"): Note(
        "The member holds its byte of the lock file before it calls, and for as long as it may touch the pool. "
        "`block_tokens` of a group divides the manifest's, and is the manifest's where it is not said: "
        "`skip_prefix_tokens` of lookups are then whole blocks in every group.",
        "`instance` and `member.id` are the ids. The same body gives the same session and member; the same "
        "member with other ranks is `id_reused`.",
    ),
    ("GET", "/v1/sessions"): _PAGED,
    ("GET", "/v1/sessions/{session}"): Note(
        "All members, the bytes the session holds, and a page of its open leases and reservations; `limit` and "
        "`cursor` page those."
    ),
    ("DELETE", "/v1/sessions/{session}"): Note(
        "The last member out closes the session.",
        "404 says that an earlier attempt got through.",
    ),
    ("POST", "/v1/sessions/{session}/heartbeat"): Note(
        "Send one every `heartbeat_s` of the last answer. Unmap the segments in `retired`. `pinned_through`: what is "
        "pinned by now, for members that need pinning. `changes_since` asks which chunks lookups began to find and "
        "ceased to find, in order, for engines that tell routers; after an answer that is not `complete` one starts "
        "with nothing.",
        "idempotent by nature: done and keep may be said twice, and questions not answered are asked again.",
    ),
    ("POST", "/v1/lookups"): Note(
        "Keys chain: each names its chunk and all before it. Locks are held by ranks, one bit each, not counted: a "
        "counted lock of nobody in particular could not tell a repeated release from a second reader's, so a client "
        "without ranks says how many `readers` it has and numbers them.",
        "(session, `request`, `epoch`) is the id. Within an epoch the same lease is renewed, so none is stranded. "
        "Once a rank has released, the epoch is over: `stale_epoch`, ask with the next one.",
    ),
    ("GET", "/v1/leases"): _PAGED,
    ("POST", "/v1/leases/{lease}/release"): Note(
        "", "(lease, rank) is the id: a rank that said done before changes nothing, and the answer is the same."
    ),
    ("POST", "/v1/releases"): Note("", "(lease, rank) is the id, as for one release."),
    ("GET", "/v1/leases/{lease}"): Note("A heartbeat renews the leases of its session; this call changes nothing."),
    ("DELETE", "/v1/leases/{lease}"): Note(
        "By the member that asked, before any rank was handed the plan. Say who in the body or in the query.",
        "idempotent by nature: nothing is left to cancel the second time.",
    ),
    ("POST", "/v1/mismatches"): Note(
        "", "idempotent by nature: chunks already out of use are not counted again."
    ),
    ("POST", "/v1/reservations"): Note(
        "A shortfall grants a prefix of the missing chunks and says why in `limited_by`.",
        "(session, `store`) is the id. The same body gives the same answer while the reservation is open and "
        "`grant_closed` afterwards; another body is `id_reused`.",
    ),
    ("POST", "/v1/reservations/{reservation}/commit"): Note(
        "A late commit is `grant_closed`, which is final, and still counts as the rank's word that it is done.",
        "(reservation, rank, part) is the id: equal checksums give the same answer, others `already_committed`.",
    ),
    ("POST", "/v1/reservations/{reservation}/abort"): Note(
        "What was committed before stays stored if all its parts were.",
        "(reservation, rank) is the id: saying it again is harmless.",
    ),
    ("POST", "/v1/cache/clear"): Note(
        "Chunks that engines are reading leave the index at once; their memory waits for the readers' word. Chunks "
        "stored while the call runs may stay.",
        _NATURAL,
    ),
    ("DELETE", "/v1/chunks"): Note("As clear, for some keys.", _NATURAL),
    ("POST", "/v1/pins"): Note(
        "Pinned chunks take part in clear, delete and mismatch as all others do. Pins can fill the pool: then "
        "reservations answer `no_space`, and `/readyz` says so.",
        "idempotent by nature: the duration counts from the last call.",
    ),
    ("GET", "/v1/config"): Note(),
    ("PATCH", "/v1/config"): Note(
        "Changes last until the server ends. A smaller `pool_bytes` drains whole segments: nothing new goes in, what "
        "nobody holds goes out, and a segment is removed once nobody holds any of it.",
        "idempotent by nature: values are absolute.",
    ),
    ("GET", "/v1/namespaces"): _PAGED,
    ("GET", "/v1/segments"): _PAGED,
    ("GET", "/v1/requests"): _PAGED,
    ("GET", "/v1/status"): Note(),
    ("GET", "/v1/stats"): Note(),
    ("GET", "/livez"): Note("503 with reasons when the server is stuck inside: restart it."),
    ("GET", "/startupz"): Note("503 until there was memory to give out for the first time."),
    ("GET", "/readyz"): Note("503 with reasons when no slot could be given out now."),
    ("GET", "/healthz"): Note("503 with reasons when no slot could be given out now."),
    ("GET", "/metrics"): Note("Base units; counters end in `_total`."),
}
