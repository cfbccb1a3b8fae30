"""How a record comes from an object store into the pages of its part: the ranges that are requested, the memory for
each, and how many requests run at once.

Where Python's own client receives them (kvdock/tiers/stores/objects_receive.py), bytes arrive in the pages and are
hashed there. What obstore brings is received whole, outside the interpreter's lock, and then copied into the pages and
hashed in one pass. What it has received and not yet copied is bounded (Receiving).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol

from kvdock._core import CHECKSUM_PRIME
from kvdock.shm.checksum import STRIPE_BYTES, copy_hashed
from kvdock.tiers.record import HEADER_BYTES, RecordError
from kvdock.tiers.tier import pages_bytes

RANGE_BYTES: Final = 8 << 20
"""A part of at least twice as much is loaded with several requests, each for about as much or more."""
RECEIVED_BYTES: Final = 256 << 20
"""What obstore may receive at once for all requests of a tier. At 25 ms it is enough for 10 GB/s."""


class Receiving:
    """Admits requests for loads: at most `connections` at once. Those through obstore receive at most `most_bytes`
    together. A larger one is admitted alone. To be used on one event loop."""

    def __init__(self, connections: int, most_bytes: int = RECEIVED_BYTES) -> None:
        self._connections, self._most_bytes = asyncio.Semaphore(connections), most_bytes
        self._bytes = 0
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def admitted(self, size_bytes: int) -> AsyncIterator[None]:
        """`size_bytes`: what the request receives into memory other than the pages."""
        async with self._connections:
            while size_bytes and self._bytes and self._bytes + size_bytes > self._most_bytes:
                self._waiting.append(asyncio.get_running_loop().create_future())
                await self._waiting[-1]
            self._bytes += size_bytes
            try:
                yield
            finally:
                self._bytes -= size_bytes
                waiting, self._waiting = self._waiting, []
                for one in waiting:
                    if not one.done():  # it was not cancelled
                        one.set_result(None)


class Range(NamedTuple):
    """The bytes [begin, end) of an object of `total` bytes."""

    begin: int
    end: int
    total: int

    @property
    def is_all(self) -> bool:
        return self.end - self.begin == self.total


def ranges_of(length: int, *, one: bool) -> list[Range]:
    """The ranges in which the object with a part of this length is requested. They end with the end of a stripe of the
    part. `one`: the whole object is requested at once."""
    total, count = HEADER_BYTES + length, 1 if one else max(1, length // RANGE_BYTES)
    step = pages_bytes(max(1, -(-length // count)))
    ends = [0, *range(HEADER_BYTES + step, total, step), total]
    return [Range(begin, end, total) for begin, end in itertools.pairwise(ends)]


class Piece(NamedTuple):
    """Memory for some bytes of a range: what begins at byte `at` of the view with this number. `is_hashed`: whether it
    begins and ends with a stripe, so that it can be hashed by itself."""

    number: int
    at: int
    memory: memoryview
    is_hashed: bool


class Writer(Protocol):
    """Something that writes to the memory of a record, in a thread of its own."""

    def stop(self, wait_s: float) -> bool:
        """It is to write no more. Returns whether it has ended within that time."""


class Sink:
    """Where a record goes. `body`: the memory of what follows the header. To be used on one event loop."""

    def __init__(self, body: Sequence[memoryview]) -> None:
        self.header = bytearray(HEADER_BYTES)
        self.writers: list[Writer] = []
        self._views, self._sums = [memoryview(self.header), *body], [0] * (1 + len(body))
        self._are_hashed = True

    @property
    def sums(self) -> Sequence[int]:
        """As Loaded.hashed."""
        return tuple(self._sums[1:]) if self._are_hashed else ()

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The memory of the bytes [begin, end) of the object, in their order."""
        found, start = list[Piece](), 0
        for number, view in enumerate(self._views):
            first, last = max(begin - start, 0), min(end - start, len(view))
            if first < last:
                ends = last % STRIPE_BYTES == 0 or last == len(view)
                found.append(Piece(number, first, view[first:last], first % STRIPE_BYTES == 0 and ends))
            start += len(view)
        return found

    def add(self, piece: Piece, share: int) -> None:
        """The bytes of the piece have come. `share`: theirs of the checksum, if it is hashed."""
        self._sums[piece.number] = (self._sums[piece.number] + share) % CHECKSUM_PRIME
        self._are_hashed &= piece.is_hashed  # else a stripe of a bundle's part is in two ranges

    async def take(self, found: Any, begin: int, end: int) -> None:
        """Receives the bytes [begin, end) of the object, which `found` of obstore is to have, and copies them. Raises
        RecordError if the store sends fewer, more or others."""
        if tuple(found.range) != (begin, end):
            raise RecordError(f"found bytes {found.range}, wanted {begin} to {end}")
        data = memoryview(await found.bytes_async())
        if len(data) != end - begin:
            raise RecordError(f"found {len(data)} bytes, wanted {end - begin}")
        for piece in self.pieces(begin, end):
            some, data = data[: len(piece.memory)], data[len(piece.memory) :]
            if piece.is_hashed:
                self.add(piece, copy_hashed(piece.memory, some, piece.at))
            else:
                piece.memory[:] = some
                self.add(piece, 0)

    def close(self, wait_s: float = 0.0) -> bool:
        """Stops what still writes, and releases the memory. Returns False if something has not ended within that
        time."""
        until_s = time.monotonic() + wait_s
        have_ended = [one.stop(max(0.0, until_s - time.monotonic())) for one in self.writers]
        if not all(have_ended):
            return False
        for view in self._views:
            view.release()
        return True
