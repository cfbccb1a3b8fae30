"""What floods send: every kind of them by its name, each from one process."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from bench.floods.bodies import Body, Described, bodies_of, calls_of, is_refused_undecoded
from bench.floods.ways import (
    HOST,
    answer_of,
    compute,
    connect,
    converse,
    crowd,
    drink,
    get,
    greet,
    hold,
    packed,
    post,
    repeat,
    sent,
    storm,
)
from kvdock.api.build import api_document
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol.forms import JSON, PACKED
from kvdock.protocol.wire_types import KEY_BYTES, MAX_KEYS, MAX_STORE_KEYS, Scope

Who = Scope | Literal["none"]
"""The scope of the flood's access token; none: it has no token."""


class Target(NamedTuple):
    """A server. `session`: one whose member is attached with the token `engine`. `lock_file`: of its members' bytes."""

    unix: str
    http: str
    session: str
    member: str
    namespace: str
    tokens: Mapping[str, str]
    """By scope."""
    lock_file: str


Sign = Callable[[bytes], bytes]
"""Puts the kind's access token into requests."""
Flood = Callable[[], None]
"""Goes on until its process is killed."""
Make = Callable[[Target, Sign], Flood]
"""Prepares the flood, which may take long."""


class Kind(NamedTuple):
    who: Who
    make: Make


def prepared(name: str, target: Target) -> Flood:
    kind = KINDS[name]
    token = target.tokens.get(kind.who, "")
    header = HOST + (f"Authorization: Bearer {token}\r\n".encode() if token else b"")
    return kind.make(target, lambda messages: messages.replace(HOST, header))


# --------------------------------------------------------------------------- the kinds that are written here


def _keys(count: int) -> bytes:
    return secrets.token_bytes(KEY_BYTES * count)  # a forked process must not begin as the one before it


def _heartbeat(at: Target, field: str, item: str, count: int) -> bytes:
    body = f'{{"member":"{at.member}","{field}":[{",".join([item] * count)}]}}'.encode()
    return post(f"/v1/sessions/{at.session}/heartbeat", body)


def _reserve(at: Target, blocks: int, hashes: int, form: str) -> bytes:
    body = {"session": at.session, "member": at.member, "store": "x", "keys": _keys(MAX_STORE_KEYS),
            "blocks": [[None, [1] * hashes, b""]] * blocks}
    made = packed if form == "packed" else lambda path, value: post(path, JSON.encode(value))
    return made("/v1/reservations", body)


def _lookup(at: Target, count: int = MAX_KEYS) -> bytes:
    body = {"session": at.session, "member": at.member, "request": "z", "keys": _keys(count)}
    return packed("/v1/lookups", body)


def _new_lookup(at: Target, sign: Sign) -> Flood:
    """Each lookup has a request and keys of its own, so the server counts each of them."""
    def say(_: bytes) -> bytes:
        body = {"session": at.session, "member": at.member, "request": secrets.token_hex(8), "keys": _keys(MAX_KEYS)}
        return sign(packed("/v1/lookups", body))

    return partial(converse, at.http, say)


def _new_store(at: Target, sign: Sign) -> Flood:
    """Each call reserves chunks for keys that no call before it had; the next one commits them."""
    parts = [[chunk, 0, 0] for chunk in range(MAX_STORE_KEYS)]

    def say(answer: bytes) -> bytes:
        reservation = (msgspec.msgpack.decode(answer) if answer else {}).get("reservation")
        if reservation is not None:
            return sign(packed(f"/v1/reservations/{reservation}/commit", {
                "session": at.session, "rank": 0, "parts": parts,
            }))
        body = {"session": at.session, "member": at.member, "store": secrets.token_hex(8),
                "keys": _keys(MAX_STORE_KEYS)}
        return sign(packed("/v1/reservations", body))

    return partial(converse, at.http, say)


def _attach_new(liveness: MemberLiveness) -> bytes:
    """An attach of an engine whose model no other has."""
    member = {"id": "q", "ranks": [0], "scheduler": True, "lock_offset": liveness.offset}
    return packed("/v1/sessions", {
        "instance": secrets.token_hex(8), "manifest": {**MANIFEST, "model": secrets.token_hex(8)}, "member": member,
    })


def _session_in(answer: bytes) -> str:
    """The session in the answer to an attach; "": it answers another call, or is a refusal, which is JSON."""
    if not answer or answer.startswith(b"{"):
        return ""
    return str(msgspec.msgpack.decode(answer).get("session", ""))


def _attach_and_leave(at: Target, sign: Sign) -> Flood:
    """An engine attaches and leaves, again and again."""
    liveness = MemberLiveness(at.lock_file, source=random.Random())  # held until the flood has ended

    def say(answer: bytes) -> bytes:
        session = _session_in(answer)
        leave = sent("DELETE", f"/v1/sessions/{session}?member=q", Body(b""))
        return sign(leave if session else _attach_new(liveness))

    return partial(converse, at.http, say)


def _new_weights(at: Target, sign: Sign) -> Flood:
    """An engine reports weights that nobody has run before, again and again, so each call makes a namespace."""
    liveness, session = MemberLiveness(at.lock_file, source=random.Random()), ""

    def say(answer: bytes) -> bytes:
        nonlocal session
        session = _session_in(answer) or session
        weights = {"session": session, "member": "q", "weights": secrets.token_hex(8)}
        return sign(packed("/v1/weights", weights) if session else _attach_new(liveness))

    return partial(converse, at.http, say)


def _ranks(at: Target) -> bytes:
    body = f'{{"session":"{at.session}","ranks":[{"0," * 4_000_000}0]}}'.encode()
    return post("/v1/leases/0000000000000001/release", body)


def _tokens(_: Target) -> bytes:
    body = f'{{"namespace":"{"0" * 64}","tokens":[{"150000," * ((1 << 20) - 1)}1]}}'.encode()
    return post("/v1/lookups", body)


MANIFEST = {"model": "m", "kv_dtype": "u8", "layers": 1, "kv_heads": 1, "head_size": 1, "chunk_tokens": 16,
            "block_tokens": 16, "groups": [{"part_bytes": 4096}]}


def _attach(_: Target) -> bytes:
    return packed("/v1/sessions", {"instance": "z", "manifest": MANIFEST, "member": {"id": "q", "lock_offset": 99}})


def _hint(at: Target) -> bytes:
    return packed("/v1/hints", {"session": at.session, "member": at.member, "keys": _keys(MAX_KEYS), "priority": -1})


def _stormed(message: Callable[[Target], bytes], connections: int, *, over_unix: bool = False) -> Make:
    def make(at: Target, sign: Sign) -> Flood:
        return partial(storm, at.unix if over_unix else at.http, [sign(message(at))], connections)

    return make


def _read(path: str, connections: int = 8) -> Make:
    return _stormed(lambda at: get(path), connections)


def _again(message: Callable[[Target], bytes]) -> Make:
    return lambda at, sign: partial(repeat, at.http, sign(message(at)))


def _held(message: bytes, connections: int, drip: bytes = b"", drip_s: float = 0.1) -> Make:
    return lambda at, sign: partial(hold, at.http, sign(message), connections, drip=drip, drip_s=drip_s)


def _drunk(path: str, connections: int) -> Make:
    return lambda at, sign: partial(drink, at.http, sign(get(path)), connections)


def _greeted(message: bytes = b"", *, resets: bool = False, reads: bool = False) -> Make:
    return lambda at, sign: partial(greet, at.http, message, resets=resets, reads=reads)


HEAD = b"GET /livez HTTP/1.1\r\n" + HOST
NILS = b"\x81\xa1x\xdd" + (8_000_000).to_bytes(4, "big") + b"\xc0" * 8_000_000
QUIET = "quiet"
BY_HAND: dict[str, Kind] = {
    # without an access token
    "endless_url": Kind("none", lambda at, _: partial(repeat, at.http, b"GET /", b"a" * (1 << 16))),
    "endless_header": Kind("none", lambda at, _: partial(repeat, at.http, HEAD + b"a: ", b"b" * (1 << 16))),
    "tiny_headers": Kind("none", lambda at, _: partial(repeat, at.http, HEAD, b"a:b\r\n" * 20_000)),
    "invalid": Kind("none", _again(lambda at: b"GARBAGE\r\n\r\n")),
    "slow_headers": Kind("none", _held(HEAD, 500, b"a: b\r\n")),
    "idle_connections": Kind("none", _held(b"", 1000)),
    "strangers_hold": Kind("none", _held(get("/livez"), 64, get("/livez"), 1.0)),
    "strangers_unread": Kind("none", _held(get("/openapi.json") * 16, 64)),
    "strangers_read": Kind("none", _read("/v1/stats?over=days", 32)),
    "unknown_tokens": Kind("none", lambda at, _: partial(
        storm, at.http, [get("/v1/sessions").replace(HOST, HOST + b"Authorization: Bearer " + b"x" * 43 + b"\r\n")], 16
    )),
    "connect_close": Kind("none", _greeted()),
    "connect_reset": Kind("none", _greeted(get("/livez"), resets=True)),
    "crowd_ends": Kind("engine", lambda at, _: partial(crowd, at.unix, b"", 200)),
    "crowd_resets": Kind("engine", lambda at, _: partial(crowd, at.unix, get("/livez"), 200)),
    "tls_hello": Kind("none", _greeted(b"\x16\x03\x01\x02\x00" + bytes(512), reads=True)),
    # health
    "pipeline": Kind("health", lambda at, sign: partial(repeat, at.http, b"", sign(get("/metrics") * 5000))),
    "docs": Kind("health", _read("/docs", 16)),
    "metrics": Kind("health", _read("/metrics", 16)),
    "no_reader": Kind("health", _held(get("/openapi.json") * 20, 100)),
    # read
    "metrics_of_tenants": Kind("admin", _read("/metrics", 16)),
    "metrics_of_sessions": Kind("read", _read("/metrics", 16)),
    "events_again": Kind("read", _drunk("/v1/events", 40)),
    "events_followed": Kind("read", _drunk("/v1/events?follow=true", 60)),
    "events_unread": Kind("read", _held(get("/v1/events"), 60)),
    "kv_snapshots": Kind("read", _drunk("/v1/kv-events", 4)),
    "kv_snapshots_unread": Kind("read", _held(get("/v1/kv-events"), 60)),
    "kv_followed": Kind("read", _drunk("/v1/kv-events?follow=true", 60)),
    "prefixes_searched": Kind("read", lambda at, sign: partial(
        storm, at.http, [sign(get(f"/v1/prefixes?limit=1000&search={number:04x}")) for number in range(4096)], 8
    )),
    # engine
    "keep": Kind("engine", _again(lambda at: _heartbeat(at, "keep", f'"{"0" * 16}"', 400_000))),
    "done": Kind("engine", _again(lambda at: _heartbeat(at, "done", f'{{"grant":"{"0" * 16}","ranks":[0]}}', 200_000))),
    "largest_heartbeat": Kind("engine", _again(lambda at: _heartbeat(at, "keep", f'"{"0" * 16}"', 1024))),
    "tiny_chunks": Kind("engine", lambda at, sign: partial(repeat, at.http, sign(
        post("/v1/lookups", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    ), b"1\r\n \r\n" * 9000)),
    "unfinished_bodies": Kind("engine", _held(post("/v1/lookups", b" " * (7 << 20), length=8 << 20), 60)),
    "ranks": Kind("engine", _again(_ranks)),
    "tokens": Kind("engine", _again(_tokens)),
    "lookups_4096": Kind("engine", _stormed(_lookup, 8)),
    "lookups_new": Kind("engine", _new_lookup),
    "stores_new": Kind("engine", _new_store),
    "lookups_unix": Kind("engine", _stormed(lambda at: _lookup(at, 16), 16, over_unix=True)),
    "lookups_unix_64": Kind("engine", _stormed(lambda at: _lookup(at, 16), 64, over_unix=True)),
    "lookups_unix_2000": Kind("engine", _stormed(lambda at: _lookup(at, 2000), 16, over_unix=True)),
    "peeks": Kind("engine", _stormed(
        lambda at: packed("/v1/lookups", {"namespace": at.namespace, "keys": _keys(MAX_KEYS)}), 16
    )),
    "attach_and_leave": Kind("engine", _attach_and_leave),
    "weights_new": Kind("engine", _new_weights),
    "heartbeats": Kind("engine", _stormed(
        lambda at: post(f"/v1/sessions/{at.session}/heartbeat", JSON.encode({"member": at.member})), 4
    )),
    "attach_refused": Kind("engine", _stormed(_attach, 8)),
    "hints": Kind("engine", _stormed(_hint, 4)),
    "blocks": Kind("engine", _stormed(lambda at: _reserve(at, 1024, 4096, "packed"), 1)),
    "blocks_4": Kind("engine", _stormed(lambda at: _reserve(at, 1024, 4096, "packed"), 4)),
    "blocks_json": Kind("engine", _stormed(lambda at: _reserve(at, 1020, 4050, "JSON"), 2)),
    "blocks_legal": Kind("engine", _stormed(lambda at: _reserve(at, 1024, 60, "packed"), 2)),
    "blocks_unix": Kind("engine", _stormed(lambda at: _reserve(at, 1024, 4096, "packed"), 2, over_unix=True)),
    "nils": Kind("engine", _stormed(lambda at: post("/v1/lookups", NILS, media_type=PACKED.media_type), 2)),
}


# --------------------------------------------------------------------------- the calls of the document

DOCUMENT = api_document()
READERS, SENDERS = 8, 2
"""Connections of one flood: of calls without a body, and with one."""


def _ids(at: Target, call: Described) -> dict[str, str]:
    """Those of what is there, but not of what the call would end."""
    session = "another" if call.method == "DELETE" else at.session
    return {"session": session, "member": at.member, "lease": "0" * 16, "reservation": "0" * 16, "request": "z"}


def _without_body(call: Described) -> Kind:
    def make(at: Target, sign: Sign) -> Flood:
        message = sign(f"{call.method} {call.target(_ids(at, call))} HTTP/1.1\r\n".encode() + HOST + b"\r\n")
        if call.is_stream:
            return partial(drink, at.http, message, READERS)
        return partial(storm, at.http, [message], READERS)

    return Kind(call.scope, make)


def _bodies(at: Target, sign: Sign, call: Described) -> tuple[Body, list[Body]]:
    path = call.target(_ids(at, call))

    def is_decoded(body: bytes) -> bool:
        with connect(at.http) as sock:
            sock.settimeout(60.0)
            sock.sendall(sign(sent(call.method, path, Body(body))))
            answer = answer_of(sock)
            return answer is not None and not is_refused_undecoded(*answer)

    return bodies_of(DOCUMENT, call, {"session": at.session, "member": at.member}, is_decoded)


def _with_body(call: Described, *, is_legal: bool) -> Kind:
    def make(at: Target, sign: Sign) -> Flood:
        legal, refused = _bodies(at, sign, call)
        path = call.target(_ids(at, call))
        messages = [sign(sent(call.method, path, body)) for body in ([legal] if is_legal else refused)]
        return partial(storm, at.http, messages, SENDERS)

    return Kind(call.scope, make)


def _of_document() -> dict[str, Kind]:
    """Each call; one that has a body twice: with the largest that is taken, and with the largest that is refused."""
    kinds = dict[str, Kind]()
    for call in calls_of(DOCUMENT):
        if call.forms:
            kinds[f"{call.name} legal"] = _with_body(call, is_legal=True)
            kinds[f"{call.name} refused"] = _with_body(call, is_legal=False)
        else:
            kinds[call.name] = _without_body(call)
    return kinds


KINDS = {QUIET: Kind("none", lambda at, _: compute), **BY_HAND, **_of_document()}
