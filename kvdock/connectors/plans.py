"""What the scheduler connector sends to the worker connectors: which slots, which blocks, under which grant.

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
    """In order; the ids in place of skipped blocks mean nothing."""
    skip_blocks: int
    """How many of the first blocks are hashed and not written: other requests share them, or a window has left them."""


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
