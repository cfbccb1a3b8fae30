"""Promises over the wire, in both forms: who computes says so, others hear of it, and it can be taken back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from admin_helpers import ok
from api_helpers import Engine, ServerProcess, attach, keys, post, unique

from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import BeingStored, Heartbeat, Lookup

CHUNK = 16


@pytest.fixture(params=["json", "msgpack"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(server.unix, packed=request.param == "msgpack") as made:
        yield made


@pytest.fixture
def pair(client: Client) -> Iterator[tuple[Engine, Engine]]:
    salt = unique("salt")
    both = attach(client, cache_salt=salt), attach(client, cache_salt=salt)
    yield both
    for engine in both:
        engine.close()


def test_another_engine_hears_how_far_a_prefix_is_stored(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    wanted = keys(4)
    assert first.lookup(wanted, computes=True).being_stored is None
    assert second.lookup(wanted).being_stored == BeingStored(tokens=4 * CHUNK, committed=0)
    first.store(wanted[:3])
    found = second.lookup(wanted, epoch=1)
    assert found.hit_tokens == 3 * CHUNK and found.being_stored == BeingStored(4 * CHUNK, 3 * CHUNK)


def test_a_request_takes_its_promise_back_and_no_other(pair: tuple[Engine, Engine], client: Client) -> None:
    first, second = pair
    first.lookup(keys(2, "a"), "a", computes=True)
    first.lookup(keys(2, "b"), "b", computes=True)
    for _ in range(2):
        client.withdraw(first.session, ["a", "never asked"])
        assert second.lookup(keys(2, "a"), "a").being_stored is None
        assert second.lookup(keys(2, "b"), "b").being_stored is not None
    client.withdraw(second.session, ["b"])
    assert second.lookup(keys(2, "b"), "b").being_stored is not None, "it was not the second's"


def test_names_that_are_withdrawn_push_out_none_that_people_read() -> None:
    with ServerProcess(table_grants=16) as small, Client(small.unix) as client:
        engine = attach(client)
        engine.store(keys(1))
        assert engine.lookup(keys(1), "read by people").lease is not None
        client.withdraw(engine.session, [f"never asked {at}" for at in range(256)])
        leases = ok(small.http, "GET", "/v1/leases")["leases"]
        assert [lease["request"] for lease in leases] == ["read by people"]
        engine.close()


def test_an_engine_in_another_namespace_hears_nothing(pair: tuple[Engine, Engine], client: Client) -> None:
    other = attach(client, cache_salt=unique("salt"))
    pair[0].lookup(keys(2), computes=True)
    assert other.lookup(keys(2)).being_stored is None
    other.close()


def test_a_limit_does_not_hide_what_is_committed(client: Client) -> None:
    salt = unique("salt")
    first = attach(client, cache_salt=salt)
    behind = attach(client, cache_salt=salt)
    first.lookup(keys(4), computes=True)
    first.store(keys(4)[:2])
    client.heartbeat(behind.session, Heartbeat(member=behind.member, pinned_through=0))
    found = behind.lookup(keys(4))
    assert (found.hit_tokens, found.limited_by) == (0, "pinning")
    assert found.being_stored == BeingStored(4 * CHUNK, 2 * CHUNK)
    first.close()
    behind.close()


def test_nobody_computes_without_a_session(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    with pytest.raises(ApiError) as refused:
        client.lookup(Lookup(namespace=engine.attached.namespace, keys=keys(1), computes=True))
    assert refused.value.code == "invalid_body"
    engine.close()
    _, answer = post(server.unix, "/v1/lookups", {"session": "x", "computes": "yes"})
    assert answer["code"] == "invalid_body"
