"""One connection to a Redis server. redis-py opens the connection; commands are sent from the caller's memory, and
values are received into it.

redis-py returns a value as `bytes`, which it has copied three times. This reader of RESP2 replies
(https://redis.io/docs/latest/develop/reference/protocol-spec/) receives a value directly into the caller's memory.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvdock.tiers.tier import Deadline

BUFFER_BYTES: Final = 1 << 16
SLICE_S: Final = 0.02
"""How often a call of the socket that waits looks at the deadline."""
LONGEST_LINE: Final = 4096
DEEPEST: Final = 8
"""The most nested arrays; the replies that are used here have at most 4."""
LONGEST_REPLY: Final = 1 << 24
"""The most elements or bytes of a reply that is not received into the caller's memory."""


class OutOfTime(Exception):
    """The deadline passed before all replies were read."""


class WireError(Exception):
    """The connection is lost, or the server does not speak RESP2."""


class ErrorReply(NamedTuple):
    """An error that the server answered. `code`: its first word, such as "OOM"."""

    code: str
    text: str


Reply = int | bytes | ErrorReply | list["Reply"] | None


def command(*words: bytes | Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """A command, as pieces to send. A word may be a sequence of pieces, which are sent one by one, so nothing large is
    copied."""
    pieces: list[bytes | memoryview] = []
    head = b"*%d\r\n" % len(words)
    for word in words:
        if isinstance(word, bytes):
            head += b"$%d\r\n%s\r\n" % (len(word), word)
        else:
            pieces += [head + b"$%d\r\n" % sum(map(len, word)), *word]
            head = b"\r\n"
    return [*pieces, head]


class Wire:
    """A connection. After any exception it cannot be used any more: close it.

    Not thread-safe: one thread at a time may use it.
    """

    def __init__(self, connection: Any) -> None:
        """`connection`: redis-py's object, after the handshake. Raises WireError if it has no socket."""
        found = getattr(connection, "_sock", None)
        if not isinstance(found, socket.socket):
            raise WireError(f"found {type(found).__name__} in a connection of redis-py, wanted a socket")
        self._connection, self._socket = connection, found
        self._socket.settimeout(SLICE_S)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0

    def close(self) -> None:
        self._connection.disconnect()

    def is_quiet(self) -> bool:
        """Whether no byte has arrived since the last reply. Otherwise the server has closed the connection, or replies
        no longer match commands."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        pending = getattr(self._socket, "pending", None)  # bytes that TLS has already decrypted
        return self._begin == self._end and not poll.poll(0) and not (pending and pending())

    def send(self, pieces: Iterable[bytes | memoryview], deadline: Deadline) -> None:
        """Raises OutOfTime, WireError."""
        for piece in _merged(pieces):
            at, view = 0, memoryview(piece)
            while at < len(view):
                _require_time(deadline)
                try:
                    at += self._socket.send(view[at:])
                except TimeoutError:
                    continue
                except OSError as error:
                    raise WireError(str(error)) from error

    def reply(self, deadline: Deadline) -> Reply:
        """Reads the next reply, whole. Raises OutOfTime, WireError."""
        return self._reply(deadline, DEEPEST)

    def value_into(self, views: Sequence[memoryview], deadline: Deadline) -> int | ErrorReply | None:
        """Reads the next reply, a value, and returns its length. If that is the length of all `views` together, the
        bytes are received into these; otherwise they are dropped. None: there is no such value. Raises OutOfTime,
        WireError."""
        line = self._line(deadline)
        if line[:1] == b"-":
            return _error(line)
        if (length := _number(line, b"$")) < 0:
            return None
        if length == sum(map(len, views)):
            for view in views:
                self._read_into(view, deadline)
        else:
            self._drop(length, deadline)
        self._read_end(deadline)
        return length

    def _reply(self, deadline: Deadline, depth: int) -> Reply:
        line = self._line(deadline)
        kind = line[:1]
        if kind == b"-":
            return _error(line)
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return _number(line, kind)
        if kind == b"*" and depth:
            length = _number(line, kind)
            _check_length(length)
            return None if length < 0 else [self._reply(deadline, depth - 1) for _ in range(length)]
        if (length := _number(line, b"$")) < 0:
            return None
        _check_length(length)
        value = bytearray(length)
        self._read_into(memoryview(value), deadline)
        self._read_end(deadline)
        return bytes(value)

    def _line(self, deadline: Deadline) -> bytes:
        while True:
            seen = bytes(self._buffer[self._begin : min(self._end, self._begin + LONGEST_LINE)])
            if (at := seen.find(b"\r\n")) >= 0:
                self._begin += at + 2
                return seen[:at]
            if len(seen) == LONGEST_LINE:
                raise WireError(f"found {seen[:40]!r} without an end, wanted a line of a reply")
            self._buffer[: len(seen)] = seen
            self._begin, self._end = 0, len(seen)
            self._end += self._receive(self._buffer[self._end :], deadline)

    def _read_into(self, view: memoryview, deadline: Deadline) -> None:
        at = min(len(view), self._end - self._begin)
        view[:at] = self._buffer[self._begin : self._begin + at]
        self._begin += at
        while at < len(view):
            at += self._receive(view[at:], deadline)

    def _read_end(self, deadline: Deadline) -> None:
        end = bytearray(2)
        self._read_into(memoryview(end), deadline)
        if end != b"\r\n":
            raise WireError(f"found {bytes(end)!r}, wanted the end of a value")

    def _drop(self, length: int, deadline: Deadline) -> None:
        scratch = memoryview(bytearray(min(length, BUFFER_BYTES)))
        while length:
            self._read_into(scratch[:length], deadline)
            length -= min(length, len(scratch))

    def _receive(self, view: memoryview, deadline: Deadline) -> int:
        while True:
            _require_time(deadline)
            try:
                received = self._socket.recv_into(view)
            except TimeoutError:
                continue
            except OSError as error:
                raise WireError(str(error)) from error
            if not received:
                raise WireError("the server has closed the connection")
            return received


def _require_time(deadline: Deadline) -> None:
    if deadline.is_over:
        raise OutOfTime


def _error(line: bytes) -> ErrorReply:
    text = line[1:].decode(errors="replace")
    return ErrorReply(text.partition(" ")[0], text)


def _check_length(length: int) -> None:
    if length > LONGEST_REPLY:
        raise WireError(f"found a reply of {length} bytes or elements, wanted at most {LONGEST_REPLY}")


def _number(line: bytes, kind: bytes) -> int:
    digits = line[1:].removeprefix(b"-")
    if line[:1] != kind or not digits.isdigit() or len(digits) > 18:
        raise WireError(f"found {line[:40]!r}, wanted a reply of kind {kind.decode()!r}")
    return int(line[1:])


def _merged(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Joins short neighbours, so that they do not need a call and a packet each."""
    short: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        if len(piece) > BUFFER_BYTES // 4 or size + len(piece) > BUFFER_BYTES:
            if short:
                yield b"".join(short)
            short, size = [], 0
        if len(piece) > BUFFER_BYTES // 4:
            yield piece
        else:
            short.append(piece)
            size += len(piece)
    if short:
        yield b"".join(short)
