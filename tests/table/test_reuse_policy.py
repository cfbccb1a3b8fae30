"""What the adaptive policy evicts, and in which order, compared with what each chunk is worth by the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from reuse_reference import ReuseReference
from table_helpers import PAGE, Client, key, new_table

ROOM = 1000
"""Chunks: more than are stored, so that only evict() takes any."""
SEEN = 1 + 1e-9
"""Sums are made in another order here."""


class Rig:
    """The table and the reference, told the same."""

    def __init__(self) -> None:
        self.engine = Client(new_table(ROOM * PAGE), PAGE)
        self.engine.table.set_eviction("adaptive")
        self.model = ReuseReference()
        self._requests = 0

    def look_up(self, *keys: bytes) -> None:
        self._requests += 1
        lease = self.engine.lookup(list(keys), self._requests).lease
        if lease:
            self.engine.table.release(self.engine.session, lease, [0])
        self.model.look_up(list(keys))

    def store(self, one: bytes, parent: bytes = b"") -> None:
        assert self.engine.store([one], parent) == 1
        self.model.store(one, parent)

    def told(self) -> list[bytes]:
        """All leaves, those first that are evicted next."""
        keys = self.engine.table.next_out(ROOM * PAGE)[self.engine.space]
        leaves = set(self.model.leaves())
        return [one for at in range(0, len(keys), 32) if (one := keys[at : at + 32]) in leaves]

    def evicted(self) -> bytes:
        """The next one, which is gone now."""
        before = list(self.model.chunks)
        assert self.engine.table.evict(1 << 40, 1) == 1
        gone, = (one for one in before if not self.engine.has(one))
        return gone


def periods(rig: Rig, seed: int) -> None:
    """Chunks with periods of their own, from a few ticks to more than the pool has chunks; some have a child that is
    stored late, and some are asked for no more after a while."""
    source = random.Random(seed)
    due = [(source.randrange(400), key(seed, number), int(4 * 2 ** source.uniform(0, 8))) for number in range(180)]
    followed = set[bytes]()
    ends = {one: source.randrange(1500, 9000) for _, one, _ in due}
    for _ in range(1400):
        at, one, period = min(due)
        due.remove((at, one, period))
        if at > ends[one]:
            due.append((1 << 40, one, period))
            continue
        due.append((at + max(1, int(period * source.uniform(0.7, 1.4))), one, period))
        if one not in rig.model.chunks:
            rig.look_up(one)
            rig.store(one)
        elif one not in followed and source.random() < 0.05:
            followed.add(one)
            rig.store(key("child", one), one)
        else:
            for _ in range(source.choice((1, 1, 1, 2))):  # twice at once counts as one use
                rig.look_up(one, *([key("child", one)] if one in followed else []))


def twice(rig: Rig, seed: int) -> None:
    """Each chunk comes back at once, and again much later: between the two it is worth less than before and after."""
    source = random.Random(seed)
    due = [(source.randrange(900), key(seed, number), 0) for number in range(300)]
    for _ in range(3000):
        at, one, uses = min(due)
        due.remove((at, one, uses))
        due.append((at + (source.randrange(300, 900) if uses % 2 else source.randrange(2, 6)), one, uses + 1))
        rig.look_up(one)
        if one not in rig.model.chunks:
            rig.store(one)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lived", [periods, twice])
def test_what_is_worth_least_goes_first(lived: Callable[[Rig, int], None], seed: int) -> None:
    rig = Rig()
    lived(rig, seed)
    worths = [rig.model.worth_of(one) for one in rig.told()]
    assert len(worths) > 60 and len(set(worths)) > 50
    assert all(first <= second * SEEN for first, second in pairwise(worths))
    for number in range(len(rig.model.chunks)):
        least = min(map(rig.model.worth_of, rig.model.leaves()))
        gone = rig.evicted()
        assert gone in rig.model.leaves() and rig.model.worth_of(gone) <= least * SEEN, number
        rig.model.evict(gone)
    rig.engine.table.check_integrity()


# --------------------------------------------------------------------------- what it remembers of chunks that are gone

GROUP = 400


def group(name: str) -> list[bytes]:
    return [key(name, number) for number in range(GROUP)]


def used_at_a_distance(engine: Client, keys: list[bytes]) -> None:
    """Stores each, and finds each three times, as many chunks apart as there are."""
    for turn in range(4):
        for number, one in enumerate(keys):
            lease = engine.lookup([one], (keys[0], turn, number)).lease
            if lease:
                engine.table.release(engine.session, lease, [0])
            else:
                assert engine.store([one]) == 1


def out_of_turn(engine: Client, keys: list[bytes]) -> int:
    """Stores each with a new chunk behind it, and evicts all: how many did not go between the new ones beside them."""
    new = group("new")
    for one, other in zip(keys, new, strict=True):
        assert engine.store([one]) == engine.store([other]) == 1
    left, place = {*keys, *new}, dict[bytes, int]()
    while left:
        assert engine.table.evict(1 << 40, 1) == 1
        gone, = (one for one in left if not engine.has(one))
        left.remove(gone)
        place[gone] = len(place)
    beside = ((keys[at], sorted((place[new[at - 1]], place[new[at]]))) for at in range(1, GROUP))
    return sum(not before < place[one] < behind for one, (before, behind) in beside)


def test_gaps_are_remembered_longer_than_the_pool_holds_chunks() -> None:
    """Those of one name in eight."""
    engine = Client(new_table(ROOM * PAGE), PAGE)
    engine.table.set_eviction("adaptive")
    for name in ("old", "b", "c", "d", "e", "f"):
        used_at_a_distance(engine, group(name))
        assert engine.table.evict(1 << 40, GROUP) == GROUP
    assert out_of_turn(engine, group("old")) > GROUP / 32


def test_what_was_deleted_after_it_came_back_is_new() -> None:
    engine = Client(new_table(ROOM * PAGE), PAGE)
    engine.table.set_eviction("adaptive")
    old = group("old")
    used_at_a_distance(engine, old)
    assert engine.table.evict(1 << 40, GROUP) == GROUP
    for one in old:
        assert engine.store([one]) == 1
    assert engine.table.delete(engine.space, b"".join(old)) == GROUP
    assert out_of_turn(engine, old) < GROUP / 32
