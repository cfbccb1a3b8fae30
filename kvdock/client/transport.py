"""The client's connections: persistent HTTP/1.1 over a Unix socket or TCP, for any number of threads.

It speaks exactly the HTTP that a kvdock server sends: one request, one answer with a Content-Length. A call costs a
third of one through http.client, whose parser builds a mail message from every header (bench/LOG.md).

Invariants: a connection is used by one thread at a time; one that timed out, broke or sent a malformed answer is
closed, never reused; a process that inherited the connections by fork cannot use them, because the parent's grants
are not the child's.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from types import NoneType
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvdock.protocol.access import NOBODY, require_trusted_server
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError, KvdockError, ServerUnavailable, without_password
from kvdock.protocol.forms import decoder_of
from kvdock.protocol.reports import Problem

RECEIVE_BYTES = 1 << 16
MAX_PIECE_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 14
MAX_ANSWER_BYTES = 1 << 28
_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5]\d\d)[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*(?=\r\n)", re.IGNORECASE)
_CODED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[^\r\n]*\bclose\b", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", re.ASCII)
_END = b"\r\n\r\n"


class AnswerError(KvdockError):
    """The bytes that came back are not one complete HTTP answer."""


class Address(NamedTuple):
    """`unix:/path` or `http://host:port`."""

    text: str
    """The address in one of these two forms, whatever form was parsed."""
    socket_path: str
    host: str
    port: int
    trusts_service: bool = False
    trusted_uid: int = NOBODY
    """Both as in protocol.access.require_trusted_server."""

    @classmethod
    def parse(cls, text: str, *, trusts_service: bool = False, trusted_uid: int = NOBODY) -> Address:
        """Also accepts `host:port` and `/path`. Raises ValueError, which names the text; what may be a password is
        left out of it."""
        wrong = ValueError(f"address found {without_password(text)!r}, wanted unix:/path or http://host:port")
        if text.startswith(("unix:", "/")):
            path = text.removeprefix("unix:").removeprefix("//")
            if path.startswith("/"):
                named = text if text.startswith("unix:") else f"unix:{text}"
                return cls(named, path, "", 0, trusts_service, trusted_uid)
            raise wrong
        spelled = f"http://{text}" if _HOST_AND_PORT.fullmatch(text) else text
        try:
            url = urlsplit(spelled)
            port = url.port
        except ValueError as error:  # a port out of range, a bracket without its end
            raise wrong from error
        is_plain = url.path in ("", "/") and not url.query and url.username is None
        if url.scheme == "http" and url.hostname and is_plain:
            return cls(spelled, "", url.hostname, 80 if port is None else port)
        raise wrong

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        if self.socket_path:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """Raises OSError; PermissionError if another user's server answers."""
        if not self.socket_path:
            sock = socket.create_connection((self.host, self.port), timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Blocking, with the kernel's timeout: a full backlog makes a non-blocking connect fail at once.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
            sock.connect(self.socket_path)
            require_trusted_server(
                sock, self.socket_path, trusts_service=self.trusts_service, trusted_uid=self.trusted_uid
            )
        except BaseException:
            sock.close()
            raise
        return sock


class Connection:
    """One connection. Timeouts are socket options, set only when they change, so a call is one send and one receive."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """Connects. Raises OSError, TimeoutError."""
        try:
            self._sock = address.connect(timeout_s)
        except BlockingIOError as error:
            raise TimeoutError from error
        self._sock.settimeout(None)
        self._timeout_s = 0.0

    def begin(self, request: bytes) -> int:
        """Sends as much of a request as takes no waiting. Returns how many bytes were sent. Raises OSError."""
        try:
            return self._sock.send(request, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def exchange(self, request: bytes, timeout_s: float, sent: int = 0) -> tuple[int, bytes, bool]:
        """(status, body, whether the connection may be used again). `sent`: how many bytes of the request begin() has
        sent. Raises OSError, TimeoutError, AnswerError."""
        deadline_s = time.monotonic() + timeout_s
        self._set_timeout(timeout_s)
        try:
            while sent < len(request):
                sent += self._sock.send(memoryview(request)[sent:])
                self._set_timeout(deadline_s - time.monotonic())
            data = self._sock.recv(RECEIVE_BYTES)
            while (end := data.find(_END)) < 0:
                if not data or len(data) > MAX_HEAD_BYTES:
                    raise AnswerError(f"{len(data)} bytes without the end of a header")
                data += self._more(deadline_s)
            status, length, reusable = _parse_head(data[: end + 2])
            missing = end + 4 + length - len(data)
            if missing < 0:
                raise AnswerError(f"{-missing} bytes after the answer")
            if missing:
                data += self._rest(missing, deadline_s)
        except BlockingIOError as error:  # how the kernel reports that its timeout has passed
            raise TimeoutError from error
        return status, data[end + 4 :], reusable

    def close(self) -> None:
        self._sock.close()

    def _rest(self, missing: int, deadline_s: float) -> bytes:
        pieces = []
        while missing:
            pieces.append(self._more(deadline_s, min(missing, MAX_PIECE_BYTES)))
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _more(self, deadline_s: float, at_most: int = RECEIVE_BYTES) -> bytes:
        self._set_timeout(deadline_s - time.monotonic())
        piece = self._sock.recv(at_most)
        if not piece:
            raise AnswerError("the connection ended within an answer")
        return piece

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s == self._timeout_s:
            return
        if timeout_s <= 0:
            raise TimeoutError
        value = _timeval(timeout_s)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = timeout_s


def _timeval(timeout_s: float) -> bytes:
    whole_s = int(timeout_s)
    return struct.pack("@ll", whole_s, max(1, int((timeout_s - whole_s) * 1e6)))  # 0 would mean no timeout


def _parse_head(head: bytes) -> tuple[int, int, bool]:
    """(status, bytes of the body, whether the connection may be used again)."""
    status = _STATUS.match(head)
    if status is None:
        raise AnswerError(f"an answer that begins {head[:32]!r}")
    code = int(status[1])
    lengths = _LENGTH.findall(head)
    if _CODED.search(head) or len(lengths) > 1 or (not lengths and code != 204):
        raise AnswerError("an answer without one Content-Length")
    length = int(lengths[0]) if lengths else 0
    if length > MAX_ANSWER_BYTES:
        raise AnswerError(f"found an answer of {length} bytes, wanted at most {MAX_ANSWER_BYTES}")
    return code, length, head.startswith(b"HTTP/1.1") and not _CLOSE.search(head)


class Begun(NamedTuple):
    """A request on a connection that has taken its first `sent` bytes."""

    connection: Connection
    request: bytes
    sent: int


class Transport:
    """A small pool of connections to one server; `call`, `begin` and `finish` are thread-safe."""

    def __init__(self, address: Address, headers: bytes = b"", keep: int = 8) -> None:
        """`headers`: as `send` takes them."""
        self.address = address
        self.send(headers)
        self._keep = keep
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # guarded by _lock, as is _closed
        self._closed = False

    def send(self, headers: bytes) -> None:
        """From now on requests have these headers, each ended by CRLF, and no others of before."""
        self._head = f" HTTP/1.1\r\nHost: {self.address.authority}\r\n".encode("ascii") + headers

    def call(
        self, method: str, path: str, body: bytes | None, timeout_s: float, media_type: bytes = b"application/json"
    ) -> tuple[int, bytes]:
        """(status, body). `timeout_s` bounds the whole call, retry included.

        Every call of the API may be repeated, so if the connection was lost (the server closed an idle one, or
        restarted) the call is sent once more on a new one. It is not repeated after a timeout, which is the caller's
        bound. Raises ServerUnavailable.
        """
        if os.getpid() != self._pid:
            raise ServerUnavailable(f"{self.address.text}: the client was made in the parent process, before a fork")
        return self._answer(self._request(method, path, body, media_type), timeout_s)

    def begin(self, method: str, path: str, body: bytes, media_type: bytes) -> Begun | None:
        """Sends the request of a call, without waiting for anything. The caller must pass what it returns to finish().
        None: nothing was sent, because no connection is open and idle; use call()."""
        with self._lock:
            if os.getpid() != self._pid or not self._idle:
                return None
            connection = self._idle.pop()
        request = self._request(method, path, body, media_type)
        try:
            return Begun(connection, request, connection.begin(request))
        except OSError:
            connection.close()
            return None

    def finish(self, begun: Begun, timeout_s: float) -> tuple[int, bytes]:
        """Waits for the answer to what begin() has sent; as call()."""
        return self._answer(begun.request, timeout_s, begun)

    def _request(self, method: str, path: str, body: bytes | None, media_type: bytes) -> bytes:
        request = f"{method} {path}".encode("ascii") + self._head
        if body is None:
            return request + b"\r\n"
        return request + b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (media_type, len(body), body)

    def _answer(self, request: bytes, timeout_s: float, begun: Begun | None = None) -> tuple[int, bytes]:
        deadline_s = time.monotonic() + timeout_s
        try:
            try:
                if begun is not None:
                    return self._exchange(begun.connection, request, timeout_s, begun.sent)
                return self._exchange(self._take(timeout_s), request, timeout_s)
            except TimeoutError:
                raise
            except (OSError, AnswerError):
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError from None
                return self._exchange(Connection(self.address, remaining_s), request, remaining_s)
        except TimeoutError as error:
            raise ServerUnavailable(f"{self.address.text}: no answer within {timeout_s:g} s") from error
        except (OSError, AnswerError) as error:
            raise ServerUnavailable(f"{self.address.text}: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Closes idle connections; one in use is closed when its call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, timeout_s: float) -> Connection:
        with self._lock:
            if self._closed:
                raise ServerUnavailable(f"{self.address.text}: the client is closed")
            if self._idle:
                return self._idle.pop()
        return Connection(self.address, timeout_s)

    def _exchange(
        self, connection: Connection, request: bytes, timeout_s: float, sent: int = 0
    ) -> tuple[int, bytes]:
        try:
            status, content, reusable = connection.exchange(request, timeout_s, sent)
        except BaseException:
            # An answer may still arrive on this connection: the next call must not read it.
            connection.close()
            raise
        with self._lock:
            if reusable and not self._closed and len(self._idle) < self._keep:
                self._idle.append(connection)
                return status, content
        connection.close()
        return status, content


A = TypeVar("A")


class Answers:
    """Decodes answers of the server at `address`. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address

    def decoded(self, call: Call[A], status: int, raw: bytes, *, packed: bool) -> A:
        """Raises ApiError for a refusal, and ServerUnavailable for bytes that are no answer to this call. `packed`:
        whether `raw` is MessagePack; refusals are always JSON."""
        try:
            if status >= 400:
                raise ApiError.from_problem(decoder_of(Problem, packed=False).decode(raw))
            if call.answer is NoneType:
                return call.answer()
            return decoder_of(call.answer, packed=packed).decode(raw)
        except msgspec.DecodeError as error:
            what = f"{call.method} {call.path} answered {status} with something else: {error}"
            raise ServerUnavailable(f"{self._address}: {what}") from error
