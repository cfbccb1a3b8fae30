"""The mover's pipe to its server: updates come in, reports go out, each as one frame."""

from __future__ import annotations

import queue
import threading
from typing import BinaryIO

import msgspec

from kvdock.protocol.mover_schemas import FRAME_HEAD, MoverConfig, MoverReport, ServerUpdate, frame


class Pipe:
    """Call config() first, once; then updates() and send(), from one thread."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes
        self._updates: queue.SimpleQueue[ServerUpdate | None] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(ServerUpdate)

    def config(self) -> MoverConfig | None:
        """None: the server has ended already."""
        first = self._read_frame()
        if first is None:
            return None
        config = msgspec.msgpack.decode(first, type=MoverConfig)
        threading.Thread(target=self._receive, name="kvdock-updates", daemon=True).start()
        return config

    def updates(self, wait_s: float) -> list[ServerUpdate] | None:
        """All updates that have come. Waits up to `wait_s` for the first. None: the server has ended."""
        found: list[ServerUpdate] = []
        while True:
            try:
                one = self._updates.get_nowait() if found else self._updates.get(timeout=wait_s)
            except queue.Empty:
                return found
            if one is None:
                self._updates.put(None)
                return found or None
            found.append(one)

    def wake(self) -> None:
        """Makes updates() return. From any thread."""
        self._updates.put(ServerUpdate())

    def send(self, report: MoverReport) -> None:
        try:
            self._writes.write(frame(report))
            self._writes.flush()
        except OSError:
            self._updates.put(None)  # the server no longer reads

    def _receive(self) -> None:
        while (read := self._read_frame()) is not None:
            self._updates.put(self._decoder.decode(read))
        self._updates.put(None)

    def _read_frame(self) -> bytes | None:
        head = self._reads.read(FRAME_HEAD.size)
        if len(head) < FRAME_HEAD.size:
            return None
        (length,) = FRAME_HEAD.unpack(head)
        found = self._reads.read(length)
        return found if len(found) == length else None
