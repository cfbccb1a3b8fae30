"""Carries out a batch of stores: finds the parts that are new, writes them, and adds them to the maps.

If a batch finds no space, it adds the parts that it has written to the maps before it waits for other batches. So it
holds no extent while it waits, and the segments may be emptied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvdock.tiers.disk.blocks import key_of, record_block
from kvdock.tiers.disk.io import FULL_ERRORS, LOST_ERRORS, Io, Transfer, raise_if_lost
from kvdock.tiers.disk.log import Log
from kvdock.tiers.disk.space import Extent, Space
from kvdock.tiers.record import Record
from kvdock.tiers.tier import Deadline, Outcome, ToStore, pages_bytes


class Writing(NamedTuple):
    """A record that is being written. `at`: its index in the batch."""

    at: int
    record: Record
    extent: Extent
    header: memoryview
    transfer: Transfer


class StoreBatch:
    def __init__(self, space: Space, log: Log, io: Io, parts: Sequence[ToStore], deadline: Deadline) -> None:
        self._space, self._log, self._io, self._parts, self._deadline = space, log, io, parts, deadline
        self._outcomes = [Outcome.LATE] * len(parts)
        self._keys = [key_of(part.record.name) for part in parts]
        self._claims: set[bytes] = set()
        self._in_progress: deque[Writing] = deque()
        self._pieces = 0
        self._written: list[Writing] = []
        self._lost: OSError | None = None

    def run(self) -> list[Outcome]:
        """Returns one outcome for each part. When it returns or raises TierError, nothing reads the pages any more."""
        left = list(range(len(self._parts)))
        while left and not self._deadline.is_over:
            self._claims, others = self._space.claim([self._keys[at] for at in left], self._deadline)
            new, begun, later = set(self._claims), set[bytes](), []
            try:
                for at in left:
                    key = self._keys[at]
                    if key in others or key in begun:  # of two equal parts in one batch, the second is found later
                        later.append(at)
                    elif key not in new:
                        self._outcomes[at] = Outcome.DONE
                    elif not self._deadline.is_over:
                        begun.add(key)
                        self._begin(at)
            finally:
                self._finish()
                self._unclaim(set(self._claims))
            if self._lost:
                raise_if_lost(self._lost)
            left = later
        return self._outcomes

    def _begin(self, at: int) -> None:
        record, pages, _ = self._parts[at]
        extent = self._extent(at, record.length)
        if extent is None:
            return
        header = self._io.headers.take()
        header[:] = record_block(record, extent.segment.mark, extent.offset)
        buffers = [header, pages[: pages_bytes(record.length)]]
        transfer = self._io.begin(self._io.write, extent.segment.fd, buffers, extent.offset)
        self._in_progress.append(Writing(at, record, extent, header, transfer))
        self._pieces += len(transfer)
        while self._pieces > self._io.most_pieces:
            self._end_first()

    def _extent(self, at: int, length: int) -> Extent | None:
        """Space for the record. None: there is no space, and the part's outcome is set."""
        while self._space.fits(length):
            extent = self._space.take(length)
            if extent is not None:
                return extent
            try:
                freed = self._space.free_space(length, self._deadline)
            except OSError as error:
                raise_if_lost(error)
                freed = _outcome_of(error)
            if freed is Outcome.FULL and (self._in_progress or self._written):
                self._finish()
            elif freed is Outcome.FULL and self._space.wait_for_writers(self._deadline):
                continue
            elif freed is not Outcome.DONE:
                self._outcomes[at] = freed
                return None
        self._outcomes[at] = Outcome.FULL
        return None

    def _end_first(self) -> None:
        writing = self._in_progress.popleft()
        self._pieces -= len(writing.transfer)
        try:
            writing.transfer.end()
        except OSError as error:
            self._give_up([writing], error)
        else:
            self._written.append(writing)
        finally:
            self._io.headers.give_back(writing.header)

    def _finish(self) -> None:
        """Waits for all writes in progress, and adds their parts to the index and the maps. Raises TierError after
        that."""
        while self._in_progress:
            self._end_first()
        written, self._written = self._written, []
        if not written:
            return
        try:
            self._space.put([(writing.record, writing.extent) for writing in written])
        except OSError as error:
            self._give_up(written, error)
        except BaseException as error:
            self._give_up(written, OSError(error))
            raise
        else:
            for writing in written:
                self._outcomes[writing.at] = Outcome.DONE
            self._unclaim({self._keys[writing.at] for writing in written})
            self._space.leave([writing.extent for writing in written])

    def _give_up(self, writings: Sequence[Writing], error: OSError) -> None:
        """Gives up records. Their extents stay unused until the segment is wiped; the bytes there must not be taken for
        a part."""
        if error.errno in LOST_ERRORS:
            self._lost = error
        for writing in writings:
            self._outcomes[writing.at] = _outcome_of(error)
            with suppress(OSError):
                self._log.mark_deleted(writing.extent.segment, writing.extent.offset, writing.record)
        self._space.leave([writing.extent for writing in writings])

    def _unclaim(self, keys: set[bytes]) -> None:
        self._claims -= keys
        self._space.unclaim(keys)


def _outcome_of(error: OSError) -> Outcome:
    return Outcome.FULL if error.errno in FULL_ERRORS else Outcome.FAILED
