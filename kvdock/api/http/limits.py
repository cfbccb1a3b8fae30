"""What one client may use of the server: connections, bytes that have arrived, time to send and to read, and turns of
the event loop.

Each limit is written once, here; `tcp_connections` is a setting. kvdock/api/http/connection.py holds connections to
them and kvdock/api/http/wire.py bodies.
"""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvdock.protocol.errors import ApiError


class Turns:
    """`await turns.next()` returns to one caller in each turn of the event loop, in the order of asking. Without turns,
    sixty requests that arrive together are answered together, and an engine waits for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._pass_on, loop)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its call may have been cancelled
                first.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._taken = False


DESCRIPTORS_KEPT: Final = 128
"""For the pool, which opens one to grow, its lock file, the listening sockets and files of the status page."""
UNIX_CONNECTIONS_LEAST: Final = 64
"""A machine that gives fewer descriptors than this, the TCP connections and those that are kept is warned about."""
NO_LIMIT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may use, unless it says otherwise. Beyond it, the connection is refused and closed."""

    tcp_connections: int
    """All together."""
    unix_connections: int
    """All together."""
    url_bytes: int = 8 << 10
    header_bytes: int = 32 << 10
    """Names and values of one request's headers."""
    headers: int = 64
    body_pieces: int = 512
    """How many pieces a body may arrive in, and one more for each KiB of it: each piece costs the server a turn."""
    pipelined: int = 16
    """Requests that wait for the answer of an earlier one."""
    header_s: float = 10.0
    """From the first byte of a request, or from connecting, to the end of its header."""
    body_s: float = 30.0
    """From the end of the header to the end of the body."""
    idle_s: int = 75
    """Between requests; longer than engines leave a connection idle between steps."""
    unread_s: float = 30.0
    """While the client does not read its answers."""


class BodyRoom:
    """Bytes of long bodies that are being received or worked on, over all calls that share the room.

    Short bodies are not counted: a room that is full of long ones does not stop them. Used from one event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.turns = Turns()

    @classmethod
    def for_bodies_of(cls, body_limit_bytes: int) -> BodyRoom:
        """For two of the longest at a time."""
        return cls(2 * body_limit_bytes)


class BodyShare:
    """What one call takes of the room, until it gives it back."""

    FREE_BYTES: Final = 64 << 10
    """Shorter bodies take nothing."""
    __slots__ = ("_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room, self._bytes = room, 0

    def hold(self, body_bytes: int) -> None:
        """Takes room for a body of which `body_bytes` have arrived. Raises ApiError(too_busy) if there is none."""
        if body_bytes <= self.FREE_BYTES:
            return
        room, more = self._room, body_bytes - self._bytes
        if room.taken_bytes + more > room.limit_bytes:
            raise ApiError(
                "too_busy", "other calls send long bodies now: try again", found=room.taken_bytes + more,
                wanted=room.limit_bytes,
            )
        room.taken_bytes += more
        self._bytes = body_bytes

    async def next_turn(self) -> None:
        """A long body is decoded when it is its turn: several that end together do not add up."""
        await self._room.turns.next()

    def give_back(self) -> None:
        self._room.taken_bytes -= self._bytes
        self._bytes = 0


def raise_descriptors() -> int:
    """Raises this process's limit of open descriptors to what the system allows it, and returns that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return NO_LIMIT if hard == resource.RLIM_INFINITY else hard


def unix_connections(descriptors: int, tcp_connections: int) -> int:
    """How many Unix connections a server may have: its descriptors, less those of TCP and of the pool."""
    return max(UNIX_CONNECTIONS_LEAST, descriptors - DESCRIPTORS_KEPT - tcp_connections)


def descriptors_wanted(tcp_connections: int) -> int:
    return tcp_connections + UNIX_CONNECTIONS_LEAST + DESCRIPTORS_KEPT
