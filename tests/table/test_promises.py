"""Promises: the first engine to ask for a prefix that nobody has is the one that others may wait for."""

from __future__ import annotations

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import Lookup, Table

CHUNK = 16
LASTS_MS = 30_000
MOST, MOST_OF_A_SESSION = 1 << 16, 8192
MOST_OF_A_TICK = 2048


@pytest.fixture
def table() -> Table:
    return new_table(256 * PAGE)


def engines(table: Table, *names: str, tenant: bytes = bytes(16)) -> list[Client]:
    return [Client(table, PAGE, name, namespace=f"shared by {tenant.hex()}", tenant=tenant) for name in names]


def prefix(count: int, name: str = "prefix") -> list[bytes]:
    return [key(name, at) for at in range(count)]


def ask(engine: Client, keys: list[bytes], request: str = "r", now: int = 0, *, computes: bool = True) -> Lookup:
    return engine.table.lookup(
        engine.session, engine.member, key(request)[:16], 1, b"".join(keys), readers=1, skip_tokens=0, now_ms=now,
        computes=computes,
    )


def stored_by_others(found: Lookup) -> tuple[int, int]:
    """How many chunks others store, and how many of these are there."""
    return found.being_stored // CHUNK, found.committed // CHUNK


def test_the_first_promises_and_the_others_hear_of_it(table: Table) -> None:
    first, second, third = engines(table, "first", "second", "third")
    keys = prefix(10)
    assert stored_by_others(ask(first, keys)) == (0, 0)
    assert stored_by_others(ask(second, keys)) == (10, 0)
    assert stored_by_others(ask(third, [*keys[:6], key("another")], computes=False)) == (6, 0)
    assert stored_by_others(ask(first, keys)) == (0, 0), "its own promise is none to wait for"
    table.check_integrity()


def test_what_is_committed_counts_until_all_is_there(table: Table) -> None:
    first, second = engines(table, "first", "second")
    keys = prefix(10)
    ask(first, keys)
    first.store(keys[:4])
    found = ask(second, keys)
    assert stored_by_others(found) == (10, 4) and found.hit_tokens == 4 * CHUNK
    first.store(keys[4:], keys[3])
    found = ask(second, keys)
    assert stored_by_others(found) == (0, 0) and found.hit_tokens == 10 * CHUNK
    table.check_integrity()


def test_a_later_request_of_a_session_takes_over_what_an_earlier_one_has_promised(table: Table) -> None:
    first, second = engines(table, "first", "second")
    keys = prefix(10)

    def heard() -> int:
        table.check_integrity()
        return stored_by_others(ask(second, keys, computes=False))[0]

    ask(first, keys, "r")
    ask(first, keys[:6], "s")
    assert heard() == 10
    table.withdraw(first.session, key("s")[:16])
    assert heard() == 0, "the first six were the later request's"
    ask(first, keys, "s")
    ask(first, keys[:6], "t")
    table.withdraw(first.session, key("s")[:16])
    assert heard() == 6, "what is left of the earlier one's is withdrawn with it"
    table.withdraw(first.session, key("r")[:16])
    assert heard() == 6, "nothing is left of the first one's"
    table.withdraw(first.session, key("t")[:16])
    assert heard() == 0


def test_who_asks_for_more_promises_the_rest(table: Table) -> None:
    first, second, third = engines(table, "first", "second", "third")
    keys = prefix(10)
    ask(first, keys[:6])
    assert stored_by_others(ask(second, keys)) == (6, 0)
    assert stored_by_others(ask(third, keys)) == (10, 0)
    table.withdraw(first.session, key("r")[:16])
    assert stored_by_others(ask(third, keys)) == (0, 0), "nobody stores the beginning: it does so itself"
    assert stored_by_others(ask(first, keys)) == (10, 0), "the third's beginning, and the second's end"


def test_a_reservation_is_as_good_as_a_promise(table: Table) -> None:
    first, second = engines(table, "first", "second")
    keys = prefix(4)
    got = first.reserve(keys[:2])
    assert stored_by_others(ask(second, keys)) == (2, 0)
    table.abort(first.session, got.grant, [0])
    assert stored_by_others(ask(second, keys)) == (0, 0)


@pytest.mark.parametrize("end", ["withdraw", "abort", "leave", "dead", "suspect", "late"])
def test_a_promise_ends(table: Table, end: str) -> None:
    first, second = engines(table, "first", "second")
    keys, now = prefix(6), 0
    ask(first, keys)
    assert stored_by_others(ask(second, keys, computes=False)) == (6, 0)
    if end == "withdraw":
        table.withdraw(first.session, key("r")[:16])
    elif end == "abort":
        table.abort(first.session, first.reserve(keys).grant, [0])
    elif end == "leave":
        table.leave(first.member)
    elif end == "dead":
        table.member_dead(first.member, 0)
    elif end == "suspect":
        table.heartbeat(second.member, 6000)
        table.tick(6001)
    elif end == "late":
        now = LASTS_MS + 1
    assert stored_by_others(ask(second, keys, now=now, computes=False)) == (0, 0)
    assert stored_by_others(ask(second, keys, "again", now=now)) == (0, 0), "it is the first now"
    third, = engines(table, "third")
    assert stored_by_others(ask(third, keys, now=now)) == (6, 0)
    table.check_integrity()


def test_storing_makes_a_promise_last(table: Table) -> None:
    first, second = engines(table, "first", "second")
    keys = prefix(6)
    ask(first, keys)
    got = first.reserve(keys[:2])
    for engine in (first, second):
        table.heartbeat(engine.member, LASTS_MS)
    table.commit(first.session, got.grant, 0, [(0, 0, 1), (1, 0, 2)], LASTS_MS)
    table.tick(2 * LASTS_MS - 60_000)
    assert stored_by_others(ask(second, keys, now=2 * LASTS_MS, computes=False)) == (6, 2)
    assert stored_by_others(ask(second, keys, now=2 * LASTS_MS + 1, computes=False)) == (0, 0)


def test_another_members_death_ends_it_too(table: Table) -> None:
    first, second = engines(table, "first", "second")
    rank = table.add_member(first.session, key("rank")[:16], [1], False, 0)
    ask(first, prefix(4))
    table.member_dead(rank, 0)
    assert stored_by_others(ask(second, prefix(4))) == (0, 0)


def test_one_session_promises_no_more_than_its_share(table: Table) -> None:
    first, second = engines(table, "first", "second")
    for at in range(MOST_OF_A_SESSION // 4096):
        ask(first, prefix(4096, f"long {at}"), f"long {at}")
    ask(first, prefix(1, "one too many"), "one too many")
    assert stored_by_others(ask(second, prefix(1, "one too many"), computes=False)) == (0, 0)
    assert stored_by_others(ask(second, prefix(4096, "long 1"), computes=False)) == (4096, 0)
    table.withdraw(first.session, key("long 0")[:16])
    ask(first, prefix(1, "one too many"), "one too many")
    assert stored_by_others(ask(second, prefix(1, "one too many"), computes=False)) == (1, 0)
    table.check_integrity()


def test_promises_that_are_over_go_some_at_a_time(table: Table) -> None:
    """So that a tick leaves other calls a turn. Until they have gone they only take room."""
    for at in range(MOST // MOST_OF_A_SESSION):
        engine, = engines(table, f"engine {at}")
        for long in range(MOST_OF_A_SESSION // 4096):
            ask(engine, prefix(4096, f"{at} {long}"), f"{long}")
    late, (last, other) = LASTS_MS + 1, engines(table, "last", "other")
    for engine in (last, other):
        table.heartbeat(engine.member, late)
    room = []
    for _ in range(3):
        ask(last, prefix(4096), now=late)
        room.append(stored_by_others(ask(other, prefix(4096), now=late, computes=False))[0])
        table.tick(late)
        table.check_integrity()
    assert room == [0, MOST_OF_A_TICK, 2 * MOST_OF_A_TICK]
    for _ in range(MOST // MOST_OF_A_TICK):
        table.tick(late)
    ask(other, prefix(4096, "other"), now=late)
    assert stored_by_others(ask(last, prefix(4096, "other"), now=late, computes=False)) == (4096, 0)
    table.check_integrity()


def test_all_sessions_promise_no_more_than_there_is_room_for(table: Table) -> None:
    many = engines(table, *(f"engine {at}" for at in range(10)))
    for engine in many:
        for at in range(2):
            ask(engine, prefix(4096, f"{engine.name} {at}"), f"{at}")
    known = [
        stored_by_others(ask(many[at - 1], prefix(4096, f"{many[at].name} 1"), "x", computes=False)) for at in range(10)
    ]
    assert known == [(4096, 0)] * 8 + [(0, 0)] * 2
    table.check_integrity()


@pytest.mark.security
def test_a_tenant_promises_no_more_than_half_of_all_unless_it_is_the_server_s_own_user(table: Table) -> None:
    """Else eight of its sessions would keep all others from promising."""
    def promised(tenant: bytes) -> int:
        """By nine engines, each as much as it may."""
        many, other = engines(table, *(f"{tenant.hex()} {at}" for at in range(9)), tenant=tenant), 0
        listener, = engines(table, f"{tenant.hex()} listens", tenant=tenant)
        for engine in many:
            for at in range(2):
                keys = prefix(4096, f"{engine.name} {at}")
                ask(engine, keys, f"{at}")
                other += stored_by_others(ask(listener, keys, "x", computes=False))[0]
        table.check_integrity()
        for engine in many:
            for at in range(2):
                table.withdraw(engine.session, key(f"{at}")[:16])
        table.check_integrity()
        return other

    assert [promised(tenant) for tenant in (b"1" * 16, b"2" * 16, bytes(16))] == [MOST // 2, MOST // 2, MOST]
