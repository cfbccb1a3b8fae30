"""A peer at the other end of a client's connection that answers as no healthy server would."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def listener(folder: Path, serve: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """A peer that does what a healthy server never would. `serve` gets each connection and its number."""
    with socket.socket(socket.AF_UNIX) as listening:
        path = str(folder / "peer.sock")
        listening.bind(path)
        listening.listen()

        def accept() -> None:
            number = 0
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    serve(connection, number)
                number += 1

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"unix:{path}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)
