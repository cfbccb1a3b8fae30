"""What the pool holds by namespace and prefix, beside a plain count; and a count while the pool changes under it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import Census, Table

pytestmark = pytest.mark.table_model

MIB = 1 << 20


def counted(table: Table, budget: int = 1 << 30) -> Census:
    census = Census(table)
    while not census.step(budget):
        pass
    return census


def chain(*what: object, length: int) -> list[bytes]:
    return [key(*what, at) for at in range(length)]


class Forest:
    """Chains of one client that share beginnings, and what a count of them should say."""

    def __init__(self, client: Client, source: random.Random, trees: int) -> None:
        self.client, self.chunks, self.uses = client, dict[bytes, int](), dict[bytes, int]()
        for tree in range(trees):
            trunk = chain(client.name, tree, length=source.randint(1, 9))
            client.store(trunk)
            for branch in range(source.randint(0, 3)):
                keys = chain(client.name, tree, branch, length=source.randint(1, 12))
                assert client.store(keys, parent=trunk[-1]) == len(keys)
                self.chunks[trunk[0]] = self.chunks.get(trunk[0], 0) + len(keys)
            self.chunks[trunk[0]] = self.chunks.get(trunk[0], 0) + len(trunk)
            self.uses[trunk[0]] = source.randint(0, 3)
            for use in range(self.uses[trunk[0]]):
                lease = client.lookup(trunk, request=(tree, use)).lease
                client.table.release(client.session, lease, [0])


@pytest.mark.parametrize("budget", [1, 7, 1 << 30])
def test_a_count_in_slices_finds_every_prefix_with_its_chunks_and_uses(budget: int) -> None:
    table, source = new_table(64 * MIB, records=8192), random.Random(5)
    forests = [Forest(Client(table, PAGE * (2 + n), f"c{n}"), source, 40) for n in range(2)]
    census = counted(table, budget)
    spaces = {space: (chunks, held) for space, chunks, held, _, _ in census.spaces()}
    for forest in forests:
        client, chunks = forest.client, sum(forest.chunks.values())
        assert spaces[client.space] == (chunks, chunks * client.part_bytes)
        found, count = census.prefixes([client.space], 1000)
        assert count == len(found) == len(forest.chunks)
        assert {first: many for _, first, many, *_ in found} == forest.chunks
        assert {first: uses for _, first, *_, uses in found} == forest.uses
        ranks = [(uses, held) for _, _, _, held, _, _, uses in found]
        assert ranks == sorted(ranks, reverse=True)
        assert census.prefixes([client.space], 3)[0] == found[:3]
    both = census.prefixes([forest.client.space for forest in forests], 1000)
    assert both[1] == sum(len(forest.chunks) for forest in forests)


def test_ages_are_those_of_the_server_clock() -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    for at_ms, name in ((1_000, "a"), (5_000, "b")):
        table.heartbeat(client.member, at_ms)
        table.tick(at_ms)
        client.lookup([key(name)], request=name, now=at_ms)
        client.store([key(name)])
        table.tick(at_ms + 1_000)  # uses are dated to the second
    table.heartbeat(client.member, 9_000)
    table.tick(9_000)
    lease = client.lookup([key("a")], request="again", now=9_000).lease
    table.release(client.session, lease, [0])
    found, _ = counted(table).prefixes([client.space], 10)
    times = {first: (born, used, uses) for _, first, _, _, born, used, uses in found}
    assert times[key("a")][0] == 1_000 and times[key("b")][0] == 5_000
    assert times[key("a")][1] == 9_000 and 5_000 <= times[key("b")][1] <= 6_000
    assert (times[key("a")][2], times[key("b")][2]) == (1, 0)
    ((_, chunks, _, oldest, newest),) = counted(table).spaces()
    assert chunks == 2 and newest == 9_000 and 5_000 <= oldest <= 6_000
    assert table.stats()["oldest_used_ms"] == oldest


def test_a_pool_without_chunks_has_no_oldest_one() -> None:
    table = new_table(16 * MIB)
    Client(table, PAGE)
    assert counted(table).spaces() == [] and counted(table).prefixes([], 5) == ([], 0)
    assert table.stats()["oldest_used_ms"] == 0


def test_a_pool_that_changes_while_it_is_counted_is_counted_about_right() -> None:
    """Records are freed and used again under the count, by other chains: it ends, and what stayed is told."""
    table, source = new_table(4 * MIB, records=2048), random.Random(9)
    client = Client(table, PAGE)
    kept = chain("kept", length=20)
    client.store(kept)
    stored: list[list[bytes]] = []
    for round_ in range(60):
        census, steps = Census(table), 0
        while not census.step(37):
            steps += 1
            keys = chain("other", round_, steps, length=source.randint(1, 30))
            client.store(keys)
            stored.append(keys)
            if source.random() < 0.5:
                gone = stored.pop(source.randrange(len(stored)))
                table.delete(client.space, b"".join(gone))
            client.table.release(client.session, client.lookup(kept, request=(round_, steps)).lease, [0])
        found, _ = census.prefixes([client.space], 10_000)
        by_first: dict[bytes, int] = defaultdict(int)
        for _, first, chunks, *_ in found:
            by_first[first] += chunks
        assert by_first[kept[0]] >= 20 or table.state_of(client.space, kept[0]) != "ready"
        table.check_integrity()
