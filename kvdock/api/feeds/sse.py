"""Server-sent events (HTML Living Standard, "Server-sent events"), and the stream of them at `GET /v1/events`.

`Stream` has what all streams of this server share: the form on the wire, the readers, and what wakes or ends them.

`EventStream` keeps the latest events, and rare ones for longer, so that a reader who comes back with the
`Last-Event-ID` of the last one that it saw misses nothing. If a reader is too slow, or was away for too long, an event
of the kind `gap` says how many events it has missed, and the oldest event that is kept comes next. An id is the
server's incarnation and the event's number: ids of another server are never taken for those of this one.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from itertools import islice

from kvdock.api.turns import next_slice
from kvdock.protocol.errors import ApiError
from kvdock.protocol.events import EVENTS, Draining, Event, Gap, kind_of
from kvdock.protocol.forms import JSON

MOST_READERS = 64
"""The readers of one stream."""
IDLE_S = 15.0
"""How often a comment is sent while nothing happens: proxies close connections that are silent."""
WOKEN_OF_TURN = 4
"""How many readers are woken in one turn of the event loop; each takes some 40 µs to go on."""
_NUMBER = re.compile(r"[0-9]{1,20}")
SLICE_BYTES = 16 << 10
"""How much of a body is made in one turn of the event loop, and a piece more."""
IsAdmitted = Callable[[], bool]
"""Whether the reader may still read: its token may have been taken out of the access file."""
RETRY = b"retry: 1000\n\n"
"""A reader whose connection has ended connects again after this many milliseconds."""
IDLE = b": nothing has happened\n\n"
MOST_MADE = 256
"""How many events are kept as pieces."""
KEPT_EVENTS = 4096
COPIED_EVENTS = 64
KEPT_RARE = 1024
"""How many events that no request causes are kept, in a ring of their own, so that last night's are still there."""


class Reader:
    """`is_over`: its place was given to another reader, so its body ends. It comes back with `Last-Event-ID`."""

    __slots__ = ("is_over", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant, self.is_over = tenant, False


class Readers:
    """Those of one stream, MOST_READERS at most. While a place is free, a tenant may have as many as it likes. Once all
    places are taken, the tenant that has most of them gives up that of its oldest reader, for a tenant that has at
    least two fewer."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Reader, None]] = {}
        """By tenant; its oldest reader comes first."""

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def make_room(self, tenant: str) -> bool:
        """For one more of the tenant. Returns whether another reader's place was needed. Raises ApiError: too_busy."""
        if len(self) < MOST_READERS:
            return False
        most = max(self._of.values(), key=len)
        if len(most) < len(self._of.get(tenant, {})) + 2:
            raise ApiError("too_busy", "too many others read the events", found=len(self), wanted=f"< {MOST_READERS}")
        oldest = next(iter(most))
        oldest.is_over = True
        self.remove(oldest)
        return True

    def add(self, tenant: str) -> Reader:
        mine = Reader(tenant)
        self._of.setdefault(tenant, {})[mine] = None
        return mine

    def remove(self, reader: Reader) -> None:
        of_tenant = self._of.get(reader.tenant, {})
        of_tenant.pop(reader, None)
        if not of_tenant:
            self._of.pop(reader.tenant, None)


class Stream:
    """Base of a stream. It is used on the server's event loop alone."""

    def __init__(self) -> None:
        self.readers = Readers()
        self._wakes = 0
        """How often readers were woken."""
        self._waiting: dict[asyncio.Future[bool], None] = {}
        self._woken: deque[asyncio.Future[bool]] = deque()
        """Readers that go on in this order, a few in each turn of the event loop."""
        self._is_ending = False

    def _wake(self) -> None:
        """Wakes the readers that wait."""
        self._wakes += 1
        if self._waiting:
            is_waking = bool(self._woken)
            self._woken.extend(self._waiting)
            self._waiting.clear()
            if not is_waking:
                self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_OF_TURN, len(self._woken))):
            _settle(self._woken.popleft(), True)
        if self._woken:
            self._woken[0].get_loop().call_soon(self._wake_some)

    async def _is_woken(self) -> bool:
        """Waits until the reader is woken, for IDLE_S at most."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[bool] = loop.create_future()
        self._waiting[mine] = None
        timer = loop.call_later(IDLE_S, _settle, mine, False)
        try:
            return await mine
        finally:
            timer.cancel()
            self._waiting.pop(mine, None)

    def make_room(self, tenant: str) -> None:
        """Before a reader of the tenant begins. Raises ApiError: too_busy."""
        if self.readers.make_room(tenant):
            self._wake()  # the one whose place it was

    async def _sent(
        self, pieces: Iterator[bytes | None], tenant: str, is_admitted: IsAdmitted
    ) -> AsyncIterator[bytes]:
        """The pieces of a body for a reader of the tenant, joined into slices. A piece that is None means that nothing
        is new: then the reader waits, or, once the server drains, the body ends. It ends before the next slice once
        `is_admitted` says no, or once the reader's place is another's."""
        reader = self.readers.add(tenant)
        try:
            is_over = False
            while not is_over and not reader.is_over and is_admitted():
                wakes = self._wakes
                await next_slice()
                slice_, is_over = _next_slice(pieces)
                if slice_:
                    yield slice_
                elif wakes != self._wakes:
                    continue  # something came while others had their turn
                elif self._is_ending:
                    return
                elif not is_over and not await self._is_woken():
                    yield IDLE
        finally:
            self.readers.remove(reader)


def _settle(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


def _next_slice(pieces: Iterator[bytes | None]) -> tuple[bytes, bool]:
    """The pieces up to the next None or SLICE_BYTES, and whether they are the last ones."""
    taken, size = list[bytes](), 0
    for piece in pieces:
        if piece is None:
            return b"".join(taken), False
        taken.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            return b"".join(taken), False
    return b"".join(taken), True


def number_in(text: str) -> int | None:
    """The number of an event in the header `Last-Event-ID`; None: the text is no number that an event can have."""
    return int(text) if _NUMBER.fullmatch(text) else None


def piece_of(kind: str, data: bytes, event_id: str) -> bytes:
    """One event of a body. `data`: JSON, which is one line. Without an id, readers come back with the one before it."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"


class EventStream(Stream):
    name = "stream"
    kinds: Collection[type[Event]] = EVENTS

    def __init__(self, incarnation: int, catch_up: Callable[[], Awaitable[None]], *, keep: int = KEPT_EVENTS) -> None:
        """`catch_up`: hands out the events that wait in the journal. It comes before `read`."""
        super().__init__()
        self.catch_up = catch_up
        self._incarnation = incarnation
        self._kept: deque[Event] = deque(maxlen=keep)
        self._rare: deque[Event] = deque(maxlen=KEPT_RARE)
        self._made: dict[int, tuple[Event, bytes]] = {}

    def take(self, event: Event) -> None:
        self._kept.append(event)
        if not event.of_requests:
            self._rare.append(event)
        self._is_ending = self._is_ending or isinstance(event, Draining)
        self._wake()

    def read(
        self, last_id: str, kinds: Collection[type[Event]], tenant: str, sees: Callable[[str], bool],
        is_admitted: IsAdmitted, *, follows: bool,
    ) -> AsyncIterator[bytes]:
        """The kept events after `last_id`, as pieces of a body; if it `follows`, then new ones, until the server
        drains. Without `last_id`: all kept events, or, if it follows, only new ones. `tenant`: the reader's. `sees`:
        whether it may know of a tenant. Events count from this call on: the head of the answer comes later."""
        seen, is_known = self._number(last_id) if last_id or follows else (0, True)
        pieces = self._pieces(last_id, seen, kinds, sees, is_known=is_known, follows=follows)
        return self._sent(pieces, tenant, is_admitted)

    def _pieces(
        self, last_id: str, seen: int, kinds: Collection[type[Event]], sees: Callable[[str], bool], *,
        is_known: bool, follows: bool,
    ) -> Iterator[bytes | None]:
        newest, at = (self._kept[-1].seq, self._kept[-1].at) if self._kept else (0, 0.0)
        yield RETRY if is_known else self._piece(Gap(at=at, lost=0, why="another_server"))
        while True:
            new = self._behind(seen)
            if not last_id and not follows and new:
                new = [*(event for event in self._rare if event.seq < new[0].seq), *new]
            if new and new[0].seq > seen + 1 and (last_id or follows):
                yield self._piece(Gap(at=new[0].at, seq=new[0].seq - 1, lost=new[0].seq - seen - 1, why="too_slow"))
            last_id = last_id or "read"  # from now on no event may be missed
            for event in new:
                seen = event.seq
                if not follows and seen > newest:
                    break
                if type(event) in kinds and (event.tenant is None or sees(event.tenant)):
                    yield self._piece(event)
            if not follows and (not new or seen > newest):
                yield f"id: {self._incarnation}-{newest}\n\n".encode()  # what it left out is nothing that it missed
                return
            if not new:
                yield None

    def _behind(self, seen: int) -> list[Event]:
        """The next events of the main ring after number `seen`, without a gap; as a copy, because others come while
        they are sent, and so few that collections of garbage do not take long with many readers."""
        if not self._kept or self._kept[-1].seq <= seen:
            return []
        start = max(0, seen + 1 - self._kept[0].seq)
        return list(islice(self._kept, start, start + COPIED_EVENTS))

    def _number(self, last_id: str) -> tuple[int, bool]:
        """(the event's number, whether it is one of this server's)."""
        newest = self._kept[-1].seq if self._kept else 0
        if not last_id:
            return newest, True
        incarnation, _, text = last_id.partition("-")
        number = number_in(text)
        if incarnation != str(self._incarnation) or number is None or number > newest:
            return 0, False
        return number, True

    def _piece(self, event: Event) -> bytes:
        """Made once for the readers that follow: all of them read the newest events."""
        made = self._made.get(event.seq)
        if made is None or made[0] is not event:
            piece = piece_of(kind_of(type(event)), JSON.encode(event), f"{self._incarnation}-{event.seq}")
            made = self._made[event.seq] = (event, piece)
            if len(self._made) > MOST_MADE:
                del self._made[next(iter(self._made))]
        return made[1]
