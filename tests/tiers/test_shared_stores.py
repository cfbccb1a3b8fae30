"""Two servers with pools of their own over one store: what one has stored the other hits, and goes on when it dies."""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually, unique
from connector_helpers import engine_over, sweep
from engine_helpers import prompt, run_one, sampling
from mover_steps import SteppedServer, kill_with_mover
from same_tokens_helpers import LENGTH, MODELS, STORED, TOKENS, Served, assert_same, served
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_stores import SHARED, RedisStore, Store, clear_once_written, clear_pool, has_state, opened, wait_until_written
from tp_helpers import engine_of_ranks, shared

from kvdock.engine.config import preset
from kvdock.engine.engine import Engine
from kvdock.engine.ranks import ProcessGroup
from kvdock.tiers.record import HEADER_BYTES

pytestmark = [pytest.mark.tiers, pytest.mark.same_tokens, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=SHARED, ids=lambda kind: kind.name)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(request.param, Path(name)) as one:
        yield one


def server_over(settings: dict[str, object], folder: Path, environment: dict[str, str] | None = None) -> SteppedServer:
    return SteppedServer(
        folder / "armed", environment, pool_bytes=64 * MIB, segment_bytes=64 * MIB, tier_asks=1, heartbeat_s=0.1,
        **settings,
    )


def over(store: Store, folder: Path) -> SteppedServer:
    return server_over(store.settings, folder, store.environment)


@pytest.fixture
def servers(store: Store, tmp_path: Path) -> Iterator[tuple[SteppedServer, SteppedServer]]:
    with over(store, tmp_path) as a, over(store, tmp_path) as b:
        for one in (a, b):
            has_state(one.unix, "open")
        yield a, b


def kill(server: ServerProcess) -> None:
    """With its mover and its pool."""
    kill_with_mover(server)
    sweep(server)


def ended(engine: Engine, tokens: list[int], new: int = TOKENS) -> Served:
    found = served(run_one(engine, tokens, sampling(new)))
    assert engine.drain(20.0)
    engine.close()
    return found


def hit(engine: Engine, tokens: list[int], wanted: Served) -> None:
    found = ended(engine, tokens)
    assert found.at_hand == STORED
    assert_same(found, wanted)


def test_a_server_hits_what_another_has_stored_and_goes_on_when_that_one_is_killed(
    servers: tuple[SteppedServer, SteppedServer]
) -> None:
    a, b = servers
    config, salt, tokens = preset(MODELS["gqa"]), unique("shared"), prompt(12, LENGTH)

    def made(server: ServerProcess) -> Engine:
        return engine_over(server.unix, config, salt=salt, tier_wait_s=20.0)

    ended(made(a), tokens, 1)
    of_pool = ended(made(a), tokens)
    assert of_pool.at_hand == STORED
    clear_once_written(a.unix)
    hit(made(b), tokens, of_pool)
    clear_pool(b.unix)
    kill(a)
    hit(made(b), tokens, of_pool)
    other = prompt(13, LENGTH)
    computed = ended(made(b), other)
    clear_once_written(b.unix)
    hit(made(b), other, computed)


@pytest.mark.sweep("store")
def test_two_ranks_hit_what_two_ranks_have_stored_at_another_server(
    servers: tuple[SteppedServer, SteppedServer]
) -> None:
    a, b = servers
    process_group = ProcessGroup(2)
    try:
        config, salt, tokens = shared(MODELS["mla"], 2), unique("shared"), prompt(14, LENGTH)
        ended(engine_of_ranks(process_group, config, a.unix, salt=salt), tokens, 1)
        of_pool = ended(engine_of_ranks(process_group, config, a.unix, salt=salt), tokens)
        clear_once_written(a.unix)
        kill(a)
        hit(engine_of_ranks(process_group, config, b.unix, salt=salt), tokens, of_pool)
    finally:
        process_group.close()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisStore]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(RedisStore, Path(name)) as one:
        assert isinstance(one, RedisStore)
        yield one


@pytest.fixture
def server(redis: RedisStore, tmp_path: Path) -> Iterator[SteppedServer]:
    with over(redis, tmp_path) as one:
        has_state(one.unix, "open")
        yield one


@pytest.fixture
def engine(server: SteppedServer) -> Iterator[TierEngine]:
    one = TierEngine(server.unix, manifest(64 << 10, model=unique("shared")))
    yield one
    one.close()


def in_the_tier_alone(server: SteppedServer, engine: TierEngine) -> list[bytes]:
    keys = engine.chain(4)
    engine.store(keys)
    clear_once_written(server.unix)
    return keys


def comes_back(engine: TierEngine, keys: list[bytes]) -> None:
    found = engine.awaited(keys, unique("again"))
    assert found.hit_tokens == len(keys) * CHUNK_TOKENS
    engine.read(keys, found)
    engine.release(found)


def test_what_another_server_puts_in_the_place_of_a_damaged_part_is_not_deleted(
    server: SteppedServer, redis: RedisStore, engine: TierEngine
) -> None:
    keys = in_the_tier_alone(server, engine)
    with redis.client() as client:
        (name,) = client.keys(f"*{keys[1].hex()}*")
        good = client.get(name)
        client.setrange(name, HEADER_BYTES + 5, bytes(16))
        server.armed.write_text("up.read")
        assert engine.lookup(keys, "r", 30.0).pending is not None
        mover = server.stands("up.read")
        client.set(name, good)
        mover.send_signal(signal.SIGCONT)
        eventually(lambda: engine.client.status().reservations == 0, 30.0)
        comes_back(engine, keys)
        assert client.get(name) == good


def test_what_the_store_has_lost_is_a_miss_and_is_written_again(
    server: SteppedServer, redis: RedisStore, engine: TierEngine
) -> None:
    keys = in_the_tier_alone(server, engine)
    with redis.client() as client:
        for name in client.keys(f"*{keys[1].hex()}*") + client.keys(f"*{keys[3].hex()}*"):
            client.delete(name)
        found = engine.awaited(keys, "misses")
        assert found.hit_tokens == CHUNK_TOKENS
        engine.release(found)
        clear_pool(server.unix)
        engine.store(keys)
        eventually(lambda: all(client.keys(f"*{key.hex()}*") for key in keys), 30.0)
    clear_pool(server.unix)
    comes_back(engine, keys)


def test_what_is_on_disk_is_hit_after_all_were_killed(tmp_path: Path) -> None:
    """With an empty pool; also when the index is gone."""
    folder, salt, tokens = tmp_path / "disk", unique("disk"), prompt(15, LENGTH)
    settings: dict[str, object] = {"disk_path": str(folder), "disk_bytes": 256 * MIB}

    def made(server: ServerProcess) -> Engine:
        has_state(server.unix, "open")
        return engine_over(server.unix, preset(MODELS["gqa"]), salt=salt, tier_wait_s=20.0)

    with server_over(settings, tmp_path) as server:
        ended(made(server), tokens, 1)
        of_pool = ended(made(server), tokens)
        clear_once_written(server.unix)
        kill(server)
    with server_over(settings, tmp_path) as server:
        hit(made(server), tokens, of_pool)
        kill(server)
    for index in folder.glob("index.db*"):
        index.unlink()
    with server_over(settings, tmp_path) as server:
        hit(made(server), tokens, of_pool)


@pytest.fixture
def redis_pair(tmp_path: Path) -> Iterator[tuple[RedisStore, ServerProcess, ServerProcess]]:
    """Two servers over a Redis of their own, which tests empty."""
    with opened(RedisStore, tmp_path) as found:
        assert isinstance(found, RedisStore)
        with over(found, tmp_path) as a, over(found, tmp_path) as b:
            for one in (a, b):
                has_state(one.unix, "open")
            yield found, a, b


def flush(store: RedisStore) -> None:
    with store.client() as client:
        client.flushall()


def test_what_is_stored_right_after_a_store_has_lost_everything_is_found_by_others(
    redis_pair: tuple[RedisStore, ServerProcess, ServerProcess]
) -> None:
    store, a, b = redis_pair
    writer, reader = (TierEngine(one.unix, manifest(64 << 10), "lost") for one in (a, b))
    writer.store(writer.chain(4))
    wait_until_written(a.unix)
    for _ in range(4):
        clear_pool(a.unix)
        flush(store)
        wanted, keys = written(writer) + 4, writer.chain(4)
        writer.store(keys)
        eventually(partial(has_written, writer, wanted), 30.0)
        clear_pool(a.unix)
        assert is_found(reader, keys)
    for engine in (writer, reader):
        engine.close()


def written(engine: TierEngine) -> int:
    (tier,) = engine.client.status().tiers
    return tier.counters["store_done"]


def has_written(engine: TierEngine, parts: int) -> bool:
    return written(engine) >= parts


def is_found(engine: TierEngine, keys: list[bytes]) -> bool:
    """In the end. That a store lacks something is remembered for some seconds."""
    tries = itertools.count()
    wanted = len(keys) * CHUNK_TOKENS
    eventually(lambda: engine.awaited(keys, f"{keys[0].hex()}-{next(tries)}").hit_tokens == wanted, 30.0)
    return True


def test_what_a_store_has_lost_is_written_again_as_long_as_the_pool_has_it(
    redis_pair: tuple[RedisStore, ServerProcess, ServerProcess]
) -> None:
    store, a, b = redis_pair
    writer, reader = (TierEngine(one.unix, manifest(64 << 10), "lost") for one in (a, b))
    keys = writer.chain(4)
    writer.store(keys)
    wait_until_written(a.unix)
    flush(store)
    assert is_found(reader, keys)
    for engine in (writer, reader):
        engine.close()
