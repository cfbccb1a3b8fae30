"""The time until other engines can hit what an engine stores."""

from __future__ import annotations

import threading
import time

from kvdock.client.client import Client

POLL_S = 0.001


class Published:
    """Asks a server without other engines how many chunks it has published, until there are `chunks` more."""

    def __init__(self, address: str, chunks: int) -> None:
        self._client = Client(address)
        self._wanted = self._count() + chunks
        self._at_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _count(self) -> int:
        return self._client.status().counters["stored_chunks"]

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            if self._count() >= self._wanted:
                self._at_s = time.perf_counter()
                return

    def at_s(self, limit_s: float) -> float | None:
        """When they were all published, on the clock of `time.perf_counter`, which all processes share; None: not
        within `limit_s`."""
        self._thread.join(limit_s)
        self._ended.set()
        self._thread.join()
        self._client.close()
        return self._at_s
