"""Which chunk goes, under LRU, compared with a model that looks at every chunk each time: by priority and last use,
leaves only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import CONVERSATION_ENDED

ROOM = 2000
"""Chunks: more than are stored, so that only evict() takes any."""


@dataclass
class Stored:
    parent: bytes
    used: int
    priority: int = 0


class Model:
    def __init__(self) -> None:
        self.chunks: dict[bytes, Stored] = {}

    def children(self, one: bytes) -> int:
        return sum(other.parent == one for other in self.chunks.values())

    def path(self, one: bytes) -> Iterator[Stored]:
        while one in self.chunks:
            yield self.chunks[one]
            one = self.chunks[one].parent

    def name(self, chunk: Stored, tick: int) -> None:
        chunk.used, chunk.priority = tick, max(0, chunk.priority)

    def look_up(self, keys: list[bytes], tick: int) -> None:
        for one in keys:
            if one not in self.chunks:
                return
            self.name(self.chunks[one], tick)

    def store(self, keys: list[bytes], parent: bytes, tick: int) -> None:
        for above in self.path(parent):
            self.name(above, tick)
        for at, one in enumerate(keys):
            new = Stored(keys[at - 1] if at else parent, tick)
            if one in self.chunks:
                new.priority = max(0, self.chunks[one].priority)
            self.chunks[one] = new

    def lower(self, keys: list[bytes], priority: int) -> None:
        own = 0
        for one in reversed(keys):
            if self.children(one) > own:
                return
            own = int(one in self.chunks)
            if own:
                self.chunks[one].priority = priority

    def retain(self, keys: list[bytes], priority: int) -> None:
        for one in keys:
            if one not in self.chunks:
                return
            chunk = self.chunks[one]
            above = self.chunks[chunk.parent].priority if chunk.parent else priority
            if above > 0:
                chunk.priority = max(chunk.priority, min(priority, above))

    def least(self) -> set[bytes]:
        """Those of which one goes next."""
        leaves = {
            one: (chunk.priority, chunk.used) for one, chunk in self.chunks.items() if not self.children(one)
        }
        return {one for one, place in leaves.items() if place == min(leaves.values())}


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_is_what_the_model_says(seed: int) -> None:
    source, engine, model, tick = random.Random(seed), Client(new_table(ROOM * PAGE), PAGE), Model(), 0
    engine.table.set_eviction("lru")
    for step in range(400):
        trunk = source.randrange(3)
        branch = trunk, source.randrange(3)
        keys = [key("chunk", name, at) for name in (trunk, branch) for at in range(5)][: source.randrange(1, 11)]
        kind = source.choices(("look up", "store", "lower", "retain", "evict"), (2, 4, 1, 1, 2))[0]
        if kind == "look up":
            tick += len(keys)
            model.look_up(keys, tick)
            if lease := engine.lookup(keys, step).lease:
                engine.table.release(engine.session, lease, [0])
        elif kind == "store":
            tick += 1
            first = source.randrange(len(keys))
            parent = keys[first - 1] if first else b""
            model.store(keys[first:], parent, tick)
            engine.store(keys[first:], parent)
        elif kind == "lower":
            priority = source.choice((-3, -1, 0, CONVERSATION_ENDED))
            model.lower(keys, priority)
            engine.table.lower(engine.space, b"".join(keys), priority)
        elif kind == "retain":
            priority = source.randrange(1, 4)
            model.retain(keys, priority)
            engine.table.retain(engine.space, b"".join(keys), priority, 1 << 40)
        else:
            for _ in range(source.randrange(1, 9)):
                least = model.least()
                assert engine.table.evict(ROOM * PAGE, 1) == (1 if least else 0)
                gone = {one for one in model.chunks if not engine.has(one)}
                assert gone <= least and len(gone) == min(1, len(least)), (step, gone, least)
                for one in gone:
                    del model.chunks[one]
        assert all(map(engine.has, model.chunks))
    engine.table.check_integrity()
