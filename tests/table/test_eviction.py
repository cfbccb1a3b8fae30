"""What each eviction policy lets go of, through the table: tails first, and then by what the policy has seen."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from table_helpers import PAGE, Client, chain, key, new_table

from kvdock._core import TableError
from kvdock.protocol.keys import UNKNOWN_PARENT as UNKNOWN

ROOM = 64
POLICIES = ("adaptive", "selective", "lru")
every_policy = pytest.mark.parametrize("policy", POLICIES)


def engine_of(policy: str, room: int = ROOM) -> Client:
    engine = Client(new_table(room * PAGE), PAGE)
    engine.table.set_eviction(policy)
    assert engine.table.eviction() == policy
    return engine


def ask(engine: Client, keys: Sequence[bytes], request: str) -> int:
    """Looks the prefix up, stores what it lacks, and ends: how many chunks it found."""
    found = engine.lookup(list(keys), request)
    hit = found.hit_tokens // 16
    if hit < len(keys):
        engine.store(list(keys[hit:]), keys[hit - 1] if hit else b"")
    if found.lease:
        engine.table.release(engine.session, found.lease, [0])
    return hit


def there(engine: Client, keys: Sequence[bytes]) -> list[bool]:
    return [engine.has(one) for one in keys]


@every_policy
def test_the_end_of_a_prefix_goes_before_its_beginning(policy: str) -> None:
    engine = engine_of(policy)
    old = chain("old", 40)
    ask(engine, old, "old")
    ask(engine, chain("new", 40), "new")
    left = there(engine, old)
    assert left == sorted(left, reverse=True) and sum(left) == 24


@every_policy
def test_what_is_leased_never_goes(policy: str) -> None:
    engine = engine_of(policy)
    held = chain("held", 20)
    ask(engine, held, "first")
    lease = engine.lookup(held, "holder").lease
    for number in range(20):
        ask(engine, chain(number, 30), f"r{number}")
    assert all(there(engine, held))
    engine.table.release(engine.session, lease, [0])
    engine.table.check_integrity()


def test_lru_lets_go_of_what_was_not_used_for_longest() -> None:
    engine = engine_of("lru", 8)
    for name in "abcdefgh":
        ask(engine, chain(name, 1), name)
    ask(engine, chain("a", 1), "again")
    ask(engine, chain("new", 2), "new")
    assert [engine.has(chain(name, 1)[0]) for name in "abcd"] == [True, False, False, True]


def test_what_is_asked_for_again_and_again_outlives_what_is_asked_for_once() -> None:
    """LRU keeps nothing of it: between two uses more is asked for than there is room."""
    shares = {}
    for name in ("adaptive", "lru"):
        engine, found, asked = engine_of(name), 0, 0
        for number in range(1500):
            if number % 4 == 0:
                found += ask(engine, chain(("hot", number // 4 % 4), 4), f"h{number}")
                asked += 4
            else:
                ask(engine, chain(("cold", number), 8), f"c{number}")
        shares[name] = found / asked
        engine.table.check_integrity()
    assert shares["lru"] < 0.05 and shares["adaptive"] > 0.5, shares


def test_of_sessions_that_do_not_fit_together_some_stay_with_the_selective_policy() -> None:
    """Sixteen, of a quarter of the pool each: four come back after 11 others, and twelve after 17. LRU lets each go
    just before it comes back; the adaptive policy lets one of the four go for one of the twelve."""
    turns = [one for number in range(300) for one in (number % 4, 4 + 2 * number % 12, 5 + 2 * number % 12)]
    shares = {}
    for policy in POLICIES:
        engine, found, asked = engine_of(policy, 256), 0, 0
        for at, session in enumerate(turns):
            hit = ask(engine, chain(("session", session), 64), f"r{at}")
            if at > 450:
                found, asked = found + hit, asked + 64
        shares[policy] = found / asked
        engine.table.check_integrity()
    assert shares["lru"] < 0.05 and shares["adaptive"] < 0.27 and shares["selective"] > 0.3, shares


def test_what_goes_on_a_retained_prefix_is_not_declined() -> None:
    engine = engine_of("selective")
    for number in range(400):
        ask(engine, chain(("often", number % 4), 16), f"o{number}")
        if number % 40 == 0:
            ask(engine, chain("seldom", 16), f"s{number}")
    engine.table.evict(4 * PAGE, 16, by_operator=True)
    first = chain("seldom", 4)
    engine.store(first)
    ask(engine, chain("seldom", 16), "declined")
    assert not engine.has(chain("seldom", 16)[-1])
    assert engine.table.retain(0, b"".join(first), 1, 1 << 40)[0] == 4
    ask(engine, chain("seldom", 16), "goes on")
    assert all(there(engine, chain("seldom", 16)))
    engine.table.check_integrity()


@pytest.mark.parametrize("policy", ["adaptive", "selective"])
def test_only_the_selective_policy_declines_what_it_would_evict_first(policy: str) -> None:
    """A session that comes back seldom, while the pool is full of sessions that come back soon."""
    engine = engine_of(policy)
    for number in range(400):
        ask(engine, chain(("often", number % 4), 16), f"o{number}")
        if number % 40 == 0:
            ask(engine, chain("seldom", 16), f"s{number}")
    ask(engine, chain("seldom", 16), "once more")
    declined = policy == "selective"
    assert all(all(there(engine, chain(("often", one), 16))) for one in range(4)) is declined
    assert any(there(engine, chain("seldom", 16))) is not declined
    fates = engine.table.fates(0, b"".join(chain("seldom", 16)))
    assert [fate for _, fate, _, _ in fates] == (["store_declined"] if declined else ["ready"])
    engine.table.evict(16 * PAGE, 16, by_operator=True)
    ask(engine, chain("seldom", 16), "with room")
    assert all(there(engine, chain("seldom", 16))), "there is room"
    engine.table.check_integrity()


def test_the_adaptive_policy_is_lru_where_uses_tell_nothing() -> None:
    """Each prefix is used twice, soon after each other, and never again."""
    shares = {}
    for policy in ("adaptive", "lru"):
        engine, found = engine_of(policy), 0
        for number in range(800):
            found += ask(engine, chain(number, 8), f"a{number}")
            if number >= 3:
                found += ask(engine, chain(number - 3, 8), f"b{number}")
        shares[policy] = found / (800 * 8)
    assert shares["lru"] > 0.99 and shares["adaptive"] > 0.95, shares


def test_what_a_limit_cuts_off_is_used_all_the_same() -> None:
    """The engine wants it, and finds it once others hold less."""
    engine = Client(new_table(8 * PAGE), PAGE)
    engine.table.set_eviction("lru")
    wanted = chain("wanted", 4)
    ask(engine, wanted, "first")
    ask(engine, chain("other", 4), "other")
    engine.table.set_limits(limit_bytes=8 * PAGE, session_cap=0.25, total_cap=1.0)
    found = engine.lookup(wanted, "cut short")
    assert (found.hit_tokens, found.limited) == (32, "held_bytes")
    engine.table.release(engine.session, found.lease, [0])
    engine.table.set_limits(limit_bytes=8 * PAGE, session_cap=1.0, total_cap=1.0)
    ask(engine, chain("new", 4), "new")
    assert all(there(engine, wanted)), "the other was not used for longer"


@every_policy
def test_random_use_keeps_what_is_derived_true(policy: str) -> None:
    source, engine = random.Random(7), engine_of(policy, 48)
    leases: list[int] = []
    for number in range(600):
        keys = chain(source.randrange(30), 12)[: source.randrange(1, 13)]
        found = engine.lookup(keys, f"r{number}")
        hit = found.hit_tokens // 16
        if hit < len(keys) and source.random() < 0.8:
            engine.store(keys[hit:], keys[hit - 1] if hit else b"")
        if found.lease:
            leases.append(found.lease)
        while len(leases) > source.randrange(5):
            engine.table.release(engine.session, leases.pop(source.randrange(len(leases))), [0])
        if source.random() < 0.05:
            engine.table.delete(engine.space, b"".join(chain(source.randrange(30), 12)))
        if source.random() < 0.05:
            engine.table.pin(engine.space, b"".join(chain(source.randrange(30), 3)), source.choice((0, 10**9)))
        if source.random() < 0.1:
            engine.table.evict(source.randrange(12) * PAGE, 8)
        if source.random() < 0.03:
            engine.table.set_eviction(source.choice(POLICIES))
        if number % 20 == 0:
            engine.table.check_integrity()
    engine.table.check_integrity()


def test_a_policy_that_is_changed_goes_on_with_what_is_there() -> None:
    engine = engine_of("lru")
    old, new = chain("old", 32), chain("new", 32)
    ask(engine, old, "old")
    ask(engine, new, "new")
    for policy in ("adaptive", "adaptive", "lru"):
        engine.table.set_eviction(policy)
        engine.table.check_integrity()
    ask(engine, chain("next", 16), "next")
    assert there(engine, old) == [True] * 16 + [False] * 16 and all(there(engine, new))


def test_an_unknown_policy_is_refused_and_changes_nothing() -> None:
    engine = engine_of("lru")
    with pytest.raises(TableError) as error:
        engine.table.set_eviction("fifo")
    assert (error.value.code, error.value.found) == ("bad_argument", "fifo")
    assert error.value.wanted == "adaptive, selective or lru" and engine.table.eviction() == "lru"


def test_a_parent_that_is_not_known_contradicts_none() -> None:
    """An engine that stores from the midst of a sequence may not know what comes before."""
    engine = Client(new_table(16 * PAGE), PAGE)
    keys = [key("chain", n) for n in range(4)]
    assert engine.store(keys[2:], UNKNOWN) == 2
    assert engine.store(keys) == 2, "what was stored with an unknown parent is there"
    assert engine.store(keys[2:], UNKNOWN) == engine.store(keys[2:], keys[1]) == 0
    assert engine.lookup(keys).hit_tokens == 4 * 16
    with pytest.raises(TableError) as refused:  # of two that are known, one is wrong
        engine.store([keys[1]], key("another"))
    assert refused.value.code == "chain_mismatch"


def test_what_has_an_unknown_parent_keeps_nothing_above_it() -> None:
    engine = Client(new_table(4 * PAGE), PAGE)
    keys = [key("chain", n) for n in range(4)]
    assert engine.store(keys[:2]) == 2
    assert engine.store(keys[2:], UNKNOWN) == 2
    assert engine.store([key("more")]) == 1
    assert [engine.has(one) for one in keys] == [True, False, True, True], "the oldest leaf goes, whatever follows it"


@pytest.mark.parametrize("found", [bytes(32), UNKNOWN])
def test_a_key_that_names_no_chunk_is_refused(found: bytes) -> None:
    engine = Client(new_table(4 * PAGE), PAGE)
    with pytest.raises(TableError) as refused:
        engine.store([found])
    assert refused.value.code == "bad_argument"


def test_a_lookup_from_the_midst_of_a_sequence_uses_what_comes_before() -> None:
    """A prefix that stays in an engine's memory is never asked for, and what follows it is."""
    engine = Client(new_table(4 * PAGE), PAGE)
    keys = [key("chain", n) for n in range(3)]
    assert engine.store(keys) == 3
    assert engine.store([key("other")]) == 1
    assert ask(engine, keys[2:], "tail") == 1
    assert engine.table.delete(engine.space, keys[2]) == 1
    assert engine.store([key("more"), key("most")]) == 2
    assert there(engine, [*keys[:2], key("other")]) == [True, True, False]
