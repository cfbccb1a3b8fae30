"""The event stream: `GET /v1/events` as server-sent events.

It keeps the latest events, and rare ones for longer, so that a reader who comes back with the `Last-Event-ID` of the
last one that it saw misses nothing. If a reader is too slow, or was away for too long, an event of the kind `gap` tells
it how many events it has missed, and the oldest event that is kept comes next.

An id is the server's incarnation and the event's number: another server's ids are never taken for this one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from itertools import islice

from kvdock.api.feeds.sse import RETRY, Stream, piece_of
from kvdock.protocol.events import EVENTS, Draining, Event, Gap, kind_of
from kvdock.protocol.forms import JSON

KEPT_EVENTS = 4096
KEPT_RARE = 1024
"""Events that no request causes are kept in a ring of their own: they tell what happened last night."""


class EventStream(Stream):
    name = "stream"
    kinds: Collection[type[Event]] = EVENTS

    def __init__(self, incarnation: int, flush: Callable[[], None], *, keep: int = KEPT_EVENTS) -> None:
        """`flush`: has the bus hand out what waits there."""
        super().__init__()
        self._flush = flush
        self._incarnation = incarnation
        self._kept: deque[Event] = deque(maxlen=keep)
        self._rare: deque[Event] = deque(maxlen=KEPT_RARE)

    def take(self, event: Event) -> None:
        self._kept.append(event)
        if not event.of_requests:
            self._rare.append(event)
        self._is_ending = self._is_ending or isinstance(event, Draining)
        self._wake()

    def read(
        self, last_id: str, kinds: Collection[type[Event]], sees: Callable[[str], bool], *, follows: bool
    ) -> AsyncIterator[bytes]:
        """What is kept behind `last_id`, as pieces of a body; if it `follows`, then what comes, until the server
        drains. Without `last_id` all that is kept; if it follows, only what comes. `sees`: whether the caller may know
        of a tenant."""
        return self._sent(self._pieces(last_id, kinds, sees, follows=follows))

    def _pieces(
        self, last_id: str, kinds: Collection[type[Event]], sees: Callable[[str], bool], *, follows: bool
    ) -> Iterator[bytes | None]:
        self._flush()
        seen, is_known = self._number(last_id) if last_id or follows else (0, True)
        at = self._kept[-1].at if self._kept else 0.0
        yield RETRY if is_known else self._piece(Gap(at=at, lost=0, why="another_server"))
        while True:
            new = self._behind(seen)
            if not last_id and not follows and new:
                new = [*(event for event in self._rare if event.seq < new[0].seq), *new]
            if new and new[0].seq > seen + 1 and last_id:
                yield self._piece(Gap(at=new[0].at, seq=new[0].seq - 1, lost=new[0].seq - seen - 1, why="too_slow"))
            last_id = last_id or "read"  # from now on nothing may be missed
            for event in new:
                seen = event.seq
                if type(event) in kinds and (event.tenant is None or sees(event.tenant)):
                    yield self._piece(event)
            if not follows:
                return
            if not new:
                yield None

    def _behind(self, seen: int) -> list[Event]:
        """A copy: while they are sent, others come. The numbers of those that are kept have no gap."""
        if not self._kept or self._kept[-1].seq <= seen:
            return []
        return list(islice(self._kept, max(0, seen + 1 - self._kept[0].seq), None))

    def _number(self, last_id: str) -> tuple[int, bool]:
        """(the event's number, whether it is one of this server's)."""
        newest = self._kept[-1].seq if self._kept else 0
        if not last_id:
            return newest, True
        incarnation, _, number = last_id.partition("-")
        if incarnation != str(self._incarnation) or not number.isdecimal() or int(number) > newest:
            return 0, False
        return int(number), True

    def _piece(self, event: Event) -> bytes:
        return piece_of(kind_of(type(event)), JSON.encode(event), f"{self._incarnation}-{event.seq}")
