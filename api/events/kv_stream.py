"""KV cache events as server-sent events: `GET /v1/kv-events`. A reader sees those of its own tenant.

Each event of the stream is one batch: `{"ts", "model", "events"}`, and its id is the batch's number. Who comes back
with `Last-Event-ID` gets what came since, or a snapshot, whose last batch alone has an id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from kvdock.api.events.kv_log import Batch, KvLog
from kvdock.api.events.stream import IDLE_S
from kvdock.protocol.events import Draining, Event
from kvdock.protocol.forms import JSON
from kvdock.protocol.kv_events import in_hex


class KvStream:
    name = "kv_events"
    kinds: Collection[type[Event]] = frozenset({Draining})

    def __init__(self, log: KvLog) -> None:
        self.readers = 0
        self._log, self._is_ending = log, False
        self._came = asyncio.Event()
        log.listeners.append(self._wake)

    def take(self, event: Event) -> None:
        self._is_ending = True
        self._wake()

    def _wake(self) -> None:
        if self.readers:
            self._came.set()
            self._came = asyncio.Event()  # the next one's

    async def read(self, tenant: str, last_id: str, *, follows: bool) -> AsyncIterator[bytes]:
        """What came after `last_id`, or a snapshot; if it `follows`, then what comes, until the server drains."""
        self.readers += 1
        try:
            following = int(last_id) + 1 if last_id.isdecimal() else 0
            yield b"retry: 1000\n\n"
            while True:
                came, (batches, is_snapshot) = self._came, self._log.since(tenant, following)
                for number, batch in enumerate(batches, 1):
                    yield _piece(batch, has_id=not is_snapshot or number == len(batches))
                if batches:
                    following = batches[-1].seq + 1
                if not follows:
                    return
                if batches:
                    continue
                if self._is_ending:
                    return
                try:
                    await asyncio.wait_for(came.wait(), IDLE_S)
                except TimeoutError:
                    yield b": nothing has happened\n\n"
        finally:
            self.readers -= 1


def _piece(batch: Batch, *, has_id: bool) -> bytes:
    body = {"ts": batch.at, "model": batch.model, "events": [in_hex(event) for event in batch.events()]}
    head = f"id: {batch.seq}\n" if has_id else ""
    return f"{head}event: kv\ndata: ".encode() + JSON.encode(body) + b"\n\n"
