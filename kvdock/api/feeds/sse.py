"""Server-sent events (HTML Living Standard, "Server-sent events"): what both streams of this server have in common.

A stream says what there is to send; here are its form on the wire, its readers, and what ends or wakes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

MOST_READERS = 64
IDLE_S = 15.0
"""So often a comment is sent where nothing happens: proxies end connections that are silent."""
RETRY = b"retry: 1000\n\n"
"""A reader whose connection has ended connects again after so many milliseconds."""
IDLE = b": nothing has happened\n\n"


class Stream:
    """Base of a stream. It is used on the server's event loop alone."""

    def __init__(self) -> None:
        self.readers = 0
        """How many read at present: callers let no more than MOST_READERS begin."""
        self._came = asyncio.Event()
        self._is_ending = False

    def _wake(self) -> None:
        """Has those who wait look again."""
        if self.readers:
            self._came.set()
            self._came = asyncio.Event()  # the next one's

    async def _sent(self, pieces: Iterator[bytes | None]) -> AsyncIterator[bytes]:
        """The pieces of a body. None among them: the stream has just looked, and nothing is new. Then the reader waits,
        or, once the server drains, is done."""
        self.readers += 1
        try:
            for piece in pieces:
                if piece is not None:
                    yield piece
                elif self._is_ending:
                    return
                else:  # nothing can have come since the stream has looked: nobody was awaited in between
                    try:
                        await asyncio.wait_for(self._came.wait(), IDLE_S)
                    except TimeoutError:
                        yield IDLE
        finally:
            self.readers -= 1


def piece_of(kind: str, data: bytes, event_id: str) -> bytes:
    """One event of a body. `data`: JSON, which is one line. Without an id, readers come back with the one before it."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"
