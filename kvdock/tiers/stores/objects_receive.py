"""Receives ranges of objects straight into the pages, with Python's own HTTP client, in threads. obstore would receive
each body into memory of its own first, which takes half as much processor time again. It signs the URLs, so it alone
has credentials.

An answer is taken only if it is exactly the one wanted. All else is obstore's to ask for again, which knows proxies,
retries and errors; after some failures in a row it is asked alone for a while. Once a request was stopped it writes to
no page, and whoever stops it can wait for that.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from kvdock._core import CHECKSUM_PRIME
from kvdock.shm.checksum import share_of
from kvdock.tiers.record import RecordError
from kvdock.tiers.stores.objects_loads import Piece, Range, Receiving, Sink
from kvdock.tiers.stores.objects_requests import Requests

log = logging.getLogger("kvdock.tiers")

SIGNED_S: Final = 900.0
"""How long a signed URL may be used: as long as a header that obstore signs."""
CONNECT_S: Final = 1.0
"""A connection that takes longer is left to obstore, which tries several addresses of a store at once."""
UNUSUAL_S: Final = 0.25
"""A request that was given up after so long without a connection has failed: others would wait in vain, too."""
SILENCE_S: Final = 30.0
"""A request that has moved no byte for this long has failed, whatever its deadline is."""
IDLE_S: Final = 20.0
"""How long an unused connection is kept."""
STEP_BYTES: Final = 1 << 20
"""What is hashed at once, while it is still in the processor's caches."""
FAILURES: Final = 8
"""After this many failures in a row, obstore is asked for everything during PAUSE_S seconds."""
PAUSE_S: Final = 300.0


class Receiver:
    """Loads ranges of the objects of one store, with at most `connections` requests at once. `authority`: certificates,
    in PEM, to trust beside the system's. To be used on one event loop."""

    def __init__(
        self, store: Any, obstore: Requests, connections: int, authority: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._obstore, self._clock = store, obstore, clock
        self._admission = Receiving(connections)
        self._threads = ThreadPoolExecutor(connections, "kvdock-objects")
        self._connections = _Connections(authority, clock)
        self._failures, self._paused_until_s = 0, 0.0

    async def signed(self, paths: Sequence[str]) -> Sequence[str | None]:
        """The URLs of objects; None: obstore is to be asked for them."""
        if self._clock() < self._paused_until_s or _has_proxy():
            return [None] * len(paths)
        try:
            return await self._obstore.sign_async(self._store, paths, timedelta(seconds=SIGNED_S))
        except Exception as error:  # obstore's errors have no common class; _failed() counts them, and obstore loads
            self._failed(error)
            return [None] * len(paths)

    async def load(self, path: str, url: str | None, wanted: Range, sink: Sink) -> str | None:
        """Loads a range of the object at this path, with the URL that signed() gave for it. Returns the object's ETag,
        if it has one. Raises FileNotFoundError, RecordError and obstore's errors."""
        if url is not None and self._clock() >= self._paused_until_s:
            async with self._admission.admitted(0):
                try:
                    return await self._receive(url, wanted, sink)
                except (OSError, ValueError, http.client.HTTPException) as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    self._failed(error)
        options = None if wanted.is_all else {"range": (wanted.begin, wanted.end)}
        async with self._admission.admitted(wanted.end - wanted.begin):
            found = await self._obstore.get_async(self._store, path, options=options)
            if found.meta["size"] != wanted.total:
                raise RecordError(f"found an object of {found.meta['size']} bytes, wanted {wanted.total}")
            await sink.take(found, wanted.begin, wanted.end)
            e_tag: str | None = found.meta["e_tag"]
            return e_tag

    async def _receive(self, url: str, wanted: Range, sink: Sink) -> str | None:
        request = _Get(urlsplit(url), wanted, sink.pieces(wanted.begin, wanted.end))
        sink.writers.append(request)
        self._obstore.sent_get()
        began_s = self._clock()
        try:
            loop = asyncio.get_running_loop()
            e_tag, shares = await loop.run_in_executor(self._threads, request.run, self._connections)
        except asyncio.CancelledError:
            if not request.is_connected and self._clock() - began_s > UNUSUAL_S:
                self._failed(TimeoutError("there was no connection"))
            raise
        finally:
            request.stop(0.0)
        self._failures = 0
        for piece, share in zip(request.pieces, shares, strict=True):
            sink.add(piece, share)
        return e_tag

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        log.debug("obstore is asked for what was not received: %s", error)
        if self._failures >= FAILURES:
            self._paused_until_s = self._clock() + PAUSE_S

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._connections.close()


class _Get:
    """One request, to be run in a thread. `pieces`: the memory for what it brings."""

    def __init__(self, url: SplitResult, wanted: Range, pieces: Sequence[Piece]) -> None:
        self.pieces, self._url, self._wanted = pieces, url, wanted
        self._state = threading.Condition()
        self._socket: socket.socket | None = None
        self._is_stopped = self._is_writing = self.is_connected = False

    def stop(self, wait_s: float) -> bool:
        """It is to write no more. Returns whether it has ended within that time. From any thread."""
        with self._state:
            self._is_stopped = True
            if self._socket is not None:
                with suppress(OSError):  # the store has closed it already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # beneath TLS, which the thread may use now
            return self._state.wait_for(lambda: not self._is_writing, wait_s)

    def run(self, connections: _Connections) -> tuple[str | None, list[int]]:
        """Returns the ETag, and of each piece the share of the checksum. Raises FileNotFoundError, and OSError,
        ValueError or HTTPException if the answer is not the one wanted."""
        kept = connections.kept(self._url)
        if kept is not None:
            with suppress(ConnectionError):  # the store has closed it meanwhile
                return self._ask(kept, connections)
            self._go_on()
        return self._ask(connections.new(self._url), connections)

    def _ask(self, connection: http.client.HTTPConnection, connections: _Connections) -> tuple[str | None, list[int]]:
        wanted, is_free = self._wanted, False
        headers = {} if wanted.is_all else {"Range": f"bytes={wanted.begin}-{wanted.end - 1}"}
        try:
            with self._until_stopped(connection.sock):
                connection.request("GET", f"{self._url.path}?{self._url.query}", headers=headers)
                with connection.getresponse() as answer:
                    e_tag = _e_tag(answer, wanted)
                    with self._writing():
                        shares = [_received(answer, piece) for piece in self.pieces]
            is_free = True
        finally:
            if is_free:
                connections.keep(self._url, connection)
            else:
                connection.close()
        return e_tag, shares

    @contextmanager
    def _until_stopped(self, one: socket.socket) -> Iterator[None]:
        with self._state:
            self._go_on()
            self._socket, self.is_connected = one, True
        try:
            yield
        finally:
            with self._state:
                self._socket = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._state:
            self._go_on()
            self._is_writing = True
        try:
            yield
        finally:
            with self._state:
                self._is_writing = False
                self._state.notify_all()

    def _go_on(self) -> None:
        if self._is_stopped:
            raise ConnectionAbortedError("the request was stopped")


def _e_tag(answer: http.client.HTTPResponse, wanted: Range) -> str | None:
    """Raises FileNotFoundError, and ValueError for any answer but the one wanted."""
    if answer.status == 404:
        raise FileNotFoundError
    found = (answer.status, answer.length, answer.getheader("Content-Range"), answer.getheader("Content-Encoding"))
    of_range = None if wanted.is_all else f"bytes {wanted.begin}-{wanted.end - 1}/{wanted.total}"
    if found != (200 if wanted.is_all else 206, wanted.end - wanted.begin, of_range, None):
        raise ValueError(f"found an answer {found}, wanted {wanted}")
    return answer.getheader("ETag")


def _received(answer: http.client.HTTPResponse, piece: Piece) -> int:
    """Receives a piece. Returns its share of the checksum, if it is hashed."""
    share = 0
    for at in range(0, len(piece.memory), STEP_BYTES):
        some = piece.memory[at : at + STEP_BYTES]
        if (count := answer.readinto(some)) != len(some):
            raise ConnectionError(f"found the end of an answer {len(some) - count} bytes before that of a piece")
        share += share_of(some, piece.at + at) if piece.is_hashed else 0
    return share % CHECKSUM_PRIME


class _Connections:
    """Connections to a store that wait for their next request, the last used first. Thread-safe."""

    def __init__(self, authority: bytes | None, clock: Callable[[], float]) -> None:
        self._authority, self._clock, self._lock = authority, clock, threading.Lock()
        self._kept: list[tuple[float, str, http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    def kept(self, url: SplitResult) -> http.client.HTTPConnection | None:
        while True:
            try:
                since_s, where, one = self._kept.pop()
            except IndexError:
                return None
            if where == url.netloc and self._clock() - since_s < IDLE_S:
                return one
            one.close()

    def keep(self, url: SplitResult, one: http.client.HTTPConnection) -> None:
        if one.sock is None:  # the store wants no other request on it
            return
        with self._lock:
            if not self._is_closed:  # else the request has outlived its tier
                self._kept.append((self._clock(), url.netloc, one))
                return
        one.close()

    def new(self, url: SplitResult) -> http.client.HTTPConnection:
        """Raises OSError."""
        assert url.hostname is not None
        began_s = self._clock()
        if url.scheme == "https":
            one: http.client.HTTPConnection = http.client.HTTPSConnection(
                url.hostname, url.port, timeout=CONNECT_S, context=self._context()
            )
        else:
            one = http.client.HTTPConnection(url.hostname, url.port, timeout=CONNECT_S)
        one.connect()
        if self._clock() - began_s > CONNECT_S:  # the first address did not answer
            one.close()
            raise TimeoutError("the connection took long")
        one.sock.settimeout(SILENCE_S)
        return one

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                context = ssl.create_default_context()
                context.set_alpn_protocols(["http/1.1"])
                if self._authority is not None:
                    context.load_verify_locations(cadata=self._authority.decode())
                self._tls = context
            return self._tls

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, []
        for _, _, one in kept:
            one.close()


def _has_proxy() -> bool:
    """Whether obstore may send requests through a proxy."""
    names = (name.lower() for name, value in os.environ.items() if value)
    return any(name.endswith(("_proxy", "_proxy_url")) and name != "no_proxy" for name in names)
