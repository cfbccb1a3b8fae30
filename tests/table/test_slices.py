"""Long work of the table is done in slices, each of which ends no more than it was told to: what is counted is how much
one call has ended, not how long it took."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from table_helpers import PAGE, Client, chain, key, new_table

from kvdock._core import Reservation, Table, TableError

pytestmark = pytest.mark.security

CHUNKS = 512
END_GRANT, DROP_PIN, ABORT_CHUNK, CHANGE_STATE, END_PREFERENCE = 8, 1, 32, 64, 8
"""Units of work (csrc/base/work.h)."""
SETTLE_MS, SUSPECT_MS = 3000, 6000


def engines(count: int) -> tuple[Table, list[Client]]:
    """With a chain of 8 chunks that all of them find."""
    table = new_table(CHUNKS * PAGE)
    clients = [Client(table, PAGE, name=f"engine {number}", namespace="all") for number in range(count)]
    assert clients[0].store(chain("all", 8)) == 8
    return table, clients


def leased(table: Table, engine: Client, count: int) -> None:
    for number in range(count):
        assert engine.lookup(chain("all", 8), (engine.name, number)).lease
    assert table.stats()["leases"] >= count


def steps(work: Callable[[], bool], left: Callable[[], int]) -> list[int]:
    """How much each call of `work` ended, until one says that nothing is left to do."""
    ended = list[int]()
    is_more = True
    while is_more:
        before = left()
        is_more = work()
        ended.append(before - left())
        assert len(ended) < 10_000
    return ended


def test_what_a_dead_member_holds_is_released_in_slices() -> None:
    table, (engine, other) = engines(2)
    leased(table, engine, 100)
    assert not table.member_dead(engine.member, 10), "it stores nothing"
    most = CHANGE_STATE + 10 * (END_GRANT + 8 * DROP_PIN)
    now_ms = 10 + SETTLE_MS
    ended = steps(lambda: table.tick(now_ms, most), lambda: table.stats()["leases"])
    assert sum(ended) == 100 and max(ended) == 10
    assert [view.session for view in table.sessions()] == [other.session]
    table.check_integrity()


def test_a_member_leaves_in_slices_and_gets_nothing_meanwhile() -> None:
    table, (engine, other) = engines(2)
    leased(table, engine, 100)
    leased(table, other, 100)
    most = CHANGE_STATE + 10 * (END_GRANT + 8 * DROP_PIN)
    assert table.leave(engine.member, most) and table.stats()["leases"] == 190
    with pytest.raises(TableError) as refused:
        engine.lookup(chain("all", 8), "while it leaves")
    assert refused.value.code == "member_dead"
    ended = steps(lambda: table.leave(engine.member, most), lambda: table.stats()["leases"])
    assert sum(ended) == 90 and max(ended) == 10
    assert [view.session for view in table.sessions()] == [other.session]
    assert not other.table.leave(other.member) and table.stats()["leases"] == 0, "all at once"
    table.check_integrity()


def test_a_member_that_has_begun_to_leave_is_gone_some_time_later() -> None:
    """Its server, or the call, may have ended in between."""
    table, (engine, _) = engines(2)
    leased(table, engine, 100)
    assert table.leave(engine.member, 1)
    assert not table.tick(SETTLE_MS) and table.stats()["leases"] == 0
    with pytest.raises(TableError, match="no such member"):
        table.leave(engine.member)
    table.check_integrity()


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "late"])
def test_stores_end_in_slices(is_dead: bool) -> None:
    table, (engine, _) = engines(2)
    for store in range(40):
        assert len(engine.reserve(chain(store, 4)).chunks) == 4
    most = 5 * (END_GRANT + 4 * ABORT_CHUNK)
    ended = steps(
        lambda: table.member_dead(engine.member, 10, most) if is_dead else table.tick(60_001, most),
        lambda: table.stats()["reserved_chunks"],
    )
    assert sum(ended) == 160 and max(ended) <= 20
    table.check_integrity()


def test_members_are_missed_in_slices() -> None:
    table, _ = engines(100)

    def living() -> int:
        return sum(view.state == "live" for view in table.members())

    ended = steps(lambda: table.tick(SUSPECT_MS + 1, 10 * CHANGE_STATE), living)
    assert sum(ended) == 100 and max(ended) == 10


@pytest.mark.parametrize("kind", ["kept", "retained"])
def test_preferences_end_in_slices(kind: str) -> None:
    table, (engine, _) = engines(2)
    stored = chain("many", 100)
    assert engine.store(stored) == 100
    if kind == "kept":
        assert table.pin(engine.space, b"".join(stored), 1000) == 100
    else:
        assert table.retain(engine.space, b"".join(stored), 1, 1000) == (100, 0)
    ended = steps(lambda: table.tick(1001, 10 * END_PREFERENCE), lambda: table.stats()[f"{kind}_bytes"] // PAGE)
    assert sum(ended) == 100 and max(ended) == 10
    table.check_integrity()


def test_what_is_evicted_next_is_told_of_few() -> None:
    table, (engine, _) = engines(2)
    for number in range(20):
        assert engine.store(chain(number, 4)) == 4
    assert sum(map(len, table.next_out(CHUNKS * PAGE).values())) == 88 * 32
    assert sum(map(len, table.next_out(CHUNKS * PAGE, 10).values())) == 10 * 32


def test_another_policy_evicts_by_its_own_order_before_it_has_seen_all_chunks() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    for number in range(8):
        assert engine.store([key(number)]) == 1
    for number in (2, 1, 0):  # these are of another kind to "adaptive"
        for again in range(3):
            found = engine.lookup([key(number)], (number, again))
            table.release(engine.session, found.lease, [0])
    table.set_eviction("lru")
    order = list[int]()
    for new in range(8, 16):
        assert engine.store([key(new)]) == 1
        order += [number for number in range(8) if not engine.has(key(number)) and number not in order]
        table.tick(0, 5)
        table.check_integrity()
    assert order == [3, 4, 5, 6, 7, 2, 1, 0]


def test_namespaces_that_nobody_uses_are_dropped_in_slices() -> None:
    table, clients = engines(50)
    spaces = [Client(table, PAGE, name=f"own {number}") for number in range(50)]
    for one in spaces:
        table.leave(one.member)
    left = [len(table.drop_idle_namespaces(20)) for _ in range(4)]
    assert left == [31, 11, 1, 1] and table.drop_idle_namespaces() == [clients[0].space]
    assert clients[0].has(chain("all", 8)[0])


def test_reservations_of_before_a_clear_are_closed_in_slices() -> None:
    table, (engine, other) = engines(2)
    for store in range(40):
        assert len(engine.reserve(chain(store, 4)).chunks) == 4
    table.raise_generation(engine.space)
    kept = other.reserve(chain("later", 4))
    most, cursor, closed = 5 * (END_GRANT + 4 * ABORT_CHUNK), 0, list[int]()
    while cursor >= 0:
        before = table.stats()["reserved_chunks"]
        cursor = table.close_cleared(cursor, most)
        closed.append(before - table.stats()["reserved_chunks"])
        table.check_integrity()
    assert sum(closed) == 160 and max(closed) <= 20
    assert table.close_cleared(0) == -1 and table.stats()["reserved_chunks"] == len(kept.chunks) == 4


OLD = [one for number in range(CHUNKS // 8) for one in chain(("old", number), 8)]
"""In chains of 8."""
NEW = chain("new", 200)


def full(records: int = 4096) -> Client:
    """Memory for CHUNKS chunks, and so many records, all taken or nearly so."""
    engine = Client(new_table(CHUNKS * PAGE, records=records), PAGE)
    for at in range(0, len(OLD), 8):
        assert engine.store(OLD[at : at + 8]) == 8
    return engine


def reserved_in_slices(engine: Client, keys: list[bytes], most: int) -> tuple[Reservation, list[int]]:
    """What is granted in the end, and how many chunks each slice has evicted."""
    evicted = [engine.table.stats()["evicted_chunks"]]
    while (found := engine.reserve(keys, most_evicted=most, goes_on=len(evicted) > 1)).has_more:
        assert not found.grant and not found.chunk_count
        evicted.append(engine.table.stats()["evicted_chunks"])
    return found, [after - before for before, after in pairwise(evicted)]


@pytest.mark.parametrize("policy", ["adaptive", "selective", "lru"])
def test_a_store_evicts_in_slices_what_it_would_evict_at_once(policy: str) -> None:
    at_once, in_slices = full(), full()
    for engine in (at_once, in_slices):
        engine.table.set_eviction(policy)
    assert at_once.reserve(NEW).chunk_count == len(NEW)
    found, slices = reserved_in_slices(in_slices, NEW, 64)
    assert found.chunk_count == len(NEW) and slices == [64, 64, 64]
    assert in_slices.table.stats()["evicted_chunks"] == at_once.table.stats()["evicted_chunks"] == len(NEW)
    assert [in_slices.has(one) for one in OLD] == [at_once.has(one) for one in OLD]
    in_slices.table.check_integrity()


def test_a_store_evicts_in_slices_for_records_and_quotas_too() -> None:
    engine = full(records=512)
    assert engine.table.free_bytes() == 0 or engine.table.stats()["evicted_chunks"]
    found, slices = reserved_in_slices(engine, NEW, 50)
    assert found.chunk_count == len(NEW) and set(slices) == {50}
    for quota in ({"bytes": CHUNKS // 2 * PAGE, "chunks": None}, {"bytes": None, "chunks": CHUNKS // 2}):
        tenant = key("tenant")[:16]
        mine = Client(new_table(CHUNKS * PAGE), PAGE, tenant=tenant)
        mine.table.set_quota(tenant, **quota)
        for at in range(0, CHUNKS // 2, 8):
            assert mine.store(OLD[at : at + 8]) == 8
        found, slices = reserved_in_slices(mine, NEW, 64)
        assert found.chunk_count == len(NEW) and slices == [64, 64, 64]
        mine.table.check_integrity()


def test_what_a_store_names_and_what_comes_before_it_is_not_evicted_for_it() -> None:
    engine = full()
    prompt = [*OLD[:8], *NEW]
    found, slices = reserved_in_slices(engine, prompt, 64)
    assert found.present == list(range(8)) and found.chunk_count == len(NEW) and slices == [64, 64, 64]
    assert all(engine.has(one) for one in OLD[:8])


@pytest.mark.parametrize("most", [8, None])
def test_a_store_never_evicts_the_chunk_that_it_follows(most: int | None) -> None:
    """The end of its own prompt is all that the tenant has, and may be what is worth least."""
    tenant, prompt = key("tenant")[:16], chain("prompt", 60)
    engine = Client(new_table(CHUNKS * PAGE), PAGE, tenant=tenant)
    engine.table.set_quota(tenant, bytes=None, chunks=50)
    assert engine.store(prompt[:40]) == 40
    more = {} if most is None else {"most_evicted": most}
    found = engine.reserve(prompt[40:], prompt[39], **more)
    assert not found.has_more and (found.chunk_count, found.limited) == (10, "quota")
    assert all(map(engine.has, prompt[:40]))


@pytest.mark.parametrize("held", [0, 30])
def test_a_store_that_its_quota_refuses_evicts_nothing_of_others(held: int) -> None:
    """A quota of 40 chunks, of which `held` are leased, in a pool that others have filled."""
    tenant = key("tenant")[:16]
    others = full()
    engine = Client(others.table, PAGE, tenant=tenant, name="limited", namespace="limited")
    engine.table.set_quota(tenant, bytes=None, chunks=40)
    mine = chain("mine", 40)
    assert engine.store(mine) == 40
    if held:
        assert engine.lookup(mine[:held], "reads").lease
    before = sum(map(others.has, OLD))
    found, _ = reserved_in_slices(engine, NEW, 16)
    assert (found.chunk_count, found.limited) == (40 - held, "quota")
    assert sum(map(others.has, OLD)) == before
    engine.table.check_integrity()


def test_a_store_that_was_not_declined_at_first_is_not_declined_midway() -> None:
    """What is left becomes worth more, the more of the rest is evicted."""
    engine = Client(new_table(64 * PAGE), PAGE)
    engine.table.set_eviction("selective")
    for number in range(400):
        keys = chain(("often", number % 4), 16) if number % 41 else chain("seldom", 16)
        hit = engine.lookup(keys, number).hit_tokens // 16
        if hit < len(keys):
            engine.store(keys[hit:], keys[hit - 1] if hit else b"")
        for view in engine.table.grants() if hit else ():
            engine.table.release(engine.session, view.grant, [0])
    seldom = chain("seldom", 16)
    refused = engine.reserve(seldom, most_evicted=4)
    assert refused.limited == "no_space" and not refused.has_more
    assert engine.reserve(seldom, most_evicted=4, goes_on=True).has_more
