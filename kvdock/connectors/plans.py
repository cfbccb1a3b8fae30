"""What the scheduler connector sends to the worker connectors: which slots, which blocks, under which grant.

Plans are data: picklable, immutable, complete. A worker that gets one needs to ask nobody anything.
A piece is one chunk of one KV group: a part for each writer, and the engine's blocks for its tokens. A batch is what
one reservation asks the server for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvdock.connectors.interface import BlocksRead, GroupBlocks
from kvdock.protocol.schemas import Manifest, Part, WritePart
from kvdock.protocol.wire_types import MAX_STORE_KEYS


@dataclass(frozen=True)
class LoadPiece:
    chunk: int
    """Counted from token 0 of the request."""
    group: int
    parts: tuple[Part, ...]
    block_ids: tuple[int, ...]
    """In order; what stands in the place of a skipped block means nothing."""
    skip_blocks: int
    """Leading blocks the engine's own prefix cache shares, or a window has left behind: hashed, never written."""


@dataclass(frozen=True)
class LoadPlan:
    request_id: str
    lease: str
    local_tokens: int
    hit_tokens: int
    chunk_tokens: int
    pieces: tuple[LoadPiece, ...]


@dataclass(frozen=True)
class StorePiece:
    chunk: int
    """Into the reservation's keys."""
    group: int
    parts: tuple[WritePart, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StorePlan:
    request_id: str
    reservation: str
    tokens: int
    pieces: tuple[StorePiece, ...]


def valid_in_all(ranks: Iterable[int]) -> int | None:
    """Tokens of a load that are valid in every rank: the least of `ranks`. None: there are no ranks."""
    return min(ranks, default=None)


@dataclass(frozen=True)
class StoreBatch:
    """Neighbouring chunks of which the engine has the same groups: what one reservation can hold."""

    store_id: str
    groups: tuple[int, ...]
    first: int
    """Which chunk of the request it begins with."""
    parent: bytes | None
    keys: tuple[bytes, ...]
    block_ids: tuple[tuple[tuple[int, ...], ...], ...] = field(repr=False)
    """Per key and group."""


# --------------------------------------------------------------------------------
# Cuts the chunks that a request stores into batches: what one reservation asks the server for.

LAST_STORE_KEYS = 32
"""What a request stores when it ends is cut so: where one of its blocks is given to another request, all of a store is
lost."""


class Batches:
    """`member`: the engine's, which names its stores."""

    def __init__(self, manifest: Manifest, member: str) -> None:
        self._per_chunk = [manifest.chunk_tokens // size for size in manifest.block_sizes]
        self._full = {at for at, group in enumerate(manifest.groups) if group.kind == "full"}
        self._member = member
        self._made = 0

    def of(
        self, keys: Sequence[bytes], block_ids: GroupBlocks, first: int, end: int, at_most: int = MAX_STORE_KEYS, *,
        parent: bytes | None = None,
    ) -> tuple[StoreBatch, ...]:
        """Chunks [first, end) of a chain whose first key has `parent`, cut where the groups of which the engine still
        has all blocks change, and behind every `at_most` of them. They end where a block of full attention is missing.
        """
        return tuple(self._cut(keys, block_ids, first, end, at_most, parent))

    def _cut(
        self, keys: Sequence[bytes], block_ids: GroupBlocks, first: int, end: int, at_most: int, parent: bytes | None
    ) -> Iterator[StoreBatch]:
        chunks: list[dict[int, tuple[int, ...]]] = []
        for chunk in range(first, end):
            whole: dict[int, tuple[int, ...]] = {}
            for group, (column, count) in enumerate(zip(block_ids, self._per_chunk, strict=True)):
                blocks = tuple(block for block in column[chunk * count : (chunk + 1) * count] if block is not None)
                if len(blocks) == count:
                    whole[group] = blocks
            chunks.append(whole)
        kinds = groupby(enumerate(chunks, first), key=lambda one: ((one[0] - first) // at_most, tuple(one[1])))
        for (_, groups), run in kinds:
            if not self._full <= set(groups):
                return  # of no use without all of full attention, and neither is what follows it
            members = list(run)
            begin, stop = members[0][0], members[-1][0] + 1
            self._made += 1
            yield StoreBatch(
                f"{self._member}-{self._made}", groups, begin, keys[begin - 1] if begin else parent,
                tuple(keys[begin:stop]), tuple(tuple(blocks.values()) for _, blocks in members),
            )

    def blocks_read(self, batches: Sequence[StoreBatch]) -> BlocksRead:
        """By group."""
        reads: list[list[int]] = [[] for _ in self._per_chunk]
        for batch in batches:
            for of_chunk in batch.block_ids:
                for group, blocks in zip(batch.groups, of_chunk, strict=True):
                    reads[group] += blocks
        return tuple(tuple(blocks) for blocks in reads)
