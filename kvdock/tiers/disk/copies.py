"""Copies parts that get a second chance from a segment that is emptied to the next one. Small ones share calls: what
follows one another in the old segment is read by one, and what does in the new one is written by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvdock.tiers.disk.io import MOST_RUN, PIECE_BYTES, Io, Transfer
from kvdock.tiers.disk.log import (
    RECORD_HEAD_BYTES,
    Entry,
    Extent,
    Kind,
    follows,
    name_of,
    read_record,
    record_block,
    record_bytes,
    record_head,
)
from kvdock.tiers.record import Record, RecordError
from kvdock.tiers.tier import PAGE_BYTES, Deadline, pages_bytes


class Move(NamedTuple):
    """A part to copy. `to`: the place for its copy."""

    key: bytes
    old: Entry
    to: Extent

    @property
    def record(self) -> Record:
        return Record(name_of(self.key), self.old.length, self.old.checksum)


def copy_all(io: Io, moves: Sequence[Move], deadline: Deadline) -> list[Move]:
    """Returns what was copied. Parts are left out if the bytes at their place are not these parts, if the storage
    fails, or once the deadline is over."""
    done: list[Move] = []
    for group in _groups(moves):
        if deadline.is_over:
            break
        if len(group) > 1:
            done += _copy_together(io, group)
        elif copy(io, group[0]):
            done += group
    return done


def _groups(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Copies that follow one another and have room in one block of memory; a larger one is alone."""
    group: list[Move] = []
    size = 0
    for move in moves:
        size += record_bytes(move.old.length)
        last = group[-1] if group else None
        if last and (
            size > PIECE_BYTES or len(group) == MOST_RUN or not follows(move.to, last.to, last.old.length)
        ):
            yield group
            group, size = [], record_bytes(move.old.length)
        group.append(move)
    if group:
        yield group


def _copy_together(io: Io, group: list[Move]) -> list[Move]:
    """What is written for a part that could not be read is no record: it has another mark or offset."""
    first, block = group[0].to, io.blocks.take()
    end = group[-1].to.offset - first.offset + record_bytes(group[-1].old.length)
    try:
        begins = [move.to.offset - first.offset for move in group]
        views = [block[begin : begin + record_bytes(one.old.length)] for begin, one in zip(begins, group, strict=True)]
        whole = _read(io, group, views)
        moved = []
        for at, (move, view) in enumerate(zip(group, views, strict=True)):
            old, to, record = move.old, move.to, move.record
            if at in whole and view[:RECORD_HEAD_BYTES] == record_head(record, old.segment.mark, old.offset):
                view[:RECORD_HEAD_BYTES] = record_head(record, to.segment.mark, to.offset)
                moved.append(move)
        if moved:
            io.write(first.segment.file, [block[:end]], first.offset)
        return moved
    except OSError:
        return []
    finally:
        io.blocks.give_back(block)


def _read(io: Io, group: list[Move], views: list[memoryview]) -> set[int]:
    """Reads the records into `views`, and returns the indexes of those that could be read."""
    runs: list[list[int]] = []
    for at in sorted(range(len(group)), key=lambda at: group[at].old.offset):
        last = group[runs[-1][-1]].old if runs else None
        if last and follows(group[at].old, last, last.length):
            runs[-1].append(at)
        else:
            runs.append([at])
    reading: list[tuple[list[int], Transfer]] = []
    whole: set[int] = set()
    try:
        for run in runs:
            old = group[run[0]].old
            reading.append((run, io.begin(io.read, old.segment.file, [views[at] for at in run], old.offset)))
    finally:
        for run, transfer in reading:
            if _is_whole(transfer):
                whole.update(run)
    return whole


def _is_whole(transfer: Transfer) -> bool:
    try:
        return transfer.end()
    except OSError:
        return False


def copy(io: Io, move: Move) -> bool:
    """Copies a part piece by piece. False: the bytes at its place are not this part, or the storage fails."""
    old, to, wanted, total = move.old, move.to, move.record, pages_bytes(move.old.length)
    source = old.segment
    try:
        found = read_record(io.read_block(source.file, old.offset), source.mark, old.offset)
        if found != (Kind.PART, wanted):
            return False
        io.write_block(to.segment.file, record_block(wanted, to.segment.mark, to.offset), to.offset)
        block = io.blocks.take()
        try:
            for begin in range(0, total, PIECE_BYTES):
                piece, behind = block[: total - begin], PAGE_BYTES + begin
                if not io.read(source.file, [piece], old.offset + behind):
                    return False
                io.write(to.segment.file, [piece], to.offset + behind)
        finally:
            io.blocks.give_back(block)
    except (OSError, RecordError):
        return False
    return True
