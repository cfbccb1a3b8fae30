"""One node: a server in a process of its own, and an engine that stores bytes and compares those that it reads.

    python -m bench.nodes.node SETTINGS

Each line on stdin is a job as JSON, {"do": NAME, …}, and has one line of JSON as its answer:

    serve            starts the server again: {"server": its process}
    store            `seed`, `chunks`: stores them, and waits until the tier has them, if it is one that is written to:
                     {"stored"}
    load             `seed`, `chunks`, `wait_s`: looks them up until nothing more is pending, and compares all bytes:
                     {"found", "wrong", "took_s"}
    empty            evicts all that the pool has
    counts           {"loaded_bytes", "stored_bytes", "peers_bytes", "received_bytes", "sent_bytes"}: of the tier, from
                     the pools of other nodes, and of the network
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.serving import ServerProcess, chain
from kvdock.client.client import Client
from kvdock.connectors.session import Attachment, EngineSession, Identity
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.reports import TierView
from kvdock.protocol.wire_types import KEY_BYTES
from kvdock.shm.checksum import checksum

PART_BYTES = 64 << 10
CHUNK_TOKENS = 16
PATIENCE_S = 60.0
TURN_S = 0.01
"""Between two questions of a node about its own load or store."""
MANIFEST = s.Manifest(
    model="nodes", revision="r", kv_dtype="bfloat16", layers=1, kv_heads=1, head_size=64, token_order="ND",
    chunk_tokens=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS, groups=(s.Group(part_bytes=PART_BYTES),), writers=1,
    tensor_parallel=1,
)


def bytes_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(PART_BYTES)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def children(process: int) -> list[int]:
    """A server has one child, its mover."""
    return [
        int(one) for task in Path(f"/proc/{process}/task").iterdir() for one in (task / "children").read_text().split()
    ]


class Node:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, self._numbers = settings, 0
        self._server: ServerProcess | None = None
        self._client: Client
        self._session: EngineSession

    def serve(self) -> dict[str, Any]:
        if self._server is not None:
            self._session.close()
            self._client.close()
            self._server.__exit__(None, None, None)
        self._server = ServerProcess("serve", **self._settings)
        self._client = Client(self._server.unix, timeout_s=PATIENCE_S)
        self._numbers += 1
        name = f"engine-{self._numbers}"
        self._session = EngineSession(self._client, MANIFEST, Identity(instance=name, member=f"{name}-m", ranks=(0,)))
        self._session.start()
        self._until(lambda: {one.state for one in self._client.status().tiers} == {"open"}, "a tier is not used")
        return {"server": self._server.pid}

    def store(self, seed: str, chunks: int) -> dict[str, Any]:
        before, keys = self.counts()["stored_bytes"], chain(chunks, seed)
        attachment = self._attachment
        granted = self._client.reserve(s.Reserve(
            session=attachment.session, member=attachment.member, store=seed, keys=keys,
        ))
        done = []
        for chunk in granted.chunks:
            (part,) = chunk.parts
            data = bytes_of(split(keys)[chunk.index])
            ctypes.memmove(self._address(part), data, len(data))
            done.append(s.PartDone(chunk.index, 0, checksum(data)))
        if granted.reservation is not None:
            self._client.commit(granted.reservation, s.Commit(session=attachment.session, rank=0, parts=done))
        if self._store.name == "peers":
            return {"stored": len(done)}
        wanted = before + len(done) * PART_BYTES
        self._until(lambda: self.counts()["stored_bytes"] >= wanted, "the tier does not store")
        return {"stored": len(done)}

    def load(self, seed: str, chunks: int, wait_s: float) -> dict[str, Any]:
        keys, began_s = chain(chunks, seed), time.monotonic()
        self._numbers += 1
        request = f"{seed}-{self._numbers}"
        try:
            while (found := self._lookup(keys, request, wait_s)).pending is not None:
                time.sleep(TURN_S)
        except (ApiError, ServerUnavailable) as error:  # the server was killed
            return {"found": 0, "wrong": 0, "took_s": time.monotonic() - began_s, "error": str(error)}
        took_s, wrong = time.monotonic() - began_s, 0
        for at, parts in enumerate(found.chunks):
            (part,) = parts
            here = ctypes.string_at(self._address(part), part.length)
            wrong += here != bytes_of(split(keys)[found.first_chunk + at])
        if found.lease is not None:
            with suppress(ServerUnavailable):
                self._client.release(found.lease, s.ReleaseLease(session=self._attachment.session, ranks=[0]))
        return {"found": len(found.chunks), "wrong": wrong, "took_s": took_s}

    def _lookup(self, keys: bytes, request: str, wait_s: float) -> s.LookupAnswer:
        attachment = self._attachment
        return self._client.lookup(s.Lookup(
            session=attachment.session, member=attachment.member, request=request, keys=keys, wait_s=wait_s,
        ))

    def empty(self) -> dict[str, Any]:
        def is_empty() -> bool:
            self._client.evict(EvictChunks(free_bytes=self._client.status().pool.limit_bytes))
            return self._client.status().chunks.ready == 0

        self._until(is_empty, "the pool is not empty")
        return {}

    def counts(self) -> dict[str, int]:
        tiers, tier = self._client.status().tiers, self._store
        network = Path("/sys/class/net/eth0/statistics")
        return {
            **{name: tier.counters.get(name, 0) for name in ("loaded_bytes", "stored_bytes", "damaged")},
            "peers_bytes": sum(one.counters.get("loaded_bytes", 0) for one in tiers if one.name == "peers"),
            "received_bytes": int((network / "rx_bytes").read_text()),
            "sent_bytes": int((network / "tx_bytes").read_text()),
        }

    @property
    def _store(self) -> TierView:
        """The tier that is written to, if there is one: peers come before it."""
        return self._client.status().tiers[-1]

    @property
    def _attachment(self) -> Attachment:
        self._until(lambda: self._session.attachment is not None, "the server is lost")
        attachment = self._session.attachment
        assert attachment is not None, "it was there"
        return attachment

    def _address(self, part: s.Part | s.WritePart) -> int:
        attachment = self._attachment
        self._session.ensure_segment(attachment, part.segment)
        return attachment.segments.address(part.segment, part.offset, part.length)

    def _until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > until_s:
                raise RuntimeError(otherwise)
            time.sleep(TURN_S)

    def close(self) -> None:
        if self._server is not None:
            for process in (*children(self._server.pid), self._server.pid):
                os.kill(process, signal.SIGKILL)


def main(settings: str) -> None:
    node = Node(json.loads(settings))
    try:
        for line in sys.stdin:
            job = json.loads(line)
            try:
                answer = getattr(node, job.pop("do"))(**job)
            except Exception as error:  # whatever it was: the bench says it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        node.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
