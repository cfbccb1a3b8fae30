"""A proxy before a Redis server that stops in the midst of a large reply, as a server does that freezes there."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

LARGE = 4096
"""An answer of this many bytes or more has a value in it."""


class HalvingProxy:
    """Listens at the Unix socket `path` and forwards to the one at `server`. Once freeze() was called, half of the next
    piece of a value goes on; then nothing does, in no connection, until thaw()."""

    def __init__(self, path: Path, server: Path) -> None:
        self._server, self._moves = server, threading.Event()
        self._moves.set()
        self._wants_half = False
        self._lock = threading.Lock()
        self._listens = socket.socket(socket.AF_UNIX)
        self._listens.bind(str(path))
        self._listens.listen()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._wants_half = True

    @property
    def is_frozen(self) -> bool:
        return not self._moves.is_set()

    def thaw(self) -> None:
        self._wants_half = False
        self._moves.set()

    def close(self) -> None:
        self.thaw()
        for one in (self._listens, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = self._listens.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._server))
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # one of them was closed
            while data := source.recv(1 << 16):
                self._moves.wait()
                if len(data) >= LARGE and self._is_first():
                    half = len(data) // 2
                    target.sendall(data[:half])
                    data = data[half:]
                    self._moves.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _is_first(self) -> bool:
        with self._lock:
            if self._wants_half and self._moves.is_set():
                self._moves.clear()
                self._wants_half = False
                return True
            return False
