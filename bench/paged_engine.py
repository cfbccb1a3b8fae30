"""An engine that is only a connector over paged memory. Its bytes follow from the tokens, so each byte can be checked.

Each call waits until the connector has finished. Used by bench/soak.py and by the kill tests.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.interface import Hit, LoadDone, Pending, StoreDone
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import paged_layout
from kvdock.protocol.schemas import Group, Manifest, Packed

BLOCK, CHUNK, HEAD = 16, 64, 512
PLANES = 4
LONGEST_CHUNKS = 12


class Array:
    """A numpy array with the methods of a tensor that paged_layout calls."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape: tuple[int, ...] = array.shape

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def stride(self) -> list[int]:
        return [step // self._array.itemsize for step in self._array.strides]

    def element_size(self) -> int:
        return int(self._array.itemsize)


def tokens_of(conversation: int, chunks: int) -> list[int]:
    found: list[int] = np.random.default_rng(conversation).integers(0, 50_000, LONGEST_CHUNKS * CHUNK).tolist()
    return found[: chunks * CHUNK]


def content_of(tokens: list[int]) -> Any:
    """uint8 [planes, blocks, bytes of a block]: each block's bytes depend on all tokens up to its end."""
    running = hashlib.blake2b(digest_size=16)
    blocks = []
    for at in range(0, len(tokens), BLOCK):
        running.update(np.array(tokens[at : at + BLOCK]).tobytes())
        stream = hashlib.shake_128(running.digest()).digest(PLANES * BLOCK * HEAD)
        blocks.append(np.frombuffer(stream, dtype=np.uint8).reshape(PLANES, BLOCK * HEAD))
    return np.stack(blocks, axis=1)


class PagedEngine:
    """`marks`: the group is packed, with that reserve of marks; 0: it is raw."""

    def __init__(
        self, settings: ConnectorSettings, model: str, seed: int, *, blocks: int, wait_s: float, marks: int = 0
    ) -> None:
        self._memory = np.zeros((PLANES, blocks, BLOCK, HEAD), dtype=np.uint8)
        layout = paged_layout("NL_X_NB_BS_HS", [Array(plane) for plane in self._memory], block_tokens=BLOCK)
        packed: Packed | UnsetType = UNSET
        if marks:
            packed = Packed(
                planes=PLANES, marks=marks, units=0, bytes=layout.packed_shape(CHUNK // BLOCK, marks, 0).packed_bytes
            )
        manifest = Manifest(
            model=model, revision="1", kv_dtype="uint8", layers=PLANES, kv_heads=1, head_size=HEAD,
            token_order=layout.token_order, chunk_tokens=CHUNK, block_tokens=BLOCK,
            groups=(Group(part_bytes=layout.part_bytes(CHUNK // BLOCK), packed=packed),),
        )
        name = f"{model}-{seed}-{os.getpid()}"
        self._connector = EngineConnector(settings, manifest, Identity(name, name), [layout])
        self._wait_s = wait_s
        self._done: list[LoadDone | StoreDone] = []

    def look(self, request: str, tokens: list[int]) -> int:
        """Looks up the tokens; returns how many of them the hit has."""
        while isinstance(found := self._connector.lookup(request, tokens, 0), Pending):
            self._poll()
        return found.tokens if isinstance(found, Hit) else 0

    def fetch(self, request: str, table: list[int], hit: int) -> int:
        """Loads `hit` tokens into the blocks of `table`, which are overwritten first; returns how many tokens are
        valid."""
        self._memory[:, table] = 0xEE
        if hit == 0:
            return 0
        self._connector.begin_load(request, [table], 0, hit)
        done = self._wait(request, LoadDone)
        assert isinstance(done, LoadDone)
        return done.valid_tokens

    def wrong_blocks(self, table: list[int], content: Any, valid: int) -> int:
        """How many of the blocks with the first `valid` tokens differ from `content`."""
        blocks = valid // BLOCK
        loaded = self._memory[:, table[:blocks]].reshape(PLANES, blocks, BLOCK * HEAD)
        return int((loaded != content[:, :blocks]).any(axis=(0, 2)).sum())

    def compute(self, table: list[int], content: Any, begin: int = 0) -> None:
        """Writes the bytes of tokens [begin, …) into their blocks."""
        first = begin // BLOCK
        self._memory[:, table[first:]] = content[:, first:].reshape(PLANES, -1, BLOCK, HEAD)

    def save(self, request: str, table: list[int], tokens: list[int]) -> None:
        if self._connector.begin_store(request, tokens, [table], len(tokens)):
            self._wait(request, StoreDone)

    def finish(self, request: str) -> None:
        self._connector.finished(request)

    def leave(self) -> None:
        self._connector.close()

    def _poll(self) -> None:
        news = self._connector.poll(0.02)
        self._done += [*news.loads, *news.stores]

    def _wait(self, request: str, kind: type[LoadDone] | type[StoreDone]) -> LoadDone | StoreDone:
        until = time.monotonic() + self._wait_s
        while True:
            for done in self._done:
                if isinstance(done, kind) and done.request_id == request:
                    self._done.remove(done)
                    return done
            if time.monotonic() > until:
                raise RuntimeError(f"no {kind.__name__} of {request} within {self._wait_s} s")
            self._poll()
