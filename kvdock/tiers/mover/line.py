"""The mover's line to its server: frames of news in, frames of words out."""

from __future__ import annotations

import queue
import threading
from typing import BinaryIO

import msgspec

from kvdock.protocol.mover_schemas import FRAME_HEAD, MoverConfig, MoverNews, MoverWords, frame


class Line:
    """`config` first, once; then `news` and `say`, from one thread."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes
        self._news: queue.SimpleQueue[MoverNews | None] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(MoverNews)

    def config(self) -> MoverConfig | None:
        """None: the server has ended already."""
        first = self._frame()
        if first is None:
            return None
        config = msgspec.msgpack.decode(first, type=MoverConfig)
        threading.Thread(target=self._listen, name="kvdock-news", daemon=True).start()
        return config

    def news(self, wait_s: float) -> list[MoverNews] | None:
        """All that has come, after waiting so long for the first; None: the server has ended."""
        found: list[MoverNews] = []
        while True:
            try:
                one = self._news.get_nowait() if found else self._news.get(timeout=wait_s)
            except queue.Empty:
                return found
            if one is None:
                self._news.put(None)
                return found or None
            found.append(one)

    def wake(self) -> None:
        """From any thread: `news` returns."""
        self._news.put(MoverNews())

    def say(self, words: MoverWords) -> None:
        try:
            self._writes.write(frame(words))
            self._writes.flush()
        except OSError:
            self._news.put(None)  # nobody reads any more

    def _listen(self) -> None:
        while (read := self._frame()) is not None:
            self._news.put(self._decoder.decode(read))
        self._news.put(None)

    def _frame(self) -> bytes | None:
        head = self._reads.read(FRAME_HEAD.size)
        if len(head) < FRAME_HEAD.size:
            return None
        (length,) = FRAME_HEAD.unpack(head)
        found = self._reads.read(length)
        return found if len(found) == length else None
