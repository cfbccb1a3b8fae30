"""What the scheduler connector sends to the worker connectors: the slots, the blocks and the grant of a load or a
store.

Plans are data: picklable, immutable, complete. A worker needs nothing else to carry one out.
A piece is one chunk of one KV group: a part for each writer, and the engine's blocks for its tokens.

From the answer to a lookup to the copier, a load is described by arrays of the native core (Chunks, Pieces), because
Python objects for each page would cost the engine's thread milliseconds. Both are sequences that make such objects for
those who ask for single chunks or pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import msgspec

from kvdock import _core
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


class Pieces(Sequence[LoadPiece]):
    """The pieces of a load in arrays."""

    def __init__(self, arrays: _core.LoadPieces) -> None:
        self.arrays = arrays

    @classmethod
    def of(cls, pieces: Sequence[LoadPiece]) -> Pieces:
        if isinstance(pieces, Pieces):
            return pieces
        return cls(_core.LoadPieces([
            (piece.chunk, piece.group, _rows(piece.parts), list(piece.block_ids), piece.skip_blocks)
            for piece in pieces
        ]))

    @classmethod
    def _of_state(cls, state: tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]) -> Pieces:
        return cls(_core.LoadPieces.of_state(state))

    def __reduce__(self) -> tuple[object, ...]:
        return Pieces._of_state, (self.arrays.state(),)

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, at: int) -> LoadPiece: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[LoadPiece]: ...

    def __getitem__(self, at: int | slice) -> LoadPiece | Sequence[LoadPiece]:
        if isinstance(at, slice):
            return tuple(self[one] for one in range(*at.indices(len(self))))
        chunk, group, parts, block_ids, skip = self.arrays.piece(at)
        return LoadPiece(chunk, group, tuple(Part(*row) for row in parts), tuple(block_ids), skip)


class Chunks(Sequence[list[Part]]):
    """The parts of the chunks of an answer, in arrays."""

    def __init__(self, arrays: _core.PartTable) -> None:
        self.arrays = arrays

    @classmethod
    def of(cls, chunks: Sequence[Sequence[Part]]) -> Chunks:
        if isinstance(chunks, Chunks):
            return chunks
        return cls(_core.PartTable([_rows(parts) for parts in chunks]))

    @classmethod
    def of_packed(cls, packed: bytes) -> Chunks:
        """From the MessagePack of an answer. Raises ValueError for bytes that are no parts."""
        return cls(_core.PartTable.of_msgpack(packed))

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, at: int) -> list[Part]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[list[Part]]: ...

    def __getitem__(self, at: int | slice) -> list[Part] | Sequence[list[Part]]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        return [Part(*row) for row in self.arrays.chunk(at)]


def column_of(blocks: Sequence[int | None]) -> array[int]:
    """A list of blocks (interface.py) as int64, with -1 in place of None."""
    if isinstance(blocks, array):
        return blocks
    if None in blocks:
        return array("q", [-1 if block is None else block for block in blocks])
    return array("q", blocks)  # type: ignore[arg-type]  # None is not among them


PartRow: TypeAlias = tuple[int, int, int, int, int, int | str]
"""The fields of a Part, as the native core takes them."""


def row_of(part: Part) -> PartRow:
    row: PartRow = msgspec.structs.astuple(part)
    return row


def _rows(parts: Iterable[Part]) -> list[PartRow]:
    return [row_of(part) for part in parts]


@dataclass(frozen=True)
class LoadPlan:
    request_id: str
    lease: str
    local_tokens: int
    hit_tokens: int
    chunk_tokens: int
    pieces: Sequence[LoadPiece]

    @property
    def arrays(self) -> _core.LoadPieces:
        """The pieces as arrays."""
        return Pieces.of(self.pieces).arrays


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
