"""What engines wish for chunks: it orders what goes, within its bounds, and keeps nothing when a quota or nothing else
is left."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from table_helpers import PAGE, Client, chain, key, new_table

from kvdock._core import CONVERSATION_ENDED, MOST_PRIORITY, Table, TableError

ROOM = 64
RETAINED = ROOM // 4
"""Chunks, of a pool of ROOM."""
EVER = 10**9
policies = pytest.mark.parametrize("policy", ["adaptive", "lru"])


def engine_of(policy: str = "lru", room: int = ROOM) -> Client:
    engine = Client(new_table(room * PAGE), PAGE)
    engine.table.set_eviction(policy)
    return engine


def stored(engine: Client, name: object, count: int, *, behind: list[bytes] | None = None) -> list[bytes]:
    """A chain that begins with the chunks `behind`."""
    own = chain(name, count)
    assert engine.store(own, behind[-1] if behind else b"") == count
    return [*(behind or []), *own]


def retain(engine: Client, keys: list[bytes], priority: int = 1, until: int = EVER) -> tuple[int, int]:
    return engine.table.retain(engine.space, b"".join(keys), priority, until)


def lower(engine: Client, keys: list[bytes], priority: int = CONVERSATION_ENDED, until: int = 0) -> tuple[int, bool]:
    return engine.table.lower(engine.space, b"".join(keys), priority, until)


def left(engine: Client, keys: list[bytes]) -> int:
    return sum(map(engine.has, keys))


def retained_bytes(table: Table) -> int:
    return table.stats()["retained_bytes"]


@policies
def test_a_retained_chain_outlives_its_equal(policy: str) -> None:
    engine = engine_of(policy)
    wanted, equal = stored(engine, "wanted", 8), stored(engine, "equal", 8)
    assert retain(engine, wanted) == (8, 0) and retained_bytes(engine.table) == 8 * PAGE
    for number in range(12):
        stored(engine, number, 8)
    assert (left(engine, wanted), left(engine, equal)) == (8, 0)
    engine.table.check_integrity()


def test_it_is_as_any_other_once_the_duration_has_ended() -> None:
    engine = engine_of()
    wanted, equal = stored(engine, "wanted", 8), stored(engine, "equal", 8)
    retain(engine, wanted, until=1000)
    engine.table.tick(999)
    assert retained_bytes(engine.table) == 8 * PAGE
    engine.table.tick(1000)
    assert retained_bytes(engine.table) == 0
    stored(engine, "new", ROOM - 8)
    assert (left(engine, wanted), left(engine, equal)) == (0, 8), "the least recently used first"
    engine.table.check_integrity()


def test_when_nothing_else_is_left_what_is_retained_goes() -> None:
    engine = engine_of()
    wanted = stored(engine, "wanted", 8)
    retain(engine, wanted)
    held = stored(engine, "held", ROOM - 8)
    assert engine.lookup(held).lease
    stored(engine, "new", 4)
    assert left(engine, wanted) == 4 and engine.table.can_evict()
    engine.table.check_integrity()


def test_only_so_much_of_the_pool_is_retained_and_the_rest_is_counted() -> None:
    engine = engine_of()
    first, second = stored(engine, "first", RETAINED - 2), stored(engine, "second", 6)
    assert retain(engine, first) == (RETAINED - 2, 0)
    assert retain(engine, second) == (2, 4)
    assert retain(engine, first) == (RETAINED - 2, 0), "it is retained already"
    assert engine.table.stats()["refused_retains"] == 4
    assert retained_bytes(engine.table) == RETAINED * PAGE
    lower(engine, first, 0)
    assert retain(engine, second) == (6, 0), "there is room again"
    for number in range(12):
        stored(engine, number, 8)
    assert (left(engine, first), left(engine, second)) == (0, 6)
    engine.table.check_integrity()


@pytest.mark.security
def test_a_tenant_retains_no_more_than_half_of_what_is_retained_unless_it_is_the_server_s_own_user() -> None:
    """Else the hints of one tenant would keep all others' from being followed."""
    table = new_table(ROOM * PAGE)
    tenants = {"1": b"1" * 16, "2": b"2" * 16, "": bytes(16)}
    one, two, own = (Client(table, PAGE, name, tenant=tenant) for name, tenant in tenants.items())
    chains = {engine.name: stored(engine, engine.name, RETAINED) for engine in (one, two, own)}
    half = RETAINED // 2
    assert [retain(engine, chains[engine.name]) for engine in (one, one, two)] == [(half, half)] * 3
    table.check_integrity()
    lower(one, chains["1"], 0)
    assert retain(two, chains["2"]) == (half, half), "not even if nobody else retains any"
    lower(two, chains["2"], 0)
    assert retain(own, chains[""]) == (RETAINED, 0)
    assert retain(one, chains["1"]) == (0, RETAINED)
    table.check_integrity()


def test_the_end_of_a_chain_is_not_retained_without_its_beginning() -> None:
    """Else a wish for one chunk would keep more than is counted."""
    engine = engine_of()
    long = stored(engine, "long", 32)
    assert retain(engine, long[31:]) == (0, 0), "there was room"
    assert engine.table.stats()["refused_retains"] == 0
    assert retain(engine, long[:4], until=500) == (4, 0)
    assert retain(engine, long[4:8], priority=50, until=EVER) == (4, 0)
    engine.table.tick(500)
    assert retained_bytes(engine.table) == 0, "not longer than what it continues"
    assert retain(engine, [*long[:4], key("absent"), *long[4:]]) == (4, 0), "and not behind a gap"
    engine.table.check_integrity()


def test_a_quota_evicts_what_is_retained_after_the_tenants_other_chunks() -> None:
    table = new_table(ROOM * PAGE)
    mine = Client(table, PAGE, "mine", tenant=key("tenant")[:16])
    wanted, other = stored(mine, "wanted", 4), stored(mine, "other", 4)
    retain(mine, wanted)
    table.set_quota(mine.tenant, bytes=None, chunks=8)
    stored(mine, "more", 4)
    assert (left(mine, wanted), left(mine, other)) == (4, 0)
    table.set_quota(mine.tenant, bytes=None, chunks=2)
    assert table.evict_over_quota(100) == 6
    assert left(mine, wanted) == 2 and left(mine, chain("more", 4)) == 0
    table.check_integrity()


@policies
def test_a_higher_priority_goes_later_and_a_lower_one_earlier(policy: str) -> None:
    engine = engine_of(policy)
    chains = {name: stored(engine, name, 4) for name in ("much", "little", "none", "less", "least")}
    retain(engine, chains["much"], MOST_PRIORITY)
    retain(engine, chains["little"], 1)
    assert lower(engine, chains["less"], -1) == (4, False)
    assert lower(engine, chains["least"], -MOST_PRIORITY) == (4, False)
    gone = []
    for _ in range(20):
        before = {name: left(engine, keys) for name, keys in chains.items()}
        assert engine.table.evict(ROOM * PAGE, 1) == 1
        gone += [name for name, keys in chains.items() if left(engine, keys) < before[name]]
        engine.table.check_integrity()
    assert gone == [name for name in ("least", "less", "none", "little", "much") for _ in range(4)]


def test_of_two_wishes_the_stronger_and_the_longer_hold() -> None:
    engine = engine_of()
    wanted, rival = stored(engine, "wanted", 4), stored(engine, "rival", 4)
    retain(engine, wanted, 5, 1000)
    retain(engine, wanted, 2, 2000)
    retain(engine, rival, 3, EVER)
    engine.table.tick(1500)
    engine.table.evict((ROOM - 4) * PAGE, 100)
    assert (left(engine, wanted), left(engine, rival)) == (4, 0)


def test_the_end_of_a_conversation_lets_exactly_the_unshared_chunks_go_first() -> None:
    engine = engine_of()
    system = stored(engine, "system", 4)
    ended = stored(engine, "ended", 6, behind=system)
    goes_on = stored(engine, "goes on", 6, behind=system)
    older = stored(engine, "older than nothing", 4)
    assert lower(engine, ended) == (6, True)
    assert engine.table.evict((ROOM - 14) * PAGE, 100) == 6
    assert left(engine, ended) == 4 == left(engine, system) and left(engine, goes_on) == 10 and left(engine, older) == 4
    engine.table.check_integrity()


def test_chunks_at_the_end_that_are_not_there_do_not_hide_those_before() -> None:
    engine = engine_of()
    ended = stored(engine, "ended", 4)
    others = stored(engine, "others", 4)
    assert lower(engine, [*ended, *chain("never stored", 3)]) == (4, False)
    engine.table.evict((ROOM - 4) * PAGE, 100)
    assert (left(engine, ended), left(engine, others)) == (0, 4)


def test_what_makes_room_for_slots_of_another_size_takes_what_is_retained_last() -> None:
    """A slab of its slots is emptied whole, whatever is wished for its chunks, but not before other leaves."""
    table = new_table(ROOM * PAGE)
    small = Client(table, PAGE, "small")
    large = Client(table, 8 * PAGE, "large")
    table.set_eviction("lru")
    wanted = stored(small, "wanted", 8)
    retain(small, wanted)
    lowered = stored(large, "lowered", 2)
    assert lower(large, lowered) == (2, False)
    stored(small, "new", ROOM - 8 - 16)
    stored(large, "first", 2)
    assert (left(large, lowered), left(small, wanted)) == (0, 8)
    stored(large, "second", 6)
    assert left(large, chain("second", 6)) == 6
    table.check_integrity()


def of_two_groups(table: Table) -> Client:
    """An engine whose chunks may lack a window."""
    engine = Client(table, PAGE)
    groups = [("full", 0, PAGE), ("window", 16, PAGE)]
    engine.space = table.add_namespace(
        key("two groups"), chunk_tokens=16, block_tokens=4, writers=1, groups=groups
    )
    engine.session = table.open_session(key("two")[:16], engine.space, 0)
    engine.member = table.add_member(engine.session, key("m")[:16], [0], True, 0)
    return engine


def store_groups(engine: Client, keys: list[bytes], mask: int) -> None:
    engine.stores += 1
    granted = engine.table.reserve(
        engine.session, engine.member, key(engine.stores)[:16], b"", b"".join(keys), groups=mask, temporary=False,
        deadline_ms=1000, now_ms=0,
    )
    parts = [(at, group, 7) for at in range(len(keys)) for group in range(2) if mask >> group & 1]
    engine.table.commit(engine.session, granted.grant, 0, parts, 0)


def test_a_chunk_that_is_replaced_stays_retained() -> None:
    table = new_table(ROOM * PAGE)
    engine = of_two_groups(table)
    store_groups(engine, [key("chunk")], 1)
    assert retain(engine, [key("chunk")], until=1000) == (1, 0)
    store_groups(engine, [key("chunk")], 3)
    assert retained_bytes(table) == 2 * PAGE, "of the chunk that took its place"
    table.check_integrity()
    table.tick(1000)
    assert retained_bytes(table) == 0


def test_a_larger_chunk_that_takes_anothers_place_is_retained_within_the_bound_only() -> None:
    table = new_table(ROOM * PAGE)
    engine, wanted = of_two_groups(table), chain("wanted", RETAINED - 2)
    store_groups(engine, wanted, 1)
    assert retain(engine, wanted) == (RETAINED - 2, 0)
    store_groups(engine, wanted, 3)
    assert [engine.has(one) for one in wanted] == [True] * len(wanted)
    assert RETAINED - 1 <= retained_bytes(table) // PAGE <= RETAINED
    table.check_integrity()


def test_a_conversation_that_another_one_continues_is_not_at_its_end() -> None:
    engine = engine_of()
    first = stored(engine, "first", 4)
    stored(engine, "second turn", 4, behind=first)
    assert lower(engine, first) == (0, True)


def test_a_walk_in_two_pieces_ends_where_one_would() -> None:
    engine = engine_of()
    ended = stored(engine, "ended", 8)
    stored(engine, "branch", 1, behind=ended[:3])
    lowered = engine.table.lower(engine.space, b"".join(ended[4:]), CONVERSATION_ENDED)
    assert lowered == (4, False)
    assert engine.table.lower(engine.space, b"".join(ended[:4]), CONVERSATION_ENDED, following=ended[4]) == (1, True)
    assert engine.table.lower(engine.space, b"".join(ended[:4]), CONVERSATION_ENDED) == (0, True), "it goes on behind"


@pytest.mark.parametrize("how", ["lookup", "store"])
def test_a_chunk_that_somebody_names_after_all_is_as_any_other(how: str) -> None:
    engine = engine_of()
    ended, others = stored(engine, "ended", 4), stored(engine, "others", 4)
    lower(engine, ended)
    if how == "lookup":
        found = engine.lookup(ended)
        engine.table.release(engine.session, found.lease, [0])
    else:
        assert engine.reserve(ended).present == [0, 1, 2, 3]
    engine.table.evict((ROOM - 4) * PAGE, 100)
    assert (left(engine, ended), left(engine, others)) == (4, 0), "the others were not used for longer"
    engine.table.check_integrity()


def test_a_lowered_priority_ends_with_its_duration() -> None:
    engine = engine_of()
    older, lowered = stored(engine, "older", 4), stored(engine, "lowered", 4)
    lower(engine, lowered, -5, until=1000)
    engine.table.tick(1000)
    engine.table.evict((ROOM - 4) * PAGE, 100)
    assert (left(engine, older), left(engine, lowered)) == (0, 4)


def test_chunks_that_are_being_written_have_wishes_too() -> None:
    """Engines say what they wish when a request ends; its last stores may still be under way."""
    engine = engine_of()
    wanted, dropped = chain("wanted", 4), chain("dropped", 4)
    granted, aborted = engine.reserve(wanted), engine.reserve(dropped)
    assert retain(engine, wanted) == (4, 0) and retain(engine, dropped) == (4, 0)
    engine.table.check_integrity()
    engine.table.commit(engine.session, granted.grant, 0, [(at, 0, 1) for at in range(4)], 0)
    engine.table.abort(engine.session, aborted.grant, [0])
    assert retained_bytes(engine.table) == 4 * PAGE
    for number in range(12):
        stored(engine, number, 8)
    assert left(engine, wanted) == 4
    engine.table.check_integrity()


def test_an_administrators_pin_outlives_the_end_of_a_conversation() -> None:
    engine = engine_of()
    pinned = stored(engine, "pinned", 4)
    engine.table.pin(engine.space, b"".join(pinned), EVER)
    assert lower(engine, pinned) == (4, False)
    for number in range(12):
        stored(engine, number, 8)
    assert left(engine, pinned) == 4
    engine.table.pin(engine.space, b"".join(pinned), 0)
    engine.table.evict(4 * PAGE, 4)
    assert left(engine, pinned) == 0, "then what was wished holds"
    engine.table.check_integrity()


@pytest.mark.parametrize(("wish", "priority"), [
    (retain, 0), (retain, -1), (retain, MOST_PRIORITY + 1), (lower, 1), (lower, CONVERSATION_ENDED - 1),
])
def test_priorities_are_refused_out_of_their_range(wish: Callable[..., None], priority: int) -> None:
    engine = engine_of()
    with pytest.raises(TableError) as error:
        wish(engine, [], priority)
    assert (error.value.code, error.value.found) == ("bad_argument", priority)


def test_chunks_are_not_retained_without_an_end() -> None:
    engine = engine_of()
    with pytest.raises(TableError) as error:
        retain(engine, stored(engine, "chain", 1), until=0)
    assert error.value.code == "bad_argument"


@policies
def test_random_wishes_keep_what_is_derived_true(policy: str) -> None:
    source, engine = random.Random(11), engine_of(policy, 48)
    leases: list[int] = []
    for number in range(600):
        engine.table.tick(number)
        engine.table.heartbeat(engine.member, number)
        trunk = source.randrange(4)
        keys = [*chain(trunk, 6), *chain((trunk, source.randrange(4)), 6)][: source.randrange(1, 13)]
        found = engine.lookup(keys, f"r{number}", now=number)
        hit = found.hit_tokens // 16
        if hit < len(keys):
            engine.store(keys[hit:], keys[hit - 1] if hit else b"")
        if found.lease:
            leases.append(found.lease)
        while len(leases) > source.randrange(3):
            engine.table.release(engine.session, leases.pop(source.randrange(len(leases))), [0])
        match source.randrange(6):
            case 0:
                retain(engine, keys, source.randrange(1, 5), number + source.randrange(1, 60))
            case 1:
                lower(engine, keys)
            case 2:
                lower(engine, keys, -source.randrange(3), source.choice((0, number + 20)))
            case 3 if source.random() < 0.3:
                engine.table.delete(engine.space, b"".join(keys[-3:]))
            case 4 if source.random() < 0.3:
                engine.table.pin(engine.space, b"".join(keys[:3]), source.choice((0, number + 30)))
            case 5:
                engine.table.evict(source.randrange(8) * PAGE, 8)
        if source.random() < 0.03:
            engine.table.set_eviction(source.choice(("adaptive", "lru")))
        assert retained_bytes(engine.table) <= 12 * PAGE
        if number % 10 == 0:
            engine.table.check_integrity()
    engine.table.check_integrity()
