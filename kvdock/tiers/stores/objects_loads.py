"""How a record comes from an object store into the pages of its part: each request's bytes are received whole, outside
the interpreter's lock, and are then copied into the pages and hashed in one pass.

What requests have received and not yet copied is bounded (Receiving).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from kvdock._core import CHECKSUM_PRIME
from kvdock.shm.checksum import STRIPE_BYTES, copy_hashed
from kvdock.tiers.record import HEADER_BYTES, RecordError
from kvdock.tiers.tier import pages_bytes

RANGE_BYTES: Final = 8 << 20
"""A part of at least twice as much is loaded with several requests, each for about as much or more."""
RECEIVED_BYTES: Final = 256 << 20
"""What all requests of a tier may receive at once. At 25 ms it is enough for 10 GB/s."""


class Receiving:
    """Admits requests for loads: at most `connections` at once, for at most `most_bytes` together. A larger one is
    admitted alone. To be used on one event loop."""

    def __init__(self, connections: int, most_bytes: int = RECEIVED_BYTES) -> None:
        self._connections, self._most_bytes = asyncio.Semaphore(connections), most_bytes
        self._bytes = 0
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def admitted(self, size_bytes: int) -> AsyncIterator[None]:
        async with self._connections:
            while self._bytes and self._bytes + size_bytes > self._most_bytes:
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


def ranges_of(length: int, *, one: bool) -> list[tuple[int, int]]:
    """The ranges in which the object with a part of this length is requested: (begin, end) of each. They end with the
    end of a stripe of the part. `one`: the whole object is requested at once."""
    total, count = HEADER_BYTES + length, 1 if one else max(1, length // RANGE_BYTES)
    step = pages_bytes(max(1, -(-length // count)))
    return list(itertools.pairwise([0, *range(HEADER_BYTES + step, total, step), total]))


class Sink:
    """Takes the bytes of a record as they arrive. `body`: the memory of what follows the header."""

    def __init__(self, body: Sequence[memoryview]) -> None:
        self.header = bytearray(HEADER_BYTES)
        self._body, self._sums = body, [0] * len(body)
        self._are_hashed = True

    @property
    def sums(self) -> Sequence[int]:
        """As Loaded.hashed."""
        return tuple(self._sums) if self._are_hashed else ()

    async def take(self, found: Any, begin: int, end: int) -> None:
        """Receives bytes [begin, end) of the object, which `found` is to have, and copies them. Raises RecordError if
        the store sends fewer, more or others."""
        if tuple(found.range) != (begin, end):
            raise RecordError(f"found bytes {found.range}, wanted {begin} to {end}")
        data = memoryview(await found.bytes_async())
        if len(data) != end - begin:
            raise RecordError(f"found {len(data)} bytes, wanted {end - begin}")
        if begin < HEADER_BYTES:
            of_header = data[: HEADER_BYTES - begin]
            self.header[begin : begin + len(of_header)] = of_header
        at = HEADER_BYTES
        for number, view in enumerate(self._body):
            first, last = max(begin, at), min(end, at + len(view))
            if first < last:
                self._put(number, first - at, view[first - at : last - at], data[first - begin : last - begin])
            at += len(view)

    def _put(self, number: int, at: int, memory: memoryview, data: memoryview) -> None:
        """`memory`: what begins at byte `at` of the piece with this number."""
        ends = len(memory) % STRIPE_BYTES == 0 or at + len(memory) == len(self._body[number])
        if at % STRIPE_BYTES == 0 and ends:
            self._sums[number] = (self._sums[number] + copy_hashed(memory, data, at)) % CHECKSUM_PRIME
        else:  # a stripe of a bundle's part is in two ranges
            memory[:] = data
            self._are_hashed = False

    def close(self) -> None:
        for view in self._body:
            view.release()
