"""Chunks of several sizes in one pool, a pool that grows and shrinks, and what an administrator may do."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from table_helpers import PAGE, Client, key, new_region, new_table

from kvdock._core import MAX_SEGMENTS, MAX_STORE_KEYS, Table, TableError

pytestmark = pytest.mark.table_model

MIB = 1 << 20
POOL = 64 * MIB


def fill(client: Client, name: str, count: int) -> int:
    """Stores up to `count` chunks without parents, one call each; returns how many are resident then."""
    for n in range(count):
        client.store([key(name, n)])
    return sum(client.has(key(name, n)) for n in range(count))


def used_share(table_client: Client) -> float:
    stats = table_client.table.stats()
    return stats["ready_bytes"] / stats["pool_bytes"]


@pytest.mark.parametrize("small_bytes", [16 * 1024, 100 * 1024, MIB])
def test_alternating_parts_of_sizes_one_to_three_use_nine_tenths_of_the_pool(small_bytes: int) -> None:
    table = new_table(POOL)
    small, large = Client(table, small_bytes, "small"), Client(table, 3 * small_bytes, "large")
    for n in range(2 * POOL // (4 * small_bytes)):
        assert small.store([key("small", n)]) == 1
        assert large.store([key("large", n)]) == 1
    table.check_integrity()
    assert used_share(small) >= 0.9


def test_a_model_that_leaves_gives_its_memory_to_another_size() -> None:
    table = new_table(POOL)
    old, new = Client(table, 100 * 1024, "old"), Client(table, 300 * 1024, "new")
    assert fill(old, "old", POOL // (100 * 1024)) * 100 * 1024 > 0.9 * POOL
    table.leave(old.member)
    resident = fill(new, "new", POOL // (300 * 1024))
    table.check_integrity()
    assert resident * 300 * 1024 >= 0.9 * POOL
    assert used_share(new) >= 0.9


def test_a_part_larger_than_any_slab_finds_space_among_small_ones() -> None:
    table = new_table(POOL)
    small, huge = Client(table, 8 * 1024, "small"), Client(table, 48 * MIB, "huge")
    fill(small, "small", POOL // (8 * 1024))
    assert huge.store([key("huge")]) == 1
    table.check_integrity()


def test_a_pinned_slab_is_never_emptied_for_another_size() -> None:
    table = new_table(POOL)
    small, large = Client(table, MIB, "small"), Client(table, 48 * MIB, "large")
    fill(small, "small", 64)
    leases = [small.lookup([key("small", n)], request=n).lease for n in range(0, 64, 8)]
    assert large.store([key("large")]) == 0
    assert all(small.has(key("small", n)) for n in range(0, 64, 8))
    for lease in leases:
        table.release(small.session, lease, [0])
    assert large.store([key("large")]) == 1
    table.check_integrity()


def test_chunks_that_name_each_other_as_parent_do_not_block_the_pool() -> None:
    table = new_table(8 * PAGE)
    liar = Client(table, PAGE)
    ring = [key("ring", n) for n in range(8)]
    for n, one in enumerate(ring):
        assert liar.store([one], parent=ring[n - 1]) == 1
    assert table.stats()["free_bytes"] == 0
    assert liar.store([key("honest")]) == 1
    table.check_integrity()


def test_a_store_that_can_have_no_space_evicts_nothing() -> None:
    """Every slab of the small size is pinned somewhere: emptying the rest would free no larger slot."""
    table = new_table(4 * MIB)
    small, large = Client(table, PAGE, "small"), Client(table, 16 * PAGE, "large")
    chains = [[key("chain", i, j) for j in range(16)] for i in range(64)]
    assert sum(small.store(chain) for chain in chains) == 1024
    for i, chain in enumerate(chains):
        small.lookup(chain[:1], request=i)
    assert large.reserve([key("large")]).limited == "no_space"
    assert all(small.has(one) for chain in chains for one in chain)
    table.check_integrity()


def test_a_record_size_without_space_evicts_no_records_of_another() -> None:
    table = new_table(64 * MIB, records=273)
    engine = Client(table, PAGE)
    fill(engine, "k", 4000)  # every page of the table belongs to records of one part now
    resident = sum(engine.has(key("k", n)) for n in range(4000))
    space = table.add_namespace(
        key("two writers"), chunk_tokens=16, block_tokens=4, writers=2, groups=[("full", 0, PAGE)]
    )
    session = table.open_session(key("s")[:16], space, 0)
    member = table.add_member(session, key("m")[:16], [0, 1], True, 0)
    got = table.reserve(
        session, member, key("store")[:16], b"", key("two"), groups=0, temporary=False, deadline_ms=1, now_ms=0
    )
    assert got.limited == "no_space"
    assert sum(engine.has(key("k", n)) for n in range(4000)) == resident
    table.check_integrity()
    table.clear(-1, 0, 1 << 20)
    assert table.reserve(
        session, member, key("again")[:16], b"", key("two"), groups=0, temporary=False, deadline_ms=1, now_ms=0
    ).grant, "pages whose records are all free serve records of another size"
    table.check_integrity()


def test_a_segment_retires_while_a_lease_on_it_is_held() -> None:
    table = new_table(8 * MIB, segments=2)
    engine = Client(table, MIB)
    keys = [key("k", n) for n in range(6)]
    assert engine.store(keys) == 6
    found = engine.lookup(keys)
    segments = {part[2] for parts in found.chunks for part in parts}
    victim = max(segments)
    with pytest.raises(TableError, match="not retired"):
        table.remove_segment(victim)
    left = table.retire_segment(victim, 1000)
    assert left > 0, "what a lease holds stays"
    with pytest.raises(TableError, match="still in use"):
        table.remove_segment(victim)
    new_parts = [part for n in range(8) for _, parts in engine.reserve([key("new", n)]).chunks for part in parts]
    assert not any(segment == victim for _, _, segment, _, _ in new_parts)
    table.release(engine.session, found.lease, [0])
    assert table.retire_segment(victim, 1000) == 0
    table.remove_segment(victim)
    table.check_integrity()
    with pytest.raises(TableError, match="ids rise"):
        table.add_segment(victim, PAGE, 4 * MIB)


@pytest.mark.security
def test_a_pool_that_is_shrunk_and_grown_for_ever_can_always_grow_again() -> None:
    """More segments than a table has places, one after the other, with chunks stored under ids far above that."""
    region = new_region()
    table = new_table(MIB, region=region)
    engine = Client(table, PAGE)
    last = 3 * MAX_SEGMENTS
    for segment in range(1, last + 1):
        table.add_segment(segment, PAGE, MIB)
        table.retire_segment(segment - 1, 0)
        table.remove_segment(segment - 1)
    keys = [key("k", n) for n in range(4)]
    assert engine.store(keys) == 4
    found = engine.lookup(keys).chunks
    assert {part[2] for parts in found for part in parts} == {last}
    table.check_integrity()
    stored = Table.stored_segments(region, pool_id=1, lock_inode=0)
    assert [one[0] for one in stored] == list(range(last + 1 - MAX_SEGMENTS, last + 1))
    assert [one[1] for one in stored] == ["gone"] * (MAX_SEGMENTS - 1) + ["live"]
    facts = [(segment, offset, size) for segment, state, offset, size in stored if state == "live"]
    next_table, _ = Table.adopt(
        region, pool_id=1, lock_inode=0, segments=facts, limit_bytes=MIB, session_cap=1.0, total_cap=1.0
    )
    assert [next_table.state_of(engine.space, one) for one in keys] == ["ready"] * 4
    with pytest.raises(TableError, match="ids rise") as refused:
        next_table.add_segment(last, PAGE, MIB)
    assert (refused.value.found, refused.value.wanted) == (last, last + 1)
    next_table.add_segment(last + 1, PAGE, MIB)
    next_table.check_integrity()


@pytest.mark.security
def test_a_table_without_a_place_for_a_segment_says_how_many_it_has() -> None:
    table = new_table(MAX_SEGMENTS * PAGE, segments=MAX_SEGMENTS)
    with pytest.raises(TableError, match="as many segments as it can") as refused:
        table.add_segment(MAX_SEGMENTS, PAGE, PAGE)
    assert (refused.value.code, refused.value.found) == ("table_full", MAX_SEGMENTS)
    table.retire_segment(7, 0)
    table.remove_segment(7)
    table.add_segment(MAX_SEGMENTS, PAGE, PAGE)
    table.check_integrity()


def test_retiring_counts_nothing_free_in_the_segment_that_goes() -> None:
    table = new_table(8 * MIB, segments=2)
    assert table.free_bytes() == 8 * MIB
    table.retire_segment(1, 0)
    assert table.free_bytes() == 4 * MIB
    table.set_limits(limit_bytes=8 * MIB, session_cap=1.0, total_cap=1.0)
    with pytest.raises(TableError, match="retire some first"):
        table.set_limits(limit_bytes=4 * MIB, session_cap=1.0, total_cap=1.0)
    table.remove_segment(1)
    table.set_limits(limit_bytes=4 * MIB, session_cap=1.0, total_cap=1.0)


def test_a_kept_chunk_outlives_the_others_until_its_time() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    fill(engine, "old", 8)
    assert table.pin(engine.space, key("old", 0), 1_000) == 1
    assert fill(engine, "new", 20) == 7
    assert engine.has(key("old", 0))
    table.tick(1_000)
    fill(engine, "newer", 8)
    assert not engine.has(key("old", 0))
    table.check_integrity()


def test_a_kept_chunk_holds_its_retiring_segment_until_its_time() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    fill(engine, "old", 4)
    table.pin(engine.space, key("old", 0), 1_000)
    assert table.retire_segment(0, 100) == PAGE == table.stats()["kept_bytes"]
    table.tick(1_000)
    assert table.stats()["kept_bytes"] == 0 and table.retire_segment(0, 100) == 0
    table.remove_segment(0)
    table.check_integrity()


def test_grants_come_in_pages_oldest_first_also_when_their_cells_are_used_again() -> None:
    """Cells are used again in the order in which their grants ended, here the youngest's first."""
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    fill(engine, "k", 1)
    first = [engine.lookup([key("k", 0)], request=n, now=n).lease for n in range(255)]
    for lease in reversed(first):
        table.release(engine.session, lease, [0])
    leases = [engine.lookup([key("k", 0)], request=n, now=n).lease for n in range(1000, 1005)]
    assert leases != sorted(leases), "ids that rise show nothing"
    shown = table.grants(engine.session)
    assert [view.grant for view in shown] == leases
    page = table.grants(engine.session, from_place=shown[2].place, limit=2)
    assert [view.grant for view in page] == leases[2:4]
    assert table.open_grants(engine.session, key(1003)[:16]) == (5, True)
    assert table.open_grants(engine.session, key(9)[:16]) == (5, False)


def test_lower_caps_leave_what_is_held_and_refuse_more() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    keys = [key(n) for n in range(4)]
    engine.store(keys)
    held = engine.lookup(keys)
    table.set_limits(limit_bytes=8 * PAGE, session_cap=0.25, total_cap=1.0)
    assert len(held.chunks) == 4
    assert engine.reserve([key("more")]).limited == "held_bytes"
    table.check_integrity()


def test_asking_too_late_for_changes_answers_that_some_are_missing() -> None:
    client = Client(new_table(4096 * PAGE), PAGE)
    (_, since, complete), kept = client.table.changes(client.space, 0, 10), 1 << 16
    assert not complete, "nobody has asked yet"
    first = [key("first", i) for i in range(4096)]
    for batch in range(8):  # after the first, each replaces the one before: 4,096 changes, then 8,192 each
        names = [key(batch, i) for i in range(4096)] if batch else first
        for start in range(0, 4096, MAX_STORE_KEYS):
            assert client.store(names[start : start + MAX_STORE_KEYS]) == MAX_STORE_KEYS
    changes, following, complete = client.table.changes(client.space, since, 5000)
    assert complete and [one for one, _ in changes[:4096]] == first and all(is_there for _, is_there in changes[:4096])
    assert {one for one, is_there in changes if not is_there} <= set(first) and following == since + 5000
    for start in range(0, 2048, MAX_STORE_KEYS):
        assert client.store([key("last", start + i) for i in range(MAX_STORE_KEYS)]) == MAX_STORE_KEYS
    assert client.table.changes(client.space, since, 1) == ([(first[0], True)], since + 1, True), f"all {kept} are kept"
    assert client.store([key("one more")]) == 1
    assert client.table.changes(client.space, since, 1) == ([], since + kept + 2, False)
    assert client.table.changes(client.space, since + 2, 1)[2]


def test_changes_of_other_namespaces_are_not_told() -> None:
    table = new_table(64 * PAGE)
    mine, other = Client(table, PAGE), Client(table, PAGE, "other")
    since = table.changes(mine.space, 0, 10)[1]
    other.store([key("other", i) for i in range(8)])
    mine.store([key("mine")])
    assert table.changes(mine.space, since, 10) == ([(key("mine"), True)], since + 9, True)
    with pytest.raises(TableError) as refused:
        table.changes(7, since, 10)
    assert refused.value.code == "unknown_namespace"


def test_all_changes_are_those_of_each_namespace_with_the_parents_of_what_is_there() -> None:
    table = new_table(64 * PAGE)
    mine, other = Client(table, PAGE), Client(table, PAGE, "other")
    since = table.all_changes(0, 10)[1]
    mine.store([key("a"), key("b")])
    other.store([key("a")])
    table.delete(mine.space, key("b"))
    told, following, complete = table.all_changes(since, 3)
    assert complete and following == since + 3 and told == [
        (mine.space, key("a"), True, bytes(32)), (mine.space, key("b"), True, bytes(32)),
        (other.space, key("a"), True, bytes(32)),
    ], "of what is gone again the parent is not known any more"
    assert table.all_changes(following, 3) == ([(mine.space, key("b"), False, bytes(32))], since + 4, True)
    mine.store([key("b")], key("a"))
    assert table.all_changes(since + 4, 3)[0] == [(mine.space, key("b"), True, key("a"))]
    assert table.all_changes(since - 1, 3)[2] is False


def test_what_is_there_is_listed_in_slices() -> None:
    table = new_table(256 * PAGE)
    mine, other = Client(table, PAGE), Client(table, PAGE, "other")
    chain = [key("chain", number) for number in range(100)]
    mine.store(chain)
    other.store([key("other")])
    assert mine.reserve([key("not published")]).grant
    found: list[tuple[int, bytes, bool, bytes]] = []
    place = calls = 0
    while place >= 0:
        some, place = table.ready(place, 16)
        found, calls = found + some, calls + 1
    assert calls > 6 and sorted(found) == sorted([
        *((mine.space, one, True, before) for before, one in itertools.pairwise([bytes(32), *chain])),
        (other.space, key("other"), True, bytes(32)),
    ])


def test_json_and_messagepack_say_what_the_lookup_found() -> None:
    table = new_table(64 * MIB)
    engine = Client(table, 70_000)
    keys = [key(n) for n in range(300)]
    engine.store(keys)
    found = engine.lookup(keys)
    assert len(found.chunks) == 300
    as_lists = [[list(part) for part in parts] for parts in found.chunks]
    assert msgspec.msgpack.decode(found.chunks_msgpack) == as_lists
    with_hex = [[[*part[:5], f"{part[5]:016x}"] for part in parts] for parts in found.chunks]
    assert msgspec.json.decode(found.chunks_json) == with_hex
    nothing = engine.lookup([key("absent")], request="other")
    assert (nothing.chunks_json, msgspec.msgpack.decode(nothing.chunks_msgpack)) == (b"[]", [])


def test_ids_are_never_used_twice_however_often_cells_are() -> None:
    table = new_table(8 * MIB)
    engine = Client(table, PAGE)
    engine.store([key("k")])
    seen = set()
    for n in itertools.islice(itertools.count(), 600):  # more than twice the grant cells
        lease = engine.lookup([key("k")], request=n).lease
        assert lease not in seen
        seen.add(lease)
        table.release(engine.session, lease, [0])
    assert table.release(engine.session, min(seen), [0]) == [], "a forgotten release is harmless"
    with pytest.raises(TableError) as unknown:
        table.release(engine.session, max(seen) + 256, [0])
    assert unknown.value.code == "unknown_grant"
    table.check_integrity()
