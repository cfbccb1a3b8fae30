"""Duplicates: chunks that a running request has in its engine's memory as well. They go first."""

from __future__ import annotations

import random
from functools import partial

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import Reservation, TableError

ROOM = 32
MOST_TAKEN_OFF = 256
"""Marks, in one call."""
SETTLED_MS = 10_000
policies = pytest.mark.parametrize("policy", ["adaptive", "lru"])


def engine_of(room: int = ROOM) -> Client:
    return Client(new_table(room * PAGE), PAGE)


def chain(name: object, count: int) -> list[bytes]:
    return [key("chain", name, at) for at in range(count)]


def store(engine: Client, keys: list[bytes], parent: bytes = b"", *, duplicate: bool = False) -> int:
    """How many were granted."""
    engine.stores += 1
    got = engine.table.reserve(
        engine.session, engine.member, key("store", engine.name, engine.stores)[:16], parent, b"".join(keys), groups=0,
        temporary=False, deadline_ms=60_000, now_ms=0, duplicate=duplicate,
    )
    if got.grant:
        engine.table.commit(engine.session, got.grant, 0, [(at, 0, 1 + at) for at, _ in got.chunks], 0)
    return len(got.chunks)


def use(engine: Client, keys: list[bytes], request: str) -> int:
    found = engine.lookup(keys, request)
    if found.lease:
        engine.table.release(engine.session, found.lease, [0])
    return found.hit_tokens // 16


def count(engine: Client, keys: list[bytes]) -> int:
    return sum(engine.has(one) for one in keys)


def test_duplicates_go_before_what_was_used_longer_ago_and_their_ends_first() -> None:
    engine = engine_of()
    old, running = chain("old", 16), chain("running", 16)
    store(engine, old)
    store(engine, running, duplicate=True)
    store(engine, chain("new", 10))
    assert count(engine, old) == 16
    assert [engine.has(one) for one in running] == [True] * 6 + [False] * 10
    engine.table.check_integrity()


def test_a_duplicate_takes_free_room_only() -> None:
    engine = engine_of()
    old, running = chain("old", 24), chain("running", 16)
    store(engine, old)
    assert store(engine, running, duplicate=True) == ROOM - 24
    assert count(engine, old) == 24 and [engine.has(one) for one in running] == [True] * 8 + [False] * 8
    assert store(engine, chain("other", 4), duplicate=True) == 0
    assert store(engine, running) == 8 and count(engine, running) == 16
    engine.table.check_integrity()


def test_a_duplicate_takes_no_room_in_its_tenants_quota() -> None:
    engine = engine_of()
    engine.table.set_quota(bytes(16), bytes=4 * PAGE, chunks=None)
    old = chain("old", 4)
    store(engine, old)
    assert store(engine, chain("running", 4), duplicate=True) == 0 and count(engine, old) == 4
    assert store(engine, chain("running", 4)) == 4


def test_what_is_stored_once_more_is_a_duplicate_no_longer() -> None:
    engine = engine_of()
    old, running = chain("old", 16), chain("running", 16)
    store(engine, old)
    store(engine, running, duplicate=True)
    store(engine, chain("new", 10))
    assert store(engine, running) == 10
    assert count(engine, running) == 16 and count(engine, old) == 6
    store(engine, chain("newer", 10))
    assert count(engine, running) == 16
    engine.table.check_integrity()


def test_a_chunk_that_is_being_written_is_unmarked_too() -> None:
    engine = engine_of()
    running = chain("running", 16)
    store(engine, chain("old", 16))
    engine.stores += 1
    got = engine.table.reserve(
        engine.session, engine.member, key("slow")[:16], b"", b"".join(running), groups=0, temporary=False,
        deadline_ms=60_000, now_ms=0, duplicate=True,
    )
    assert store(engine, running) == 0
    engine.table.commit(engine.session, got.grant, 0, [(at, 0, 1) for at in range(16)], 0)
    store(engine, chain("new", 10))
    assert count(engine, running) == 16 and count(engine, chain("old", 16)) == 6


def test_a_lookup_that_finds_a_duplicate_unmarks_it() -> None:
    engine = engine_of()
    old, running = chain("old", 16), chain("running", 16)
    store(engine, old)
    store(engine, running, duplicate=True)
    assert use(engine, running, "another request") == 16
    store(engine, chain("new", 10))
    assert count(engine, running) == 16 and count(engine, old) == 6


def test_beside_another_engine_of_the_namespace_nothing_is_a_duplicate() -> None:
    table = new_table(ROOM * PAGE)
    engine = Client(table, PAGE, "engine")
    second = Client(table, PAGE, "second", namespace="engine")
    store(engine, chain("old", 16))
    store(engine, chain("running", 16), duplicate=True)
    store(engine, chain("new", 10))
    assert count(engine, chain("running", 16)) == 16
    store(engine, chain("beside it", 6), duplicate=True)
    table.leave(second.member)
    store(engine, chain("newer", 6))
    assert count(engine, chain("beside it", 6)) == 6, "also when the other has left"
    store(engine, chain("alone", 6), duplicate=True)
    store(engine, chain("newest", 6))
    assert count(engine, chain("alone", 6)) == 0


def test_an_engine_of_another_namespace_does_not_matter() -> None:
    table = new_table(ROOM * PAGE)
    engine, other = Client(table, PAGE, "engine"), Client(table, PAGE, "other")
    store(other, chain("old", 16))
    store(engine, chain("running", 16), duplicate=True)
    store(other, chain("new", 10))
    assert count(other, chain("old", 16)) == 16 and count(engine, chain("running", 16)) == 6


def test_what_an_earlier_turn_ended_with_does_not_keep_a_duplicate() -> None:
    engine = engine_of()
    turn = chain("turn", 8)
    store(engine, turn)
    store(engine, chain("earlier end", 1), turn[3])
    store(engine, turn, duplicate=True)
    store(engine, chain("new", 23 + 8))
    assert count(engine, turn) == 0 and engine.has(chain("earlier end", 1)[0])
    engine.table.check_integrity()


def test_a_duplicate_with_two_children_waits_until_one_has_gone() -> None:
    engine = engine_of()
    shared, branches = chain("shared", 1), [chain("one", 4), chain("two", 4)]
    for branch in branches:
        store(engine, [*shared, *branch])
    store(engine, shared, duplicate=True)
    store(engine, chain("new", 23 + 3))
    assert count(engine, shared) == 1 and [count(engine, branch) for branch in branches] == [1, 4]
    store(engine, chain("newer", 1 + 1))
    assert count(engine, shared) == 0 and [count(engine, branch) for branch in branches] == [0, 4]
    engine.table.check_integrity()


def test_all_of_a_prefix_that_several_conversations_share_is_no_duplicate() -> None:
    engine = engine_of()
    shared, turn = chain("shared", 4), chain("turn", 6)
    others = [chain(("other", at), 4) for at in range(2)]
    store(engine, chain("old", 4))
    store(engine, [*shared, *turn], duplicate=True)  # before the others came
    for other in others:
        store(engine, other, shared[-1])
    store(engine, [*shared, *turn], duplicate=True)
    store(engine, chain("new", 10 + 6 + 4))
    assert count(engine, turn) == count(engine, chain("old", 4)) == 0 and count(engine, shared) == 4
    assert [use(engine, [*shared, *other], f"other {at}") for at, other in enumerate(others)] == [8, 8]
    engine.table.check_integrity()


def test_what_is_kept_or_retained_is_no_duplicate() -> None:
    engine = engine_of()
    kept, running = chain("kept", 4), chain("running", 12)
    store(engine, kept, duplicate=True)
    engine.table.pin(engine.space, b"".join(kept), 1 << 40)
    store(engine, running, duplicate=True)
    retained = engine.table.retain(engine.space, b"".join(running[:4]), 5, 1 << 40)
    assert retained[0] == 4
    store(engine, chain("old", 16))
    store(engine, chain("new", 12))
    assert count(engine, kept) == 4 and count(engine, running) == 4
    assert count(engine, chain("old", 16)) == 12
    engine.table.check_integrity()


@policies
def test_what_a_duplicate_continued_waits_its_turn_when_the_duplicate_went(policy: str) -> None:
    engine = engine_of()
    engine.table.set_eviction(policy)
    old, history = chain("old", 16), chain("history", 8)
    store(engine, old)
    store(engine, history)
    store(engine, chain("tail", 8), history[-1], duplicate=True)
    store(engine, chain("new", 12))
    assert (count(engine, old), count(engine, history), count(engine, chain("tail", 8))) == (12, 8, 0)


@policies
def test_a_parent_waits_its_turn_when_a_quota_took_its_child(policy: str) -> None:
    """The quota looks at one tenant's chunks, the next store at all."""
    table = new_table(ROOM * PAGE)
    other, mine = Client(table, PAGE, "other"), Client(table, PAGE, "mine", tenant=key("tenant")[:16])
    table.set_eviction(policy)
    store(other, chain("old", 16))
    store(mine, chain("mine", 12))
    table.set_quota(mine.tenant, bytes=None, chunks=10)
    assert table.evict_over_quota(8) == 2
    table.evict(8 * PAGE, 8)
    assert (count(other, chain("old", 16)), count(mine, chain("mine", 12))) == (14, 10)


def test_what_may_go_again_is_compared_with_a_parent_that_was_next() -> None:
    engine = engine_of()
    engine.table.set_eviction("lru")
    held, young = chain("held", 1), chain("young", 4)
    store(engine, held)
    lease = engine.lookup(held).lease
    store(engine, young)
    engine.table.evict((ROOM - 4) * PAGE, 1)
    engine.table.release(engine.session, lease, [0])
    engine.table.evict((ROOM - 3) * PAGE, 1)
    assert (count(engine, held), count(engine, young)) == (0, 3)


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_an_engine_that_has_ended_has_no_duplicates(end: str) -> None:
    table = new_table(ROOM * PAGE)
    engine, other = Client(table, PAGE, "engine"), Client(table, PAGE, "other")
    store(other, chain("old", 16))
    store(engine, chain("running", 16), duplicate=True)
    if end == "leaves":
        table.leave(engine.member)
    else:
        table.member_dead(engine.member, 0)
        table.tick(SETTLED_MS)
        table.heartbeat(other.member, SETTLED_MS)
    again = Client(table, PAGE, "again", namespace="engine")
    store(other, chain("new", 10))
    assert count(again, chain("running", 16)) == 16 and count(other, chain("old", 16)) == 6
    store(again, chain("own", 8), duplicate=True)
    store(other, chain("newer", 8))
    assert count(again, chain("own", 8)) == 0, "its own marks count"
    table.check_integrity()


def test_marks_count_only_while_no_other_engine_is_in_the_namespace() -> None:
    table = new_table(ROOM * PAGE)
    engine = Client(table, PAGE, "engine")
    store(engine, chain("old", 16))
    store(engine, chain("running", 16), duplicate=True)
    second = Client(table, PAGE, "second", namespace="engine")
    store(second, chain("new", 10))
    assert (count(engine, chain("running", 16)), count(engine, chain("old", 16))) == (16, 6)
    table.check_integrity()


def test_marks_that_no_longer_count_are_taken_off_some_at_a_time() -> None:
    many = 3 * MOST_TAKEN_OFF
    table = new_table((many + 16) * PAGE, records=2 * many)
    engine, other = Client(table, PAGE, "engine"), Client(table, PAGE, "other")
    table.set_eviction("lru")
    store(other, chain("old", 8))
    for at in range(many):
        store(engine, chain(at, 1), duplicate=True)
    table.leave(engine.member)
    third = Client(table, PAGE, "third")
    store(third, chain("counts", 8), duplicate=True)
    gone = []
    for at in range(4):
        assert store(other, chain(("new", at), 1)) == 1
        gone.append((8 - count(other, chain("old", 8)), 8 - count(third, chain("counts", 8))))
        table.check_integrity()
    assert gone == [(1, 0), (2, 0), (2, 1), (2, 2)], "as if there were no duplicates, until a mark that counts is met"


def test_a_store_of_what_follows_unmarks_what_it_continues() -> None:
    engine = engine_of()
    above = chain("above", 16)
    store(engine, above, duplicate=True)
    store(engine, chain("old", 16))
    assert store(engine, chain("below", 4), above[-1]) == 4
    assert count(engine, above) == 16 and count(engine, chain("old", 16)) == 12
    store(engine, chain("new", 8))
    assert count(engine, above) == 16


def test_what_is_there_is_unmarked_beside_what_is_being_written() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    engine.space = table.add_namespace(
        key("two groups"), chunk_tokens=16, block_tokens=4, writers=1,
        groups=[("full", 0, PAGE), ("window", 16, PAGE)],
    )
    engine.session = table.open_session(key("two groups")[:16], engine.space, 0)
    engine.member = table.add_member(engine.session, key("its member")[:16], [0], True, 0)

    def ask(one: str, *, groups: int = 1, duplicate: bool = False) -> Reservation:
        engine.stores += 1
        return table.reserve(
            engine.session, engine.member, key(engine.stores)[:16], b"", key(one), groups=groups, temporary=False,
            deadline_ms=1000, now_ms=0, duplicate=duplicate,
        )

    table.set_eviction("lru")
    for one in ("old", "running"):
        table.commit(engine.session, ask(one, duplicate=one == "running").grant, 0, [(0, 0, 7)], 0)
    more = ask("running", groups=3, duplicate=True)
    assert ask("running").busy == [0]
    table.abort(engine.session, more.grant, [0])
    table.evict(7 * PAGE, 1)
    assert engine.has(key("running")) and not engine.has(key("old"))


def test_a_quota_takes_duplicates_first() -> None:
    engine = engine_of()
    engine.table.set_quota(bytes(16), bytes=20 * PAGE, chunks=None)
    store(engine, chain("old", 8))
    store(engine, chain("running", 8), duplicate=True)
    store(engine, chain("new", 8))
    assert count(engine, chain("old", 8)) == 8 and count(engine, chain("running", 8)) == 4


def test_what_leads_to_a_kept_chunk_stays_although_it_was_a_duplicate() -> None:
    engine = engine_of()
    running = chain("running", 8)
    store(engine, running, duplicate=True)
    assert engine.table.pin(engine.space, running[5], 1 << 40) == 1
    store(engine, chain("new", ROOM))
    assert [engine.has(one) for one in running] == [True] * 6 + [False] * 2
    engine.table.check_integrity()


def test_a_repeated_call_with_another_mark_is_another_call() -> None:
    engine = engine_of()
    ask = partial(
        engine.table.reserve, engine.session, engine.member, key("same")[:16], b"", key("one"), groups=0,
        temporary=False, deadline_ms=60_000, now_ms=0,
    )
    ask(duplicate=True)
    with pytest.raises(TableError, match="another body"):
        ask()


@policies
def test_random_use_keeps_what_is_derived_true(policy: str) -> None:
    engine, source = engine_of(), random.Random(7)
    engine.table.set_eviction(policy)
    for step in range(1500):
        name = source.randrange(6), source.randrange(1, 9)
        keys = chain(("session", name[0]), name[1]) + chain(("own", *name, source.randrange(4)), source.randrange(3))
        if source.random() < 0.3:
            use(engine, keys, f"r{step}")
        else:
            first = source.randrange(len(keys))
            store(engine, keys[first:], keys[first - 1] if first else b"", duplicate=source.random() < 0.6)
        if step % 50 == 0:
            engine.table.check_integrity()
    engine.table.check_integrity()
