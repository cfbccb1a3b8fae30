"""Both forms of the engine's calls say the same; both sockets answer alike; releases ride along."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from api_helpers import MIB, Engine, ServerProcess, attach, keys, raw, unique

from kvdock.api.http.engine_calls import ENGINE_CALLS, find
from kvdock.client.client import Client
from kvdock.client.transport import Transport
from kvdock.protocol import calls, schemas as s
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.forms import JSON, PACKED, Form
from kvdock.protocol.reports import Problem
from kvdock.protocol.wire_types import MAX_KEYS, MAX_RELEASES, Carried, RefusedRelease

FORMS = [JSON, PACKED]
PACKED_HEADERS = {"Content-Type": PACKED.media_type}


def packed(hex_keys: list[str]) -> bytes:
    return bytes.fromhex("".join(hex_keys))


@pytest.fixture(scope="module")
def home() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=32 * MIB, segment_bytes=32 * MIB) as server:
        yield server


@pytest.fixture
def engine(home: ServerProcess) -> Iterator[Engine]:
    with Client(home.unix) as client:
        engine = attach(client)
        yield engine
        engine.leave()


def send(address: str, path: str, body: object, form: Form, accept: str = "") -> tuple[int, str, Any]:
    """(status, media type, decoded answer) over a plain HTTP client."""
    headers = {"Content-Type": form.media_type, **({"Accept": accept} if accept else {})}
    status, answered, content = raw(address, "POST", path, form.encode(body), headers)
    media_type = answered["content-type"]
    decode: Callable[[bytes], Any] = msgspec.msgpack.decode if "msgpack" in media_type else msgspec.json.decode
    return status, media_type, decode(content)


def numbers(parts: list[list[Any]]) -> list[list[int]]:
    """Parts with their checksums as numbers."""
    return [[*part[:5], part[5] if isinstance(part[5], int) else int(part[5], 16)] for part in parts]


# --------------------------------------------------------------------------- two forms, one meaning


@pytest.mark.parametrize("way", ["unix", "http"])
def test_a_lookup_answers_the_same_in_both_forms(home: ServerProcess, engine: Engine, way: str) -> None:
    wanted = keys(5, unique("both"))
    granted = engine.reserve(wanted)
    assert granted.reservation is not None
    sums = [random.Random(7).getrandbits(61), 0, 1, 2**61 - 2, 255]
    done = [s.PartDone(chunk.index, 0, value) for chunk, value in zip(granted.chunks, sums, strict=True)]
    engine.client.commit(granted.reservation, s.Commit(session=engine.session, rank=0, parts=done))
    body = {"session": engine.session, "member": engine.member, "request": unique("r")}
    address = getattr(home, way)
    _, plain_type, plain = send(address, "/v1/lookups", {**body, "keys": wanted}, JSON)
    _, packed_type, compact = send(address, "/v1/lookups", {**body, "keys": packed(wanted)}, PACKED)
    assert (plain_type, packed_type) == ("application/json", "application/msgpack")
    assert plain["hit_tokens"] == 5 * 16 and plain["lease"] is not None
    assert [numbers(chunk) for chunk in plain.pop("chunks")] == compact["chunks"]
    assert [chunk[0][5] for chunk in compact.pop("chunks")] == sums
    assert plain == compact


@pytest.mark.parametrize("way", ["unix", "http"])
def test_a_reservation_answers_the_same_in_both_forms(home: ServerProcess, engine: Engine, way: str) -> None:
    stored, wanted = keys(2, unique("have")), keys(3, unique("want"))
    engine.store(stored)
    store = unique("s")
    body = {"session": engine.session, "member": engine.member, "store": store, "deadline_s": 30.0}
    address = getattr(home, way)
    _, _, plain = send(address, "/v1/reservations", {**body, "keys": [*wanted]}, JSON)
    _, _, compact = send(address, "/v1/reservations", {**body, "keys": packed(wanted)}, PACKED)
    assert [chunk["index"] for chunk in plain["chunks"]] == [0, 1, 2] and all(c["parts"] for c in plain["chunks"])
    assert plain == compact
    _, _, nothing = send(address, "/v1/reservations", {**body, "store": unique("s"), "keys": packed(stored)}, PACKED)
    assert nothing["reservation"] is None and nothing["present"] == [0, 1] and nothing["chunks"] == []


def test_several_groups_and_writers_decode_the_same_in_both_forms(home: ServerProcess) -> None:
    with Client(home.unix) as compact, Client(home.unix, packed=False) as plain:
        shape: dict[str, Any] = {"writers": 2, "tensor_parallel": 2, "model": "several",
                                 "groups": (s.Group(part_bytes=8192), s.Group(part_bytes=4096))}
        engine = attach(compact, ranks=[0, 1], **shape)
        wanted = keys(20, "several")
        engine.store(wanted, ranks=2)
        body = s.Lookup(session=engine.session, member=engine.member, request="r", keys=wanted, readers=2)
        one, other = compact.lookup(body), plain.lookup(body)
        assert one.hit_tokens == 320 and [len(chunk) for chunk in one.chunks] == [4] * 20
        for mine, theirs in zip(one.chunks, other.chunks, strict=True):
            for left, right in zip(mine, theirs, strict=True):
                assert left.checksum_value == right.checksum_value
                assert msgspec.structs.astuple(left)[:5] == msgspec.structs.astuple(right)[:5]
        compact.leave(engine.session, engine.member)
        engine.close()


def test_packed_keys_travel_as_one_bin_and_checksums_as_integers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    real = Transport.call

    def listening(
        self: Transport, method: str, path: str, body: bytes | None, timeout_s: float, media_type: bytes
    ) -> Any:
        sent.append(msgspec.msgpack.decode(body) if body else None)
        return real(self, method, path, body, timeout_s, media_type)

    monkeypatch.setattr(Transport, "call", listening)
    wanted = keys(3, unique("bin"))
    engine.store(wanted)
    found = engine.lookup(wanted)
    assert sent[0]["keys"] == sent[-1]["keys"] == packed(wanted)
    assert isinstance(found.chunks[0][0].checksum, int)


def test_a_list_of_keys_and_one_string_of_bytes_are_the_same_keys(home: ServerProcess, engine: Engine) -> None:
    wanted = keys(3, unique("list"))
    engine.store(wanted)
    with Client(home.unix, packed=False) as plain:
        for client in (engine.client, plain):
            for given in (wanted, packed(wanted)):
                body = s.Lookup(session=engine.session, member=engine.member, request=unique("r"), keys=given)
                assert client.lookup(body).hit_tokens == 48


@pytest.mark.parametrize(("sent", "accept", "answered"), [
    (JSON, "", JSON), (PACKED, "", PACKED), (JSON, "*/*", JSON), (PACKED, "*/*", PACKED),
    (JSON, "application/msgpack", PACKED), (PACKED, "application/json; q=1", JSON),
    (PACKED, "application/json, application/msgpack", PACKED), (PACKED, "text/html", PACKED),
])
@pytest.mark.parametrize("way", ["unix", "http"])
def test_an_answer_comes_in_the_requests_form_unless_it_accepts_only_the_other(
    home: ServerProcess, engine: Engine, sent: Form, accept: str, answered: Form, way: str
) -> None:
    body = {"session": engine.session, "releases": []}
    status, media_type, _ = send(getattr(home, way), "/v1/releases", body, sent, accept)
    assert (status, media_type) == (200, answered.media_type)


# --------------------------------------------------------------------------- what is no body

GARBAGE = [b"", b"\xc1", b"\x81\xa7session", b"\xdf\xff\xff\xff\xff", b"\xa5abc", b'{"session":"x"}', b"\x91" * 5000]
"""Nothing, a byte that means nothing, cut short, a map of 2³² items, JSON, nesting."""
WRONG = [[], 1, None, {"session": 5}, {"keys": "00" * 32, "session": "x"}, {"session": "x", "surprise": 1}]


@pytest.mark.parametrize("way", ["unix", "http"])
@pytest.mark.parametrize("path", ["/v1/lookups", "/v1/reservations", "/v1/leases/0000000000000000/release"])
def test_garbage_is_a_problem_and_not_a_failure(home: ServerProcess, path: str, way: str) -> None:
    address = getattr(home, way)
    for content in GARBAGE:
        status, headers, answer = raw(address, "POST", path, content, PACKED_HEADERS)
        problem = msgspec.json.decode(answer, type=Problem)
        assert headers["content-type"] == "application/problem+json"
        assert (status, problem.code) in {(400, "malformed_msgpack"), (422, "invalid_body")}, content
    for body in WRONG:
        status, _, answer = raw(address, "POST", path, msgspec.msgpack.encode(body), PACKED_HEADERS)
        assert (status, msgspec.json.decode(answer)["code"]) == (422, "invalid_body"), body


def test_every_truncation_of_a_good_body_is_refused(home: ServerProcess, engine: Engine) -> None:
    body = s.Lookup(session=engine.session, member=engine.member, request="r", keys=packed(keys(2)))
    whole = PACKED.encode(body)
    for length in range(len(whole)):
        status, _, answer = raw(home.unix, "POST", "/v1/lookups", whole[:length], PACKED_HEADERS)
        assert (status, msgspec.json.decode(answer)["code"]) == (400, "malformed_msgpack"), length
    assert raw(home.unix, "POST", "/v1/lookups", whole, PACKED_HEADERS)[0] == 200


@pytest.mark.parametrize(("given", "code"), [
    (b"x" * 31, "invalid_body"), (b"x" * 33, "invalid_body"), (b"x" * (32 * MAX_KEYS + 32), "invalid_body"),
])
def test_keys_that_are_not_32_bytes_each_are_refused(engine: Engine, given: bytes, code: str) -> None:
    with pytest.raises(ApiError) as error:
        engine.client.lookup(s.Lookup(session=engine.session, member=engine.member, request="r", keys=given))
    assert error.value.code == code


@pytest.mark.parametrize("bad", [["0" * 63], ["0" * 63, "0" * 65], ["z" * 64], [" " * 64], ["00" * 16 + " " * 32]])
def test_hex_keys_that_are_none_are_refused_by_the_server_not_packed_away(engine: Engine, bad: list[str]) -> None:
    with pytest.raises(ApiError) as error:
        engine.lookup(bad)
    assert error.value.code == "invalid_body"


@pytest.mark.parametrize("value", [-1, 2**61 - 1, 2**64 - 1, 1.5])
def test_a_checksum_out_of_range_is_refused(home: ServerProcess, engine: Engine, value: float) -> None:
    reservation = engine.reserve(keys(1, unique("sum"))).reservation
    body = {"session": engine.session, "rank": 0, "parts": [[0, 0, value]]}
    for form in FORMS:
        status, _, problem = send(home.unix, f"/v1/reservations/{reservation}/commit", body, form)
        assert (status, problem["code"]) == (422, "invalid_body")


# --------------------------------------------------------------------------- the table of calls, on both sockets


def test_a_refusal_is_the_same_problem_on_both_sockets(home: ServerProcess, engine: Engine) -> None:
    body = {"session": engine.session, "member": "nobody", "keys": b""}
    refused = [send(address, "/v1/lookups", body, PACKED) for address in (home.unix, home.http)]
    assert refused[0] == refused[1] and refused[0][0] == 404 and refused[0][2]["code"] == "unknown_member"
    for headers in ({}, {"Content-Type": "text/plain"}, {**PACKED_HEADERS, "Kvdock-Api": "999"}):
        status = {raw(address, "POST", "/v1/lookups", b"", headers)[0] for address in (home.unix, home.http)}
        assert len(status) == 1 and status <= {400, 415, 406, 409, 421, 422, 426}


def test_refusals_are_counted(home: ServerProcess, engine: Engine) -> None:
    before = engine.client.status().counters["refusals"]
    send(home.unix, "/v1/lookups", {}, PACKED)
    assert engine.client.status().counters["refusals"] == before + 1


@pytest.mark.parametrize(("method", "path", "name", "id_"), [
    ("POST", "/v1/lookups", "lookup", ""),
    ("POST", "/v1/leases/0f/release", "release", "0f"),
    ("DELETE", "/v1/leases/0f", "cancel", "0f"),
    ("DELETE", "/v1/sessions/0f", "leave", "0f"),
    ("PUT", "/v1/lookups", "", ""),
    ("GET", "/v1/leases/0f", "", ""),
    ("POST", "/v1/lookups/", "", ""),
    ("POST", "/v1/leases//release", "", ""),
    ("POST", "/v1/leases/0f/", "", ""),
    ("DELETE", "/v1/leases/0f/", "", ""),
    ("DELETE", "/v1/leases/", "", ""),
    ("POST", "/v1/leases/a/b/release", "", ""),
    ("POST", "/v2/leases/0f/release", "", ""),
    ("POST", "/v1/leases/0f/commit", "", ""),
])
def test_a_call_is_found_by_its_method_and_path(method: str, path: str, name: str, id_: str) -> None:
    found = find(method, path)
    assert (name, id_) == ("" if found is None else found[0].name, "" if found is None else found[1])


def test_the_table_has_every_call_for_engines_and_peers() -> None:
    wanted = [call for call in vars(calls).values() if isinstance(call, calls.Call)]
    wanted = [call for call in wanted if call.scope in ("engine", "peer")]
    assert {one.call for one in ENGINE_CALLS} == set(wanted)


@pytest.mark.parametrize("way", ["unix", "http"])
@pytest.mark.parametrize(("method", "path", "code", "found", "status"), [
    ("POST", "/v1/lookups?a=1", "unknown_parameter", "a", 422),
    ("DELETE", "/v1/leases/0f?session=s&member=m&a=1", "unknown_parameter", "a", 422),
    ("DELETE", "/v1/leases/0f?session=s", "bad_argument", "query.member", 422),
    ("DELETE", "/v1/leases/0f?session=&member=m", "bad_argument", "query.session", 422),
    ("DELETE", f"/v1/leases/0f?session={'s' * 257}&member=m", "bad_argument", "query.session", 422),
    ("DELETE", f"/v1/leases/0f?session={'s' * 256}&member=m", "unknown_session", "s" * 256, 404),
    ("DELETE", "/v1/sessions/0f?member=", "unknown_session", "0f", 404),
    ("GET", "/v1/lookups", "method_not_allowed", "GET", 405),
    ("PUT", "/v1/sessions/0f", "method_not_allowed", "PUT", 405),
])
def test_what_a_call_does_not_take_is_refused_on_both_sockets(
    home: ServerProcess, way: str, method: str, path: str, code: str, found: str, status: int
) -> None:
    body, content_type = b"{}" if method == "POST" else None, {"Content-Type": JSON.media_type}
    answered, headers, content = raw(getattr(home, way), method, path, body, content_type)
    problem = msgspec.json.decode(content, type=Problem)
    assert (answered, problem.code, problem.found) == (status, code, found)
    assert problem.wanted or code != "bad_argument"
    if status == 405:
        assert headers["allow"] == ("POST" if path == "/v1/lookups" else "DELETE, GET, HEAD")


def test_a_member_leaves_and_a_lease_is_cancelled_without_content(home: ServerProcess) -> None:
    with Client(home.unix) as client:
        engine = attach(client)
        stored = keys(1, unique("cancelled"))
        engine.store(stored)
        lease = engine.lookup(stored, request=unique("r")).lease
        for path in (
            f"/v1/leases/{lease}?session={engine.session}&member={engine.member}",
            f"/v1/sessions/{engine.session}?member={engine.member}",
        ):
            status, headers, content = raw(home.http, "DELETE", path)
            assert (status, content, headers.get("content-type")) == (204, b"", None)
            assert headers["cache-control"] == "no-store" and headers["kvdock-api"] == "1"
        engine.close()


def test_every_call_of_the_clients_is_a_route_of_the_openapi(home: ServerProcess) -> None:
    paths = msgspec.json.decode(raw(home.http, "GET", "/openapi.json")[2])["paths"]
    known = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    said = {(call.method, call.path) for call in vars(calls).values() if isinstance(call, calls.Call)}
    assert len(said) == 45 and said <= known
    both = paths["/v1/lookups"]["post"]
    for content in (both["requestBody"]["content"], both["responses"]["200"]["content"]):
        assert set(content) == {"application/json", "application/msgpack"}


# --------------------------------------------------------------------------- releases that ride along


def leased(engine: Engine) -> str:
    wanted = keys(2, unique("ride"))
    engine.store(wanted)
    lease = engine.lookup(wanted, request=unique("r")).lease
    assert lease is not None
    return lease


def open_leases(engine: Engine) -> set[str]:
    return {view.grant for view in engine.client.leases(limit=1000).leases if view.session == engine.listed}


CARRIERS: list[tuple[str, Callable[[Engine], Carried]]] = [
    ("lookup", lambda e: e.lookup([], request=unique("r"))),
    ("reserve", lambda e: e.reserve(keys(1, unique("n")), store=unique("s"))),
    ("heartbeat", lambda e: e.heartbeat()),
]


@pytest.mark.parametrize("carry", [carry for _, carry in CARRIERS], ids=[name for name, _ in CARRIERS])
def test_a_queued_release_leaves_with_the_next_call(engine: Engine, carry: Callable[[Engine], Carried]) -> None:
    lease = leased(engine)
    engine.client.release_later(lease, engine.session, [0])
    assert lease in open_leases(engine), "queued: nothing was said yet"
    assert carry(engine).refused_releases == []
    assert lease not in open_leases(engine)


def test_a_commit_carries_releases_too(engine: Engine) -> None:
    lease = leased(engine)
    granted = engine.reserve(keys(1, unique("n")), store=unique("s"))
    engine.client.release_later(lease, engine.session, [0])
    assert engine.commit(granted).refused_releases == []
    assert lease not in open_leases(engine)


def test_releases_that_are_refused_never_fail_the_call_and_are_reported(home: ServerProcess, engine: Engine) -> None:
    other = attach(engine.client, model="foreign")
    foreign, mine = leased(other), leased(engine)
    stored = keys(2, unique("stored"))
    engine.store(stored)
    for lease, ranks in ((foreign, [0]), ("00000000deadbeef", [0]), (mine, [5])):
        engine.client.release_later(lease, engine.session, ranks)
    answer = engine.lookup(stored, request=unique("r"))
    assert answer.hit_tokens == 32
    assert [(refused.lease, refused.code) for refused in answer.refused_releases] == [
        (foreign, "foreign_grant"), ("00000000deadbeef", "unknown_grant"), (mine, "not_a_holder")]
    assert engine.heartbeat().refused_releases == [], "a refused release is not sent again"
    other.leave()


def test_a_release_is_handled_before_the_call_that_carries_it(home: ServerProcess) -> None:
    """Under a cap that one lease fills, the lookup that carries its release is not limited."""
    with ServerProcess(session_cap=0.004) as server, Client(server.unix) as client:
        engine = attach(client)
        first, second = keys(4, "first"), keys(4, "second")
        engine.store(first)
        engine.store(second)
        lease = engine.lookup(first, request="a").lease
        assert engine.lookup(second, request="b").limited_by == "held_bytes"
        assert lease is not None
        client.release_later(lease, engine.session, [0])
        assert engine.lookup(second, request="c").limited_by is None
        engine.close()


def beat(engine: Engine) -> list[RefusedRelease]:
    return engine.heartbeat().refused_releases


def ask(engine: Engine) -> list[RefusedRelease]:
    found = engine.lookup(keys(2, "asked"), request="the same each time")
    return found.refused_releases


@pytest.mark.parametrize("carry", [beat, ask])
def test_a_release_whose_carrier_got_no_answer_is_carried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, carry: Callable[[Engine], list[RefusedRelease]]
) -> None:
    lease = leased(engine)
    engine.client.release_later(lease, engine.session, [0])
    real = Transport.call
    sent: list[bytes | None] = []

    def answer_lost(self: Transport, method: str, path: str, body: bytes | None, *rest: Any) -> Any:
        sent.append(body)
        real(self, method, path, body, *rest)
        raise ServerUnavailable("the answer was lost")

    monkeypatch.setattr(Transport, "call", answer_lost)
    with pytest.raises(ServerUnavailable):
        carry(engine)
    monkeypatch.undo()
    assert lease not in open_leases(engine), "the server heard it"
    assert carry(engine) == [], "and hears it again, to no harm"
    assert sent[0] is not None and lease.encode() in sent[0]
    assert engine.client._releases.sessions() == []


def test_a_release_whose_carrier_was_refused_is_carried_again(engine: Engine) -> None:
    lease = leased(engine)
    engine.client.release_later(lease, engine.session, [0])
    with pytest.raises(ApiError):
        engine.client.lookup(s.Lookup(session=engine.session, member="", request="", keys=b""))  # no body at all
    assert lease in open_leases(engine)
    engine.heartbeat()
    assert lease not in open_leases(engine)


def test_releases_of_a_lost_session_are_forgotten(engine: Engine) -> None:
    engine.client.release_later("0" * 16, "no-such-session", [0])
    with pytest.raises(ApiError) as error:
        engine.client.flush("no-such-session")
    assert error.value.code == "unknown_session" and engine.client._releases.sessions() == []


def test_flush_sends_more_than_one_call_can_carry(engine: Engine) -> None:
    leases = [leased(engine) for _ in range(3)]
    for lease in leases:
        engine.client.release_later(lease, engine.session, [0])
    for number in range(2 * MAX_RELEASES):
        engine.client.release_later(f"{number:016x}", engine.session, [0])
    refused = engine.client.flush(engine.session)
    assert len(refused) == 2 * MAX_RELEASES and not open_leases(engine) & set(leases)


def test_closing_a_client_sends_what_is_queued(home: ServerProcess, engine: Engine) -> None:
    lease = leased(engine)
    with Client(home.unix) as leaving:
        leaving.release_later(lease, engine.session, [0])
    assert lease not in open_leases(engine)


def test_ranks_of_one_lease_gather_and_each_session_has_its_own(engine: Engine) -> None:
    wanted = keys(2, unique("ranks"))
    engine.store(wanted)
    lease = engine.lookup(wanted, request=unique("r"), readers=3).lease
    assert lease is not None
    for rank in (0, 2, 0):
        engine.client.release_later(lease, engine.session, [rank])
    engine.client.release_later(lease, "another-session", [1])
    engine.heartbeat()
    assert engine.client.lease(lease).remaining == [1]
    with pytest.raises(ApiError):
        engine.client.flush("another-session")


@pytest.mark.parametrize(("lease", "ranks"), [("", [0]), ("0" * 15, [0]), ("G" * 16, [0]), ("0" * 16, [128])])
def test_a_release_that_no_server_takes_is_refused_at_once(engine: Engine, lease: str, ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="found"):
        engine.client.release_later(lease, engine.session, ranks)
    assert engine.heartbeat().refused_releases == []


def test_a_lookup_without_a_session_carries_nothing(home: ServerProcess) -> None:
    body = {"namespace": "0" * 64, "keys": [], "releases": [["0" * 16, [0]]]}
    assert send(home.unix, "/v1/lookups", body, JSON)[2]["code"] == "invalid_body"
