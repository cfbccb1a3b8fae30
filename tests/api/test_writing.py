"""Reservations, commits and aborts, over a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from admin_helpers import ok
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, keys, unique
from server_fixtures import attached_engine

from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError

engine = attached_engine(label="writer")


@pytest.fixture
def pair(client: Client) -> Iterator[Engine]:
    """Two ranks, each writing its own parts."""
    attached = attach(client, ranks=[0, 1], tensor_parallel=2, writers=2)
    yield attached
    attached.leave()


def fresh(count: int = 2) -> list[str]:
    return keys(count, unique("fresh"))


def hit(engine: Engine, wanted: list[str]) -> int:
    return engine.client.lookup(s.Lookup(namespace=engine.attached.namespace, keys=wanted)).hit_tokens


def refused(code: str, error: pytest.ExceptionInfo[ApiError]) -> None:
    assert error.value.code == code, error.value


def test_a_reservation_has_a_slot_for_every_rank_and_nothing_is_visible_before_the_commit(pair: Engine) -> None:
    wanted = fresh(3)
    granted = pair.reserve(wanted)
    assert [chunk.index for chunk in granted.chunks] == [0, 1, 2]
    assert all([part.writer for part in chunk.parts] == [0, 1] for chunk in granted.chunks)
    assert hit(pair, wanted) == 0
    half = pair.commit(granted, rank=0)
    assert (half.ready, half.remaining) == (0, [1])
    assert hit(pair, wanted) == 0, "a partial hit cannot exist"
    whole = pair.commit(granted, rank=1)
    assert (whole.ready, whole.remaining) == (3, [])
    assert hit(pair, wanted) == 48


def test_a_reservation_names_what_is_present_and_what_is_being_written(client: Client, engine: Engine) -> None:
    wanted = fresh(4)
    engine.store(wanted[:1])
    other = attach(client)
    other.reserve(wanted[1:2], parent=wanted[0])
    granted = engine.reserve(wanted)
    assert granted.present == [0] and granted.busy == [1]
    assert all(chunk.index > 1 for chunk in granted.chunks)
    other.close()


def test_a_repeated_reservation_is_the_same_one(engine: Engine) -> None:
    wanted = fresh()
    assert engine.reserve(wanted, store="same") == engine.reserve(wanted, store="same")


def test_a_store_id_with_another_body_is_refused(engine: Engine) -> None:
    engine.reserve(fresh(), store="taken")
    with pytest.raises(ApiError) as error:
        engine.reserve(fresh(), store="taken")
    refused("id_reused", error)


def test_a_commit_may_be_repeated_with_equal_checksums_only(engine: Engine) -> None:
    granted = engine.reserve(fresh())
    first = engine.commit(granted, checksum=5)
    assert engine.commit(granted, checksum=5) == first
    with pytest.raises(ApiError) as error:
        engine.commit(granted, checksum=6)
    refused("already_committed", error)


def test_chunks_become_ready_one_by_one(engine: Engine) -> None:
    wanted = fresh(3)
    granted = engine.reserve(wanted)
    assert granted.reservation is not None
    part = s.PartDone(0, 0, f"{1:016x}")
    answer = engine.client.commit(granted.reservation, s.Commit(session=engine.session, rank=0, parts=[part]))
    assert (answer.ready, answer.remaining) == (1, [0])
    assert hit(engine, wanted) == 16


def test_a_commit_after_an_abort_is_gone(engine: Engine) -> None:
    wanted = fresh()
    granted = engine.reserve(wanted)
    assert granted.reservation is not None
    answer = engine.client.abort(granted.reservation, s.Abort(session=engine.session, ranks=[0]))
    assert answer.remaining == []
    with pytest.raises(ApiError) as error:
        engine.commit(granted)
    refused("grant_closed", error)
    assert error.value.status == 410
    assert hit(engine, wanted) == 0
    assert engine.store(wanted).chunks, "the keys can be stored again"


def test_an_abort_by_the_asker_needs_no_ranks(pair: Engine) -> None:
    granted = pair.reserve(fresh())
    assert granted.reservation is not None
    answer = pair.client.abort(granted.reservation, s.Abort(session=pair.session, member=pair.member))
    assert answer.remaining == []
    eventually(lambda: pair.client.session(pair.session).held_bytes == 0)


def test_a_commit_after_the_deadline_is_gone_and_discharges(engine: Engine) -> None:
    wanted = fresh()
    granted = engine.reserve(wanted, deadline_s=0.05)
    client = engine.client
    eventually(lambda: all(view.closed for view in client.leases().leases if view.grant == granted.reservation))
    assert client.session(engine.session).held_bytes > 0, "a deadline frees no memory"
    with pytest.raises(ApiError) as error:
        engine.commit(granted)
    refused("grant_closed", error)
    assert hit(engine, wanted) == 0
    assert client.session(engine.session).held_bytes == 0


@pytest.mark.security
def test_a_late_commit_of_one_part_is_the_ranks_word_for_all_as_the_route_says(
    engine: Engine, server: ServerProcess
) -> None:
    granted = engine.reserve(fresh(3), deadline_s=0.05)
    assert granted.reservation is not None
    client = engine.client
    eventually(lambda: all(view.closed for view in client.leases().leases if view.grant == granted.reservation))
    one = s.Commit(session=engine.session, rank=0, parts=[s.PartDone(0, 0, f"{1:016x}")])
    with pytest.raises(ApiError) as error:
        client.commit(granted.reservation, one)
    refused("grant_closed", error)
    assert client.session(engine.session).held_bytes == 0
    commit = ok(server.http, "GET", "/openapi.json")["paths"]["/v1/reservations/{reservation}/commit"]["post"]
    assert "the rank counts as done with the whole reservation, whichever parts it names" in commit["description"]


def test_a_temporary_chunk_goes_with_its_last_reader(engine: Engine) -> None:
    wanted = fresh(1)
    engine.store(wanted, temporary=True)
    found = engine.lookup(wanted)
    assert found.hit_tokens == 16
    engine.release(found.lease, 0)
    assert hit(engine, wanted) == 0


def test_a_temporary_chunk_that_two_requests_hit_stays(engine: Engine) -> None:
    wanted = fresh(1)
    engine.store(wanted, temporary=True)
    leases = [engine.lookup(wanted, request=name).lease for name in ("one", "two")]
    for lease in leases:
        engine.release(lease, 0)
    assert hit(engine, wanted) == 16


def test_a_store_continues_a_sequence_by_its_parent(engine: Engine) -> None:
    wanted = fresh(4)
    engine.store(wanted[:2])
    engine.store(wanted[2:], parent=wanted[1])
    assert hit(engine, wanted) == 64


def test_tokens_with_a_parent_are_refused(engine: Engine) -> None:
    with pytest.raises(ApiError) as error:
        engine.client.reserve(
            s.Reserve(session=engine.session, member=engine.member, store="t", tokens=[1] * 32, parent="0" * 64)
        )
    refused("invalid_body", error)


def test_a_windowed_group_may_be_left_out_of_a_store(client: Client) -> None:
    groups = (s.Group(part_bytes=8192), s.Group(kind="window", window_tokens=16, part_bytes=4096))
    engine = attach(client, groups=groups)
    wanted = fresh(3)
    engine.store(wanted[:2], groups=[0])
    assert hit(engine, wanted[:2]) == 0, "the window before the end of the hit is missing"
    engine.store(wanted[2:], parent=wanted[1])
    found = engine.lookup(wanted)
    assert found.hit_tokens == 48
    assert [[part.group for part in parts] for parts in found.chunks] == [[0], [0], [0, 1]]
    engine.close()


def test_a_full_pool_evicts_what_nobody_holds_and_grants_a_prefix_of_what_fits() -> None:
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as small, Client(small.unix) as client:
        engine = attach(client)
        for _ in range(4):
            engine.store(keys(60, unique("old")))
        status = client.status()
        assert status.counters["evicted_chunks"] > 0 and status.pool.ready_bytes <= 2 * MIB
        held = keys(100, unique("held"))
        engine.store(held)
        lease = engine.lookup(held).lease
        granted = engine.reserve(keys(60, unique("new")))
        assert granted.limited_by == "no_space" and 0 < len(granted.chunks) < 60
        assert hit(engine, held) == 1600
        engine.release(lease, 0)
        engine.close()


def test_a_pool_grows_segment_by_segment_before_it_evicts() -> None:
    with ServerProcess(pool_bytes=4 * MIB, segment_bytes=MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        assert client.status().pool.segments == 1
        wanted = keys(150, unique("grow"))
        granted = engine.store(wanted)
        assert {part.segment for chunk in granted.chunks for part in chunk.parts} >= {0, 1, 2}
        assert client.status().counters["evicted_chunks"] == 0
        assert engine.heartbeat().segments == len(client.segments().segments) >= 3
        assert sum(segment.used_bytes for segment in client.segments().segments) == 150 * 16384
        engine.close()


@pytest.mark.parametrize(("growth", "grown"), [("ahead", True), ("demand", False)])
def test_a_pool_has_all_of_its_memory_behind_the_start_when_told_so(growth: str, grown: bool) -> None:
    with (
        ServerProcess(pool_bytes=4 * MIB, segment_bytes=1 * MIB, growth=growth) as server,
        Client(server.unix) as client,
    ):
        if grown:
            eventually(lambda: client.status().pool.segments == 4)
        engine = attach(client)
        engine.store(keys(8, unique("little")))
        assert client.status().pool.segments == (4 if grown else 1)
        engine.close()


def test_a_pool_grows_below_its_own_mark_and_evicts_nothing_before_it_is_full() -> None:
    with (
        ServerProcess(
            pool_bytes=4 * MIB, segment_bytes=1 * MIB, grow_water=0.5, low_water=0.4, high_water=0.4
        ) as server,
        Client(server.unix) as client,
    ):
        eventually(lambda: client.status().pool.segments >= 2)
        engine = attach(client)
        engine.store(keys(60, unique("some")))
        eventually(lambda: client.status().pool.segments >= 3)
        assert client.status().counters["evicted_chunks"] == 0
        engine.close()


def test_the_watermark_keeps_some_of_a_full_pool_free() -> None:
    with (
        ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB, low_water=0.2, high_water=0.4) as server,
        Client(server.unix) as client,
    ):
        engine = attach(client)
        engine.store(keys(120, unique("full")))
        eventually(lambda: client.status().pool.free_bytes >= 0.4 * 2 * MIB)
        engine.close()
