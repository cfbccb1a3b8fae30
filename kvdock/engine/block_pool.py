"""Which KV blocks are held, and which hold a known prefix.

A block's reference count is the number of its holders: each request whose table names it, and each store of
the connector that reads it. Invariants (check_integrity):
- a block is in the free queue exactly when it has no holder: free + held = all;
- `cached` maps a name to one block, and that block carries that name;
- a block gets its name only when its whole content is valid, and loses it before it is written again.
The free queue is in order of release, so an allocation takes the least recently used block, and its name is
forgotten. A free block that has a name is evictable: it counts as free until a hit holds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Name: TypeAlias = tuple[int, bytes]
"""(KV group, chain hash): the KV of the same tokens differs from group to group."""


class OutOfBlocks(RuntimeError):
    """There are fewer free blocks than asked for; nothing was allocated."""


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
        """How many free blocks hold a known prefix."""
        return sum(self.references[block] == 0 for block in self.cached.values())

    def room_beside(self, blocks: Iterable[int]) -> int:
        """How many blocks could still be allocated if `blocks`, free or not, were held."""
        return len(self.free) - sum(block in self.free for block in set(blocks))

    def touch(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block; a free one leaves the queue and keeps its content."""
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder and no known content. Raises OutOfBlocks."""
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
        """Takes a holder from each. The last block is queued first, so a prefix is evicted after what follows it."""
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} released more often than held"
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None

    def register(self, block: int, name: Name) -> None:
        """Notes that `block` holds valid KV of `name`. A name that has a block already keeps it."""
        assert self.references[block] > 0, f"block {block} registered while free"
        if self.names[block] is None and name not in self.cached:
            self.cached[name] = block
            self.names[block] = name

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """AssertionError unless the conservation laws hold; `holders` is every list of blocks held now."""
        held = Counter(block for blocks in holders for block in blocks)
        counted = {block: count for block, count in enumerate(self.references) if count}
        assert counted == dict(held), f"references: found {counted}, wanted {dict(held)}"
        assert not self.free.keys() & held.keys(), "a held block is in the free queue"
        assert len(self.free) + len(held) == self.num_blocks, "a block is neither free nor held"
        named = {name: block for block, name in enumerate(self.names) if name is not None}
        assert named == self.cached, "cached prefixes and blocks' names differ"
