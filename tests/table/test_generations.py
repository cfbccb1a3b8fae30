"""A namespace's generation: one call clears it, also for who reserved before, and for a server that is killed midway.
"""

from __future__ import annotations

import os

import pytest
from table_helpers import PAGE, Client, key, new_region, new_table

from kvdock._core import Mapping, Table, TableError

CHAIN = [key("chain", at) for at in range(6)]
POOL = 16 * PAGE


def adopted(region: Mapping) -> tuple[Table, dict[str, int]]:
    return Table.adopt(
        region, pool_id=1, lock_inode=0, segments=[(0, PAGE, POOL)], limit_bytes=POOL, session_cap=1.0, total_cap=1.0
    )


def copy_of(region: Mapping, at: int = 0, with_bytes: bytes = b"") -> Mapping:
    content = bytearray(memoryview(region))
    content[at : at + len(with_bytes)] = with_bytes
    fd = os.memfd_create("kvdock-copy")
    os.ftruncate(fd, len(content))
    os.pwrite(fd, content, 0)
    copy = Mapping(fd, len(content))
    os.close(fd)
    return copy


def refused(code: str, call: object, *arguments: object) -> None:
    assert callable(call)
    with pytest.raises(TableError) as error:
        call(*arguments)
    assert error.value.code == code


def test_a_raise_clears_all_that_is_there_and_only_that_namespace() -> None:
    table = new_table(POOL)
    engine, other = Client(table, PAGE), Client(table, PAGE, "other")
    engine.store(CHAIN), other.store(CHAIN)
    assert table.generation(engine.space) == 0
    assert table.raise_generation(engine.space) == 1
    assert not any(map(engine.has, CHAIN)) and all(map(other.has, CHAIN))
    assert engine.lookup(CHAIN).hit_tokens == 0
    assert table.peek(engine.space, b"".join(CHAIN)) == 0
    assert engine.store(CHAIN) == 6, "what is stored afterwards is found"
    assert engine.lookup(CHAIN, "again").hit_tokens == 6 * 16
    table.check_integrity()


def test_what_is_cleared_is_taken_out_little_by_little_and_never_what_came_later() -> None:
    table = new_table(POOL)
    engine = Client(table, PAGE)
    engine.store(CHAIN)
    table.raise_generation(engine.space)
    assert table.stats()["ready_chunks"] == 6, "it takes no walk"
    engine.store([key("new", at) for at in range(3)])
    taken = cursor = 0
    while cursor >= 0:
        count, cursor = table.clear_old(cursor, 2)
        taken += count
    assert (taken, table.stats()["ready_chunks"]) == (6, 3)
    table.check_integrity()


def test_a_generation_rises_to_what_is_asked_for_and_never_falls() -> None:
    table = new_table(POOL)
    engine = Client(table, PAGE)
    assert table.raise_generation(engine.space, 7) == 7
    engine.store(CHAIN)
    assert table.raise_generation(engine.space, 7) == table.raise_generation(engine.space, 3) == 7
    assert all(map(engine.has, CHAIN)), "what has that generation already is not cleared"
    assert table.raise_generation(engine.space) == 8
    refused("bad_argument", table.raise_generation, engine.space, 1 << 48)
    refused("unknown_namespace", table.raise_generation, 999)


def test_what_was_reserved_before_a_raise_is_never_published() -> None:
    table = new_table(POOL)
    engine = Client(table, PAGE)
    engine.store(CHAIN[:2])
    granted = engine.reserve(CHAIN[2:], CHAIN[1])
    table.raise_generation(engine.space)
    assert engine.reserve(CHAIN[2:]).chunks, "who stores now is not told that somebody else does"
    parts = [(index, 0, 1) for index, _ in granted.chunks]
    refused("grant_closed", table.commit, engine.session, granted.grant, 0, parts, 0)
    assert not any(map(engine.has, CHAIN))
    table.check_integrity()


def test_an_open_reservation_of_before_a_raise_is_over_in_each_call() -> None:
    """Until it is closed, which is done in slices."""
    table = new_table(POOL)
    engine, writer = Client(table, PAGE, "a", "both"), Client(table, PAGE, "b", "both")
    granted = [writer.reserve([one]) for one in CHAIN[:3]]
    parts = [(0, 0, 1)]
    table.raise_generation(engine.space)
    assert engine.lookup(CHAIN, "r").hit_tokens == 0
    assert engine.reserve(CHAIN[:1]).chunks, "its key is free"
    refused("grant_closed", table.make_raw, writer.session, granted[0].grant, 0, [(0, 0)], 0)
    writer.stores = 1
    refused("grant_closed", writer.reserve, CHAIN[1:2])
    table.check_integrity()
    assert table.close_cleared(0) == -1
    for one in granted:
        refused("grant_closed", table.commit, writer.session, one.grant, 0, parts, 0)
    assert [engine.has(one) for one in CHAIN] == [False] * 6
    assert table.stats()["reservations"] == 1 and table.stats()["reserved_chunks"] == 1
    table.check_integrity()


def test_a_lease_from_before_a_raise_keeps_its_memory_until_it_is_released() -> None:
    table = new_table(POOL)
    engine = Client(table, PAGE)
    engine.store(CHAIN)
    found = engine.lookup(CHAIN)
    table.raise_generation(engine.space)
    table.clear_old(0, 100)
    assert engine.lookup(CHAIN, "other").hit_tokens == 0
    assert table.stats()["quarantined_chunks"] == 6
    table.release(engine.session, found.lease, [0])
    assert table.stats()["quarantined_chunks"] == 0
    table.check_integrity()


def test_deleted_keys_are_not_published_by_who_was_storing_them() -> None:
    table = new_table(POOL)
    engine = Client(table, PAGE)
    granted = engine.reserve(CHAIN)
    assert table.delete(engine.space, CHAIN[2]) == 0
    parts = [(index, 0, 1 + index) for index, _ in granted.chunks]
    table.commit(engine.session, granted.grant, 0, parts, 0)
    assert [engine.has(one) for one in CHAIN] == [True, True, False, True, True, True]
    table.check_integrity()


def test_the_next_server_knows_the_generation_and_lets_go_of_what_was_cleared() -> None:
    region = new_region()
    table = new_table(POOL, region=region)
    engine = Client(table, PAGE)
    engine.store(CHAIN)
    table.raise_generation(engine.space, 5)
    engine.store([key("new")])
    del table
    table, found = adopted(region)
    assert (found["cleared"], found["chunks"]) == (6, 1)
    assert table.generation(engine.space) == 5
    assert [table.state_of(engine.space, one) for one in CHAIN] == ["absent"] * 6
    assert table.state_of(engine.space, key("new")) == "ready"
    assert table.raise_generation(engine.space) == 6


def test_a_damaged_generation_refuses_the_pool() -> None:
    """Else what was cleared could be found again."""
    region = new_region()
    table = new_table(POOL, region=region)
    engine = Client(table, PAGE)
    engine.store(CHAIN)
    before = bytes(memoryview(region))
    table.raise_generation(engine.space, 5)
    after = bytes(memoryview(region))
    changed = [at for at in range(0, len(after), 8) if before[at : at + 8] != after[at : at + 8]]
    assert len(changed) == 2, "a raise is two stores"
    adopted(copy_of(region))
    for at in changed:
        for bad in (after[at : at + 7] + bytes([after[at + 7] ^ 1]), bytes(8), bytes([1]) + after[at + 1 : at + 8]):
            refused("not_adoptable", adopted, copy_of(region, at, bad))
    adopted(copy_of(region, changed[0], before[changed[0] : changed[0] + 8]))  # killed between the two
