"""What the table counts of the reuse of chunks: their age when lookups find them, and their age and uses when they are
evicted."""

from __future__ import annotations

from itertools import accumulate

from table_helpers import PAGE, Client, key, new_table

DAY_MS = 24 * 3600 * 1000


def engine_of(room: int) -> Client:
    engine = Client(new_table(room * PAGE), PAGE)
    engine.table.set_eviction("lru")
    return engine


def store(engine: Client, name: object, now: int, count: int = 1) -> list[bytes]:
    keys = [key("chunk", name, at) for at in range(count)]
    got = engine.reserve(keys, now=now)
    engine.table.commit(engine.session, got.grant, 0, [(index, 0, 1) for index, _ in got.chunks], now)
    return keys


def ask(engine: Client, keys: list[bytes], request: str, now: int) -> None:
    lease = engine.lookup(keys, request, now=now).lease
    engine.table.release(engine.session, lease, [0])


def seen(engine: Client, name: str) -> dict[int, int]:
    """The buckets that are not empty, by their upper bound; 0 for the last, which has none."""
    bounds, counts, _ = engine.table.reuse()[name]
    assert len(counts) == len(bounds) + 1 and bounds == sorted(bounds)
    return {bound: count for bound, count in zip([*bounds, 0], counts, strict=True) if count}


def test_the_age_of_each_chunk_that_a_request_finds_is_counted_once() -> None:
    engine = engine_of(16)
    keys = store(engine, "a", 10_000, count=3)
    assert seen(engine, "hit_age") == {}
    found = engine.lookup(keys, "r", now=14_000)
    engine.lookup(keys, "r", now=200_000)  # the same request asks again
    assert seen(engine, "hit_age") == {5: 3} and engine.table.reuse()["hit_age"][2] == 3 * 4
    engine.table.release(engine.session, found.lease, [0])
    ask(engine, keys[:1], "s", 200_400)
    ask(engine, keys[1:2], "t", 200_400 + 30 * DAY_MS)
    assert seen(engine, "hit_age") == {1: 1, 5: 3, 0: 1}


def test_benchmarks_are_left_out() -> None:
    engine = engine_of(16)
    keys = store(engine, "a", 0)
    engine.table.lookup(
        engine.session, engine.member, key("r")[:16], 1, keys[0], readers=1, skip_tokens=0, now_ms=90_000, is_apart=True
    )
    assert seen(engine, "hit_age") == {}


def test_an_evicted_chunk_counts_with_its_age_and_its_uses() -> None:
    engine = engine_of(3)
    unused, used, last = (store(engine, name, 10_000) for name in ("unused", "used", "last"))
    for number in range(4):
        ask(engine, used, f"r{number}", 20_000)
    ask(engine, last, "last", 50_000)
    store(engine, "new", 100_000, count=2)
    assert engine.table.stats()["evicted_chunks"] == 2
    assert [engine.has(one[0]) for one in (unused, used, last)] == [False, False, True]
    assert seen(engine, "eviction_age") == {300: 2} and engine.table.reuse()["eviction_age"][2] == 90 + 80
    assert seen(engine, "eviction_uses") == {0: 1, 5: 1}


def test_what_an_operator_deletes_was_not_evicted() -> None:
    engine = engine_of(3)
    keys = store(engine, "a", 10_000)
    engine.table.delete(engine.space, keys[0])
    assert seen(engine, "eviction_age") == seen(engine, "eviction_uses") == {}


def test_the_bounds_reach_from_a_second_to_weeks() -> None:
    for name in ("hit_age", "eviction_age"):
        bounds, counts, total = engine_of(1).table.reuse()[name]
        assert (bounds[0], bounds[-1], len(bounds)) == (1, 28 * 24 * 3600, 14)
        assert list(accumulate(counts))[-1] == total == 0
