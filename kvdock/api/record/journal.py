"""The journal: parts of the server publish what happens, and feeds get it a moment later.

To publish costs a caller one append to a bounded queue. When the queue is full, the event is dropped and counted. An
event that no subscriber takes is not even made, if the caller asks `wants` first. A task of its own hands events to
subscribers, in slices between which calls are answered. If a subscriber raises an exception, that is logged, and the
others get the event. Events that are published before `open` wait for the first subscribers.

Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from kvdock.api.turns import next_slice
from kvdock.protocol.events import EVENTS, Event

log = logging.getLogger("kvdock.api")

QUEUE_EVENTS = 16_384
"""How many events may wait: those of some seconds of a busy server."""
SLICE_EVENTS = 64
BATCH_S = 0.02
"""How much later subscribers get events, many at a time: waking them for each would cost a call more than publishing
it."""


class Subscriber(Protocol):
    """Gets the events of `kinds`, in their order."""

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Collection[type[Event]]: ...

    def take(self, event: Event) -> None: ...


class _Later(NamedTuple):
    """An event that is made when it is handed out."""

    seq: int
    at: float
    make: Callable[..., Event]
    values: tuple[Any, ...]

    def made(self) -> Event:
        event = self.make(*self.values)
        event.seq, event.at = self.seq, self.at
        return event


class Journal:
    def __init__(self, wall_s: Callable[[], float], *, most: int = QUEUE_EVENTS) -> None:
        self.published: Counter[type[Event]] = Counter()
        self.dropped = 0
        self._wall_s, self._most = wall_s, most
        self._queue: deque[Event | _Later] = deque()
        self._seq = 0
        self._subscribers: list[Subscriber] = []
        self._takers: dict[type[Event], tuple[Subscriber, ...]] = {}
        self._came = asyncio.Event()
        self._is_open = False

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._seq

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)
        self._sort()

    def open(self) -> None:
        """From now on, events that no subscriber takes are left out."""
        self._is_open = True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.remove(subscriber)
        self._sort()

    def _sort(self) -> None:
        self._takers = {
            kind: takers for kind in EVENTS
            if (takers := tuple(one for one in self._subscribers if kind in one.kinds))
        }

    def wants(self, kind: type[Event]) -> bool:
        """Whether a subscriber takes events of this kind."""
        return kind in self._takers

    def publish(self, event: Event) -> None:
        if self._takes(type(event)):
            self._seq += 1
            event.seq, event.at = self._seq, self._wall_s()
            self._queue.append(event)

    def publish_later(
        self, kind: type[Event], make: Callable[..., Event], *values: Any, at: float | None = None
    ) -> None:
        """Publishes the event that `make` makes of `values` when it is handed out: calls that are answered in a tenth
        of a millisecond do not wait for that. The values must not change meanwhile. `at`: Unix seconds; None: now."""
        if self._takes(kind):
            self._seq += 1
            self._queue.append(_Later(self._seq, self._wall_s() if at is None else at, make, values))

    def _takes(self, kind: type[Event]) -> bool:
        """Whether the event is to be queued."""
        if self._is_open and kind not in self._takers:
            return False
        if len(self._queue) >= self._most:
            self.dropped += 1
            return False
        if not self._came.is_set():
            self._came.set()
        return True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._came.wait()
            await asyncio.sleep(BATCH_S)
            self._came.clear()
            while self._queue:
                self._hand_out(SLICE_EVENTS)
                await next_slice()

    async def catch_up(self) -> None:
        """Hands out the events that wait now, in slices: before they are read."""
        last = self._seq
        while self._queue and self._queue[0].seq <= last:
            self._hand_out(SLICE_EVENTS)
            await next_slice()

    def flush(self) -> None:
        """Hands out all events that wait, now: at the server's end."""
        self._hand_out(len(self._queue))

    def _hand_out(self, most: int) -> None:
        for _ in range(min(most, len(self._queue))):
            queued = self._queue.popleft()
            event = queued.made() if isinstance(queued, _Later) else queued
            kind = type(event)
            self.published[kind] += 1
            for subscriber in self._takers.get(kind, ()):
                try:
                    subscriber.take(event)
                except Exception:  # whatever it was: the other subscribers get the event
                    log.exception("the subscriber %s failed at an event", subscriber.name)
