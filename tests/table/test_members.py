"""A member that has ended gives its place back: at once if no open grant names it, else with the last of these."""

from __future__ import annotations

import pytest
from table_helpers import PAGE, Client, chain, key, new_region, new_table

from kvdock._core import MAX_MEMBERS, Lookup, Mapping, Table, TableError

pytestmark = [pytest.mark.table_model]


GONE, NONCE_AT = 4, 16
"""The state of such a member, and where its id is in its cell, in bytes."""


def sealed(value: int) -> int:
    """A state word with its check, as csrc/table/layout.h makes it."""
    return value | (value * 0x9E3779B97F4A7C15 % (1 << 64) >> 48) << 48


def joined(table: Table, session: int, name: object, ranks: list[int] | None = None) -> int:
    return table.add_member(session, key("member", name)[:16], ranks or [], False, 0)


def used(table: Table) -> int:
    """The places of members that are taken; the tenant's own figure is the same."""
    table.check_integrity()
    taken = table.stats()["members"]
    assert table.tenant(bytes(16)).members == taken
    return taken


def adopted(region: Mapping) -> Table:
    return Table.adopt(
        region, pool_id=1, lock_inode=0, segments=[(0, PAGE, 8 * PAGE)], limit_bytes=8 * PAGE, session_cap=1.0,
        total_cap=1.0,
    )[0]


def leased_by_two(table: Table, engine: Client) -> tuple[int, Lookup]:
    """A member that asks for a lease, which ends when the engine's own member releases rank 0."""
    engine.store(chain("all", 1))
    asker = joined(table, engine.session, "asker", [1])
    lease = table.lookup(
        engine.session, asker, key("request")[:16], 1, b"".join(chain("all", 1)), readers=2, skip_tokens=0, now_ms=0
    )
    assert lease.lease
    return asker, lease


@pytest.mark.security
def test_members_that_come_and_leave_take_no_places_from_others() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    for number in range(MAX_MEMBERS + 1):
        table.leave(joined(table, engine.session, number))
    assert used(table) == 1
    Client(table, PAGE, name="another's")
    assert used(table) == 2


@pytest.mark.security
def test_members_that_die_give_their_places_back_once_they_have_settled() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    dead = [joined(table, engine.session, number) for number in range(3)]
    for member in dead:
        table.member_dead(member, 0)
    assert used(table) == 4
    table.heartbeat(engine.member, 1 << 20)
    table.tick(1 << 20)
    assert used(table) == 1 and table.members_named(dead) == []


def test_a_member_keeps_its_place_as_long_as_another_rank_has_its_lease() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    asker, lease = leased_by_two(table, engine)
    table.leave(asker)
    assert used(table) == 2, "the rank is asked because the member that asked for the lease is gone"
    assert table.heartbeat(engine.member, 0) == [(lease.lease, [0])]
    with pytest.raises(TableError, match="come back under a new one"):
        joined(table, engine.session, "asker", [1])
    table.release(engine.session, lease.lease, [0])
    assert used(table) == 1
    again = joined(table, engine.session, "asker", [1])
    assert again != asker and used(table) == 2
    with pytest.raises(TableError, match="no such member"):
        table.heartbeat(asker, 0)


def test_an_adopted_member_that_is_gone_gives_its_place_back_with_its_lease() -> None:
    region = new_region()
    table = new_table(8 * PAGE, region=region)
    engine = Client(table, PAGE)
    asker, lease = leased_by_two(table, engine)
    table.leave(asker)
    del table
    next_one = adopted(region)
    assert used(next_one) == 2
    next_one.release(engine.session, lease.lease, [0])
    assert used(next_one) == 1


def test_a_session_that_ends_gives_all_places_back() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    asker, _ = leased_by_two(table, engine)
    table.leave(asker)
    table.leave(engine.member)
    assert used(table) == 0 and table.sessions() == []


def test_a_member_whose_server_was_killed_before_it_gave_the_place_back_is_forgotten_at_adoption() -> None:
    region = new_region()
    table = new_table(8 * PAGE, region=region)
    engine = Client(table, PAGE)
    member = joined(table, engine.session, "it leaves")
    table.leave(member)
    del table
    gone = (member >> 20) << 3 | GONE
    with memoryview(region) as view:
        cell = bytes(view).index(key("member", "it leaves")[:16]) - NONCE_AT
        view[cell : cell + 8] = sealed(gone).to_bytes(8, "little")
    assert used(adopted(region)) == 1
