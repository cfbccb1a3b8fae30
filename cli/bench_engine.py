"""An engine without a model, for `kvdock bench`: paged memory, a layout over it, and the connector. No torch.

Ownership: the engine owns its memory, one anonymous mapping, and a spare one of the same size for plain copies.
Invariant: what `stored` has stored is deleted when its `with` block ends.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import secrets
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvdock.cli.operator import delete
from kvdock.cli.outcome import FAILED, CommandError
from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.errors import RefusedError
from kvdock.connectors.interface import Hit, Pending, Progress
from kvdock.connectors.session import Attachment, Identity
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.schemas import Group, Manifest

FORMAT = "NL_X_NB_TWO_BS_NH_HS"
BLOCK_TOKENS = 16
ELEMENT_BYTES = 2
PATIENCE_S = 30.0
REQUEST = "bench"


@dataclass(frozen=True)
class Shape:
    """The KV's dimensions; by default a small model's: 16 KiB a run, 2 MiB a chunk."""

    layers: int = 4
    heads: int = 8
    head_size: int = 64
    chunk_blocks: int = 16

    @property
    def run_bytes(self) -> int:
        return BLOCK_TOKENS * self.heads * self.head_size * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self.run_bytes

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_blocks * BLOCK_TOKENS

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.block_bytes


@dataclass(frozen=True)
class _Tensor:
    """One layer of contiguous memory, with what paged_layout asks of a tensor."""

    address: int
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        strides = [1]
        for extent in reversed(self.shape[1:]):
            strides.append(strides[-1] * extent)
        return tuple(reversed(strides))

    def element_size(self) -> int:
        return ELEMENT_BYTES


class BenchEngine:
    """Attached to the server from its construction to `close`. Raises CommandError when the server refuses it."""

    def __init__(self, address: str, shape: Shape, num_blocks: int, *, threads: int) -> None:
        self.shape, self.num_blocks = shape, num_blocks
        self._memory, self._spare = (mmap.mmap(-1, num_blocks * shape.block_bytes) for _ in range(2))
        self._address, self.spare = _address_of(self._memory), _address_of(self._spare)
        self._spare[:] = bytes(len(self._spare))  # touched: no page faults while it is measured
        self._order = random.Random(7).sample(range(num_blocks), num_blocks)
        name = f"bench-{secrets.token_hex(8)}"
        try:
            self.connector = EngineConnector(
                ConnectorSettings(address, copy_threads=threads), _manifest(shape),
                Identity(name, name, label="kvdock bench"), [self._layout()],
            )
        except RefusedError as error:
            raise CommandError(str(error), FAILED) from error

    @property
    def client(self) -> Client:
        return self.connector.session.client

    @property
    def attachment(self) -> Attachment:
        found = self.connector.session.attachment
        if found is None:
            raise CommandError("the server was lost while it was measured", FAILED)
        return found

    def close(self) -> None:
        self.connector.close()

    # ------------------------------------------------------------------ its memory

    def fill(self, seed: int) -> None:
        """Random bytes that differ from block to block."""
        self._memory[:] = random.Random(seed).randbytes(len(self._memory))

    def wipe(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def contents(self) -> bytes:
        return self._memory[:]

    def pieces(self) -> tuple[array[int], int]:
        """Addresses of all runs in the order in which they are stored, and the bytes of one."""
        run, planes = self.shape.run_bytes, 2 * self.shape.layers
        layer_bytes = self.num_blocks * 2 * run
        return array("Q", (
            self._address + plane // 2 * layer_bytes + (2 * block + plane % 2) * run
            for block in self._order for plane in range(planes)
        )), run

    def _layout(self) -> PagedLayout:
        shape = self.shape
        extents = (self.num_blocks, 2, BLOCK_TOKENS, shape.heads, shape.head_size)
        layer_bytes = self.num_blocks * 2 * shape.run_bytes
        layers = [_Tensor(self._address + at * layer_bytes, extents) for at in range(shape.layers)]
        return paged_layout(FORMAT, layers, block_tokens=BLOCK_TOKENS)

    # ------------------------------------------------------------------ the verbs, waited for

    @contextmanager
    def stored(self, client: Client, tokens: list[int]) -> Iterator[list[bytes]]:
        """Stores the KV of `tokens`, yields the keys of its chunks, and deletes them at the end."""
        attachment = self.attachment
        keys = chunk_keys(attachment.namespace, tokens, self.shape.chunk_tokens)
        try:
            waited_for = self.connector.begin_store(REQUEST, tokens, [self._order], len(tokens))
            if waited_for:
                self._wait(lambda news: any(done.block_ids == waited_for for done in news.stores))
            yield keys
        finally:
            self.connector.finished(REQUEST)
            delete(client, attachment.namespace.hex(), keys)

    def hit_chunks(self, tokens: list[int]) -> int:
        """Polls until the lookup is answered. `load` uses its lease; otherwise the lease ends with the session."""
        end_s = time.monotonic() + PATIENCE_S
        while isinstance(found := self.connector.lookup(REQUEST, tokens, 0), Pending):
            self._poll(end_s)
        return found.tokens // self.shape.chunk_tokens if isinstance(found, Hit) else 0

    def load(self, chunks: int) -> None:
        """Fills the blocks with what the last lookup found."""
        tokens = chunks * self.shape.chunk_tokens
        self.connector.begin_load(REQUEST, [self._order], 0, tokens)
        self._wait(lambda news: any(done.valid_tokens == tokens for done in news.loads))

    def _wait(self, ended: Callable[[Progress], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not ended(self._poll(end_s)):
            pass

    def _poll(self, end_s: float) -> Progress:
        if time.monotonic() > end_s:
            raise CommandError(f"the server did not finish within {PATIENCE_S:.0f} s", FAILED)
        return self.connector.poll(0.05)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _manifest(shape: Shape) -> Manifest:
    """The same for every run, so that the server gets no new namespace each time."""
    return Manifest(
        model=f"kvdock-bench-{shape.chunk_bytes}", kv_dtype="bytes",
        layers=shape.layers, kv_heads=shape.heads, head_size=shape.head_size,
        chunk_tokens=shape.chunk_tokens, block_tokens=BLOCK_TOKENS, groups=(Group(part_bytes=shape.chunk_bytes),),
    )
