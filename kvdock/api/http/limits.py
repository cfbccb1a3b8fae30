"""What one client may use of the server: connections, bytes of bodies, and time to send and to read.

Each limit is written once, here; `tcp_connections` is a setting. kvdock/api/http/connection.py holds connections to
them and kvdock/api/http/wire.py bodies.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvdock.api.turns import FairQueue
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import OWN_TENANT

DESCRIPTORS_KEPT: Final = 128
"""Descriptors for the pool (which opens a file to grow), its lock file, the listening sockets and the page's files."""
UNIX_CONNECTIONS_LEAST: Final = 64
"""The server warns if the system allows fewer descriptors than these, TCP's and DESCRIPTORS_KEPT together."""
NO_LIMIT: Final = 1 << 20
STRANGERS: Final = "\n"
"""In place of a tenant, whose name has no line break."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection, except the first two, which are for all. A connection beyond a limit is refused and
    closed."""

    tcp_connections: int
    """How many may be open over TCP."""
    unix_connections: int
    """How many may be open over the Unix socket."""
    url_bytes: int = 8 << 10
    header_bytes: int = 32 << 10
    """The names and values of a request's headers, in sum."""
    headers: int = 64
    body_pieces: int = 512
    """A body may arrive in this many pieces and one for each KiB of it: each piece costs a turn of the event loop."""
    pipelined: int = 16
    """Requests that wait for the answer of an earlier one."""
    header_s: float = 10.0
    """From the first byte of a request, or from connecting, to the end of its header."""
    body_s: float = 30.0
    """From the end of the header to the end of the body."""
    idle_s: int = 75
    """Between requests; longer than engines leave a connection idle between steps."""
    stranger_idle_s: int = 5
    """The same for a connection on which no token was shown."""
    unread_s: float = 30.0
    """While the client does not read its answers."""


class BodyCapacity:
    """How many bytes of long bodies may be received or in work at once, over all calls that share this. A tenant may
    have half of them, which is one body of the greatest length; the server's own user may have all. Short bodies are
    not counted, so that long ones do not stop them. Used from one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._of_tenants = Counter[str]()
        self.queue = FairQueue()

    @classmethod
    def for_bodies_of(cls, body_limit_bytes: int) -> BodyCapacity:
        """Capacity for two bodies of the greatest length at a time."""
        return cls(2 * body_limit_bytes)

    def take(self, tenant: str, more: int) -> None:
        """Raises ApiError(too_busy)."""
        its = self._of_tenants[tenant] + more
        if tenant != OWN_TENANT and its > self.limit_bytes // 2:
            raise ApiError(
                "too_busy", "other calls of the tenant send long bodies now: try again", found=its,
                wanted=self.limit_bytes // 2,
            )
        if self.taken_bytes + more > self.limit_bytes:
            raise ApiError(
                "too_busy", "other calls send long bodies now: try again", found=self.taken_bytes + more,
                wanted=self.limit_bytes,
            )
        self.taken_bytes += more
        self._of_tenants[tenant] = its

    def give_back(self, tenant: str, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes
        self._of_tenants[tenant] -= size_bytes
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]


class BodyShare:
    """One call's share of the capacity, until it is given back."""

    FREE_BYTES: Final = 64 << 10
    """Shorter bodies need no share."""
    __slots__ = ("_bytes", "_capacity", "_tenant")

    def __init__(self, capacity: BodyCapacity, tenant: str | None) -> None:
        """`tenant`: the caller's; None: a stranger, of whom no long body is read."""
        self._capacity, self._tenant, self._bytes = capacity, STRANGERS if tenant is None else tenant, 0

    def hold(self, body_bytes: int) -> None:
        """Counts a body. `body_bytes` of it have arrived. Raises ApiError(too_busy) if that exceeds the capacity."""
        if body_bytes <= self.FREE_BYTES:
            return
        self._capacity.take(self._tenant, body_bytes - self._bytes)
        self._bytes = body_bytes

    async def next_turn(self) -> None:
        """Long bodies are decoded one in each turn of the event loop, so that several that end together do not delay
        other calls by their sum."""
        await self._capacity.queue.next()

    def give_back(self) -> None:
        self._capacity.give_back(self._tenant, self._bytes)
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
