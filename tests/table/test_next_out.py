"""Table.next_out: what is evicted next, told before it is."""

from __future__ import annotations

import pytest
from table_helpers import PAGE, Client, key, new_table

CHUNKS = 32


def cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_it_names_what_is_evicted_next_and_no_more_than_asked_for(policy: str) -> None:
    table = new_table(CHUNKS * PAGE)
    table.set_eviction(policy)
    engine = Client(table, PAGE)
    chains = [[key("chain", chain, at) for at in range(4)] for chain in range(CHUNKS // 4)]
    for chain in chains:
        engine.store(chain)
    for at in (0, 2, 4):
        found = engine.lookup(chains[at], ("again", at))
        table.release(engine.session, found.lease, [0])
    stored = {one for chain in chains for one in chain}
    for number in range(4):
        named = cut(table.next_out(4 * PAGE)[engine.space])
        assert len(named) == 4
        new = [key("new", number, at) for at in range(4)]
        engine.store(new)
        gone = {one for one in stored if not engine.has(one)}
        assert gone == set(named)
        stored = stored - gone | set(new)
    table.check_integrity()


def test_it_leaves_out_what_may_not_go() -> None:
    table = new_table(CHUNKS * PAGE)
    engine, other = Client(table, PAGE), Client(table, PAGE, name="other")
    assert table.next_out(CHUNKS * PAGE) == {}
    chain, single = [key("chain", at) for at in range(6)], key("single")
    engine.store(chain)
    other.store([single])
    table.pin(other.space, single, 1 << 40)
    held = table.hold(engine.session, engine.member, key("hold")[:16], chain[3], 0)
    assert {space: set(cut(keys)) for space, keys in table.next_out(CHUNKS * PAGE).items()} == {
        engine.space: set(chain[4:])
    }
    table.release(engine.session, held.lease, [0])
    table.pin(other.space, single, 0)
    assert {space: set(cut(keys)) for space, keys in table.next_out(CHUNKS * PAGE).items()} == {
        engine.space: set(chain), other.space: {single}
    }
    assert table.next_out(PAGE - 1) == {}
