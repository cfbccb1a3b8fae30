"""The arrays in which a load is described, against the same in plain Python."""

from __future__ import annotations

import pickle
import random
from array import array
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from kvdock import _core
from kvdock.connectors.plans import Chunks, LoadPiece, LoadPlan, Pieces, column_of
from kvdock.datapath.copy import DescribedParts, PartCopy
from kvdock.datapath.errors import CopyError
from kvdock.protocol.schemas import Part

SEGMENTS = [(3, 1 << 20, 1 << 16), (5, 1 << 24, 1 << 16)]
LENGTH = 256
PRIME = _core.CHECKSUM_PRIME


def part(group: int, writer: int, number: int) -> Part:
    return Part(group, writer, SEGMENTS[number % 2][0], number * LENGTH, LENGTH, 10**15 + number)


def pieces_of(
    chunks: Sequence[Sequence[Part]], first: int, end: int, columns: Sequence[Sequence[int | None]],
    per_chunk: Sequence[int], local: Sequence[int],
) -> Iterator[LoadPiece]:
    """A piece for each chunk and group that has a block to load."""
    for at, parts in enumerate(chunks[: end - first]):
        for group, column in enumerate(columns):
            begin = (first + at) * per_chunk[group]
            blocks = column[begin : begin + per_chunk[group]]
            wanted = [block for block in blocks[max(0, local[group] - begin) :] if block is not None]
            if wanted:
                skip = per_chunk[group] - len(wanted)
                mine = tuple(one for one in parts if one.group == group)
                yield LoadPiece(first + at, group, mine, (*[0] * skip, *wanted), skip)


def test_parts_of_an_answer_are_read_as_msgspec_reads_them() -> None:
    source = random.Random(2)
    sizes = [0, 1, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1]

    def any_part() -> Part:
        group, writer, segment, offset, length = (source.choice(sizes) for _ in range(5))
        return Part(group, writer, segment, offset, length, source.randrange(source.choice([2, PRIME])))

    for count in (0, 1, 15, 16, 70_000):
        most = 3 if count < 100 else 1
        chunks = [[any_part() for _ in range(source.choice([0, 1, most]))] for _ in range(count)]
        found = Chunks.of_packed(msgspec.msgpack.encode(chunks))
        assert [*found] == chunks and len(found) == count
    many = [[part(0, 0, number) for number in range(70_000)]]
    assert [*Chunks.of_packed(msgspec.msgpack.encode(many))] == many


WHOLE = msgspec.msgpack.encode([[part(1, 0, 3), part(0, 1, 70_000)], [part(0, 0, 5)]])
NO_PARTS: list[object] = [
    None, 3, {}, [3], [[3]], [[[1, 2, 3, 4, 5]]], [[[1, 2, 3, 4, 5, 6, 7]]], [[[1, 2, 3, 4, 5, "06"]]],
    [[[1, 0, 3, 0, 1, PRIME]]], [[[-1, 0, 3, 0, 1, 2]]], [[[1 << 63, 0, 3, 0, 1, 2]]], [[[1, 0, 3, 0, 1, 2.0]]],
    [[[1, 0, 3, 0, None, 2]]],
]


@pytest.mark.parametrize("other", [
    *(WHOLE[:end] for end in range(len(WHOLE))), WHOLE + b"\0", *map(msgspec.msgpack.encode, NO_PARTS),
    b"\xdd\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff" + b"\x90" * 9,
])
def test_other_bytes_are_no_parts(other: bytes) -> None:
    with pytest.raises(ValueError, match=f"parts: found {len(other)} other bytes, wanted MessagePack"):
        Chunks.of_packed(other)


def test_pieces_are_cut_as_in_plain_python() -> None:
    source = random.Random(1)
    for _ in range(200):
        groups, first, count = source.randrange(1, 4), source.randrange(3), source.randrange(1, 6)
        per_chunk = [source.choice([1, 2, 4]) for _ in range(groups)]
        chunks = [
            [part(group, writer, source.randrange(200)) for group in range(groups) for writer in range(2)
             if source.random() < 0.9]
            for _ in range(count)
        ]
        end = first + source.randrange(count + 1)
        columns: list[list[int | None]] = []
        for group in range(groups):
            gone = source.randrange(end * per_chunk[group] + 1)
            columns.append([None] * gone + [source.randrange(99) for _ in range(end * per_chunk[group] - gone)])
        local = [source.randrange(end + 1) * size for size in per_chunk]
        wanted = tuple(pieces_of(chunks, first, end, columns, per_chunk, local))
        found = Pieces(Chunks.of(chunks).arrays.pieces(first, end, [*map(column_of, columns)], per_chunk, local))
        assert tuple(found) == wanted == tuple(Pieces.of(wanted)) == tuple(pickle.loads(pickle.dumps(found)))
        assert found.arrays.complete() is all(piece.parts for piece in wanted)
        assert found.arrays.counts(groups) == [
            sum(piece.group == group for piece in wanted) for group in range(groups)
        ]
        assert [list(parts) for parts in Chunks.of(chunks)] == chunks


def plan(count: int, **how: int) -> LoadPlan:
    pieces = [
        LoadPiece(chunk, group, tuple(part(group, writer, 8 * chunk + 4 * group + writer) for writer in range(2)),
                  (chunk, chunk), how.get("skip", 0))
        for chunk in range(count) for group in range(2)
    ]
    return LoadPlan("r", "lease", 0, 64 * count, 64, pieces)


def test_a_copier_gets_the_parts_of_one_group_and_writer_with_the_engines_pages() -> None:
    """Group 1 has the last two pages alone."""
    pages = [array("q", [70, 71, 72, 73]), array("q", [81, 82])]
    with pytest.raises(CopyError, match=r"page of group 1: found 0, wanted one of the last 2 of 4"):
        plan(4).arrays.placed(pages, 4)
    placed = plan(4, skip=1).arrays.placed([pages[0], array("q", [80, *pages[1], 83])], 4)
    assert placed.segments(1, 1) == [5] and placed.segments(1, 0) == [3] and placed.segments(0, 2) == []
    *described, chunks = placed.described(1, 1, 1, 4, 2, [LENGTH, 99], SEGMENTS)
    copies = DescribedParts.of(*described).copies()
    assert memoryview(chunks).cast("q").tolist() == [1, 2, 3]
    assert copies == [
        PartCopy((1 << 24) + number * LENGTH, [chunk, page], 1, 10**15 + number, LENGTH)
        for chunk, page, number in ((1, 81, 13), (2, 82, 21), (3, 83, 29))
    ]


@pytest.mark.parametrize(("group", "writer", "blocks", "lengths", "segments", "said"), [
    (0, 2, 2, [LENGTH], SEGMENTS, "part of group 0 by writer 2: found none, wanted 256 bytes"),
    (1, 0, 2, [8, 16], SEGMENTS, "part of group 1 by writer 0: found 256 bytes, wanted 8 or 16 bytes"),
    (0, 0, 4, [LENGTH], SEGMENTS, "blocks for a part of group 0: found 2, wanted 4"),
    (0, 0, 2, [LENGTH], SEGMENTS[1:], "segment of a part: found 3, wanted one that is mapped"),
    (0, 0, 2, [LENGTH], [(3, 0, 2304), SEGMENTS[1]],
     "end of a part in segment 3: found 4352, wanted at most 2304"),
])
def test_parts_that_are_not_as_they_must_be_are_refused(
    group: int, writer: int, blocks: int, lengths: list[int], segments: list[tuple[int, int, int]], said: str
) -> None:
    with pytest.raises(CopyError, match=said):
        plan(3).arrays.described(group, writer, 0, 3, blocks, lengths, segments)


def test_trust_is_counted_in_bytes_and_in_parts() -> None:
    for most_bytes, most_parts in ((3 * LENGTH, 99), (1 << 30, 3)):
        trusted = _core.TrustedParts(most_bytes, most_parts)
        trusted.add_pieces(plan(1).arrays, 5.0)
        assert len(trusted) == 3
        found = trusted.others(Chunks.of([plan(1).pieces[0].parts, plan(1).pieces[1].parts]).arrays, 4.0)
        assert [(chunk, Part(*row)) for chunk, row in found] == [(0, part(0, 0, 0))], "the first one was forgotten"
        assert len(trusted.others(Chunks.of([plan(1).pieces[1].parts]).arrays, 5.0)) == 2, "added no later than that"
        both, second = (Chunks.of([piece.parts for piece in plan(1).pieces[first:2]]).arrays for first in (0, 1))
        assert [trusted.has_all(second, 4.0), trusted.has_all(second, 5.0), trusted.has_all(both, 4.0)] == [
            True, False, False
        ]
