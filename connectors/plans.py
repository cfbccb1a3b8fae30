"""What the scheduler half tells the worker halves: which slots, which blocks, under which grant.

Plans are data: picklable, immutable, complete. A worker that gets one needs to ask nobody anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdock.api.schemas import Part, WritePart


@dataclass(frozen=True)
class LoadChunk:
    """One chunk to read: its parts, and the engine's blocks for its tokens, in order."""

    index: int
    """Counted from token 0 of the request."""
    parts: tuple[Part, ...]
    block_ids: tuple[int, ...]
    skip_blocks: int
    """Leading blocks the engine's own prefix cache shares: read and hashed, never written."""


@dataclass(frozen=True)
class LoadPlan:
    request_id: str
    lease: str
    local_tokens: int
    hit_tokens: int
    chunk_tokens: int
    chunks: tuple[LoadChunk, ...]


@dataclass(frozen=True)
class StoreChunk:
    index: int
    """Into the reservation's keys."""
    parts: tuple[WritePart, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StorePlan:
    request_id: str
    reservation: str
    tokens: int
    chunks: tuple[StoreChunk, ...]
