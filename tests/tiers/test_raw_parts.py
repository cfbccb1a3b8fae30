"""Parts of a packed group that lie in a tier: raw ones, which could not be packed, and damaged ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import shake_128
from pathlib import Path

import pytest
from api_helpers import eventually
from mover_steps import SteppedServer
from msgspec.structs import replace
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_helpers import KIB
from tier_server import PART, SETTINGS, is_served, is_written
from tier_stores import DiskStore, RedisStore, Store, clear_pool, opened

from kvdock.protocol.schemas import Commit, Group, MakeRaw, Manifest, Packed, PartDone, RawPart, Reserve
from kvdock.shm.checksum import checksum

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

PACKED_BYTES = 360 * KIB
POOL_CHUNKS = 8


def packed_manifest() -> Manifest:
    packed = Packed(planes=1, marks=176, units=40, bytes=PACKED_BYTES)
    return replace(manifest(PART), groups=(Group(part_bytes=PART, packed=packed),))


class PackingEngine(TierEngine):
    """Chunks in `raw` could not be packed."""

    def __init__(self, address: str) -> None:
        super().__init__(address, packed_manifest())
        self.raw: set[bytes] = set()

    def bytes_of(self, key: bytes, writer: int = 0) -> bytes:
        return shake_128(key).digest(PART if key in self.raw else PACKED_BYTES)

    def store_raw(self, keys: Sequence[bytes]) -> None:
        self.raw.update(keys)
        attachment = self.attachment
        granted = self.client.reserve(Reserve(
            session=attachment.session, member=attachment.member, store="raw", keys=b"".join(keys), parent=None,
        ))
        assert granted.reservation is not None
        parts = [RawPart(index, 0) for index in range(len(keys))]
        body = MakeRaw(session=attachment.session, rank=0, parts=parts)
        done = []
        for slot in self.client.make_raw(granted.reservation, body).parts:
            data = self.bytes_of(keys[slot.index])
            ctypes.memmove(self._memory(slot.segment, slot.offset, slot.length), data, len(data))
            done.append(PartDone(slot.index, 0, checksum(data)))
        assert len(done) == len(keys)
        self.client.commit(granted.reservation, Commit(session=attachment.session, rank=0, parts=done))

    def count(self, name: str) -> int:
        (tier,) = self.client.status().tiers
        return tier.counters[name]


@pytest.fixture(params=[DiskStore, RedisStore], ids=lambda kind: kind.name)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as one:
        yield one


@pytest.fixture
def server(store: Store, tmp_path: Path) -> Iterator[SteppedServer]:
    pool = POOL_CHUNKS * PACKED_BYTES
    usual = {name: value for name, value in SETTINGS.items() if not name.startswith("disk")}
    settings = {**usual, "pool_bytes": pool, "segment_bytes": pool, **store.settings}
    with SteppedServer(tmp_path / "armed", store.environment, **settings) as one:
        yield one


@pytest.fixture
def engine(server: SteppedServer) -> Iterator[PackingEngine]:
    with closing(PackingEngine(server.unix)) as one:
        is_served(server, 1)
        yield one


def damage(store: Store, part: bytes) -> None:
    if isinstance(store, RedisStore):
        with store.client() as client:
            for key in client.scan_iter(_type="string"):
                if (at := client.get(key).find(part[:64])) >= 0:
                    client.setrange(key, at, bytes(64))
        return
    assert isinstance(store, DiskStore)
    for log in store.folder.glob("segment-*"):
        if (at := log.read_bytes().find(part[:64])) >= 0:
            with log.open("r+b") as file:
                file.seek(at)
                file.write(bytes(64))


def test_a_damaged_packed_part_is_counted_deleted_and_written_again(
    store: Store, server: SteppedServer, engine: PackingEngine
) -> None:
    keys = engine.chain(2)
    engine.store(keys)
    is_written(engine, keys)
    clear_pool(server.unix)
    damage(store, engine.bytes_of(keys[0]))
    assert engine.awaited(keys, "damaged").hit_tokens == 0
    eventually(lambda: engine.count("damaged") == 1, 30.0)
    engine.store(keys[:1])
    eventually(lambda: engine.count("store_done") == 3, 30.0)
    clear_pool(server.unix)
    found = engine.awaited(keys, "again")
    assert found.hit_tokens == 2 * CHUNK_TOKENS
    engine.read(keys, found)
    engine.release(found)


def test_a_raw_part_for_which_the_pool_has_no_room_is_not_taken_for_damaged(
    server: SteppedServer, engine: PackingEngine
) -> None:
    raw, held = engine.chain(1), engine.chain(POOL_CHUNKS - 2)
    engine.store_raw(raw)
    is_written(engine, raw)
    clear_pool(server.unix)
    engine.store(held)
    lease = engine.lookup(held, "holds")
    assert lease.hit_tokens == len(held) * CHUNK_TOKENS
    for number in range(3):
        assert engine.awaited(raw, f"no room {number}", 1.0).hit_tokens == 0
    assert engine.count("damaged") == 0
    engine.release(lease)
    found = engine.awaited(raw, "room")
    assert found.hit_tokens == CHUNK_TOKENS
    engine.read(raw, found)
    engine.release(found)
    assert engine.count("damaged") == 0
