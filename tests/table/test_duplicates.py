"""Duplicates: chunks that a running request has in its engine's memory as well. They go first."""

from __future__ import annotations

import random
from functools import partial

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import TableError

ROOM = 32


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
    engine.stores += 1
    got = engine.table.reserve(
        engine.session, engine.member, key("slow")[:16], b"", b"".join(running), groups=0, temporary=False,
        deadline_ms=60_000, now_ms=0, duplicate=True,
    )
    assert store(engine, running) == 0
    engine.table.commit(engine.session, got.grant, 0, [(at, 0, 1) for at in range(16)], 0)
    store(engine, chain("old", 16))
    use(engine, running, "r")
    store(engine, chain("new", 16))
    assert count(engine, running) == 16


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
    table.leave(second.member)
    store(engine, chain("running", 16), duplicate=True)
    store(engine, chain("newer", 10))
    assert count(engine, chain("running", 16)) == 6


def test_an_engine_of_another_namespace_does_not_matter() -> None:
    table = new_table(ROOM * PAGE)
    engine, other = Client(table, PAGE, "engine"), Client(table, PAGE, "other")
    store(other, chain("old", 16))
    store(engine, chain("running", 16), duplicate=True)
    store(other, chain("new", 10))
    assert count(other, chain("old", 16)) == 16 and count(engine, chain("running", 16)) == 6


def test_what_an_earlier_turn_ended_with_does_not_keep_a_duplicate_and_a_shared_prefix_is_kept() -> None:
    engine = engine_of()
    shared, turn = chain("shared", 4), chain("turn", 8)
    store(engine, shared)
    for at in range(2):
        store(engine, chain(("other", at), 4), shared[-1])
    store(engine, turn, shared[-1])
    store(engine, chain("earlier end", 1), turn[3])
    store(engine, [*shared, *turn], duplicate=True)
    store(engine, chain("new", 11 + 8))
    assert count(engine, turn) == 0 and engine.has(chain("earlier end", 1)[0])
    assert count(engine, shared) == 4
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


def test_a_quota_takes_duplicates_first() -> None:
    engine = engine_of()
    engine.table.set_quota(bytes(16), bytes=20 * PAGE, chunks=None)
    store(engine, chain("old", 8))
    store(engine, chain("running", 8), duplicate=True)
    store(engine, chain("new", 8))
    assert count(engine, chain("old", 8)) == 8 and count(engine, chain("running", 8)) == 4


def test_a_repeated_call_with_another_mark_is_another_call() -> None:
    engine = engine_of()
    ask = partial(
        engine.table.reserve, engine.session, engine.member, key("same")[:16], b"", key("one"), groups=0,
        temporary=False, deadline_ms=60_000, now_ms=0,
    )
    ask(duplicate=True)
    with pytest.raises(TableError, match="another body"):
        ask()


@pytest.mark.parametrize("policy", ["adaptive", "arc", "lru"])
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
