"""Tracks which requests hold which KV blocks, and which blocks have a known prefix.

BlockPool manages single blocks. The reference count of a block is the number of its holders: each request whose table
names it, and each store of the connector that reads it. The free queue is in order of release, so an allocation takes
the least recently used block, which loses its name. A free block that has a name is evictable: it counts as free until
a hit holds it.

BlockManager has the block tables of requests, one list of blocks for each KV group, over one pool that all groups
share. table[g][i] is the block with tokens [i * block_tokens, (i + 1) * block_tokens) of group g, or None if the group
no longer needs it (config.py has the rule). All lists of a table have the same length.

A request with local hits is allocated in two phases: first every group touches its hits, then every group allocates.
If each group did both in turn, one group could be given the block of another group's hit, which is free until it is
touched, and one physical block would serve both.

Invariants (`check_integrity` of both):
- a block is in the free queue exactly when it has no holder: free + held = all;
- `cached` maps a name to one block, and that block carries that name;
- a block gets its name only when its whole content is valid, and loses it before it is written again;
- no block is in two groups or at two indices; two tables share a block only if it has a name;
- only blocks that a group no longer needs are None.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from kvdock.engine.config import GroupKind, first_needed, most_blocks

Name: TypeAlias = tuple[int, bytes]
"""(KV group, chain hash): the KV of the same tokens differs from group to group."""


class OutOfBlocks(RuntimeError):
    """There are not enough free blocks; nothing was allocated."""


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """16 bytes that name a full block and all blocks before it; the first block's parent is b''."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.names: list[Name | None] = [None] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[Name, int] = {}

    @property
    def evictable(self) -> int:
        """The number of free blocks that hold a known prefix."""
        return sum(self.references[block] == 0 for block in self.cached.values())

    def room_beside(self, blocks: Iterable[int]) -> int:
        """The number of blocks that could still be allocated if `blocks`, free or not, were held."""
        return len(self.free) - sum(block in self.free for block in set(blocks))

    def touch(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block; a free block leaves the queue and keeps its content."""
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one holder and no name. Raises OutOfBlocks."""
        if count > len(self.free):
            raise OutOfBlocks(f"blocks: found {len(self.free)} free, wanted {count}")
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.references[block] = 1
            old = self.names[block]
            if old is not None:
                del self.cached[old]
                self.names[block] = None
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder from each block. The last block is queued first, so a block is evicted after those that
        follow it in its prefix."""
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} released more often than held"
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None

    def register(self, block: int, name: Name) -> None:
        """Records that `block` holds the valid KV of `name`. A name that has a block already keeps it."""
        assert self.references[block] > 0, f"block {block} registered while free"
        if self.names[block] is None and name not in self.cached:
            self.cached[name] = block
            self.names[block] = name

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the invariants hold. `holders`: all lists of blocks that are held now."""
        held = Counter(block for blocks in holders for block in blocks)
        counted = {block: count for block, count in enumerate(self.references) if count}
        assert counted == dict(held), f"references: found {counted}, wanted {dict(held)}"
        assert not self.free.keys() & held.keys(), "a held block is in the free queue"
        assert len(self.free) + len(held) == self.num_blocks, "a block is neither free nor held"
        named = {name: block for block, name in enumerate(self.names) if name is not None}
        assert named == self.cached, "cached prefixes and blocks' names differ"


Table: TypeAlias = list[list[int | None]]
"""For each group, its blocks. []: no blocks."""


@dataclass(frozen=True)
class Hit:
    """A cached prefix of `length` blocks: for each group its blocks, None for those that the group does not need."""

    length: int
    blocks: tuple[tuple[int | None, ...], ...]


class BlockManager:
    def __init__(
        self, kinds: Sequence[GroupKind], num_blocks: int, block_tokens: int, *, step_tokens: int
    ) -> None:
        """`step_tokens`: the most tokens that a request computes in one step."""
        self.pool = BlockPool(num_blocks)
        self.kinds, self.block_tokens = tuple(kinds), block_tokens
        self._step_tokens = step_tokens

    # ------------------------------------------------------------------ the prefix cache

    def match(self, hashes: Sequence[bytes]) -> Hit:
        """The longest prefix of `hashes` for which every group has the blocks that it needs. Changes nothing."""
        found = [[self.pool.cached.get((g, name)) for name in hashes] for g in range(len(self.kinds))]
        runs = [_runs(column) for column in found]
        for length in range(len(hashes), 0, -1):
            firsts = [self._first_block(kind, length * self.block_tokens) for kind in self.kinds]
            if all(run[length - 1] >= length - first for run, first in zip(runs, firsts, strict=True)):
                needed = [
                    (None,) * first + tuple(column[first:length]) for column, first in zip(found, firsts, strict=True)
                ]
                return Hit(length, tuple(needed))
        return Hit(0, tuple(() for _ in self.kinds))

    def register(self, table: Table, hashes: Sequence[bytes], begin: int) -> None:
        """Adds blocks [begin, len(hashes)) of the table, which are full and valid, to the prefix cache."""
        for group, column in enumerate(table):
            for index in range(begin, len(hashes)):
                block = column[index]
                if block is not None:
                    self.pool.register(block, (group, hashes[index]))

    # ------------------------------------------------------------------ tables

    def fits(self, hit: Hit, tokens: int) -> bool:
        """Whether there are enough blocks for a request of `tokens` tokens that begins with `hit`, without taking
        blocks from other requests."""
        pages = self.pages(tokens)
        wanted = sum(
            min(pages - hit.length, most_blocks(kind, tokens, self._step_tokens, self.block_tokens))
            for kind in self.kinds
        )
        return wanted <= self.pool.room_beside(held(hit.blocks))

    def admit(self, hit: Hit, hit_tokens: int, end: int) -> Table:
        """A table for [0, end), of which [0, hit_tokens) need not be computed. It has the blocks of `hit` that a prefix
        of hit_tokens needs; the other blocks are fresh. Raises OutOfBlocks, and then changes nothing."""
        firsts = [self._first_block(kind, hit_tokens) for kind in self.kinds]
        kept = [blocks[first:] for blocks, first in zip(hit.blocks, firsts, strict=True)]
        fresh = [self.pages(end) - max(first, hit.length) for first in firsts]
        room = self.pool.room_beside(held(kept))
        if sum(fresh) > room:
            raise OutOfBlocks(f"blocks: found room for {room}, wanted {sum(fresh)}")
        table: Table = [[None] * max(first, hit.length) for first in firsts]
        for phase, g in self._turns():
            if phase == 0:
                self.pool.touch(held([kept[g]]))
                table[g][firsts[g] : hit.length] = kept[g]
            else:
                table[g] += self.pool.allocate(fresh[g])
        return table

    def _turns(self) -> Iterable[tuple[int, int]]:
        """All (phase, group). In phase 0 each group touches its hits; then, in phase 1, each group allocates."""
        return product((0, 1), range(len(self.kinds)))

    def lacking(self, table: Table, end: int) -> int:
        """The number of free blocks that are missing to grow `table` to [0, end); 0 or less: none."""
        return len(table) * (self.pages(end) - len(table[0])) - len(self.pool.free)

    def grow(self, table: Table, end: int) -> None:
        """Appends fresh blocks to a running request's table. Raises OutOfBlocks, and then changes nothing."""
        lacking, missing = self.lacking(table, end), self.pages(end) - len(table[0])
        if missing > 0 and lacking > 0:
            raise OutOfBlocks(f"blocks: found {lacking} too few, wanted {missing} for each of {len(table)} groups")
        for column in table if missing > 0 else ():
            column += self.pool.allocate(missing)

    def leave_behind(self, table: Table, computed: int) -> None:
        """Releases the blocks that their group no longer needs once `computed` tokens are computed."""
        for kind, column in zip(self.kinds, table, strict=True):
            index = self._first_block(kind, computed)
            while index > 0 and (block := column[index - 1]) is not None:
                index -= 1
                column[index] = None
                self.pool.release([block])

    def holds(self, table: Table, tokens: int) -> bool:
        """Whether the list of every group has all blocks from the first that is needed to compute from `tokens` on."""
        return all(
            None not in column[self._first_block(kind, tokens) :]
            for kind, column in zip(self.kinds, table, strict=True)
        )

    def release(self, table: Table) -> None:
        """Releases all blocks; in every group, the blocks of the last tokens first."""
        self.pool.release([block for row in zip(*table, strict=True) for block in row if block is not None])

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def check_integrity(self, tables: Sequence[tuple[Table, int]], others: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless tables and pool agree. Each table comes with the number of its tokens that are
        computed or being loaded; `others` are all other lists of held blocks."""
        seen: dict[int, tuple[int, int]] = {}
        for table, computed in tables:
            assert len({len(column) for column in table}) <= 1, "lists of a table differ in length"
            assert not table or self.holds(table, computed), "a block is missing"
            for group, column in enumerate(table):
                for index, block in enumerate(column):
                    if block is None:
                        continue
                    before = seen.setdefault(block, (group, index))
                    assert before == (group, index), f"block {block}: found at {(group, index)} and at {before}"
        holders = Counter(block for table, _ in tables for block in held(table))
        nameless = [block for block, count in holders.items() if count > 1 and self.pool.names[block] is None]
        assert not nameless, f"tables share blocks {nameless} that have no name"
        self.pool.check_integrity([*(held(table) for table, _ in tables), *others])

    def _first_block(self, kind: GroupKind, tokens: int) -> int:
        """The index of the first block that is needed to continue after `tokens`."""
        return first_needed(kind, tokens) // self.block_tokens


def held(columns: Iterable[Iterable[int | None]]) -> list[int]:
    """All blocks of a table or a hit."""
    return [block for column in columns for block in column if block is not None]


def _runs(column: Sequence[int | None]) -> list[int]:
    """For each index, the number of blocks without a gap that end there."""
    runs, run = [], 0
    for block in column:
        run = 0 if block is None else run + 1
        runs.append(run)
    return runs
