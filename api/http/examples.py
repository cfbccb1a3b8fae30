"""One example of every body and answer for the OpenAPI document, and curl lines made from them.

A curl line has shell variables in place of the ids below, and works once they are set. Bodies leave out fields with a
default; answers have all fields.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvdock.protocol import admin_schemas as a, reports as r, schemas as s
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.wire_types import Answer, Body

SESSION = "0a1b2c-1"
MEMBER = "scheduler-0"
INSTANCE = "engine-7"
LEASE = "0a1b2c0000000001"
RESERVATION = "0a1b2c0000000002"
POOL_ID = "3fa90c51d27be604"
LOCK_OFFSET = 4242424242424242
NAMESPACE = "5e" * 32
KEYS = ["1f" * 32, "2f" * 32]
CHECKSUM = "043ed4a6d9c7888f"
BASE_URL = "localhost:7410"

VARIABLES = {
    SESSION: "SESSION", MEMBER: "MEMBER", INSTANCE: "INSTANCE", LEASE: "LEASE", RESERVATION: "RESERVATION",
    str(LOCK_OFFSET): "LOCK_OFFSET", NAMESPACE: "NAMESPACE",
}
"""Text of an example → the shell variable that replaces it in curl lines."""

_MANIFEST: dict[str, Any] = {
    "model": "example-model", "kv_dtype": "bfloat16", "layers": 2, "kv_heads": 2, "head_size": 64,
    "chunk_tokens": 16, "block_tokens": 4, "groups": [{"part_bytes": 16384}],
}
_CHANGES = 662316 << 32
_ASKER = {"session": SESSION, "member": MEMBER}

BODIES: dict[type[Body], dict[str, Any]] = {
    s.AttachSession: {
        "instance": INSTANCE, "manifest": _MANIFEST,
        "member": {"id": MEMBER, "ranks": [0], "scheduler": True, "lock_offset": LOCK_OFFSET},
    },
    s.Heartbeat: {"member": MEMBER, "pinned_through": 1, "changes_since": _CHANGES},
    s.Lookup: {**_ASKER, "request": "r-1", "keys": KEYS},
    s.ReleaseLease: {"session": SESSION, "ranks": [0]},
    s.ReleaseMany: {"session": SESSION, "releases": [[LEASE, [0]]]},
    s.CancelLease: _ASKER,
    s.ReportMismatch: {"session": SESSION, "lease": LEASE, "chunks": [0]},
    s.Reserve: {**_ASKER, "store": "s-1", "keys": KEYS},
    s.Commit: {"session": SESSION, "rank": 0, "parts": [[0, 0, CHECKSUM]]},
    s.Abort: {"session": SESSION, "ranks": [0]},
    a.ClearCache: {"namespace": NAMESPACE},
    a.DeleteChunks: {"namespace": NAMESPACE, "keys": KEYS},
    a.PinChunks: {"namespace": NAMESPACE, "keys": KEYS, "duration_s": 60},
    a.PatchConfig: {"session_cap": 0.5, "session_grants": 4096},
}

_SEGMENT = s.Segment(
    id=0, name="/kvdock-3fa90c51d27be604-0000", bytes=1 << 30, data_offset=4096, prefaulted_bytes=1 << 30,
    used_bytes=32768,
)
_MEMBER = s.MemberView(id=MEMBER, ranks=[0], scheduler=True, state="live", heartbeat_age_s=0.8, pinned_through=1)
_SESSION = s.SessionView(
    session=SESSION, instance=INSTANCE, label="", model="example-model", namespace=NAMESPACE, members=[_MEMBER],
    leases=1, reservations=0, held_bytes=32768, age_s=61.5,
)
_LEASE = r.LeaseView(
    grant=LEASE, kind="lease", session=SESSION, request="r-1", epoch=0, readers=1, remaining=[0], chunks=2,
    bytes=32768, age_s=0.1, closed=False,
)
_POOL = r.PoolView(
    limit_bytes=4 << 30, allocated_bytes=1 << 30, prefaulted_bytes=1 << 30, free_bytes=1073704960, reserved_bytes=0,
    ready_bytes=32768, quarantined_bytes=0, held_bytes=32768, segments=1,
)
_LIMITS = Limits(
    pool_bytes=4 << 30, session_cap=0.5, total_cap=0.75, low_water=0.05, high_water=0.1, session_grants=4096
)


def answers() -> dict[type[Answer], Answer]:
    part = s.Part(0, 0, 0, 4096, 16384, CHECKSUM)
    request = r.RequestView(
        at=1700000000.0, kind="lookup", session=SESSION, label="", request="r-1", tokens=32, hit_tokens=32, chunks=2,
        bytes=32768, took_us=41,
    )
    series = r.Series(name="hit_ratio", title="Tokens found", unit="ratio", chart="Hit ratio", values=[None, 1.0])
    detail = {
        **msgspec.structs.asdict(_SESSION),
        "members": [a.MemberDetail(**msgspec.structs.asdict(_MEMBER), grants=[LEASE])],
    }
    manifest = msgspec.convert(_MANIFEST, s.Manifest)
    found = [
        s.SessionAttached(
            session=SESSION, member=MEMBER, namespace=NAMESPACE, pool_id=POOL_ID, incarnation=662316,
            segments=[_SEGMENT], part_bytes=[16384], chunk_tokens=16, heartbeat_s=2.0,
            changes_next=_CHANGES,
        ),
        s.HeartbeatAnswer(
            heartbeat_s=2.0, questions=[], segments=1,
            changes=s.Changes(changes=[s.Change(KEYS[0], True)], next=_CHANGES + 1, complete=True),
        ),
        s.Sessions(sessions=[_SESSION]),
        a.SessionDetail(**detail, grants=[_LEASE]),
        s.LookupAnswer(hit_tokens=32, lease=LEASE, first_chunk=0, chunks=[[part], [part]]),
        s.ReleaseAnswer(remaining=[]),
        s.ReleaseManyAnswer(),
        _LEASE,
        r.Leases(leases=[_LEASE]),
        s.MismatchAnswer(quarantined=1),
        s.ReserveAnswer(
            reservation=RESERVATION, deadline_s=30.0, present=[1], busy=[],
            chunks=[s.GrantedChunk(index=0, parts=[s.WritePart(0, 0, 0, 4096, 16384)])],
        ),
        s.CommitAnswer(ready=1, remaining=[]),
        s.Segments(pool_id=POOL_ID, lock_file="/dev/shm/kvdock-3fa90c51d27be604.lock", segments=[_SEGMENT]),
        r.Health(status="ok"),
        r.Status(
            status="ok", reasons=[], version="0.1.0", pool_id=POOL_ID, incarnation=662316, uptime_s=61.5,
            now=1700000000.0, pool=_POOL, chunks=r.ChunkCounts(reserved=0, ready=2, quarantined=0), sessions=1,
            leases=1, reservations=0, counters={"lookups": 1, "hit_tokens": 32},
        ),
        r.Stats(interval_s=1.0, age_s=0.2, series=[series]),
        r.Requests(requests=[request]),
        a.Cleared(chunks=2),
        a.Deleted(chunks=2),
        a.Pinned(chunks=2),
        a.Config(limits=_LIMITS, settings={"pool_bytes": 4 << 30, "port": 7410}, retiring=[]),
        a.Namespaces(namespaces=[
            a.NamespaceView(namespace=NAMESPACE, manifest=manifest, chunk_bytes=16384, sessions=1)
        ]),
    ]
    return {type(answer): answer for answer in found}


def by_name() -> dict[str, Any]:
    """Examples as JSON values, by the name of their struct."""
    plain = {body.__name__: example for body, example in BODIES.items()}
    return plain | {kind.__name__: msgspec.to_builtins(example) for kind, example in answers().items()}


def curl(method: str, path: str, body: Any) -> str:
    """One line for a shell in which the VARIABLES are set. `body`: a JSON value, or None."""
    url = BASE_URL + path
    for name in ("session", "lease", "reservation"):
        url = url.replace(f"{{{name}}}", f"${name.upper()}")
    words = ["curl -sS", *([f"-X {method}"] if method not in ("GET", "POST") else []), f'"{url}"']
    if body is not None:
        text = json.dumps(body, separators=(",", ":"))
        for example, variable in VARIABLES.items():
            text = text.replace(example, f"'\"${variable}\"'")
        words += ["-H 'content-type: application/json'", f"-d '{text}'"]
    return " ".join(words)
