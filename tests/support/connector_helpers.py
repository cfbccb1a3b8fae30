"""Connectors for tests without an engine around them: paged memory, the verbs driven by hand, and a spectator.

Everything is real: a server process (api_helpers.ServerProcess), shared memory, EngineConnector with its
threads. A Rig is what an engine process has, minus the model: its blocks hold whatever a test puts there.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import msgspec
import torch
from api_helpers import PATIENCE_S, Engine as Member, ServerProcess, attach, unique
from bytes_helpers import open_descriptors
from engine_helpers import config, poison, prompt
from frozen import send

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.interface import BlocksRead, Hit, LoadDone, Pending, StoreDone
from kvdock.connectors.packing import with_packing
from kvdock.connectors.session import Attachment, Identity
from kvdock.datapath.devices import CPU
from kvdock.datapath.layout import paged_layout
from kvdock.datapath.segments import AttachedSegments
from kvdock.engine.config import EngineConfig
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import manifest_of
from kvdock.protocol import schemas as s
from kvdock.protocol.keys import chunk_keys
from kvdock.shm.segment import SegmentInfo

CHUNK = 64
"""Tokens of a chunk: equal to the tiny preset's prefill chunk, so that a hit ends where a step would."""
BLOCK = 16
PER_CHUNK = CHUNK // BLOCK


def connector_over(
    kv: KVCache, address: str, *, label: str = "rig", salt: str = "", chunk_tokens: int = CHUNK,
    instance: str | None = None, **settings: Any,
) -> EngineConnector:
    """As kvdock/engine/kvdock.py connects, with a cache salt, and patience with a server that stands still a moment."""
    settings.setdefault("timeout_s", PATIENCE_S)
    layout = paged_layout(kv.format, kv.tensors, block_tokens=kv.block_tokens)
    manifest = msgspec.structs.replace(manifest_of(kv.config, layout, chunk_tokens), cache_salt=salt)
    identity = Identity(instance or unique("instance"), unique("member"), label=label)
    layouts = [layout] * len(manifest.groups)
    manifest = with_packing(manifest, layouts, settings.get("pack", "auto"), CPU)
    return EngineConnector(ConnectorSettings(address, **settings), manifest, identity, layouts)


def engine_over(address: str, settings: EngineConfig | None = None, **options: Any) -> Engine:
    """A real engine on poisoned memory with kvdock; `options` are connector_over's."""
    settings = settings if settings is not None else config()
    kv = KVCache(settings)
    poison(kv)
    return Engine(settings, connector_over(kv, address, **options), kv=kv)


def kvdock_of(engine: Engine) -> EngineConnector:
    assert isinstance(engine.connector, EngineConnector)
    return engine.connector


class Rig:
    """One connector with one KV group over its own blocks, used as an engine's single thread would."""

    def __init__(self, address: str, *, num_blocks: int = 128, seed: int = 0, kv: KVCache | None = None,
                 **options: Any) -> None:
        self.kv = kv if kv is not None else KVCache(config(num_blocks=num_blocks))
        if kv is None:
            self.fill(seed)
        self.connector = connector_over(self.kv, address, **options)
        self.loads: list[LoadDone] = []
        self.stores: list[StoreDone] = []

    def fill(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for paged in (*self.kv.k, *self.kv.v):
            paged.copy_(torch.randn(paged.shape, generator=draw))

    def blocks(self, ids: Sequence[int]) -> torch.Tensor:
        """The content of these blocks, all layers: (2 layers, blocks, tokens, heads, head size)."""
        return torch.stack([paged[list(ids)] for paged in (*self.kv.k, *self.kv.v)])

    @property
    def attachment(self) -> Attachment:
        found = self.connector.session.attachment
        assert found is not None, "the server is lost"
        return found

    def leases(self, client: Client) -> int:
        """How many leases the server lists for this connector's session."""
        return sum(lease.session == s.listed_id(self.attachment.session) for lease in client.leases().leases)

    # ---- the verbs, waited for

    def poll(self, timeout_s: float = 0.05) -> None:
        news = self.connector.poll(timeout_s)
        self.loads += news.loads
        self.stores += news.stores

    def lookup(self, request: str, tokens: Sequence[int], local: int = 0) -> int:
        """Tokens that can be had, `local` at least."""
        until = time.monotonic() + PATIENCE_S
        while isinstance(found := self.connector.lookup(request, tokens, local), Pending):
            assert time.monotonic() < until, "the lookup was never answered"
            self.poll()
        return found.tokens if isinstance(found, Hit) else local

    def load(self, request: str, block_ids: Sequence[int], local: int, hit: int) -> LoadDone:
        self.connector.begin_load(request, [block_ids], local, hit)
        return self.wait_load(request)

    def store(self, request: str, tokens: Sequence[int], block_ids: Sequence[int], computed: int | None = None) -> None:
        """Stores the whole chunks of `tokens` and forgets the request."""
        computed = len(tokens) if computed is None else computed
        wanted = self.connector.begin_store(request, tokens, [block_ids], computed)
        if wanted:
            self.wait_store(request, wanted)
        self.connector.finished(request)

    def wait_load(self, request: str) -> LoadDone:
        until = time.monotonic() + PATIENCE_S
        while not (found := [done for done in self.loads if done.request_id == request]):
            assert time.monotonic() < until, "no LoadDone"
            self.poll()
        self.loads.remove(found[0])
        return found[0]

    def wait_store(self, request: str, block_ids: BlocksRead) -> StoreDone:
        wanted = StoreDone(request, block_ids)
        until = time.monotonic() + PATIENCE_S
        while wanted not in self.stores:
            assert time.monotonic() < until, "no StoreDone"
            self.poll()
        self.stores.remove(wanted)
        return wanted

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Spectator:
    """A member of its own in a connector's namespace: it sees the slots behind the keys, and can spoil them."""

    def __init__(self, client: Client, manifest: s.Manifest) -> None:
        self.manifest = manifest
        self.member: Member = attach(client, **msgspec.structs.asdict(manifest))
        attached = self.member.attached
        self.segments = AttachedSegments(int(attached.pool_id, 16))
        for one in attached.segments:
            self.segments.attach(SegmentInfo(one.id, one.name, one.bytes, one.data_offset))
        self._asked = 0

    def slots(self, tokens: Sequence[int]) -> list[s.Part]:
        """The parts of the chunks that are READY for this prefix; nothing stays leased."""
        namespace = bytes.fromhex(self.member.attached.namespace)
        keys = [key.hex() for key in chunk_keys(namespace, tokens, self.manifest.chunk_tokens)]
        self._asked += 1
        found = self.member.lookup(keys, f"look-{self._asked}", 1)
        if found.lease is not None:
            self.member.release(found.lease, 0)
        return [part for parts in found.chunks for part in parts]

    def flip(self, part: s.Part, at: int) -> None:
        """Flips the lowest bit of one byte of a stored part, in shared memory."""
        with memoryview(self.segments.mapping(part.segment)) as view:
            view[part.offset + at] ^= 1

    def close(self) -> None:
        self.member.client.leave(self.member.session, self.member.member)
        self.segments.close()
        self.member.close()

    def __enter__(self) -> Spectator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tokens_of(seed: int, chunks: int, tail: int = 0) -> list[int]:
    return prompt(seed, chunks * CHUNK + tail)


def mapped_objects() -> int:
    """Mappings of what engines map of a pool (segments and lock files) in this process.

    Not of chunk tables: a server that ran in this process leaves its own to the garbage collector."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/kvdock-" in line and "-table" not in line for line in lines)


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvdock"))


@contextmanager
def no_trace() -> Iterator[None]:
    """Descriptors, threads and mappings afterwards are those of before, without a garbage collection.

    One before it takes what earlier tests left to the collector, which could go at any time."""
    forks.start()  # what forks servers stays
    gc.collect()
    before = open_descriptors(), own_threads(), mapped_objects()
    yield
    after = open_descriptors(), own_threads(), mapped_objects()
    assert after == before


@contextmanager
def successor(server: ServerProcess) -> Iterator[ServerProcess]:
    """Another server at the same socket, with a pool of its own."""
    with ServerProcess(socket_path=server.settings["socket_path"], adopt="never") as second:
        yield second


def stopped(server: ServerProcess) -> None:
    send(server.process.pid, signal.SIGSTOP)


def continued(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGCONT)


@contextmanager
def halted(server: ServerProcess, connector: EngineConnector) -> Iterator[None]:
    """The server is stopped, and the connector's calls give up after a second. While it runs they do not: a slow
    machine is no lost server."""
    stopped(server)
    client = connector.session.client
    client.timeout_s, before_s = 1.0, client.timeout_s
    try:
        yield
    finally:
        client.timeout_s = before_s
        continued(server)


def sweep(server: ServerProcess) -> None:
    """Removes what a killed server left in shared memory."""
    for name in server.shared_memory():
        (Path("/dev/shm") / name).unlink(missing_ok=True)


@contextmanager
def mortal(**settings: object) -> Iterator[ServerProcess]:
    """A server that may be killed; whatever is left of its pool is removed."""
    with ServerProcess(**settings) as server:
        try:
            yield server
        finally:
            server.stop(signal.SIGKILL)
            sweep(server)
