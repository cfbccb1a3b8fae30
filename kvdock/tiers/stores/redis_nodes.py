"""The servers of a Redis tier: the settings in its URL, the connections to them, and the server of a cluster that has a
key."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvdock.protocol.errors import without_password
from kvdock.tiers.stores.resp import SLICE_S, ErrorReply, OutOfTime, Reply, Wire, WireError, command
from kvdock.tiers.stores.urls import existing_file, read_url, some_text, whole, yes_or_no
from kvdock.tiers.tier import Deadline, TierError, TierUrlError

NAME: Final = "redis"
DEFAULT_PORT: Final = 6379
MOST_TTL_S: Final = 10 * 366 * 86_400
LONGEST_CONNECT_S: Final = 10.0
REFRESH_S: Final = 1.0
"""The least time between two calls that ask a cluster which server has which slots."""

_ANY: Final = {
    "cluster": yes_or_no,
    "connections": whole(1, 64),
    "db": whole(0, 1 << 20),
    "password_env": some_text,
    "password_file": existing_file,
    "ttl_s": whole(1, MOST_TTL_S),
}
_TLS: Final = {"ca_file": existing_file, "cert_file": existing_file, "key_file": existing_file}


class Address(NamedTuple):
    """A server's address. `port` 0: it is a Unix socket, and `host` is its path."""

    host: str
    port: int


@dataclass(frozen=True)
class Settings:
    """`password`: read for each connection, because its file may be replaced. `connections`: the most connections that
    one verb uses at once. `ttl_s` 0: values stay until the server evicts them."""

    address: Address
    user: str | None
    password: Callable[[], str | None]
    tls: Mapping[str, str] | None
    db: int = 0
    cluster: bool = False
    connections: int = 4
    ttl_s: int = 0


def read_settings(url: str, environment: Mapping[str, str]) -> Settings:
    """Reads redis://USER@HOST:PORT/DB, rediss:// (with TLS) or unix:///PATH; docs/operate/tiers_redis.md has the
    parameters. `environment`: where password_env is looked up. Raises TierUrlError."""
    scheme = url.partition(":")[0]
    found = read_url(url, ("redis", "rediss", "unix"), _ANY | _TLS if scheme == "rediss" else _ANY)
    parts, options = found
    if scheme == "unix":
        if parts.hostname or not parts.path:
            raise TierUrlError(f"unix: found {parts.netloc!r} and the path {parts.path!r}, wanted unix:///PATH")
        address = Address(parts.path, 0)
    else:
        try:
            address = Address(parts.hostname or "localhost", parts.port or DEFAULT_PORT)
        except ValueError:
            raise TierUrlError(f"{scheme}: found another, wanted a port from 1 to 65535") from None
        if path := parts.path.strip("/"):
            if not path.isdecimal() or "db" in options:
                raise TierUrlError(
                    f"{scheme}: found the path /{without_password(path)}, wanted the number of a database, once"
                )
            options["db"] = int(path)
    if options.get("cluster") and (options.get("db") or scheme == "unix"):
        raise TierUrlError(f"{scheme}: found a database or a Unix socket with cluster=yes, wanted neither")
    tls = {name: str(options.pop(name)) for name in _TLS if name in options} if scheme == "rediss" else None
    if tls is not None and ("cert_file" in tls) != ("key_file" in tls):
        raise TierUrlError("rediss: found one of cert_file and key_file, wanted both or neither")
    file, variable = options.pop("password_file", None), options.pop("password_env", None)
    password = partial(_password, scheme, file, variable, environment)
    if password() is None and found.user:
        raise TierUrlError(f"{scheme}: found the user {found.user!r}, wanted password_file or password_env too")
    return Settings(address, found.user or None, password, tls, **options)


def _password(scheme: str, file: Path | None, variable: str | None, environment: Mapping[str, str]) -> str | None:
    if file is not None and variable is not None:
        raise TierUrlError(f"{scheme}: found password_file and password_env, wanted one of them")
    if file is not None:
        password, source = file.read_text().rstrip("\r\n"), str(file)
    elif variable is not None:
        password, source = environment.get(variable, ""), f"environment variable {variable}"
    else:
        return None
    if not password:
        raise TierUrlError(f"{scheme}: found no password in {source}, wanted one")
    return password


class Nodes:
    """Connections to the servers. Thread-safe."""

    def __init__(self, settings: Settings, client: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`client`: the module redis. `clock`: a monotonic clock, in seconds."""
        self._settings, self._client, self._clock = settings, client, clock
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._idle: dict[Address, list[Wire]] = {}
        self._slots: dict[int, Address] = {}
        self._refreshed_s, self._is_stale = -math.inf, True
        self._is_closed = False

    def borrow(self, address: Address, deadline: Deadline) -> Wire:
        """A connection for one thread, which gives it back or closes it. Raises TierError, OutOfTime."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                wire = idle.pop() if idle else None
            if wire is None:
                return self._dial(address, deadline)
            if wire.is_quiet():
                return wire
            wire.close()

    def give_back(self, address: Address, wire: Wire) -> None:
        """Takes back a connection from which every reply was read."""
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if is_kept := not self._is_closed and len(idle) < 2 * self._settings.connections:
                idle.append(wire)
        if not is_kept:
            wire.close()

    def lost(self, address: Address) -> None:
        """A connection to this server has failed, so its idle connections may have failed too: they are closed."""
        with self._lock:
            wires = self._idle.pop(address, [])
            self._is_stale = True
        for wire in wires:
            wire.close()

    def address_of(self, key: bytes, deadline: Deadline) -> Address:
        """The server that has the key. Raises TierError, OutOfTime."""
        if not self._settings.cluster:
            return self._settings.address
        slot = self._client.crc.key_slot(key)
        if self._is_stale and self._clock() - self._refreshed_s >= REFRESH_S:
            self._refresh(deadline)
        if slot not in self._slots:
            raise TierError(NAME, f"no server of the cluster has slot {slot}")
        return self._slots[slot]

    def addresses(self, deadline: Deadline) -> list[Address]:
        """All servers that have keys. Raises TierError, OutOfTime."""
        if not self._settings.cluster:
            return [self._settings.address]
        self.address_of(b"", deadline)
        return list(dict.fromkeys(self._slots.values()))

    def forget_slots(self) -> None:
        """A server does not have a slot that it had: the cluster is asked again soon."""
        self._is_stale = True

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            wires = [wire for idle in self._idle.values() for wire in idle]
            self._idle = {}
        for wire in wires:
            wire.close()

    def _dial(self, address: Address, deadline: Deadline) -> Wire:
        """Connects in a thread of its own, because name resolution has no timeout."""
        dialled: Future[Wire] = Future()

        def dial(timeout_s: float) -> None:
            try:
                dialled.set_result(self._connected(address, timeout_s))
            except Exception as error:  # of redis-py, sockets or TLS: the waiting thread raises it
                dialled.set_exception(error)

        timeout_s = max(SLICE_S, min(deadline.left_s, LONGEST_CONNECT_S))
        threading.Thread(target=dial, args=(timeout_s,), name="kvdock-redis-dial", daemon=True).start()
        until_s = self._clock() + timeout_s + SLICE_S
        while not (deadline.is_over or dialled.done() or self._clock() > until_s):
            wait([dialled], SLICE_S)
        if dialled.done():
            try:
                return dialled.result()
            except Exception as error:  # of any kind: there is no connection
                raise TierError(NAME, f"cannot connect to {_text(address)}: {error}") from error
        dialled.add_done_callback(_close_late)
        if deadline.is_over:
            raise OutOfTime
        raise TierError(NAME, f"{_text(address)} did not answer within {timeout_s:.1f} s")

    def _connected(self, address: Address, timeout_s: float) -> Wire:
        settings, client = self._settings, self._client
        arguments: dict[str, Any] = {
            "db": settings.db, "username": settings.user, "password": settings.password(), "protocol": 2,
            "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s,
            "retry": client.retry.Retry(client.backoff.NoBackoff(), 0),
        }  # fmt: skip
        if not address.port:
            connection = client.UnixDomainSocketConnection(path=address.host, **arguments)
        elif settings.tls is None:
            connection = client.Connection(host=address.host, port=address.port, **arguments)
        else:
            names = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
            files = {names[name]: path for name, path in settings.tls.items()}
            connection = client.SSLConnection(host=address.host, port=address.port, **files, **arguments)
        connection.connect()
        return Wire(connection)

    def _refresh(self, deadline: Deadline) -> None:
        """Asks the cluster which server has which slots, in one thread at a time. Raises TierError if no server
        answers, OutOfTime."""
        while not self._refreshing.acquire(timeout=SLICE_S):
            if deadline.is_over:
                raise OutOfTime
        try:
            first_error = None
            for address in dict.fromkeys((self._settings.address, *self._slots.values())):
                if not self._is_stale:
                    return
                try:
                    self._slots = read_slots(self.ask(address, command(b"CLUSTER", b"SLOTS"), deadline), address)
                    self._is_stale, self._refreshed_s = False, self._clock()
                except TierError as error:
                    first_error = first_error or error
            if self._is_stale and first_error is not None:
                raise first_error
        finally:
            self._refreshing.release()

    def ask(self, address: Address, pieces: list[bytes | memoryview], deadline: Deadline) -> Reply:
        """Sends one command to one server. Raises TierError, also if the server answers with an error; OutOfTime."""
        wire = self.borrow(address, deadline)
        try:
            wire.send(pieces, deadline)
            reply = wire.reply(deadline)
        except WireError as error:
            wire.close()
            self.lost(address)
            raise TierError(NAME, f"{_text(address)}: {error}") from error
        except BaseException:
            wire.close()
            raise
        self.give_back(address, wire)
        if isinstance(reply, ErrorReply):
            raise TierError(NAME, f"{_text(address)}: {reply.text}")
        return reply


def read_slots(reply: Any, asked: Address) -> dict[int, Address]:
    """Reads the answer to CLUSTER SLOTS. A server without a name is the one that was asked. Raises TierError."""
    slots: dict[int, Address] = {}
    try:
        for first, last, master, *_ in reply:
            address = Address(master[0].decode() if master[0] else asked.host, int(master[1]))
            slots.update(dict.fromkeys(range(first, last + 1), address))
    except (TypeError, ValueError, IndexError, AttributeError):
        raise TierError(NAME, f"found {str(reply)[:80]}, wanted an answer to CLUSTER SLOTS") from None
    return slots


def _close_late(dialled: Future[Wire]) -> None:
    """Closes a connection that was made after the deadline."""
    if dialled.exception() is None:
        dialled.result().close()


def _text(address: Address) -> str:
    return f"{address.host}:{address.port}" if address.port else address.host
