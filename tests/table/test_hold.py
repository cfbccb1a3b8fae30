"""Leases of single chunks: Table.hold."""

from __future__ import annotations

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import Lookup, Table, TableError

CHAIN = [key("chain", at) for at in range(6)]


@pytest.fixture
def table() -> Table:
    return new_table(8 * PAGE)


@pytest.fixture
def engine(table: Table) -> Client:
    made = Client(table, PAGE)
    assert made.store(CHAIN) == 6
    return made


def hold(engine: Client, keys: list[bytes], request: object = "hold") -> Lookup:
    return engine.table.hold(engine.session, engine.member, key(request)[:16], b"".join(keys), 0)


def test_chunks_are_leased_wherever_they_stand_and_only_those_that_are_there(engine: Client) -> None:
    held = hold(engine, [CHAIN[4], key("nowhere"), CHAIN[1]])
    assert [len(parts) for parts in held.chunks] == [1, 0, 1]
    assert [parts[0][5] for parts in held.chunks if parts] == [5, 2], "their checksums"
    assert [view.chunks for view in engine.table.grants()] == [2]
    engine.table.check_integrity()


def test_what_is_held_is_not_evicted_until_it_is_released(engine: Client) -> None:
    held = hold(engine, [CHAIN[5]])
    other = [key("other", at) for at in range(8)]
    engine.store(other)
    assert engine.has(CHAIN[5]), "and so nothing above it can go either"
    engine.table.release(engine.session, held.lease, [0])
    engine.store([key("third", at) for at in range(8)])
    assert not engine.has(CHAIN[5])
    engine.table.check_integrity()


def test_a_repeat_has_the_same_lease_until_it_is_released(engine: Client) -> None:
    held = hold(engine, [CHAIN[0], key("nowhere")])
    again = hold(engine, [CHAIN[0], key("nowhere")])
    assert (again.lease, again.chunks) == (held.lease, held.chunks)
    with pytest.raises(TableError) as refused:
        hold(engine, [CHAIN[1]])
    assert refused.value.code == "id_reused"
    engine.table.release(engine.session, held.lease, [0])
    with pytest.raises(TableError) as refused:
        hold(engine, [CHAIN[0], key("nowhere")])
    assert refused.value.code == "grant_closed"


def test_nothing_is_leased_where_nothing_is_there(engine: Client) -> None:
    held = hold(engine, [key("nowhere")])
    assert (held.lease, held.chunks) == (0, [[]]) and engine.table.grants() == []


def test_a_hold_is_no_use_so_what_is_evicted_first_stays_the_same(table: Table) -> None:
    engine = Client(table, PAGE)
    table.set_eviction("lru")
    first, second = [key("first")], [key("second")]
    engine.store(first)
    engine.store(second)
    held = hold(engine, first)
    table.release(engine.session, held.lease, [0])
    engine.store([key("more", at) for at in range(7)])
    assert not engine.has(first[0]) and engine.has(second[0])


def test_the_caps_hold(engine: Client) -> None:
    engine.table.set_limits(limit_bytes=8 * PAGE, session_cap=0.25, total_cap=1.0)
    held = hold(engine, CHAIN)
    assert (held.limited, [len(parts) for parts in held.chunks]) == ("held_bytes", [1, 1, 0, 0, 0, 0])


def test_temporary_chunks_that_no_lookup_leased_can_be_dropped(engine: Client) -> None:
    table, keys = engine.table, [key("temporary", at) for at in range(2)]
    for number, one in enumerate(keys):
        granted = table.reserve(
            engine.session, engine.member, key("store", number)[:16], b"", one, groups=0, temporary=True,
            deadline_ms=60_000, now_ms=0,
        )
        assert table.drop_unread(engine.space, one) == 0, "it is not there yet"
        table.commit(engine.session, granted.grant, 0, [(0, 0, 1)], 0)
    engine.lookup(keys[:1])
    hold(engine, keys[1:])
    assert table.drop_unread(engine.space, b"".join([*keys, *CHAIN])) == 1
    assert [engine.has(one) for one in [*keys, *CHAIN]] == [True, False, *[True] * 6]
    table.check_integrity()
