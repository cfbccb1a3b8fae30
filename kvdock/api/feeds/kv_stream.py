"""KV cache events as server-sent events: `GET /v1/kv-events`. A reader sees those of its own tenant.

Each event of the stream is one batch: `{"ts", "model", "events"}`, and its id is the batch's number. Who comes back
with `Last-Event-ID` gets what came since, or a snapshot, whose last batch alone has an id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator

from kvdock.api.feeds.kv import Batch, KvLog
from kvdock.api.feeds.sse import RETRY, Stream, piece_of
from kvdock.protocol.events import Draining, Event
from kvdock.protocol.forms import JSON
from kvdock.protocol.kv_events import in_hex


class KvStream(Stream):
    name = "kv_events"
    kinds: Collection[type[Event]] = frozenset({Draining})

    def __init__(self, log: KvLog) -> None:
        super().__init__()
        self._log = log
        log.listeners.append(self._wake)

    def take(self, event: Event) -> None:
        self._is_ending = True
        self._wake()

    def read(self, tenant: str, last_id: str, *, follows: bool) -> AsyncIterator[bytes]:
        """What came after `last_id`, or a snapshot; if it `follows`, then what comes, until the server drains."""
        return self._sent(self._pieces(tenant, last_id, follows=follows))

    def _pieces(self, tenant: str, last_id: str, *, follows: bool) -> Iterator[bytes | None]:
        following = int(last_id) + 1 if last_id.isdecimal() else 0
        yield RETRY
        while True:
            batches, is_snapshot = self._log.since(tenant, following)
            for number, batch in enumerate(batches, 1):
                yield _piece(batch, has_id=not is_snapshot or number == len(batches))
            if batches:
                following = batches[-1].seq + 1
            if not follows:
                return
            if not batches:
                yield None


def _piece(batch: Batch, *, has_id: bool) -> bytes:
    body = {"ts": batch.at, "model": batch.model, "events": [in_hex(event) for event in batch.events()]}
    return piece_of("kv", JSON.encode(body), str(batch.seq) if has_id else "")
