"""One batch of stores: which of its parts are new, their writes under way, and how they become known.

A batch that finds no room makes known what it has written, so that this may go; it waits for others holding nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvdock.tiers.disk.blocks import key_of, record_block
from kvdock.tiers.disk.io import FULL_ERRORS, LOST_ERRORS, Io, Transfer, raise_if_lost
from kvdock.tiers.disk.log import Log
from kvdock.tiers.disk.space import Place, Space
from kvdock.tiers.record import Record
from kvdock.tiers.tier import Deadline, Outcome, ToStore, pages_bytes


class Writing(NamedTuple):
    """A record under way to storage."""

    at: int
    """Which of the batch."""
    record: Record
    place: Place
    header: memoryview
    transfer: Transfer


class Stores:
    def __init__(self, space: Space, log: Log, io: Io, parts: Sequence[ToStore], deadline: Deadline) -> None:
        self._space, self._log, self._io, self._parts, self._deadline = space, log, io, parts, deadline
        self._outcomes = [Outcome.LATE] * len(parts)
        self._keys = [key_of(part.record.name) for part in parts]
        self._claims: set[bytes] = set()
        self._under_way: deque[Writing] = deque()
        self._pieces = 0
        self._written: list[Writing] = []
        self._lost: OSError | None = None

    def run(self) -> list[Outcome]:
        """Raises TierError; nothing reads the pages any more then."""
        left = list(range(len(self._parts)))
        while left and not self._deadline.is_over:
            self._claims, others = self._space.claim([self._keys[at] for at in left], self._deadline)
            new, begun, later = set(self._claims), set[bytes](), []
            try:
                for at in left:
                    key = self._keys[at]
                    if key in others or key in begun:  # of two in one batch, the second finds the first
                        later.append(at)
                    elif key not in new:
                        self._outcomes[at] = Outcome.DONE
                    elif not self._deadline.is_over:
                        begun.add(key)
                        self._begin(at)
            finally:
                self._settle()
                self._unclaim(set(self._claims))
            if self._lost:
                raise_if_lost(self._lost)
            left = later
        return self._outcomes

    def _begin(self, at: int) -> None:
        record, pages = self._parts[at]
        place = self._place(at, record.length)
        if place is None:
            return
        header = self._io.headers.take()
        header[:] = record_block(record, place.segment.mark, place.offset)
        buffers = [header, pages[: pages_bytes(record.length)]]
        transfer = self._io.begin(self._io.write, place.segment.fd, buffers, place.offset)
        self._under_way.append(Writing(at, record, place, header, transfer))
        self._pieces += len(transfer)
        while self._pieces > self._io.most_pieces:
            self._end_first()

    def _place(self, at: int, length: int) -> Place | None:
        """Room for it; None: there is none, and the outcome says so."""
        while self._space.fits(length):
            place = self._space.take(length)
            if place is not None:
                return place
            try:
                made = self._space.make_room(length, self._deadline)
            except OSError as error:
                raise_if_lost(error)
                made = _outcome_of(error)
            if made is Outcome.FULL and (self._under_way or self._written):
                self._settle()
            elif made is Outcome.FULL and self._space.wait_for_writers(self._deadline):
                continue
            elif made is not Outcome.DONE:
                self._outcomes[at] = made
                return None
        self._outcomes[at] = Outcome.FULL
        return None

    def _end_first(self) -> None:
        writing = self._under_way.popleft()
        self._pieces -= len(writing.transfer)
        try:
            writing.transfer.end()
        except OSError as error:
            self._give_up([writing], error)
        else:
            self._written.append(writing)
        finally:
            self._io.headers.give_back(writing.header)

    def _settle(self) -> None:
        """Ends all that is under way and makes it known. Raises TierError after that."""
        while self._under_way:
            self._end_first()
        written, self._written = self._written, []
        if not written:
            return
        try:
            self._space.put([(writing.record, writing.place) for writing in written])
        except OSError as error:
            self._give_up(written, error)
        except BaseException as error:
            self._give_up(written, OSError(error))
            raise
        else:
            for writing in written:
                self._outcomes[writing.at] = Outcome.DONE
            self._unclaim({self._keys[writing.at] for writing in written})
            self._space.leave([writing.place for writing in written])

    def _give_up(self, writings: Sequence[Writing], error: OSError) -> None:
        """Their places stay unused until the segment goes; what stands there must not be taken for a part."""
        if error.errno in LOST_ERRORS:
            self._lost = error
        for writing in writings:
            self._outcomes[writing.at] = _outcome_of(error)
            with suppress(OSError):
                self._log.mark_deleted(writing.place.segment, writing.place.offset, writing.record)
        self._space.leave([writing.place for writing in writings])

    def _unclaim(self, keys: set[bytes]) -> None:
        self._claims -= keys
        self._space.unclaim(keys)


def _outcome_of(error: OSError) -> Outcome:
    return Outcome.FULL if error.errno in FULL_ERRORS else Outcome.FAILED
