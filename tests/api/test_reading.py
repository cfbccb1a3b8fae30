"""Lookups, leases and their ends, over a real server."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import pytest
from api_helpers import Engine, ServerProcess, attach, eventually, keys, post, raw, unique
from server_fixtures import attached_engine

from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.reports import LeaseView

engine = attached_engine(label="reader")


@pytest.fixture
def prefix(engine: Engine) -> list[str]:
    stored = keys(4, unique("prefix"))
    engine.store(stored)
    return stored


def grants_of(client: Client, engine: Engine) -> dict[str, LeaseView]:
    return {view.grant: view for view in client.leases().leases if view.session == engine.listed}


def refused(code: str, error: pytest.ExceptionInfo[ApiError]) -> None:
    assert error.value.code == code, error.value


def test_a_lookup_finds_the_longest_stored_prefix_and_says_where_each_part_lies(
    engine: Engine, prefix: list[str]
) -> None:
    found = engine.lookup([*prefix, *keys(2, unique("missing"))])
    assert found.hit_tokens == 4 * 16 and found.first_chunk == 0
    assert [len(parts) for parts in found.chunks] == [1] * 4
    part = found.chunks[0][0]
    assert (part.group, part.writer, part.segment, part.length) == (0, 0, 0, 16384)
    assert part.checksum_value == 7
    assert len({part.offset for parts in found.chunks for part in parts}) == 4


def test_a_hole_ends_the_hit(engine: Engine, prefix: list[str]) -> None:
    assert engine.lookup([prefix[0], keys(1, unique("hole"))[0], prefix[1]]).hit_tokens == 16


def test_nothing_found_is_an_answer_without_a_lease(engine: Engine) -> None:
    found = engine.lookup(keys(3, unique("nothing")))
    assert (found.hit_tokens, found.lease, found.chunks) == (0, None, [])


def test_a_skip_leaves_out_the_chunks_wholly_before_it(engine: Engine, prefix: list[str]) -> None:
    found = engine.lookup(prefix, skip_prefix_tokens=20)
    assert found.hit_tokens == 64 and found.first_chunk == 1 and len(found.chunks) == 3


def test_a_skip_of_the_whole_hit_locks_nothing(engine: Engine, prefix: list[str]) -> None:
    found = engine.lookup(prefix, skip_prefix_tokens=64)
    assert found.hit_tokens == 64 and found.lease is None and found.chunks == []


def test_asking_again_in_an_epoch_renews_the_same_lease(client: Client, engine: Engine, prefix: list[str]) -> None:
    first = engine.lookup(prefix[:2])
    again = engine.lookup(prefix[:2])
    longer = engine.lookup(prefix)
    assert first.lease == again.lease == longer.lease and longer.hit_tokens == 64
    assert len(grants_of(client, engine)) == 1


def test_a_late_release_of_an_old_epoch_leaves_the_new_lease_whole(
    client: Client, engine: Engine, prefix: list[str]
) -> None:
    old = engine.lookup(prefix, epoch=0).lease
    new = engine.lookup(prefix, epoch=1).lease
    assert old is not None and new is not None and old != new
    engine.release(old, 0)
    assert grants_of(client, engine)[new].remaining == [0]
    assert engine.release(new, 0) == []


@pytest.mark.parametrize(("first", "then", "code"), [
    ({"epoch": 3}, {"epoch": 2}, "stale_epoch"), ({"readers": 1}, {"readers": 2}, "id_reused"),
], ids=["of a past epoch", "with other readers"])
def test_another_lookup_of_the_same_request_is_refused(
    engine: Engine, prefix: list[str], first: dict[str, Any], then: dict[str, Any], code: str
) -> None:
    engine.lookup(prefix, **first)
    with pytest.raises(ApiError) as error:
        engine.lookup(prefix, **then)
    refused(code, error)


def test_a_partial_release_leaves_the_other_ranks_holding(client: Client) -> None:
    with_two = attach(client, ranks=[0, 1], tensor_parallel=2, writers=2)
    stored = keys(2, unique("tp2"))
    with_two.store(stored, ranks=2)
    lease = with_two.lookup(stored, readers=2).lease
    assert lease is not None
    assert with_two.release(lease, 0) == [1]
    assert with_two.release(lease, 0) == [1], "releasing twice by one rank is harmless"
    assert grants_of(client, with_two)[lease].remaining == [1]
    assert with_two.release(lease, 1) == []
    eventually(lambda: client.session(with_two.session).held_bytes == 0)
    with_two.close()


def test_four_engines_of_two_ranks_hold_two_readers_each(client: Client) -> None:
    engines = [attach(client, ranks=[0, 1], tensor_parallel=2, writers=2) for _ in range(4)]
    stored = keys(3, unique("shared"))
    engines[0].store(stored, ranks=2)
    leases = [engine.lookup(stored, readers=2) for engine in engines]
    assert len({found.lease for found in leases}) == 4
    assert all(found.hit_tokens == 48 and len(found.chunks[0]) == 2 for found in leases)
    for engine, found in zip(engines, leases, strict=True):
        view = grants_of(client, engine)[str(found.lease)]
        assert (view.readers, view.remaining) == (2, [0, 1])
    for engine, found in zip(engines, leases, strict=True):
        assert engine.release(found.lease, 0) == [1]
        assert engine.release(found.lease, 1) == []
    for engine in engines:
        engine.close()


@pytest.mark.security
def test_a_lease_is_its_sessions_own(client: Client, engine: Engine, prefix: list[str]) -> None:
    lease = str(engine.lookup(prefix).lease)
    thief = attach(client)
    for attempt in (
        lambda: thief.release(lease, 0),
        lambda: client.cancel(lease, thief.session, thief.member),
        lambda: client.mismatch(s.ReportMismatch(session=thief.session, lease=lease, chunks=[0])),
    ):
        with pytest.raises(ApiError) as error:
            attempt()
        refused("foreign_grant", error)
    assert grants_of(client, engine)[lease].remaining == [0]
    thief.close()


def test_renewing_says_what_the_lease_still_holds(client: Client, engine: Engine, prefix: list[str]) -> None:
    found = engine.lookup(prefix, request="named request")
    view = client.lease(str(found.lease))
    assert (view.kind, view.request, view.remaining, view.chunks) == ("lease", "named request", [0], 4)
    assert view.bytes == 4 * 16384
    engine.release(found.lease, 0)
    with pytest.raises(ApiError) as error:
        client.lease("0" * 16)
    refused("unknown_grant", error)


@pytest.mark.parametrize("how", ["body", "query"])
def test_cancel_by_the_asker_ends_the_lease(
    server: ServerProcess, client: Client, engine: Engine, prefix: list[str], how: str
) -> None:
    lease = str(engine.lookup(prefix).lease)
    if how == "body":
        client.cancel(lease, engine.session, engine.member)
    else:
        query = f"session={engine.session}&member={engine.member}"
        assert raw(server.http, "DELETE", f"/v1/leases/{lease}?{query}")[0] == 204
    assert lease not in grants_of(client, engine)


@pytest.mark.security
def test_only_the_asker_may_cancel(client: Client, engine: Engine, prefix: list[str]) -> None:
    other = attach(client, instance=engine.body.instance, ranks=[1], scheduler=False)
    lease = str(engine.lookup(prefix).lease)
    with pytest.raises(ApiError) as error:
        client.cancel(lease, engine.session, other.member)
    refused("not_the_asker", error)
    other.close()


def test_a_reported_mismatch_is_a_miss_from_then_on(client: Client, engine: Engine, prefix: list[str]) -> None:
    lease = str(engine.lookup(prefix).lease)
    answer = client.mismatch(s.ReportMismatch(session=engine.session, lease=lease, chunks=[2]))
    assert answer.quarantined >= 1
    assert engine.lookup(prefix, request="after").hit_tokens == 32
    assert client.status().counters["mismatches"] >= 1


def test_without_a_session_a_lookup_answers_a_length_and_holds_nothing(
    client: Client, engine: Engine, prefix: list[str]
) -> None:
    found = client.lookup(s.Lookup(namespace=engine.attached.namespace, keys=prefix))
    assert (found.hit_tokens, found.lease, found.chunks) == (64, None, [])
    assert grants_of(client, engine) == {}


@pytest.mark.parametrize("count", [40, 5000])
def test_tokens_are_hashed_into_the_same_keys_as_the_engines(client: Client, engine: Engine, count: int) -> None:
    """40 tokens are hashed on the loop, 5000 in a thread; a tail shorter than a chunk has no key."""
    tokens = [hash((unique("t"), index)) % (1 << 32) for index in range(count)]
    own = [key.hex() for key in chunk_keys(bytes.fromhex(engine.attached.namespace), tokens, 16)]
    engine.store(own[:-1] if len(own) > 200 else own)
    found = client.lookup(s.Lookup(session=engine.session, member=engine.member, request="tokens", tokens=tokens))
    assert found.hit_tokens == 16 * (len(own) - (len(own) > 200))


def test_tokens_are_refused_where_engines_hash_them_in_their_own_way(client: Client) -> None:
    with closing(attach(client, hash_function="sha256 of mine")) as engine:
        own = s.Lookup(session=engine.session, member=engine.member, request="r")
        for asked in (own, s.Lookup(namespace=engine.attached.namespace)):
            with pytest.raises(ApiError, match="give keys") as refused:
                client.lookup(msgspec.structs.replace(asked, tokens=list(range(64))))
            assert (refused.value.code, refused.value.found, refused.value.wanted) == (
                "bad_argument", "sha256 of mine", "blake2b-256"
            )
            assert client.lookup(msgspec.structs.replace(asked, keys=keys(1, "none"))).hit_tokens == 0


@pytest.mark.security
def test_two_manifests_never_meet(client: Client, engine: Engine, prefix: list[str]) -> None:
    other = attach(client, revision="another")
    assert other.attached.namespace != engine.attached.namespace
    assert other.lookup(prefix).hit_tokens == 0
    other.close()


def test_a_renewal_is_not_counted_as_a_lookup(client: Client, engine: Engine, prefix: list[str]) -> None:
    before = client.status().counters
    for _ in range(5):
        engine.lookup(prefix, request="counted once")
    after = client.status().counters
    assert after["lookups"] - before["lookups"] == 1
    assert after["lookup_renewals"] - before["lookup_renewals"] == 4
    assert after["lookup_tokens"] - before["lookup_tokens"] == 64


def test_an_answer_has_exactly_the_schemas_fields(server: ServerProcess, engine: Engine, prefix: list[str]) -> None:
    _, answer = post(server.http, "/v1/lookups", {
        "session": engine.session, "member": engine.member, "request": "raw", "keys": prefix,
    })
    assert set(answer) == set(s.LookupAnswer.__struct_fields__)
    group, writer, segment, offset, length, checksum = answer["chunks"][0][0]
    assert (group, writer, segment, length, checksum) == (0, 0, 0, 16384, f"{7:016x}") and offset >= 4096
