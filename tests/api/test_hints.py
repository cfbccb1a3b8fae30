"""POST /v1/hints: what engines wish for chunks, from the call to what is evicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from admin_helpers import ok, refused
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, keys, post, unique

from kvdock.client.client import Client
from kvdock.client.http_client import HttpClient
from kvdock.protocol import schemas as s
from kvdock.protocol.schemas import Hint, HintAnswer

CHUNK_BYTES = 16384
POOL_CHUNKS = 2 * MIB // CHUNK_BYTES
RETAINED = POOL_CHUNKS // 4


@pytest.fixture
def small() -> Iterator[Engine]:
    """An engine at a server of its own, with little room."""
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        yield engine
        engine.close()


def hint(engine: Engine, chain: list[str], **wish: Any) -> HintAnswer:
    return engine.client.hint(Hint(session=engine.session, member=engine.member, keys=chain, **wish))


def flood(engine: Engine, rounds: int = 8) -> None:
    for _ in range(rounds):
        engine.store(keys(50, unique("flood")))


def found(engine: Engine, chain: list[str]) -> int:
    """Chunks, without using them."""
    peek = s.Lookup(namespace=engine.attached.namespace, keys=chain)
    return engine.client.lookup(peek).hit_tokens // 16


def test_a_retained_chunk_survives_pressure_that_evicts_its_equal(small: Engine) -> None:
    wanted, equal = keys(8, "wanted"), keys(8, "equal")
    small.store(wanted)
    small.store(equal)
    answer = hint(small, [*wanted, *keys(1, "absent")], priority=10, duration_s=600)
    assert (answer.chunks, answer.refused) == (8, 0)
    assert small.client.status().pool.retained_bytes == 8 * CHUNK_BYTES
    flood(small)
    assert (found(small, wanted), found(small, equal)) == (8, 0)


def test_the_duration_ends(small: Engine) -> None:
    wanted = keys(8, "wanted")
    small.store(wanted)
    hint(small, wanted, priority=10, duration_s=0.05)
    eventually(lambda: small.client.status().pool.retained_bytes == 0)
    flood(small)
    assert found(small, wanted) == 0


def test_no_more_is_retained_than_may_be(small: Engine) -> None:
    long = keys(RETAINED + 20, "long")
    small.store(long)
    assert hint(small, long, priority=10, duration_s=600) == HintAnswer(chunks=RETAINED, refused=20)
    status = small.client.status()
    assert status.pool.retained_bytes == RETAINED * CHUNK_BYTES and status.counters["refused_retains"] == 20
    flood(small)
    assert found(small, long) == RETAINED


def test_what_lies_behind_a_gap_is_not_counted_as_too_much(small: Engine) -> None:
    """The gap is in one of the pieces in which a long prompt is looked at, and there are chunks in the next."""
    chain = keys(600, "chain")
    small.store(chain[:10])
    small.store(chain[512:522], parent=chain[511])
    assert hint(small, chain, priority=5, duration_s=60) == HintAnswer(chunks=10, refused=0)
    status = small.client.status()
    assert status.pool.retained_bytes == 10 * CHUNK_BYTES and status.counters["refused_retains"] == 0


def test_a_quota_evicts_what_is_retained() -> None:
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        wanted = keys(8, "wanted")
        engine.store(wanted)
        hint(engine, wanted, priority=100, duration_s=600)
        ok(server.http, "PATCH", "/v1/config", {"tenants": {"": {"chunks": 3}}})
        eventually(lambda: found(engine, wanted) == 3)
        engine.close()


def test_the_end_of_a_conversation_lets_its_own_chunks_go_first(small: Engine) -> None:
    system, ended = keys(4, "system"), keys(20, "ended")
    goes_on, older = keys(20, "goes on"), keys(40, "older")
    for tail in (older, system):
        small.store(tail)
    for tail in (ended, goes_on):
        small.store(tail, parent=system[-1])
    time.sleep(0.01)
    answer = hint(small, [*system, *ended], conversation_ended=True)
    assert (answer.chunks, answer.refused) == (20, 0)
    small.store(keys(POOL_CHUNKS - 84 + 15, "new"))
    assert found(small, [*system, *ended]) < 24 and found(small, [*system, *goes_on]) == 24
    assert found(small, older) == 40, "although it was not used for longer"


def test_a_long_prompt_is_looked_at_in_pieces(client: Client) -> None:
    """More keys than are worked on at once; a branch in the middle ends the walk there."""
    engine = attach(client, model=unique("long"), groups=(s.Group(part_bytes=4096),))
    chain = keys(1400, unique("long"))
    engine.store(chain[:1000])
    engine.store(chain[1000:], parent=chain[999])
    engine.store(keys(1, unique("branch")), parent=chain[699])
    assert hint(engine, chain, conversation_ended=True).chunks == 700
    assert hint(engine, chain, priority=-5).chunks == 700
    assert hint(engine, chain[:400], priority=0).chunks == 0, "it goes on behind"
    answer = hint(engine, chain, priority=5, duration_s=60)
    assert answer.chunks + answer.refused == 1400
    hint(engine, chain, priority=0)
    engine.close()


def test_a_hint_is_taken_as_json_too(small: Engine, server: ServerProcess) -> None:
    with HttpClient(small.client.address) as client:
        chain = keys(2, "json")
        small.store(chain)
        body = Hint(session=small.session, member=small.member, keys=chain, priority=1, duration_s=1)
        assert client.hint(body).chunks == 2


@pytest.mark.parametrize(("wish", "found_at"), [
    ({"priority": 1}, "$.priority"),
    ({"conversation_ended": True, "priority": -1}, "$.conversation_ended"),
    ({"conversation_ended": True, "duration_s": 1}, "$.conversation_ended"),
])
def test_wishes_that_do_not_go_together_are_refused(
    server: ServerProcess, client: Client, wish: dict[str, Any], found_at: str
) -> None:
    engine = attach(client, model=unique("model"))
    body = {"session": engine.session, "member": engine.member, "keys": keys(1), **wish}
    problem = refused(server.http, "POST", "/v1/hints", body)
    assert (problem["code"], problem["found"]) == ("invalid_body", found_at) and problem["wanted"]
    engine.close()


@pytest.mark.parametrize("wish", [
    {"priority": 101, "duration_s": 1}, {"priority": -101}, {"priority": 1, "duration_s": 0},
    {"priority": 1, "duration_s": 86401}, {"priority": 1.5, "duration_s": 1}, {"claim": "x"}, {"keys": ["z" * 64]},
    {"keys": keys(1) * 4097},
])
def test_wishes_out_of_range_are_refused(server: ServerProcess, client: Client, wish: dict[str, Any]) -> None:
    engine = attach(client, model=unique("model"))
    body = {"session": engine.session, "member": engine.member, "keys": keys(1), **wish}
    assert refused(server.http, "POST", "/v1/hints", body)["code"] == "invalid_body"
    engine.close()


def test_a_hint_needs_a_member_of_a_session_of_its_own(server: ServerProcess, client: Client) -> None:
    engine = attach(client, model=unique("model"))
    for session, member, code in (
        (engine.session, "nobody", "unknown_member"), ("no-session", engine.member, "unknown_session")
    ):
        status, problem = post(server.http, "/v1/hints", {"session": session, "member": member, "keys": keys(1)})
        assert (status, problem["code"]) == (404, code)
    engine.close()
