"""KV events of tiers: routers learn which tier has a chunk, and when it has it no more."""

from __future__ import annotations

import asyncio
import itertools
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from kv_readers import Belief, ZmqReader, endpoints, streamed
from mover_steps import ForkingServer, SteppedServer
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, SETTINGS, flood, is_served, is_written, mover
from tier_stores import DiskStore, RedisStore, opened

from kvdock.api.feeds import kv
from kvdock.api.feeds.kv import CHUNK_BYTES, SLICE, KvLog, Source
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import ClearCache, DeleteChunks
from kvdock.protocol.kv_events import BlockNames, BlockStored, KvEvent, block_hash, named

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

POOL = ("CPU", None, None)
ON = {"disk": ("STORAGE", "LOCAL", "disk"), "redis": ("STORAGE", "REMOTE", "redis")}
Copy = tuple[str, str | None, str | None]


class Media:
    """What a router believes of each medium."""

    def __init__(self) -> None:
        self.of: dict[Copy, Belief] = {}
        self.tokens: dict[Copy, dict[int, list[int]]] = {}

    def hear(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.of.clear()
                continue
            copy = event["medium"], event.get("locality"), event.get("ownership")
            self.of.setdefault(copy, Belief()).hear([event])
            if event["type"] == "BlockStored":
                tokens = self.tokens.setdefault(copy, {})
                tokens |= dict.fromkeys(event["block_hashes"], event["token_ids"])

    def there(self, copy: Copy) -> set[int]:
        return self.of[copy].there if copy in self.of else set()


class Router:
    def __init__(self, server: ServerProcess) -> None:
        self.reader, self.media = ZmqReader(server), Media()

    def hears(self, is_enough: Callable[[Media], bool]) -> Media:
        """Reads until it believes that. The reader's own time limit ends a wait for what does not come."""
        while not is_enough(self.media):
            self.media.hear(self.reader.next()[2])
        return self.media


def hashes(keys: Sequence[bytes]) -> set[int]:
    return {block_hash(key) for key in keys}


def snapshot(server: ServerProcess) -> Media:
    """What a router that comes now is told."""
    media = Media()
    for _, body in streamed(server):
        media.hear([
            {**event, "block_hashes": [int(one, 16) for one in event.get("block_hashes", ())]}
            for event in body["events"]
        ])
    return media


def names_of(keys: Sequence[bytes]) -> list[BlockNames]:
    return [named(None, [], range(CHUNK_TOKENS * at, CHUNK_TOKENS * (at + 1))) for at in range(len(keys))]


def name(engine: TierEngine, keys: Sequence[bytes]) -> None:
    """As an engine does that stores them and is told that they are there."""
    attachment = engine.attachment
    engine.client.reserve(s.Reserve(
        session=attachment.session, member=attachment.member, store=engine.rng.randbytes(8).hex(),
        keys=b"".join(keys), blocks=names_of(keys),
    ))


def comes_back(engine: TierEngine, keys: Sequence[bytes], chunks: int) -> None:
    """The first `chunks` do; on a busy machine a store may be too slow for one request."""

    def came() -> bool:
        found = engine.awaited(keys, engine.rng.randbytes(8).hex())
        if found.lease is not None:
            engine.read(keys, found)
            engine.release(found)
        return found.hit_tokens == chunks * CHUNK_TOKENS

    eventually(came, 60.0)


@pytest.fixture(params=[DiskStore, RedisStore], ids=["disk", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[DiskStore | RedisStore]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder, opened(request.param, Path(folder)) as one:
        yield one


@pytest.fixture
def server(store: DiskStore | RedisStore) -> Iterator[ServerProcess]:
    with ForkingServer(**{**SETTINGS, "disk_bytes": 0, **store.settings, **endpoints()}) as process:
        yield process


@pytest.fixture
def router(server: ServerProcess) -> Iterator[Router]:
    made = Router(server)
    yield made
    made.reader.close()


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[TierEngine]:
    made = TierEngine(server.unix, manifest(PART))
    is_served(server, 1)
    yield made
    made.close()


def test_a_copy_on_a_tier_has_events_of_its_own_and_outlives_the_pool_s(
    store: DiskStore | RedisStore, server: ServerProcess, engine: TierEngine, router: Router
) -> None:
    on, keys = ON[store.name], engine.chain(4)
    wanted = hashes(keys)
    engine.store(keys)
    name(engine, keys)
    media = router.hears(lambda media: media.there(POOL) == media.there(on) == wanted)
    flood(engine)
    router.hears(lambda media: not media.there(POOL) & wanted)
    assert media.there(on) >= wanted
    router.hears(lambda media: all(media.tokens[on][one] for one in wanted))
    late = snapshot(server)
    assert late.there(on) >= wanted and not late.there(POOL) & wanted
    assert {tuple(late.tokens[on][one]) for one in wanted} == {
        tuple(range(CHUNK_TOKENS * at, CHUNK_TOKENS * (at + 1))) for at in range(len(keys))
    }
    comes_back(engine, keys, len(keys))
    engine.client.clear(ClearCache())
    router.hears(lambda media: not media.there(on) and not media.there(POOL))


@pytest.mark.parametrize("change", [ClearCache, DeleteChunks], ids=["clear", "delete"])
def test_what_is_cleared_before_its_storing_is_told_is_not_believed(
    change: type[ClearCache] | type[DeleteChunks], store: DiskStore | RedisStore, tmp_path: Path
) -> None:
    """The mover stands still between the two."""
    settings: dict[str, Any] = {**SETTINGS, "disk_bytes": 0, **store.settings, **endpoints()}
    with SteppedServer(tmp_path / "armed", **settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        server.armed.write_text("down.written")
        keys = engine.chain(1)
        engine.store(keys)
        mover = server.stands("down.written")
        if change is ClearCache:
            engine.client.clear(ClearCache())
        else:
            engine.client.delete(DeleteChunks(namespace=engine.attachment.namespace.hex(), keys=[keys[0].hex()]))
        mover.send_signal(signal.SIGCONT)
        eventually(lambda: sum(tier.pending_orders for tier in engine.client.status().tiers) == 0, 30.0)
        later = engine.chain(1)
        engine.store(later)
        eventually(lambda: snapshot(server).there(ON[store.name]) >= hashes(later), 30.0)
        assert snapshot(server).there(ON[store.name]) == hashes(later)
        engine.close()


@pytest.mark.parametrize("store", [RedisStore], ids=["redis"], indirect=True)
def test_what_a_store_has_lost_is_told_once_a_load_misses_it(
    store: RedisStore, engine: TierEngine, router: Router
) -> None:
    on, keys = ON[store.name], engine.chain(4)
    engine.store(keys)
    router.hears(lambda media: media.there(on) == hashes(keys))
    flood(engine)
    with store.client() as redis:
        for one in redis.scan_iter("*"):
            if keys[2].hex() in one.decode():
                redis.delete(one)
    comes_back(engine, keys, 2)
    media = router.hears(lambda media: block_hash(keys[2]) not in media.there(on))
    assert media.there(on) >= hashes(keys[:2])


def test_after_a_mover_is_killed_only_what_the_next_one_tells_is_believed(
    store: DiskStore | RedisStore, server: ServerProcess, engine: TierEngine, router: Router
) -> None:
    on, keys = ON[store.name], engine.chain(4)
    engine.store(keys)
    name(engine, keys)
    router.hears(lambda media: media.there(on) == hashes(keys))
    mover(server).send_signal(signal.SIGKILL)
    router.hears(lambda media: not media.there(on))
    if isinstance(store, DiskStore):  # which lists what it has
        media = router.hears(lambda media: media.there(on) == hashes(keys))
        assert all(media.tokens[on][one] for one in hashes(keys)), "the server has kept the names"


def test_a_disk_that_was_listed_before_an_engine_came_is_told_once_one_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "disk_path": str(tmp_path / "disk")}
    with ForkingServer(**settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        keys = engine.chain(4)
        engine.store(keys)
        is_written(engine, keys)
        engine.close()
    with ForkingServer(**settings, **endpoints()) as server:
        router = Router(server)
        eventually(lambda: mover(server).is_running(), 30.0)
        engine = TierEngine(server.unix, manifest(PART))
        try:
            router.hears(lambda media: media.there(ON["disk"]) == hashes(keys))
            assert not router.media.there(POOL)
        finally:
            engine.close()
            router.reader.close()


# ------------------------------------------------------------------ bounds


def made(*there: bytes) -> KvLog:
    """A log beside a table that has these chunks, and never says what has changed."""
    table = [(0, key, True, bytes(32)) for key in there]
    log = KvLog(lambda since, most: ([], since, True), lambda start, budget: (table, -1), lambda: 1.0)
    log.met(0, Source(b"n" * 32, "", "m", CHUNK_TOKENS))
    return log


def some(count: int, first: int = 0) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in range(first, first + count))


def events(log: KvLog) -> list[KvEvent]:
    batches, is_snapshot = log.since("", log._logs._first)
    assert not is_snapshot
    return [event for batch in batches for event in batch.events()]


def test_a_long_list_is_told_a_slice_in_each_turn_of_the_event_loop() -> None:
    async def told() -> list[int]:
        log = made()
        turns = [0]
        telling = asyncio.create_task(log.tier_has(b"n" * 32, "disk", some(20 * SLICE), is_there=True))
        while not telling.done():
            turns.append(log.tier_chunks)
            await asyncio.sleep(0)
        return [*turns, log.tier_chunks]

    turns = asyncio.run(told())
    assert turns[-1] == 20 * SLICE
    assert max(after - before for before, after in itertools.pairwise(turns)) <= SLICE


def test_of_what_does_not_fit_unnamed_copies_are_left_out_and_named_ones_replace_the_oldest(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "MOST_TIER_BYTES", 10 * CHUNK_BYTES)
    log = made()
    asyncio.run(log.tier_has(b"n" * 32, "disk", some(25), is_there=True))
    assert log.tier_chunks == 10
    log.named(0, some(1, 100), [named(None, [7], range(CHUNK_TOKENS))])
    asyncio.run(log.tier_has(b"n" * 32, "disk", some(1, 100), is_there=True))
    *_, stored, _, gone = events(log)
    assert isinstance(stored, BlockStored) and stored.block_hashes == [7] and stored.ownership == "disk"
    assert log.tier_chunks == 9 and getattr(gone, "block_hashes", None) == (1,), "two make room for a longer one"


def test_of_chunks_in_namespaces_that_no_engine_uses_the_newest_are_remembered(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "MOST_EARLY", 10)
    log = made()
    asyncio.run(log.tier_has(b"o" * 32, "disk", some(25), is_there=True))
    asyncio.run(log.tier_has(b"o" * 32, "disk", some(1, 20), is_there=False))
    assert events(log) == []
    log.met(1, Source(b"o" * 32, "", "m", CHUNK_TOKENS))
    asyncio.run(log._follow_tiers())
    assert [event.block_hashes for event in events(log)[1:] if isinstance(event, BlockStored)] == [
        [number] for number in range(15, 25) if number != 20
    ]
    assert not log._lower.early


def test_after_all_was_declared_void_copies_on_tiers_are_told_again() -> None:
    log = made()
    asyncio.run(log.tier_has(b"n" * 32, "disk", some(2 * SLICE), is_there=True))

    async def begin_anew() -> None:
        beginning = asyncio.create_task(log._begin_anew())
        while log.tier_chunks != SLICE:  # half is told again
            await asyncio.sleep(0)
        first, void, last = (some(1, number) + b"disk" for number in (0, 2 * SLICE - 2, 2 * SLICE - 1))
        log._take_copies(b"n" * 32, [void], is_there=True)
        log._take_copies(b"n" * 32, [first, last], is_there=False)
        await beginning

    asyncio.run(begin_anew())
    media = Media()
    for event in events(log):
        media.hear([{"type": type(event).__name__, **{
            field: getattr(event, field) for field in event.__struct_fields__
        }}])
    assert media.there(ON["disk"]) == set(range(1, 2 * SLICE - 1))
    assert log._lower.room.used_bytes == CHUNK_BYTES * (2 * SLICE - 2)
