"""Quotas of tenants in the table: who is evicted for whom, and what survives a restart. test_model.py holds the rules
step by step."""

from __future__ import annotations

import time

import pytest
from table_helpers import PAGE, Client, key, new_region, new_table

from kvdock._core import Mapping, Table, TableError

pytestmark = [pytest.mark.table_model, pytest.mark.security]

OWN = bytes(16)
ONE, TWO = key("one")[:16], key("two")[:16]


def used(table: Table, tenant: bytes) -> tuple[int, int]:
    view = table.tenant(tenant)
    return view.bytes, view.chunks


def adopt(region: Mapping, pages: int) -> Table:
    table, _ = Table.adopt(
        region, pool_id=1, lock_inode=0, segments=[(0, PAGE, pages * PAGE)], limit_bytes=pages * PAGE,
        session_cap=1.0, total_cap=1.0,
    )
    return table


def test_a_tenant_at_its_quota_evicts_its_own_coldest_chunks_and_nobody_elses() -> None:
    table = new_table(64 * PAGE)
    other, mine = Client(table, PAGE, "other", tenant=TWO), Client(table, PAGE, "mine", tenant=ONE)
    table.set_quota(ONE, bytes=8 * PAGE, chunks=None)
    for n in range(10):
        assert other.store([key("other", n)]) == 1  # colder than all that follows
    for n in range(30):
        assert mine.store([key("mine", n)]) == 1
        assert used(table, ONE) <= (8 * PAGE, 8)
    assert [n for n in range(30) if mine.has(key("mine", n))] == list(range(22, 30))
    assert all(other.has(key("other", n)) for n in range(10))
    assert used(table, TWO) == (10 * PAGE, 10)
    table.check_integrity()


def test_what_the_quota_has_no_room_for_is_cut_off_the_end_of_a_store() -> None:
    table = new_table(64 * PAGE)
    mine = Client(table, PAGE, "mine", tenant=ONE)
    table.set_quota(ONE, bytes=None, chunks=5)
    granted = mine.reserve([key(n) for n in range(9)])
    assert ([index for index, _ in granted.chunks], granted.limited) == ([0, 1, 2, 3, 4], "quota")
    assert mine.reserve([key("more")]).limited == "quota", "its own open reservation holds all of it"
    assert table.tenant(ONE).grants == 1
    table.check_integrity()


def test_a_chunk_larger_than_the_quota_evicts_nothing() -> None:
    table = new_table(64 * PAGE)
    small, large = Client(table, PAGE, "small", tenant=ONE), Client(table, 9 * PAGE, "large", tenant=ONE)
    table.set_quota(ONE, bytes=8 * PAGE, chunks=None)
    small.store([key(n) for n in range(8)])
    assert large.reserve([key("large")]).limited == "quota"
    assert used(table, ONE) == (8 * PAGE, 8)
    assert small.store([key("next")]) == 1, "small ones have room as before"


def test_nothing_is_evicted_for_a_session_that_has_not_page_locked_every_segment() -> None:
    """What became free could lie where it may not write."""
    table = new_table(64 * PAGE, segments=2)
    mine = Client(table, PAGE, "mine", tenant=ONE)
    mine.store([key(n) for n in range(4)])
    table.set_quota(ONE, bytes=None, chunks=4)
    table.report_pinned(mine.member, 1)
    assert mine.reserve([key("new")]).limited == "quota" and used(table, ONE)[1] == 4
    assert all(mine.has(key(n)) for n in range(4))
    table.report_pinned(mine.member, 2)
    assert mine.store([key("new")]) == 1 and not mine.has(key(3))


def test_a_pin_never_beats_a_quota_and_goes_last() -> None:
    table = new_table(64 * PAGE)
    mine = Client(table, PAGE, "mine", tenant=ONE)
    for n in range(4):
        mine.store([key(n)])
    table.pin(mine.space, key(0) + key(1), 10_000)
    table.set_quota(ONE, bytes=None, chunks=4)
    for n in range(10, 14):
        assert mine.store([key(n)]) == 1
    assert mine.has(key(0)) and mine.has(key(1)), "there were chunks that nobody pinned"
    assert mine.lookup([key(12)], request="a").lease and mine.lookup([key(13)], request="b").lease
    assert mine.store([key("new")]) == 1
    assert [mine.has(key(n)) for n in (0, 1, 12, 13)] == [False, True, True, True]
    assert mine.store([key("newer")]) == 1
    assert mine.has(key(1)) and not mine.has(key("new")), "what is not pinned goes first, though it is younger"
    assert table.stats()["kept_bytes"] == PAGE
    table.check_integrity()


def test_a_lowered_quota_is_reached_in_slices_and_leaves_what_is_leased() -> None:
    table = new_table(4096 * PAGE, records=8192)
    mine, other = Client(table, PAGE, "mine", tenant=ONE), Client(table, PAGE, "other", tenant=TWO)
    for batch in range(4):
        mine.store([key("mine", batch, n) for n in range(256)])
    other.store([key("other", n) for n in range(64)])
    assert mine.lookup([key("mine", 3, n) for n in range(20)]).lease
    table.set_quota(ONE, bytes=10 * PAGE, chunks=None)
    assert mine.reserve([key("more")]).limited == "quota", "first it has to use less"
    assert used(table, ONE) == (1024 * PAGE, 1024), "a reservation does not do the work of many"
    assert [table.evict_over_quota(300) for _ in range(5)] == [300, 300, 300, 104, 0]
    assert used(table, ONE) == (20 * PAGE, 20) and used(table, TWO) == (64 * PAGE, 64)
    table.check_integrity()


def test_the_default_quota_is_for_all_but_the_servers_own_user_and_those_with_one_of_their_own() -> None:
    table = new_table(64 * PAGE)
    table.set_default_quota(bytes=None, chunks=2)
    own, one, two = (Client(table, PAGE, name, tenant=t) for name, t in (("own", OWN), ("one", ONE), ("two", TWO)))
    table.set_quota(TWO, bytes=None, chunks=4)
    for tenant, stays in ((own, 6), (one, 2), (two, 4)):
        for n in range(6):
            tenant.store([key(tenant.name, n)])
        assert used(table, tenant.tenant)[1] == stays
    assert [(t.tenant, t.quota_bytes, t.quota_chunks) for t in table.tenants()] == sorted(
        [(OWN, None, None), (ONE, None, 2), (TWO, None, 4)]
    )


def test_tenants_survive_adoption_and_their_quotas_are_set_again() -> None:
    region = new_region()
    table = new_table(64 * PAGE, region=region)
    mine, other = Client(table, PAGE, "mine", tenant=ONE), Client(table, PAGE, "other", tenant=TWO)
    table.set_quota(ONE, bytes=None, chunks=6)
    for n in range(6):
        mine.store([key(n)])
    other.store([key("other")])
    mine.lookup([key(1)])
    mine.reserve([key(2), key("begun")])
    del table
    adopted = adopt(region, 64)
    view = adopted.tenant(ONE)
    assert (view.chunks, view.namespaces, view.sessions, view.grants) == (6, 1, 1, 2), "one chunk was never published"
    assert (view.quota_bytes, view.quota_chunks) == (None, None)
    assert used(adopted, TWO) == (PAGE, 1)
    adopted.set_quota(ONE, bytes=None, chunks=3)
    while adopted.evict_over_quota(1):
        pass
    assert used(adopted, ONE) == (3 * PAGE, 3) and used(adopted, TWO) == (PAGE, 1)
    adopted.check_integrity()


def test_another_owner_written_into_a_namespace_is_noticed_at_adoption() -> None:
    region = new_region()
    Client(new_table(PAGE, region=region), PAGE, "mine", tenant=ONE).store([key("k")])
    memory = memoryview(region).cast("B")
    at = bytes(memory).index(ONE)
    memory[at : at + 16] = TWO
    with pytest.raises(TableError, match="a namespace is damaged"):
        adopt(region, 1)


def test_a_namespace_belongs_to_one_tenant() -> None:
    table = new_table(PAGE)
    mine = Client(table, PAGE, "mine", tenant=ONE)
    with pytest.raises(TableError, match="another tenant's") as refused:
        Client(table, PAGE, "other", "mine", tenant=TWO)
    assert refused.value.code == "bad_argument"
    assert table.has_namespace(key("space", "mine", PAGE)) and not table.has_namespace(key("other"))
    assert [t.tenant for t in table.tenants()] == [mine.tenant], "the refused one left nothing"


def test_a_tenant_is_forgotten_with_its_last_namespace_unless_it_has_a_quota() -> None:
    table = new_table(8 * PAGE)
    for n in range(2000):
        table.leave(Client(table, PAGE, f"engine-{n}", tenant=key("tenant", n)[:16]).member)
    table.set_quota(TWO, bytes=None, chunks=2)
    table.drop_idle_namespaces()
    assert [t.tenant for t in table.tenants()] == [TWO]
    table.check_integrity()


def test_a_store_at_the_quota_costs_the_same_in_a_pool_a_hundred_times_as_large() -> None:
    """A scan of the larger pool for one chunk to evict would cost about a hundred times as much."""

    def cost_ns(others: int) -> float:
        table = new_table((others + 1024) * PAGE, records=others + 4096)
        other, mine = Client(table, PAGE, "other", tenant=TWO), Client(table, PAGE, "mine", tenant=ONE)
        for batch in range(others // 512):
            other.store([key("other", batch, n) for n in range(512)])
        table.set_quota(ONE, bytes=None, chunks=256)
        mine.store([key("first", n) for n in range(256)])
        best = float("inf")
        for turn in range(5):
            names = [key("turn", turn, n) for n in range(256)]
            began = time.thread_time_ns()
            granted = mine.reserve(names)
            best = min(best, time.thread_time_ns() - began)
            assert len(granted.chunks) == 256
            table.commit(mine.session, granted.grant, 0, [(n, 0, 1) for n in range(256)], 0)
        assert used(table, TWO)[1] == others
        return best

    assert cost_ns(51_200) < 10 * cost_ns(512)
