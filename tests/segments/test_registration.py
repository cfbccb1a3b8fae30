"""Segments are registered in the background, in order; no grant names one that a rank of its session has not."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator

import pytest
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, keys, post, raw
from mlock_helpers import GatedLock, MemoryLock, locked_bytes, no_locked_memory
from prometheus_client.parser import text_string_to_metric_families
from table_helpers import PAGE, Client as TableClient, key, new_table

from kvdock._core import SEGMENT_IDS, CudaError, TableError, cuda_unavailable
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import SegmentPool
from kvdock.client.client import Client
from kvdock.datapath.segments import AttachedSegments, CudaRegister, SegmentRegistrar


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    """With a lock, so that no server that starts meanwhile takes it for one that was left behind."""
    pool_id = secrets.randbits(64)
    lock = PoolLock.create(pool_id, address="a test's")
    found = SegmentPool(pool_id, limit_bytes=8 * MIB, segment_bytes=MIB, prefault_threads=1)
    yield found
    found.close()
    lock.close(unlink=True)


@pytest.fixture
def mapped(pool: SegmentPool) -> Iterator[AttachedSegments]:
    segments = AttachedSegments(pool.pool_id)
    for _ in range(3):
        segments.attach(pool.grow())
    yield segments
    segments.close()


# --------------------------------------------------------------------------- the thread


def test_segments_are_registered_in_the_order_of_their_ids(mapped: AttachedSegments) -> None:
    before, registered, asked = locked_bytes(), threading.Semaphore(0), list[int]()

    def register(address: int, size_bytes: int) -> MemoryLock.Locked:
        assert size_bytes == MIB, "a segment is registered in one piece"
        asked.append(address)
        return MemoryLock()(address, size_bytes)

    registrar = SegmentRegistrar(mapped, register, progress=registered.release, piece_bytes=64 << 10)
    assert all(registered.acquire(timeout=10.0) for _ in range(3)), "`progress` is called for each"
    assert asked == [mapped.mapping(segment).address for segment in range(3)]
    assert registrar.pinned_through == 3 and locked_bytes() == before + 3 * MIB
    registrar.close()
    assert locked_bytes() == before


def test_a_segment_that_retires_is_unregistered_before_it_is_unmapped(
    pool: SegmentPool, mapped: AttachedSegments
) -> None:
    before = locked_bytes()
    registrar = SegmentRegistrar(mapped, MemoryLock())
    eventually(lambda: registrar.pinned_through == 3)
    with pytest.raises(BufferError):
        mapped.detach(1)
    registrar.unregister(1)
    mapped.detach(1)
    assert locked_bytes() == before + 2 * MIB and not registrar.is_registered(1)
    assert registrar.pinned_through == 3, "ids are not used again: what retires below changes nothing"
    mapped.attach(pool.grow())
    registrar.wake()
    eventually(lambda: registrar.pinned_through == 4)
    registrar.close()


def test_unregistering_waits_for_the_registration_under_way(mapped: AttachedSegments) -> None:
    register = GatedLock()
    registrar = SegmentRegistrar(mapped, register)
    assert register.reached.wait(10.0)
    retire = threading.Thread(target=registrar.unregister, args=(0,))
    retire.start()
    retire.join(0.1)
    assert retire.is_alive(), "the memory is still being registered"
    register.gate.set()
    retire.join(10.0)
    assert not retire.is_alive() and not registrar.is_registered(0)
    mapped.detach(0)
    eventually(lambda: registrar.pinned_through == 3)
    registrar.close()


def test_a_retired_segment_that_was_never_registered_does_not_hold_back_the_others(mapped: AttachedSegments) -> None:
    register = GatedLock()
    registrar = SegmentRegistrar(mapped, register)
    assert register.reached.wait(10.0)
    registrar.unregister(1)
    mapped.detach(1)
    register.gate.set()
    eventually(lambda: registrar.pinned_through == 3)
    assert not registrar.is_registered(1) and registrar.is_registered(2)
    registrar.close()


def test_what_the_kernel_refuses_is_logged_once_with_advice_and_tried_again(
    mapped: AttachedSegments, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvdock.datapath")
    with no_locked_memory():
        registrar = SegmentRegistrar(mapped, MemoryLock(), retry_s=0.02)
        eventually(lambda: "still cannot be registered" in caplog.text)
        assert registrar.pinned_through == 0 and not registrar.is_registered(0)
    eventually(lambda: registrar.pinned_through == 3)
    registrar.close()
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "ulimit -l" in warning.getMessage() and "segment 0" in warning.getMessage()


def test_it_ends_at_once_while_it_waits_to_try_again(mapped: AttachedSegments) -> None:
    with no_locked_memory():
        registrar = SegmentRegistrar(mapped, MemoryLock(), retry_s=3600.0)
        eventually(lambda: registrar._logged == 0)
        registrar.close()
    assert not any(thread.name == "kvdock-register" for thread in threading.enumerate())


def test_a_machine_without_a_gpu_says_so_when_asked_to_register_for_one(mapped: AttachedSegments) -> None:
    if cuda_unavailable():
        with pytest.raises(CudaError):
            CudaRegister(device=0)(mapped.mapping(0).address, MIB)
        return
    CudaRegister(device=0)(mapped.mapping(0).address, MIB).close()


# --------------------------------------------------------------------------- the table


def two_segments() -> tuple[TableClient, list[bytes]]:
    """A client whose eight chunks lie four in each of two segments, all in one chain."""
    client = TableClient(new_table(8 * PAGE, segments=2), PAGE)
    chain = [key("chain", n) for n in range(8)]
    assert client.store(chain) == 8
    assert [part[0][2] for part in client.lookup(chain, "all").chunks] == [0] * 4 + [1] * 4
    return client, chain


def test_a_hit_ends_where_a_rank_has_not_registered() -> None:
    client, chain = two_segments()
    for through, hit in ((0, 0), (1, 4), (2, 8)):
        client.table.report_pinned(client.member, through)
        found = client.lookup(chain, f"r{through}")
        assert found.hit_tokens == 16 * hit
        assert found.limited == ("" if hit == 8 else "pinning")
        assert found.unpinned_tokens == 16 * (8 - hit)
        assert all(part[2] < through for parts in found.chunks for part in parts)
        client.table.check_integrity()


def test_chunks_before_the_skip_need_no_registration() -> None:
    client, chain = two_segments()
    late = [key("late", n) for n in range(2)]
    client.table.delete(client.space, chain[0])  # frees a slot in segment 0
    client.table.report_pinned(client.member, 1)
    found = client.table.lookup(
        client.session, client.member, key("r")[:16], 1, b"".join(chain[4:]), readers=1, skip_tokens=64, now_ms=0
    )
    assert (found.hit_tokens, found.limited, found.unpinned_tokens) == (64, "", 0)
    assert client.store(late) == 0, "the freed slot waits for the lease named all"


def test_a_store_takes_registered_slots_only_and_evicts_nothing_for_want_of_them() -> None:
    client = TableClient(new_table(8 * PAGE, segments=2), PAGE)
    client.table.report_pinned(client.member, 1)
    got = client.reserve([key("a", n) for n in range(6)])
    assert got.limited == "pinning" and [parts[0][2] for _, parts in got.chunks] == [0] * 4
    client.table.commit(client.session, got.grant, 0, [(n, 0, 1 + n) for n in range(4)], 0)
    again = client.reserve([key("b")])
    assert (again.limited, again.grant) == ("pinning", 0)
    assert all(client.has(key("a", n)) for n in range(4))
    client.table.report_pinned(client.member, 2)
    assert client.store([key("c", n) for n in range(5)]) == 5, "all is registered: it evicts like any other"
    client.table.check_integrity()


def test_one_engine_that_registers_slowly_does_not_hold_back_another() -> None:
    client, chain = two_segments()
    client.table.report_pinned(client.member, 0)
    session = client.table.open_session(key("other")[:16], client.space, 0)
    member = client.table.add_member(session, key("other member")[:16], [0], True, 0)
    found = client.table.lookup(
        session, member, key("r")[:16], 1, b"".join(chain), readers=1, skip_tokens=0, now_ms=0
    )
    assert (found.hit_tokens, found.limited) == (16 * 8, "")


def test_the_rank_that_has_registered_least_counts_until_it_dies_or_leaves() -> None:
    client, chain = two_segments()
    slow, slowest = (
        client.table.add_member(client.session, key("rank", rank)[:16], [rank], False, 0) for rank in (1, 2)
    )
    for member, through in ((client.member, 2), (slow, 1), (slowest, 0)):
        client.table.report_pinned(member, through)
    assert client.lookup(chain, "a").hit_tokens == 0
    client.table.member_dead(slowest, 0)
    client.table.check_integrity()
    assert client.lookup(chain, "b").hit_tokens == 16 * 4
    client.table.leave(slow)
    client.table.check_integrity()
    assert client.lookup(chain, "c").hit_tokens == 16 * 8


def test_a_figure_above_every_segment_id_is_refused() -> None:
    client, _ = two_segments()
    with pytest.raises(TableError) as refused:
        client.table.report_pinned(client.member, above := SEGMENT_IDS + 1)
    assert (refused.value.code, refused.value.found, refused.value.wanted) == ("bad_argument", above, SEGMENT_IDS)


# --------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=4 * MIB, segment_bytes=MIB) as found:
        yield found


def metric(server: ServerProcess, name: str) -> float:
    text = raw(server.http, "GET", "/metrics")[2].decode()
    return next(s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name)


def rises_to(server: ServerProcess, name: str, value: float) -> None:
    """The text of /metrics may be a second old."""
    eventually(lambda: metric(server, name) >= value)
    assert metric(server, name) == value


def ranks_of(client: Client, model: str) -> tuple[Engine, Engine]:
    """One engine of two ranks, both of which read the same parts."""
    first = attach(client, ranks=[0], model=model, tensor_parallel=2)
    second = attach(
        client, ranks=[1], scheduler=False, instance=first.body.instance, model=model, tensor_parallel=2
    )
    return first, second


def test_heartbeats_carry_it_and_what_it_cost_is_counted(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        writer, chain = attach(client, model="counted", tensor_parallel=2), keys(120, "counted")
        writer.store(chain)  # 120 parts of 16 KiB: more than a segment
        one, two = ranks_of(client, "counted")
        segments = len(client.segments().segments)
        assert segments >= 2
        one.heartbeat(pinned_through=segments)
        two.heartbeat(pinned_through=1)
        lost = {name: metric(server, f"kvdock_unpinned_{name}_total") for name in ("lookups", "chunks", "tokens")}
        for _ in range(2):  # a repeat costs nothing more
            short = one.lookup(chain, "r", readers=2)
            assert short.limited_by == "pinning" and 0 < short.hit_tokens < 16 * 120
        assert {part.segment for parts in short.chunks for part in parts} == {0}
        missing = 120 - short.hit_tokens // 16
        for name, more in (("lookups", 1), ("chunks", missing), ("tokens", 16 * missing)):
            rises_to(server, f"kvdock_unpinned_{name}_total", lost[name] + more)
        [shown] = [view for view in client.sessions().sessions if view.session == one.listed]
        assert {member.id: member.pinned_through for member in shown.members} == {
            one.member: segments, two.member: 1,
        }
        two.heartbeat()
        assert one.lookup(chain, "s", readers=2).limited_by == "pinning", "a heartbeat without it changes nothing"
        two.heartbeat(pinned_through=segments)
        assert one.lookup(chain, "t", readers=2).hit_tokens == 16 * 120
        assert writer.lookup(chain, "u").hit_tokens == 16 * 120
        for engine in (writer, one, two):
            engine.leave()


def test_a_member_that_has_registered_nothing_is_granted_nothing(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client, model="fresh")
        engine.heartbeat(pinned_through=0)
        short = metric(server, "kvdock_unpinned_reservations_total")
        granted = engine.reserve(keys(2, "fresh"))
        assert (granted.reservation, granted.limited_by, granted.chunks) == (None, "pinning", [])
        rises_to(server, "kvdock_unpinned_reservations_total", short + 1)
        engine.heartbeat(pinned_through=len(client.segments().segments))
        assert engine.reserve(keys(2, "fresh")).limited_by is None
        status, problem = post(
            server.unix, f"/v1/sessions/{engine.session}/heartbeat", {"member": engine.member, "pinned_through": -1}
        )
        assert (status, problem["code"], problem["found"]) == (422, "invalid_body", "$.pinned_through")
        engine.leave()
