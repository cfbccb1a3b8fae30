"""Turns of the event loop, and who has them: one call of people or strangers or one slice of long work, and a few reads
in each, whoever asks for how many. Of short calls of engines a turn has several.

Invariants: calls and slices that wait go on in the order in which they came; of reads that wait, each client has one
after the other, in the order in which its own came.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

SLICE_S = 0.0003
SLICE_WORK: Final = 12_000
"""As much in the table's units of work (csrc/base/work.h)."""
READS_OF_TURN: Final = 4
ENGINE_READS_OF_TURN: Final = 4
"""Short ones, each of which may be a lookup."""
ENDS_OF_TURN: Final = 16
"""Connections that are closed in one turn because their clients have closed them; each takes some 15 µs."""
SHORT_READ_BYTES: Final = 4 << 10
"""Longer reads of engines, such as lookups of hundreds of keys, come one in a turn, so that short ones do not wait for
them."""
LONG_READ_BYTES: Final = 64 << 10
CALLS_WAITING: Final = 16


@contextmanager
def not_collected() -> Iterator[None]:
    """In a thread that makes much that stays. A collection of garbage walks all of it on the thread that makes one more
    object, which may be the event loop's: so there is none meanwhile, and later ones leave out every object that is in
    the process when this ends. That includes objects of calls in flight: they end with their last reference, but a
    circle of references among them stays for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class SharedTurns:
    """Which of several queues has the turn: they take turns where more than one wants it."""

    def __init__(self) -> None:
        self._is_taken = False
        self._owed: FairQueue | None = None
        """The queue that was refused: it comes next."""

    def take(self, queue: FairQueue, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the queue has this turn."""
        if self._is_taken or self._owed not in (None, queue):
            self._owed = self._owed or queue
            return False
        self._owed, self._is_taken = None, True
        loop.call_soon(self._end)
        return True

    def forgo(self, queue: FairQueue) -> None:
        """Nobody waits in the queue any more."""
        if self._owed is queue:
            self._owed = None

    def _end(self) -> None:
        self._is_taken = False


class FairQueue:
    """`await queue.next()` returns to one caller in each turn of the event loop, in the order of the calls. Without it,
    sixty requests that arrive together are answered together, and an engine waits for all of them."""

    def __init__(self, turns: SharedTurns | None = None) -> None:
        """`turns`: shared with other queues."""
        self._turns = turns or SharedTurns()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def next(self) -> None:
        """In this turn, if nobody else has it."""
        loop = asyncio.get_running_loop()
        if self._taken or not self._turns.take(self, loop):
            await self.later()
        else:
            self._take(loop)

    async def later(self) -> None:
        """In the next turn at the earliest."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.append(mine)
        if not self._taken:
            self._take(loop)
        await mine

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = True
        loop.call_soon(self._pass_on, loop)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._waiting[0].done():  # its call was cancelled
            self._waiting.popleft()
        if not self._waiting:
            self._taken = False
            self._turns.forgo(self)
            return
        if self._turns.take(self, loop):
            self._waiting.popleft().set_result(None)
        loop.call_soon(self._pass_on, loop)


class _Queues:
    """Those of an event loop."""

    def __init__(self) -> None:
        turns = SharedTurns()
        self.calls, self.slices = FairQueue(turns), FairQueue(turns)
        self.began_s = time.thread_time()
        """When somebody last got a turn, in processor time of the loop's thread."""


_OF_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = WeakKeyDictionary()


def _queues() -> _Queues:
    """Those of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _OF_LOOP.get(loop)
    if found is None:
        found = _OF_LOOP[loop] = _Queues()
    return found


async def next_call() -> None:
    """Waits for a turn of the event loop in which no other call of people or strangers begins or is answered, and no
    long work has a slice."""
    queues = _queues()
    await queues.calls.next()
    queues.began_s = time.thread_time()


async def next_slice() -> None:
    """Waits for a later turn of the event loop in which no other long work has a slice, and no call begins."""
    queues = _queues()
    await queues.slices.later()
    queues.began_s = time.thread_time()


class Slices:
    """Long work on the event loop in slices of SLICE_S of processor time. They are counted from the beginning of the
    turn, whoever began it: so several pieces of work that follow one another have one slice, and not one each."""

    def __init__(self) -> None:
        self._queues = _queues()

    async def give_turn(self) -> None:
        """Lets others run if the slice is over. Call it after each small step."""
        if time.thread_time() - self._queues.began_s >= SLICE_S:
            await next_slice()


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Each of the items, with turns for others in between; what is done with one of them is a small step. Each is let
    go before the next one: to free thousands that have ended meanwhile takes ms."""
    slices, left = Slices(), deque(items)
    del items
    while left:
        yield left.popleft()
        await slices.give_turn()


class Backlog:
    """What waits for its turn, by client: the clients take turns, however much each of them wants. So an engine with
    one connection waits for one read of another that has sixty, and not for sixty."""

    def __init__(self) -> None:
        self._clients: deque[Hashable] = deque()
        """Those that wait; the first is next."""
        self._of: dict[Hashable, deque[Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add(self, client: Hashable, go_on: Callable[[], None]) -> None:
        if client not in self._of:
            self._of[client] = deque()
            self._clients.append(client)
        self._of[client].append(go_on)

    def next(self) -> Callable[[], None]:
        """Takes it out. Raises IndexError if nothing waits."""
        client = self._clients.popleft()
        its = self._of[client]
        found = its.popleft()
        if its:
            self._clients.append(client)
        else:
            del self._of[client]
        return found


class ReadTurns:
    """How much of what arrives is handled in one turn of the event loop: `of_turn` short reads of all connections that
    share this, or one long read; nothing while more than `calls_waiting` calls wait, which would become ever more."""

    def __init__(self, of_turn: int = READS_OF_TURN, calls_waiting: float = CALLS_WAITING) -> None:
        self._of_turn, self._most_waiting = of_turn, calls_waiting
        self._left = of_turn
        self._waiting = Backlog()
        self._is_counting = False

    def take(self, read_bytes: int) -> bool:
        """Whether the read may be handled now."""
        if self._left <= 0 or self._waiting or self._calls_wait():
            return False
        self._spend(read_bytes)
        return True

    def wait(self, client: Hashable, go_on: Callable[[], None], read_bytes: int) -> None:
        """Calls `go_on` when it is the client's turn."""
        self._waiting.add(client, partial(self._go_on, go_on, read_bytes))
        self._count()

    def _go_on(self, go_on: Callable[[], None], read_bytes: int) -> None:
        self._spend(read_bytes)
        go_on()

    def _spend(self, read_bytes: int) -> None:
        self._left -= 1 + read_bytes * self._of_turn // LONG_READ_BYTES
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._left, self._is_counting = self._of_turn, False
        while self._waiting and self._left > 0 and not self._calls_wait():
            self._waiting.next()()
        if self._waiting:
            self._count()

    def _calls_wait(self) -> bool:
        return _queues().calls.waiting > self._most_waiting
