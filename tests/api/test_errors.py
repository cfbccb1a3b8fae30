"""Every error leaves as problem details of one shape, with its code, and the values found and wanted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from api_helpers import Engine, ServerProcess, attach, http_connection, keys, post, raw, unique
from paths import ROOT

from kvdock.client.client import Client
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import CODES, ApiError, problem_of
from kvdock.protocol.reports import Problem

SHAPE = set(Problem.__struct_fields__)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def engine(server: ServerProcess) -> Any:
    with Client(server.unix) as client:
        attached = attach(client)
        attached.store(keys(4, "errors"))
        yield attached
        attached.close()


def lookup_body(engine: Engine, **more: object) -> dict[str, object]:
    body = {"session": engine.session, "member": engine.member, "request": unique("r"), "keys": keys(4, "errors")}
    return {**body, **more}


def reserve_body(engine: Engine, **more: object) -> dict[str, object]:
    body = {"session": engine.session, "member": engine.member, "store": unique("s"), "keys": keys(1, unique("new"))}
    return {**body, **more}


def a_lease(engine: Engine) -> str:
    lease = engine.lookup(keys(4, "errors"), request=unique("r")).lease
    assert lease is not None
    return lease


def a_reservation(engine: Engine) -> str:
    reservation = engine.reserve(keys(1, unique("new")), store=unique("s")).reservation
    assert reservation is not None
    return reservation


def commit_body(engine: Engine, parts: list[list[object]], rank: int = 0) -> dict[str, object]:
    return {"session": engine.session, "rank": rank, "parts": parts}


CHECKSUM = "0123456789abcdef"
OTHER_CHECKSUM = "0edcba9876543210"


def committed(engine: Engine, reservation: str) -> str:
    parts = [s.PartDone(0, 0, CHECKSUM)]
    engine.client.commit(reservation, s.Commit(session=engine.session, rank=0, parts=parts))
    return reservation


HELD: list[MemberLiveness] = []
"""Locks of members that are never attached, held until the tests end."""


def held_byte(engine: Engine) -> int:
    HELD.append(MemberLiveness(engine.client.segments().lock_file, source=random.Random()))
    return HELD[-1].offset


def attach_body(engine: Engine, **member: object) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(engine.body)
    body["member"].update(member)
    return body


def other_manifest(engine: Engine, **fields: object) -> dict[str, Any]:
    body = attach_body(engine)
    body["manifest"].update(fields)
    return body


Call = tuple[str, Any]
REFUSALS: list[tuple[str, Any]] = [
    ("unknown_session", lambda e: ("/v1/lookups", lookup_body(e, session="000000-1"))),
    ("unknown_member", lambda e: ("/v1/lookups", lookup_body(e, member="nobody"))),
    ("unknown_namespace", lambda e: ("/v1/lookups", {"namespace": "0" * 64, "keys": []})),
    ("lock_not_visible", lambda e: ("/v1/sessions", attach_body(e, id="new", ranks=[1], lock_offset=12345))),
    ("layout_mismatch", lambda e: ("/v1/sessions", other_manifest(e, layers=99))),
    ("rank_taken", lambda e: ("/v1/sessions", attach_body(
        e, id=unique("second"), ranks=[0], lock_offset=held_byte(e)))),
    ("id_reused", lambda e: ("/v1/sessions", attach_body(e, ranks=[1]))),
    ("bad_argument", lambda e: ("/v1/sessions", attach_body(e, id="new", ranks=[1, 1]))),
    ("bad_argument", lambda e: ("/v1/sessions", {**other_manifest(e, chunk_tokens=17), "instance": unique("i")})),
    ("bad_argument", lambda e: ("/v1/reservations", reserve_body(e, groups=[1]))),
    ("invalid_body", lambda e: (
        "/v1/sessions", other_manifest(e, groups=[{"part_bytes": 4096, "kind": "state"}]))),
    ("pool_too_small", lambda e: (
        "/v1/sessions", {**other_manifest(e, groups=[{"part_bytes": 1 << 29}]), "instance": unique("i")})),
    ("unknown_grant", lambda e: ("/v1/leases/00000000deadbeef/release", {"session": e.session, "ranks": [0]})),
    ("unknown_grant", lambda e: ("/v1/leases/not-a-grant/release", {"session": e.session, "ranks": [0]})),
    ("not_a_holder", lambda e: (f"/v1/leases/{a_lease(e)}/release", {"session": e.session, "ranks": [5]})),
    ("skip_misaligned", lambda e: ("/v1/lookups", lookup_body(e, skip_prefix_tokens=3))),
    ("skip_exceeds_hit", lambda e: ("/v1/lookups", lookup_body(e, skip_prefix_tokens=400))),
    ("chain_mismatch", lambda e: ("/v1/reservations", reserve_body(e, keys=keys(4, "errors")[1:]))),
    ("not_reserved", lambda e: (
        f"/v1/reservations/{a_reservation(e)}/commit", commit_body(e, [[7, 0, CHECKSUM]]))),
    ("already_committed", lambda e: (
        f"/v1/reservations/{committed(e, a_reservation(e))}/commit", commit_body(e, [[0, 0, OTHER_CHECKSUM]]))),
    ("invalid_body", lambda e: ("/v1/lookups", lookup_body(e, wait_ms=3))),
    ("invalid_body", lambda e: ("/v1/lookups", lookup_body(e, keys=["z" * 64]))),
    ("invalid_body", lambda e: ("/v1/lookups", lookup_body(e, keys=[" " * 64]))),
    ("invalid_body", lambda e: ("/v1/lookups", lookup_body(e, keys=["00"]))),
    ("invalid_body", lambda e: ("/v1/lookups", lookup_body(e, tokens=[1, 2]))),
    ("invalid_body", lambda e: ("/v1/lookups", {"session": e.session, "member": e.member})),
    ("invalid_body", lambda e: ("/v1/lookups", [1])),
    ("invalid_body", lambda e: ("/v1/reservations", reserve_body(e, deadline_s=0))),
    ("invalid_body", lambda e: (
        f"/v1/reservations/{a_reservation(e)}/commit", commit_body(e, [[0, 0, "0x00000000000_00"]]))),
    ("invalid_body", lambda e: (f"/v1/reservations/{a_reservation(e)}/commit", commit_body(e, [[0, 0, "0"]]))),
    ("invalid_body", lambda e: (f"/v1/reservations/{a_reservation(e)}/commit", commit_body(e, [[-1, 0, CHECKSUM]]))),
]


@pytest.mark.security
@pytest.mark.parametrize(("code", "call"), REFUSALS, ids=[f"{i}-{code}" for i, (code, _) in enumerate(REFUSALS)])
def test_a_refused_call_is_a_problem_with_its_code(server: ServerProcess, engine: Engine, code: str, call: Any) -> None:
    path, body = call(engine)
    status, problem = post(server.http, path, body)
    assert problem["code"] == code, problem
    assert set(problem) == SHAPE
    assert status == problem["status"] == CODES[code].status
    assert problem["title"] == CODES[code].title
    assert problem["type"] == f"/docs#{code}"
    assert problem["instance"] == path
    assert problem["found"] is not None or problem["wanted"] is not None


HUGE = (1 << 62, 1 << 64, 1 << 70)


@pytest.mark.security
@pytest.mark.parametrize("number", HUGE)
def test_a_number_no_field_can_mean_is_never_the_servers_fault(
    server: ServerProcess, engine: Engine, number: int
) -> None:
    """Every integer of every body, one after the other: refused by schema or table, no 500."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/lookups", lookup_body(engine, epoch=0, readers=1, skip_prefix_tokens=0)),
        ("/v1/reservations", reserve_body(engine, deadline_s=1, groups=[0])),
        (f"/v1/reservations/{a_reservation(engine)}/commit", commit_body(engine, [[0, 0, CHECKSUM]])),
        (f"/v1/leases/{a_lease(engine)}/release", {"session": engine.session, "ranks": [0]}),
        ("/v1/mismatches", {"session": engine.session, "lease": a_lease(engine), "chunks": [0]}),
        ("/v1/hints", {"session": engine.session, "member": engine.member, "keys": keys(2), "priority": -1}),
        ("/v1/sessions", {**attach_body(engine, id=unique("m"), ranks=[3]), "instance": unique("i")}),
        (f"/v1/sessions/{engine.session}/heartbeat",
         {"member": engine.member, "done": [{"grant": "0" * 16, "ranks": [0]}]}),
    ]
    tried = 0
    for path, body in bodies:
        for changed in with_each_integer(body, number):
            status, problem = post(server.http, path, changed)
            assert status in (200, 204, 404, 409, 422, 507), (path, changed, problem)
            tried += 1
    assert tried >= 20


def with_each_integer(value: Any, number: int) -> Iterator[Any]:
    """Copies of a JSON value, each with one of its integers replaced."""
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int | float):
        yield number
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for at, item in items:
        for changed in with_each_integer(item, number):
            copy: Any = dict(value) if isinstance(value, dict) else list(value)
            copy[at] = changed
            yield copy


REQUESTS: list[tuple[str, str, str, bytes | None, dict[str, str]]] = [
    ("not_found", "GET", "/v2/nothing", None, {}),
    ("not_found", "GET", "/static/../api/app.py", None, {}),
    ("method_not_allowed", "PUT", "/v1/lookups", b"{}", JSON),
    ("malformed_json", "POST", "/v1/lookups", b'{"request": ', JSON),
    ("malformed_json", "POST", "/v1/lookups", b'{"request": "\xff"}', JSON),
    ("malformed_json", "POST", "/v1/lookups", b"", JSON),
    ("invalid_body", "POST", "/v1/lookups", b"[" * 100_000, JSON),
    ("unsupported_media_type", "POST", "/v1/lookups", b"{}", {"Content-Type": "text/plain"}),
    ("too_large", "POST", "/v1/lookups", b" " * (9 << 20), JSON),
    ("wrong_host", "GET", "/v1/status", None, {"Host": "evil.example:7410"}),
    ("bad_argument", "GET", "/v1/requests?limit=many", None, {}),
]


@pytest.mark.security
@pytest.mark.parametrize(
    ("code", "method", "path", "body", "headers"), REQUESTS, ids=[row[0] + row[2] for row in REQUESTS]
)
def test_a_request_that_is_none_is_a_problem_too(
    server: ServerProcess, code: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> None:
    status, answered, content = raw(server.http, method, path, body, headers)
    problem = json.loads(content)
    assert problem["code"] == code, problem
    assert set(problem) == SHAPE
    assert status == CODES[code].status
    assert answered["content-type"] == "application/problem+json"
    assert answered["cache-control"] == "no-store"


@pytest.mark.security
def test_a_body_that_does_not_say_how_long_it_is_still_meets_the_limit(server: ServerProcess) -> None:
    connection = http_connection(server.unix)
    pieces = iter([b" " * (1 << 20)] * 9)
    connection.request("POST", "/v1/lookups", pieces, JSON, encode_chunked=True)
    response = connection.getresponse()
    assert json.loads(response.read())["code"] == "too_large"
    connection.close()


def test_an_invalid_body_names_the_path_in_it(server: ServerProcess, engine: Engine) -> None:
    _, problem = post(server.http, "/v1/lookups", lookup_body(engine, readers=0))
    assert problem["found"] == "$.readers"
    assert ">= 1" in problem["wanted"]


def test_a_layout_mismatch_names_the_fields_that_differ(server: ServerProcess, engine: Engine) -> None:
    _, problem = post(server.http, "/v1/sessions", other_manifest(engine, layers=99))
    assert problem["found"] == {"layers": 99} and problem["wanted"] == {"layers": 2}
    _, problem = post(server.http, "/v1/sessions", other_manifest(engine, any_tensor_parallel=True))
    assert problem["found"] == {"any_tensor_parallel": True} and problem["wanted"] == {"any_tensor_parallel": None}


def test_a_method_that_is_not_allowed_is_answered_with_those_that_are(server: ServerProcess) -> None:
    _, headers, _ = raw(server.http, "PUT", "/v1/lookups", b"{}", JSON)
    assert headers["allow"] == "POST"


def test_the_clients_error_is_the_servers() -> None:
    problem = problem_of("chain_mismatch", "stored elsewhere", found=b"\x01\x02", wanted=[1, b"\x03"])
    error = ApiError.from_problem(msgspec.json.decode(msgspec.json.encode(problem), type=Problem))
    assert (error.code, error.status, error.found, error.wanted) == ("chain_mismatch", 409, "0102", [1, "03"])
    assert "0102" in str(error)


def test_a_code_from_a_newer_server_keeps_its_status() -> None:
    error = ApiError.from_problem(Problem(type="", title="", status=418, detail="new", code="teapot"))
    assert (error.code, error.status) == ("teapot", 418)


def test_every_code_of_the_table_is_known_here() -> None:
    sources = (path for kind in ("cpp", "h") for path in ROOT.glob(f"csrc/table/*.{kind}"))
    thrown = {code for path in sources for code in re.findall(r'TableError\("(\w+)"', path.read_text())}
    of_adoption = {"not_adoptable", "wrong_version"}  # they end a server's start, and are in no answer
    assert thrown > of_adoption and thrown - of_adoption <= set(CODES), thrown - set(CODES)
