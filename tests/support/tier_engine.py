"""An engine with real memory of the pool, for tests of what lower tiers bring: it stores bytes and reads them."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Sequence
from hashlib import shake_128

from api_helpers import PATIENCE_S

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment, EngineSession, Identity
from kvdock.protocol.schemas import (
    Commit,
    Group,
    Lookup,
    LookupAnswer,
    Manifest,
    Part,
    PartDone,
    ReleaseLease,
    Reserve,
    ReserveAnswer,
)
from kvdock.shm.checksum import checksum

CHUNK_TOKENS = 16


def manifest(part_bytes: int, *, model: str = "tiers", writers: int = 1, readers: int = 1) -> Manifest:
    return Manifest(
        model=model, revision="r", kv_dtype="bfloat16", layers=1, kv_heads=1, head_size=64, token_order="ND",
        chunk_tokens=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS, groups=(Group(part_bytes=part_bytes),), writers=writers,
        tensor_parallel=max(writers, readers),
    )


class TierEngine:
    """All ranks of one instance."""

    def __init__(self, address: str, of: Manifest, name: str = "engine", seed: int = 0) -> None:
        self.client, self.manifest = Client(address, timeout_s=PATIENCE_S), of
        self.rng = random.Random(f"{name}/{seed}")
        ranks = tuple(range(of.tensor_parallel))
        self.session = EngineSession(self.client, of, Identity(instance=name, member=f"{name}-m", ranks=ranks))
        self.session.start()

    @property
    def part_bytes(self) -> int:
        return self.manifest.groups[0].part_bytes

    def chain(self, count: int) -> list[bytes]:
        return [self.rng.randbytes(32) for _ in range(count)]

    def bytes_of(self, key: bytes, writer: int = 0) -> bytes:
        """What is stored under a key."""
        return shake_128(key + bytes([writer])).digest(self.part_bytes)

    @property
    def attachment(self) -> Attachment:
        """It may be lost for a moment, on a busy machine."""
        until_s = time.monotonic() + PATIENCE_S
        while (attachment := self.session.attachment) is None:
            assert time.monotonic() < until_s, "the server is lost"
            time.sleep(0.01)  # between two looks
        return attachment

    def _memory(self, segment: int, offset: int, length: int) -> int:
        attachment = self.attachment
        self.session.ensure_segment(attachment, segment)
        return attachment.segments.address(segment, offset, length)

    def store(
        self, keys: Sequence[bytes], parent: bytes | None = None, *, temporary: bool = False
    ) -> ReserveAnswer:
        attachment = self.attachment
        granted = self.client.reserve(Reserve(
            session=attachment.session, member=attachment.member, store=self.rng.randbytes(8).hex(),
            keys=b"".join(keys), parent=parent.hex() if parent else None, temporary=temporary,
        ))
        if granted.reservation is None:
            return granted
        for rank in range(self.manifest.writers):
            done = []
            for chunk in granted.chunks:
                for part in chunk.parts:
                    if part.writer == rank:
                        data = self.bytes_of(keys[chunk.index], rank)
                        ctypes.memmove(self._memory(part.segment, part.offset, part.length), data, len(data))
                        done.append(PartDone(chunk.index, part.group, checksum(data)))
            self.client.commit(granted.reservation, Commit(session=attachment.session, rank=rank, parts=done))
        return granted

    def lookup(self, keys: Sequence[bytes], request: str = "r", wait_s: float = 0.0, **more: float) -> LookupAnswer:
        attachment = self.attachment
        return self.client.lookup(Lookup(
            session=attachment.session, member=attachment.member, request=request, keys=b"".join(keys), wait_s=wait_s,
            readers=self.manifest.tensor_parallel, **more,  # type: ignore[arg-type]  # of floats alone
        ))

    def awaited(self, keys: Sequence[bytes], request: str = "r", wait_s: float = 20.0) -> LookupAnswer:
        """Asks until nothing more is pending."""
        until_s = time.monotonic() + wait_s + PATIENCE_S
        while (found := self.lookup(keys, request, wait_s)).pending is not None:
            assert time.monotonic() < until_s, "it says for ever that more comes"
            time.sleep(0.005)  # between two questions
        return found

    def read(self, keys: Sequence[bytes], found: LookupAnswer) -> None:
        """Every part of the answer has the bytes that were stored."""
        for index, parts in enumerate(found.chunks):
            assert parts, "a chunk without parts"
            for part in parts:
                here = ctypes.string_at(self._memory(part.segment, part.offset, part.length), part.length)
                assert here == self.bytes_of(keys[found.first_chunk + index], part.writer), index

    def damage(self, part: Part, at: int = 0) -> None:
        """Flips a bit of one byte in the pool."""
        ctypes.c_ubyte.from_address(self._memory(part.segment, part.offset, part.length) + at).value ^= 1

    def release(self, found: LookupAnswer, ranks: Sequence[int] | None = None) -> list[int]:
        attachment = self.attachment
        assert found.lease is not None
        wanted = list(range(self.manifest.tensor_parallel)) if ranks is None else list(ranks)
        return self.client.release(found.lease, ReleaseLease(session=attachment.session, ranks=wanted)).remaining

    def close(self) -> None:
        self.session.close()
        self.client.close()
