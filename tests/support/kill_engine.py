"""An engine for the kill tests: a connector over paged memory whose bytes every prefix has to itself."""

from __future__ import annotations

import os
import time
from http.client import HTTPException

import admin_helpers
import msgspec
import numpy as np

from bench.soak import BLOCK, CHUNK, HEAD, PLANES, Array, content_of, tokens_of
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.interface import Hit, LoadDone, Pending, StoreDone
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import paged_layout
from kvdock.protocol.schemas import Group, Manifest

BLOCKS = 64
PER_CHUNK = CHUNK // BLOCK
CHUNK_BYTES = PLANES * CHUNK * HEAD
WAIT_S = 20.0


class KillEngine:
    """Stores and loads `chunks` chunks of a numbered conversation."""

    def __init__(self, address: str, seed: int) -> None:
        self._memory = np.zeros((PLANES, BLOCKS, BLOCK, HEAD), dtype=np.uint8)
        layout = paged_layout("NL_X_NB_BS_HS", [Array(plane) for plane in self._memory], block_tokens=BLOCK)
        manifest = Manifest(
            model="kill", revision="1", kv_dtype="uint8", layers=PLANES, kv_heads=1, head_size=HEAD,
            token_order=layout.token_order, chunk_tokens=CHUNK, block_tokens=BLOCK,
            groups=(Group(part_bytes=layout.part_bytes(PER_CHUNK)),),
        )
        nonce = f"kill-{seed}-{os.getpid()}"
        settings = ConnectorSettings(address, timeout_s=5.0, copy_threads=1)
        self._connector = EngineConnector(settings, manifest, Identity(nonce, nonce), [layout])
        self._done: list[LoadDone | StoreDone] = []
        self._requests = 0

    def store(self, conversation: int, chunks: int) -> None:
        tokens = tokens_of(conversation, chunks)
        table = list(range(chunks * PER_CHUNK))
        self._memory[:, table] = content_of(tokens).reshape(PLANES, -1, BLOCK, HEAD)
        request = self._next()
        self._look(request, tokens)
        if self._connector.begin_store(request, tokens, [table], len(tokens)):
            self._wait(request, StoreDone)
        self._connector.finished(request)

    def load(self, conversation: int, chunks: int) -> tuple[int, int]:
        """(chunks loaded, blocks with wrong bytes)."""
        tokens = tokens_of(conversation, chunks)
        table = list(range(chunks * PER_CHUNK))
        self._memory[:] = 0xEE
        request = self._next()
        hit = self._look(request, tokens)
        valid = 0
        if hit > 0:
            self._connector.begin_load(request, [table], 0, hit)
            done = self._wait(request, LoadDone)
            assert isinstance(done, LoadDone)
            valid = done.valid_tokens
        self._connector.finished(request)
        blocks = valid // BLOCK
        loaded = self._memory[:, table[:blocks]].reshape(PLANES, blocks, BLOCK * HEAD)
        return valid // CHUNK, int((loaded != content_of(tokens)[:, :blocks]).any(axis=(0, 2)).sum())

    def fill(self, first: int, conversations: int, chunks: int) -> None:
        for conversation in range(first, first + conversations):
            self.store(conversation, chunks)

    def call(self, address: str, method: str, path: str, body: object) -> int:
        """An operator's call: its HTTP status, 0 when the server is lost meanwhile."""
        try:
            return admin_helpers.call(address, method, path, body)[0]
        except (OSError, HTTPException):
            return 0

    def hurry(self, deadline_s: float) -> None:
        """From now on its reservations have so short a deadline."""
        client = self._connector.session.client
        real = client.reserve
        vars(client)["reserve"] = lambda body, **how: real(msgspec.structs.replace(body, deadline_s=deadline_s), **how)

    def leave(self) -> None:
        self._connector.close()

    def _next(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def _look(self, request: str, tokens: list[int]) -> int:
        while isinstance(found := self._connector.lookup(request, tokens, 0), Pending):
            self._poll()
        return found.tokens if isinstance(found, Hit) else 0

    def _poll(self) -> None:
        news = self._connector.poll(0.02)
        self._done += [*news.loads, *news.stores]

    def _wait(self, request: str, kind: type[LoadDone] | type[StoreDone]) -> LoadDone | StoreDone:
        until = time.monotonic() + WAIT_S
        while True:
            for done in tuple(self._done):
                if isinstance(done, kind) and done.request_id == request:
                    self._done.remove(done)
                    return done
            if time.monotonic() > until:
                raise RuntimeError(f"no {kind.__name__} of {request} within {WAIT_S} s")
            self._poll()
