"""An engine for the kill tests, which stores and loads numbered conversations and compares every byte."""

from __future__ import annotations

from http.client import HTTPException

import admin_helpers
import msgspec

from bench.paged_engine import BLOCK, CHUNK, HEAD, PLANES, PagedEngine, content_of, tokens_of
from kvdock.connectors.engine_connector import ConnectorSettings

PER_CHUNK = CHUNK // BLOCK
CHUNK_BYTES = PLANES * CHUNK * HEAD


class KillEngine(PagedEngine):
    """Stores and loads `chunks` chunks of a numbered conversation. `packs`: it packs its parts, of which none fits."""

    def __init__(self, address: str, seed: int, packs: bool) -> None:
        settings = ConnectorSettings(address, timeout_s=5.0, copy_threads=1)
        super().__init__(settings, "kill", seed, blocks=64, wait_s=20.0, marks=16 if packs else 0)
        self._requests = 0

    def store(self, conversation: int, chunks: int) -> None:
        tokens, table, request = tokens_of(conversation, chunks), list(range(chunks * PER_CHUNK)), self._next()
        self.compute(table, content_of(tokens))
        self.look(request, tokens)
        self.save(request, table, tokens)
        self.finish(request)

    def load(self, conversation: int, chunks: int) -> tuple[int, int]:
        """(chunks loaded, blocks with wrong bytes)."""
        tokens, table, request = tokens_of(conversation, chunks), list(range(chunks * PER_CHUNK)), self._next()
        valid = self.fetch(request, table, self.look(request, tokens))
        self.finish(request)
        return valid // CHUNK, self.wrong_blocks(table, content_of(tokens), valid)

    def fill(self, first: int, conversations: int, chunks: int) -> None:
        for conversation in range(first, first + conversations):
            self.store(conversation, chunks)

    def call(self, address: str, method: str, path: str, body: object) -> int:
        """The HTTP status of an operator's call; 0 when the server is lost meanwhile."""
        try:
            return admin_helpers.call(address, method, path, body)[0]
        except (OSError, HTTPException):
            return 0

    def run(self, weights: str) -> None:
        """It runs these weights from now on, as far as its session is concerned."""
        self._connector.session.runs(weights)

    def hurry(self, deadline_s: float) -> None:
        """From now on its reservations have this deadline."""
        client = self._connector.session.client
        real = client.reserve
        vars(client)["reserve"] = lambda body, **how: real(msgspec.structs.replace(body, deadline_s=deadline_s), **how)

    def _next(self) -> str:
        self._requests += 1
        return f"r{self._requests}"
