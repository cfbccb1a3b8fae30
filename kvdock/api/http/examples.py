"""One example of every body and answer for the OpenAPI document, and curl lines made from them.

A curl line has shell variables in place of the ids below, and works once they are set. Bodies leave out fields with a
default; answers have all fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from kvdock.protocol import admin_schemas as a, schemas as s
from kvdock.protocol.schemas import Hint
from kvdock.protocol.wire_types import Answer, Body, Scope

SESSION = "0a1b2c-1-" + "5d" * 16
LISTED_SESSION = SESSION.rpartition("-")[0]
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
OVER_THE_SOCKET = '--unix-socket "$SOCKET"'
"""In calls that need more than the scope `health`: the server's own user needs no access token there."""

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
    s.Heartbeat: {
        "member": MEMBER, "pinned_through": 1, "changes_since": _CHANGES, "outcomes": [
            {"request": "r-1", "prompt_tokens": 40, "local_tokens": 0, "found_tokens": 16, "loaded_tokens": 16},
        ],
    },
    s.Lookup: {**_ASKER, "request": "r-1", "keys": KEYS},
    a.Acknowledge: {},
    s.RunWeights: {**_ASKER, "weights": "step-42"},
    s.ReleaseLease: {"session": SESSION, "ranks": [0]},
    s.ReleaseMany: {"session": SESSION, "releases": [[LEASE, [0]]]},
    s.ReportMismatch: {"session": SESSION, "lease": LEASE, "chunks": [0]},
    Hint: {**_ASKER, "keys": KEYS, "priority": 10, "duration_s": 60},
    s.Hold: {**_ASKER, "request": "h-1", "keys": KEYS},
    s.Prefetch: {**_ASKER, "keys": KEYS, "after_s": 20},
    s.Reserve: {**_ASKER, "store": "s-1", "keys": KEYS},
    s.MakeRaw: {"session": SESSION, "rank": 0, "parts": [[0, 0]]},
    s.Commit: {"session": SESSION, "rank": 0, "parts": [[0, 0, CHECKSUM]]},
    s.Abort: {"session": SESSION, "ranks": [0]},
    a.ClearCache: {"namespace": NAMESPACE},
    a.DeleteChunks: {"namespace": NAMESPACE, "keys": KEYS},
    a.EvictChunks: {"free_bytes": 1 << 20},
    a.EmptyTier: {"tier": "objects", "namespaces": [NAMESPACE]},
    a.PinChunks: {"namespace": NAMESPACE, "keys": KEYS, "duration_s": 60, "name": "support-bot"},
    a.DrainServer: {"is_drained": False},
    a.PatchConfig: {"session_cap": 0.5, "session_grants": 4096},
}

_VALUES: dict[str, Any] = {
    **_MANIFEST, "session": LISTED_SESSION, "SessionAttached.session": SESSION, "tenant": "",
    "member": MEMBER, "instance": INSTANCE, "MemberView.id": MEMBER,
    "MemberDetail.id": MEMBER, "namespace": NAMESPACE, "filed_in": NAMESPACE, "base": NAMESPACE, "weights": "",
    "lease": LEASE, "grant": LEASE, "grants": LEASE,
    "reservation": RESERVATION, "request": "r-1", "key": KEYS[0], "last_key": KEYS[1], "checksum": CHECKSUM,
    "pool_id": POOL_ID, "last_tokens": 32,
    "fork_key": KEYS[1], "shared_tokens": 32, "shared_bytes": 16384, "branches": 0, "branch_bytes": 0,
    "labels": "support-bot",
    "incarnation": 662316, "changes_next": _CHANGES, "next": _CHANGES + 1, "is_there": True, "complete": True,
    "lock_file": f"/dev/shm/kvdock-{POOL_ID}.lock", "Segment.name": f"/kvdock-{POOL_ID}-0000-5c1d0b7e9a3f2468",
    "Segment.id": 0,
    "Segment.bytes": 1 << 30, "data_offset": 4096, "offset": 4096, "length": 16384, "bytes": 16384, "part_bytes": 16384,
    "chunk_bytes": 16384, "used_bytes": 16384, "ready_bytes": 16384, "kv_bytes": 16384, "raw_parts": 0,
    "held_bytes": 16384, "allocated_bytes": 1 << 30,
    "prefaulted_bytes": 1 << 30, "free_bytes": 1073721344, "limit_bytes": 4 << 30, "pool_bytes": 4 << 30,
    "reserved_bytes": 0, "quarantined_bytes": 0, "reserved": 0, "quarantined": 0, "reservations": 0, "epoch": 0,
    "ranks": 0, "remaining": 0, "busy": [], "retiring": [], "ReleaseAnswer.remaining": [],
    "CommitAnswer.remaining": [], "MismatchAnswer.quarantined": 1, "index": 0, "group": 0, "writer": 0, "segment": 0,
    "first_chunk": 0, "tokens": 32, "hit_tokens": 16, "prompt_tokens": 40, "local_tokens": 0, "found_tokens": 16,
    "loaded_tokens": 16, "took_us": 41, "uptime_s": 61.5, "now": 1700000000.0,
    "at": 1700000000.0, "heartbeat_s": 2.0, "deadline_s": 30.0, "scheduler": True, "state": "live", "status": "ok",
    "kind": "lookup", "unit": "ratio", "Series.name": "loaded_share", "title": "Loaded from kvdock",
    "chart": "Prompt tokens",
    "session_cap": 0.5, "total_cap": 0.75, "grow_water": 0.05, "low_water": 0.005, "high_water": 0.01,
    "session_grants": 4096,
    "eviction": "adaptive",
    "version": "0.1.0", "settings": {"pool_bytes": 4 << 30, "port": 7410},
    "counters": {"lookups": 1, "loaded_tokens": 16}, "date": "2026-11-25",
}
"""Values of answers by the names of their fields, of one struct or of all; the others follow from their types."""
_PLAIN: dict[type[inspect.Type], Any] = {
    inspect.IntType: 1, inspect.FloatType: 0.5, inspect.BoolType: False, inspect.StrType: "", inspect.DictType: {},
    inspect.AnyType: None, inspect.NoneType: None,
}


def _example(kind: inspect.Type, value: Any = None) -> Any:
    """A JSON value of that type: `value`, if it is one."""
    if isinstance(kind, inspect.Metadata):
        return _example(kind.type, value)
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: _field(kind.cls.__name__, field) for field in kind.fields}
        shown = {name: value for name, value in fields.items() if value is not msgspec.NODEFAULT}
        return list(shown.values()) if kind.array_like else shown
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return value if value == [] else [_example(kind.item_type, value)]
    if isinstance(kind, inspect.LiteralType):
        return value if value in kind.values else kind.values[0]
    if isinstance(kind, inspect.UnionType):
        found = [_example(one, value) for one in kind.types if not isinstance(one, inspect.NoneType)]
        return value if value in found else found[0]
    plain = _PLAIN[type(kind)]
    return value if type(value) is type(plain) else plain


def _field(struct: str, field: inspect.Field) -> Any:
    """An example of a field: its default, unless it has none or few would guess its form. NODEFAULT: absent."""
    if field.required or field.name in ("changes", "outcome"):
        return _example(field.type, _VALUES.get(f"{struct}.{field.name}", _VALUES.get(field.name)))
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def by_name(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Any]:
    """Examples as JSON values, by the name of their struct."""
    answers = {kind.__name__: _example(inspect.type_info(kind)) for kind in kinds if issubclass(kind, Answer)}
    return answers | {body.__name__: example for body, example in BODIES.items()}


def curl(method: str, path: str, query: Iterable[str], body: Any, scope: Scope) -> str:
    """One line for a shell in which SOCKET and the VARIABLES are set. `query`: names of the
    parameters that are required; `body`: a JSON value, or None."""
    url = (BASE_URL if scope == "health" else "localhost") + path
    for name in ("session", "lease", "reservation", "request"):
        url = url.replace(f"{{{name}}}", f"${name.upper()}")
    if parameters := "&".join(f"{name}=${name.upper()}" for name in query):
        url += f"?{parameters}"
    over = [] if scope == "health" else [OVER_THE_SOCKET]
    words = ["curl -sS", *over, *([f"-X {method}"] if method not in ("GET", "POST") else []), f'"{url}"']
    if body is not None:
        text = json.dumps(body, separators=(",", ":"))
        for example, variable in VARIABLES.items():
            text = text.replace(example, f"'\"${variable}\"'")
        words += ["-H 'content-type: application/json'", f"-d '{text}'"]
    return " ".join(words)
