"""The client's connections: persistent HTTP/1.1 over a Unix socket or TCP, for any number of threads.

Invariants: a connection is used by one thread at a time; one that timed out or broke is closed, never
reused; a process that inherited the pool by fork gets no connection at all, because what the parent
was granted is not the child's to use.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from typing import NamedTuple
from urllib.parse import urlsplit

from kvdock.api.errors import ServerUnavailable


class UnixHTTPConnection(http.client.HTTPConnection):
    """HTTP/1.1 over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        self.sock = sock


class Address(NamedTuple):
    """`unix:/path` or `http://host:port`."""

    text: str
    socket_path: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError naming the text."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:").removeprefix("//")
            if path.startswith("/"):
                return cls(text, path, "", 0)
        else:
            url = urlsplit(text)
            if url.scheme == "http" and url.hostname and url.path in ("", "/") and not url.query:
                return cls(text, "", url.hostname, url.port or 80)
        raise ValueError(f"address found {text!r}, wanted unix:/path or http://host:port")

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.socket_path:
            return UnixHTTPConnection(self.socket_path, timeout_s)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)


class Transport:
    """A small pool of connections to one server; `call` is thread-safe."""

    def __init__(self, address: Address, keep: int = 8) -> None:
        self.address = address
        self._keep = keep
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []  # guarded by _lock, as is _closed
        self._closed = False

    def call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """(status, body). `timeout_s` bounds the whole call, retry included.

        Every call of the API may be repeated, so one that meets a lost connection (the server closed
        an idle one, or restarted) is sent once more on a fresh one. Silence is not repeated: the caller
        set the bound. Raises ServerUnavailable.
        """
        if os.getpid() != self._pid:
            raise ServerUnavailable(f"{self.address.text}: this process was forked from the client's own")
        deadline_s = time.monotonic() + timeout_s
        connection = self._take()
        try:
            return self._exchange(connection, method, path, body, deadline_s)
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        except (OSError, http.client.HTTPException):
            fresh = self.address.connection(timeout_s)
        try:
            return self._exchange(fresh, method, path, body, deadline_s)
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{self.address.text}: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Closes idle connections; one in use is closed when its call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _silent(self, timeout_s: float) -> ServerUnavailable:
        return ServerUnavailable(f"{self.address.text}: no answer within {timeout_s:g} s")

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._closed:
                raise ServerUnavailable(f"{self.address.text}: the client is closed")
            if self._idle:
                return self._idle.pop()
        return self.address.connection(1.0)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, deadline_s: float
    ) -> tuple[int, bytes]:
        try:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            connection.timeout = remaining_s
            if connection.sock is not None:
                connection.sock.settimeout(remaining_s)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            status, content = response.status, response.read()
        except BaseException:
            # Whatever happened, an answer may still be on its way: the next call must not read it.
            connection.close()
            raise
        self._give_back(connection, reusable=not response.will_close)
        return status, content

    def _give_back(self, connection: http.client.HTTPConnection, *, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._closed and len(self._idle) < self._keep:
                self._idle.append(connection)
                return
        connection.close()
