"""The connections of clients that have many. The kernel names all sockets that are ready at once, and the event loop
reads each of them in one turn: a process with a thousand connections would hold it for ms when it ends.

Invariant: of the connections here, WOKEN_OF_TURN are read in one turn of the event loop, however many are ready.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final

MOST_OF_PROCESS: Final = 16
"""So many connections of one process, or from one address over TCP, are read as soon as they are ready."""
MOST_OF_USER: Final = 128
"""The same of all processes of a user, so that many processes with few connections each are a crowd, too."""
WOKEN_OF_TURN: Final = 16


class Crowd:
    """The sockets here wait for their clients in a set of their own in the kernel. The event loop watches that set as
    one descriptor, and asks it for a few that are ready. Used from one event loop."""

    def __init__(self) -> None:
        self._open = Counter[Hashable]()
        self._waiting: dict[int, Callable[[], None]] = {}
        """By descriptor, what reads on."""
        self._set: select.epoll | None = None

    def begin(self, user: Hashable, process: Hashable) -> bool:
        """Counts a connection. Returns whether it belongs to the crowd."""
        self._open[user] += 1
        self._open[user, process] += 1
        return self._open[user] > MOST_OF_USER or self._open[user, process] > MOST_OF_PROCESS

    def end(self, user: Hashable, process: Hashable) -> None:
        for client in (user, (user, process)):
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
        if self._set is not None and not self._open:
            asyncio.get_running_loop().remove_reader(self._set.fileno())
            self._set.close()
            self._set = None

    def wait(self, descriptor: int, go_on: Callable[[], None]) -> None:
        """Calls `go_on` once when there is something to read, or when the client has ended the connection."""
        if self._set is None:
            self._set = select.epoll()
            asyncio.get_running_loop().add_reader(self._set.fileno(), self._wake)
        self._waiting[descriptor] = go_on
        wanted = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
        try:
            self._set.modify(descriptor, wanted)
        except FileNotFoundError:
            self._set.register(descriptor, wanted)

    def forget(self, descriptor: int, go_on: Callable[[], None]) -> None:
        """The descriptor may be another connection's by now; the kernel takes a closed one out by itself."""
        if self._waiting.get(descriptor) == go_on:
            del self._waiting[descriptor]

    def _wake(self) -> None:
        assert self._set is not None
        for descriptor, _ in self._set.poll(0, WOKEN_OF_TURN):
            if go_on := self._waiting.pop(descriptor, None):
                go_on()
