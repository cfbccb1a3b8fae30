"""What the scheduler connector sends to the worker connectors: the slots, the blocks and the grant of a load or a
store.

Plans are data: picklable, immutable, complete. A worker needs nothing else to carry one out.
A piece is one chunk of one KV group: a part for each writer, and the engine's blocks for its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvdock.protocol.schemas import Part, WritePart


@dataclass(frozen=True)
class LoadPiece:
    chunk: int
    """Counted from token 0 of the request."""
    group: int
    parts: tuple[Part, ...]
    block_ids: tuple[int, ...]
    """In the order of their tokens; the first `skip_blocks` ids have no meaning."""
    skip_blocks: int
    """How many blocks at the start are hashed in the slot and not written: other requests share them, or a window has
    left them behind."""


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
    """An index into the reservation's keys."""
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
    """How many tokens of a load are valid on every rank: the least of `ranks`, the numbers of the ranks. None: there
    are no ranks."""
    return min(ranks, default=None)
