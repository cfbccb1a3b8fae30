"""`read_events` where what answers is no kvdock, or dies in the middle of an event."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from kvdock.client.events import StreamedEvent, read_events
from kvdock.client.transport import Address
from kvdock.protocol.errors import ServerUnavailable

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
"""The body lasts until the connection ends: a proxy may send it so."""
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b'retry: 1000\n\nid: 1-1\nevent: grown\ndata: {"kind":"grown","seq":1}\n\n'
CUT = b'id: 1-2\nevent: attached\ndata: {"label":"\xc3'
"""In the middle of a letter."""


@contextmanager
def answering(path: Path, content: bytes) -> Iterator[Address]:
    """One connection gets `content` for its request, and is then closed."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with closing(connection):
                connection.recv(65536)
                connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address.parse(f"unix:{path}")
        thread.join(10)


@pytest.mark.parametrize("content", [
    b"", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops",
    b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}", CHUNKED + b"12\r\ndata: {]\nid: 1-1\n\n\r\n0\r\n\r\n",
])
def test_what_is_no_kvdock_is_unavailable(tmp_path: Path, content: bytes) -> None:
    with answering(tmp_path / "odd.sock", content) as address, pytest.raises(ServerUnavailable):
        list(read_events(address))


@pytest.mark.parametrize("head", [PLAIN, CHUNKED + b"fff\r\n"], ids=["plain", "chunked"])
@pytest.mark.parametrize("sent", [WHOLE + CUT, WHOLE + CUT[:-1], WHOLE + CUT[:12], WHOLE + CUT[:3]])
def test_an_event_that_is_cut_is_not_told(tmp_path: Path, head: bytes, sent: bytes) -> None:
    """It comes again to who comes back behind the one before it."""
    told: list[StreamedEvent] = []
    with answering(tmp_path / "dies.sock", head + sent) as address, suppress(ServerUnavailable):
        for one in read_events(address):
            told.append(one)
    assert told == [StreamedEvent("1-1", {"kind": "grown", "seq": 1})]
