"""What the pool holds by namespace and prefix, beside a plain count; and a count while the pool changes under it."""

from __future__ import annotations

import random
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from threading import Event
from typing import Any

import pytest
from census_pages import counts_while_pages_change
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import Census, Table

pytestmark = pytest.mark.table_model

MIB = 1 << 20
MOST_PREFIXES = 256


def counted(table: Table, budget: int = 1 << 30) -> Census:
    census = Census(table)
    while not census.step(budget):
        pass
    return census


def listed(census: Census, spaces: list[int], most: int) -> tuple[list[tuple[Any, ...]], int]:
    """The first fields of each prefix, up to its last key and the depth of that, and how many prefixes there are."""
    found, count, _ = census.prefixes(spaces, most)
    return [one[:9] for one in found], count


def forks(census: Census, space: int, start: int = 0, most: int = 100) -> list[tuple[Any, ...]]:
    """For each prefix: first key, chunks, bytes; key at the fork, its depth, bytes up to there, branches, kept."""
    return [(*one[1:4], *one[9:]) for one in census.prefixes([space], most, start)[0]]


def chain(*what: object, length: int) -> list[bytes]:
    return [key(*what, at) for at in range(length)]


def look(client: Client, keys: list[bytes], request: object, now: int = 0) -> None:
    client.table.release(client.session, client.lookup(keys, request=request, now=now).lease, [0])


def forked(trunk: str, *branches: str, length: int) -> tuple[Client, list[list[bytes]]]:
    """A table with a stored trunk and branches that go on from its end, and their keys."""
    client = Client(new_table(16 * MIB), PAGE)
    chains = [chain(name, length=length) for name in (trunk, *branches)]
    client.store(chains[0])
    for branch in chains[1:]:
        client.store(branch, parent=chains[0][-1])
    return client, chains


class Forest:
    """Chains of one client that share beginnings, and what a count of them should say, by first key."""

    def __init__(self, client: Client, source: random.Random, trees: int) -> None:
        self.client, self.chunks, self.uses = client, dict[bytes, int](), dict[bytes, int]()
        self.lasts: dict[bytes, set[tuple[bytes, int]]] = {}
        for tree in range(trees):
            trunk = chain(client.name, tree, length=source.randint(1, 9))
            client.store(trunk)
            ends = {(trunk[-1], len(trunk))}
            for branch in range(source.randint(0, 3)):
                keys = chain(client.name, tree, branch, length=source.randint(1, 12))
                assert client.store(keys, parent=trunk[-1]) == len(keys)
                ends.add((keys[-1], len(trunk) + len(keys)))
                self.chunks[trunk[0]] = self.chunks.get(trunk[0], 0) + len(keys)
            self.chunks[trunk[0]] = self.chunks.get(trunk[0], 0) + len(trunk)
            self.uses[trunk[0]] = source.randint(0, 3)
            for use in range(self.uses[trunk[0]]):
                look(client, trunk, (tree, use))
            deepest = {end for end in ends if end[1] == max(depth for _, depth in ends)}
            self.lasts[trunk[0]] = {(trunk[-1], len(trunk))} if self.uses[trunk[0]] else deepest


@pytest.mark.parametrize("budget", [1, 7, 1 << 30])
def test_a_count_in_slices_finds_every_prefix_with_its_chunks_and_uses(budget: int) -> None:
    table, source = new_table(64 * MIB, records=8192), random.Random(5)
    forests = [Forest(Client(table, PAGE * (2 + n), f"c{n}"), source, 40) for n in range(2)]
    census = counted(table, budget)
    spaces = {space: (chunks, held) for space, chunks, held, _, _ in census.spaces()}
    for forest in forests:
        client, chunks = forest.client, sum(forest.chunks.values())
        assert spaces[client.space] == (chunks, chunks * client.part_bytes)
        found, count = listed(census, [client.space], 1000)
        assert count == len(found) == len(forest.chunks)
        assert {first: many for _, first, many, *_ in found} == forest.chunks
        assert {first: uses for _, first, *_, uses, _, _ in found} == forest.uses
        assert all((last, deep) in forest.lasts[first] for _, first, *_, last, deep in found)
        ranks = [(uses, held) for _, _, _, held, _, _, uses, *_ in found]
        assert ranks == sorted(ranks, reverse=True)
        assert listed(census, [client.space], 3)[0] == found[:3]
    both = listed(census, [forest.client.space for forest in forests], 1000)
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
    look(client, [key("a")], "again", 9_000)
    found, _ = listed(counted(table), [client.space], 10)
    times = {first: (born, used, uses) for _, first, _, _, born, used, uses, *_ in found}
    assert times[key("a")][0] == 1_000 and times[key("b")][0] == 5_000
    assert times[key("a")][1] == 9_000 and 5_000 <= times[key("b")][1] <= 6_000
    assert (times[key("a")][2], times[key("b")][2]) == (1, 0)
    ((_, chunks, _, oldest, newest),) = counted(table).spaces()
    assert chunks == 2 and newest == 9_000 and 5_000 <= oldest <= 6_000
    assert table.stats()["oldest_used_ms"] == oldest


def test_a_pool_without_chunks_has_no_oldest_one() -> None:
    table = new_table(16 * MIB)
    Client(table, PAGE)
    assert counted(table).spaces() == [] and listed(counted(table), [], 5) == ([], 0)
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
            look(client, kept, (round_, steps))
        found, _ = listed(census, [client.space], 10_000)
        by_first: dict[bytes, int] = defaultdict(int)
        for _, first, chunks, *_ in found:
            by_first[first] += chunks
        assert by_first[kept[0]] >= 20 or table.state_of(client.space, kept[0]) != "ready"
        table.check_integrity()


def test_the_last_key_is_the_deepest_that_half_of_the_lookups_found_and_a_pin_of_it_keeps_it_all() -> None:
    client, (system, often, once) = forked("system", "often", "once", length=4)
    table = client.table
    ((*_, last, depth),) = listed(counted(table), [client.space], 1)[0]
    assert last in (often[-1], once[-1]) and depth == 8, "nobody has looked anything up: the deepest"
    for number, asked in enumerate(([*system, *often[:2]], [*system, *often[:3]], [*system, *once], system[:1])):
        look(client, asked, number)
    ((*_, last, depth),) = listed(counted(table), [client.space], 1)[0]
    assert (last, depth) == (often[1], 6), "two of four"
    assert table.pin(client.space, last, 1 << 40) == 1
    while table.evict(16 * MIB, 100):
        pass
    assert [client.has(one) for one in [*system, *often, *once]] == [True] * 6 + [False] * 6


def test_the_most_used_of_many_prefixes_of_several_namespaces_are_ranked_together() -> None:
    table, source = new_table(64 * MIB, records=8192), random.Random(3)
    clients = [Client(table, PAGE, f"c{n}") for n in range(3)]
    uses: dict[bytes, int] = {}
    for client in clients[:2]:
        for number in range(MOST_PREFIXES + 60):
            first = key(client.name, number)
            client.store([first])
            uses[first] = source.randint(0, 4)
            for use in range(uses[first]):
                look(client, [first], (number, use))
    found, count = listed(counted(table, 64), [client.space for client in clients], 10_000)
    assert count == len(uses)
    expected = sorted(uses.values(), reverse=True)[:MOST_PREFIXES]
    assert [one[6] for one in found] == [uses[one[1]] for one in found] == expected
    one_found, one_count = listed(counted(table), [clients[1].space], 10)
    assert one_count == MOST_PREFIXES + 60 and {one[0] for one in one_found} == {clients[1].space}


def test_no_call_does_more_than_its_budget_however_many_prefixes_there_are_or_deep() -> None:
    """Each chunk is looked at twice, and each prefix is ranked, or each chunk's way to its first one is found."""
    table, count = new_table(64 * MIB, records=16384), 12_000
    client = Client(table, PAGE)
    singles = [key("single", n) for n in range(count)]
    for first in singles:
        client.store([first])
    assert calls_until_whole(table) >= 3 * count // 64
    table.delete(client.space, b"".join(singles))
    deep = chain("deep", length=count)
    for at in range(0, count, 1000):
        client.store(deep[at : at + 1000], parent=deep[at - 1] if at else b"")
    assert calls_until_whole(table) >= 3 * count // 64
    ((_, first, chunks, *_, last, depth),) = listed(counted(table, 64), [client.space], 5)[0]
    assert (first, chunks, last, depth) == (deep[0], count, deep[-1], count)


def test_a_way_that_is_found_from_its_far_end_is_gone_in_pieces() -> None:
    """Records that are given back are taken in reverse while others of their page are in use."""
    table, length = new_table(16 * MIB, records=512), 300
    client = Client(table, PAGE)
    old, keys = chain("old", length=length), chain("far", length=length)
    client.store([*old, key("stays")])
    table.delete(client.space, b"".join(old))
    client.store(keys)
    census, looked = Census(table), 0
    while not census.step(1):
        looked += 1
    forward = new_table(16 * MIB, records=512)
    other = Client(forward, PAGE)
    other.store([*keys, key("stays")])
    assert looked >= calls_until_whole(forward, 1) + length // 2 - 10, "the first way is as long as the chain, halved"
    found = listed(census, [client.space], 5)[0]
    assert [(one[1], one[2], *one[-2:]) for one in found] == [(keys[0], length, keys[-1], length)]


def calls_until_whole(table: Table, budget: int = 64) -> int:
    census, calls = Census(table), 1
    while not census.step(budget):
        calls += 1
    return calls


def test_counts_beside_stores_and_lookups_of_another_thread_see_whole_prefixes() -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    kept, done = chain("kept", length=9), Event()
    client.store(kept)

    def work() -> None:
        for number in range(1500):
            client.store(chain("other", number, length=3))
            look(client, kept, number)
            table.delete(client.space, b"".join(chain("other", number, length=3)))
        done.set()

    with ThreadPoolExecutor(1) as others:
        worker = others.submit(work)
        while not done.is_set() and not worker.done():
            found, _ = listed(counted(table, 5), [client.space], 10)
            ((chunks, last, depth),) = [(one[2], *one[-2:]) for one in found if one[1] == kept[0]]
            assert (chunks, last, depth) == (9, kept[-1], 9) and all(one[2] <= 9 for one in found)
        worker.result()
    table.check_integrity()


def test_a_prefix_that_goes_after_the_count_is_left_out_and_what_takes_its_record_is_not_it() -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    for name in "abc":
        client.store(chain(name, length=3))
    census = counted(table)
    table.delete(client.space, b"".join(chain("b", length=3)))
    client.store(chain("new", length=3))
    found, count = listed(census, [client.space], 10)
    assert {one[1] for one in found} == {key("a", 0), key("c", 0)} and count == 2
    assert {one[1] for one in listed(counted(table), [client.space], 10)[0]} == {key(n, 0) for n in ("a", "c", "new")}


def test_ids_of_records_that_their_page_has_no_more_room_for_are_not_followed() -> None:
    """In a process of its own, which would end: nothing behind the table's memory may be read."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        counts = process.submit(counts_while_pages_change, range(0, 2400, 80)).result()
    assert counts == [([key("wide", 0)], 1)] + [([], 0)] * 29, "only what came before the count began is found"


@pytest.mark.parametrize("whose", ["one", "other"])
def test_a_chunk_is_not_counted_for_what_took_its_parents_record(whose: str) -> None:
    """Records that were given back are taken in reverse, so the parent's comes after its child's."""
    for stop in range(1, 40):
        table = new_table(16 * MIB)
        client = Client(table, PAGE, "one")
        other = client if whose == "one" else Client(table, PAGE, whose)
        before, pair = chain("before", length=10), chain("pair", length=2)
        client.store([*before, key("stays")])
        table.delete(client.space, b"".join(before))
        client.store(pair)
        census = Census(table)
        for _ in range(stop):
            census.step(1)
        table.delete(client.space, pair[0])
        other.store([key("theirs")])
        while not census.step(1):
            pass
        found = {one[1]: (*one[2:4], *one[7:]) for one in listed(census, [other.space], 5)[0]}
        assert found.get(key("theirs"), (1, PAGE, key("theirs"), 1)) == (1, PAGE, key("theirs"), 1)


def test_the_last_key_is_one_of_its_prefix_although_chunks_go_meanwhile() -> None:
    for stop in [*range(1, 20), *range(20, 1200, 50)]:
        table = new_table(16 * MIB)
        client = Client(table, PAGE)
        keys = chain("kept", length=3)
        client.store(keys)
        census = Census(table)
        for _ in range(stop):
            census.step(1)
        table.delete(client.space, keys[2])
        client.store([key("new")])
        while not census.step(1):
            pass
        lasts = {one[1]: one[7:] for one in listed(census, [client.space], 5)[0]}
        assert lasts[keys[0]] in [(one, 1 + at) for at, one in enumerate(keys)]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_chunks_that_name_each_other_in_a_circle_are_one_prefix(length: int) -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    ring = chain("ring", length=length)
    assert client.store(ring, parent=ring[-1]) == length
    ((_, first, chunks, *_),), count = listed(counted(table, 1), [client.space], 5)
    assert first in ring and (chunks, count) == (length, 1)


def test_what_lost_its_beginning_is_of_no_prefix_until_that_is_stored_again() -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    keys = chain("torn", length=5)
    client.store(keys)
    table.delete(client.space, keys[1])
    found, count = listed(counted(table), [client.space], 5)
    assert [(one[1], one[2], one[-1]) for one in found] == [(keys[0], 1, 1)] and count == 1
    assert [chunks for _, chunks, *_ in counted(table).spaces()] == [4]
    client.store([keys[1]], parent=keys[0])
    assert [(one[1], one[2], one[-1]) for one in listed(counted(table), [client.space], 5)[0]] == [(keys[0], 5, 5)]


def test_a_chunk_whose_parent_is_not_known_begins_a_prefix() -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    client.store(chain("middle", length=3), parent=b"\xff" * 32)
    ((_, first, chunks, *_, last, depth),) = listed(counted(table), [client.space], 5)[0]
    assert (first, chunks, last, depth) == (key("middle", 0), 3, key("middle", 2), 3)


# --------------------------------------------------------------------------- where prefixes fork


def test_a_prefix_ends_where_its_tree_forks_and_its_branches_are_counted_from_there() -> None:
    table = new_table(16 * MIB)
    client = Client(table, PAGE)
    system, answers = chain("system", length=4), [chain("answer", n, length=2 + n) for n in range(3)]
    client.store(system)
    assert forks(counted(table), client.space) == [(system[0], 4, 4 * PAGE, system[3], 4, 4 * PAGE, 0, False)]
    client.store(answers[0], parent=system[-1])
    assert forks(counted(table), client.space) == [(system[0], 6, 6 * PAGE, answers[0][-1], 6, 6 * PAGE, 0, False)]
    for answer in answers[1:]:
        client.store(answer, parent=system[-1])
    late = chain("late", length=2)
    client.store(late, parent=answers[2][0])
    for budget in (1, 7, 1 << 30):
        assert forks(counted(table, budget), client.space) == [
            (system[0], 15, 15 * PAGE, system[3], 4, 4 * PAGE, 3, False)
        ]
    below = Census(table, below=(client.space, system[3]))
    while not below.step(5):
        pass
    assert sorted(forks(below, client.space)) == sorted([
        (answers[0][0], 2, 2 * PAGE, answers[0][1], 2, 2 * PAGE, 0, False),
        (answers[1][0], 3, 3 * PAGE, answers[1][2], 3, 3 * PAGE, 0, False),
        (answers[2][0], 6, 6 * PAGE, answers[2][0], 1, PAGE, 2, False),
    ])
    deeper = counted_below(table, client.space, answers[2][0])
    assert {one[0] for one in forks(deeper, client.space)} == {answers[2][1], late[0]}
    assert forks(counted_below(table, client.space, late[1]), client.space) == [], "nothing goes on from a last chunk"


def counted_below(table: Table, space: int, key_: bytes) -> Census:
    census = Census(table, below=(space, key_))
    while not census.step(1 << 30):
        pass
    return census


def test_what_goes_on_from_a_chunk_is_of_its_namespace_alone() -> None:
    table = new_table(16 * MIB)
    clients = [Client(table, PAGE * (1 + n), f"c{n}") for n in range(2)]
    shared = chain("shared", length=2)
    for client in clients:
        client.store(shared)
        client.store(chain("own", client.name, length=3), parent=shared[-1])
    below = counted_below(table, clients[0].space, shared[-1])
    both = [client.space for client in clients]
    assert [one[:4] for one in below.prefixes(both, 10)[0]] == [
        (clients[0].space, key("own", clients[0].name, 0), 3, 3 * clients[0].part_bytes)
    ]


def test_a_kept_chunk_keeps_the_prefixes_before_it_and_no_others() -> None:
    client, (system, kept, other) = forked("system", "kept", "other", length=2)
    table = client.table
    table.pin(client.space, kept[-1], 1 << 40)
    assert [one[-1] for one in forks(counted(table), client.space)] == [True]
    below = forks(counted_below(table, client.space, system[-1]), client.space)
    assert {one[0]: one[-1] for one in below} == {kept[0]: True, other[0]: False}


def test_branches_come_in_pages_and_each_comes_once() -> None:
    table = new_table(64 * MIB, records=8192)
    client = Client(table, PAGE)
    root = key("root")
    client.store([root])
    for number in range(2100):
        client.store([key("branch", number)], parent=root)
    below, start, seen, pages = counted_below(table, client.space, root), 0, [], 0
    while True:
        found, count, start = below.prefixes([client.space], 1000, start)
        seen += [one[1] for one in found]
        pages += 1
        assert count == 2100 and len(found) <= MOST_PREFIXES
        if not start:
            break
    assert pages == 8 and len(seen) == len(set(seen)) == 2048, "pages reach the most used ones"


def test_named_chunks_are_found_in_their_prefixes_and_searched_for() -> None:
    table = new_table(16 * MIB)
    client, other = Client(table, PAGE, "one"), Client(table, PAGE * 2, "two")
    chains = [chain("c", number, length=3) for number in range(4)]
    for keys in chains:
        client.store(keys)
    other.store(chain("theirs", length=2))
    named = [(client.space, chains[2][1]), (client.space, chains[0][0]), (client.space, key("gone"))]

    def found(**search: Any) -> set[bytes]:
        census = Census(table, named=named, **search)
        while not census.step(1):
            pass
        assert sorted(census.named()) == [(0, chains[2][0], 2), (1, chains[0][0], 1)]
        rows, count, _ = census.prefixes([client.space, other.space], 100)
        assert count == len(rows)
        return {one[1] for one in rows}

    everything = {*(keys[0] for keys in chains), key("theirs", 0)}
    assert found() == everything
    assert found(search=[]) == set()
    assert found(search=[other.space]) == {key("theirs", 0)}
    assert found(search=[], sought=1) == {chains[2][0]}
    assert found(search=[other.space], sought=2) == {chains[2][0], chains[0][0], key("theirs", 0)}
    deep = chains[3][2]
    assert found(search=[], keys=(deep[:4] + bytes(28), deep[:4] + b"\xff" * 28)) == {chains[3][0]}
