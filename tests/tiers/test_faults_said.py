"""What fails is said, with the file and the name of the error; a disk that cannot be written is still read."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from mover_steps import SteppedServer
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, POOL, is_served
from tier_stores import DiskStore, RedisStore, S3Store, Store, clear_once_written, clear_pool, has_state, opened

from kvdock.protocol.reports import TierView

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]


@pytest.fixture
def disk() -> Iterator[DiskStore]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(DiskStore, Path(name)) as one:
        yield one


def the_tier(engine: TierEngine) -> TierView:
    (tier,) = engine.client.status().tiers
    return tier


@pytest.mark.parametrize(("error", "state"), [("ENOSPC", "full"), ("EROFS", "read_only"), ("EIO", "read_only")])
def test_a_disk_that_cannot_be_written_says_so_and_is_read(
    disk: DiskStore, tmp_path: Path, error: str, state: str
) -> None:
    with SteppedServer(
        tmp_path / "armed", disk.environment, pool_bytes=POOL, segment_bytes=POOL, tier_asks=1, heartbeat_s=0.1,
        **disk.settings,
    ) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        has_state(server.unix, "open")
        kept = engine.chain(4)
        engine.store(kept)
        clear_once_written(server.unix)
        disk.stop(error)

        def is_said() -> bool:
            engine.store(engine.chain(2))
            return the_tier(engine).state == state

        eventually(is_said, 60.0)
        said = the_tier(engine)
        assert said.why and error in said.error and str(disk.folder / "segment-") in said.error
        eventually(lambda: f"({error})" in server.log_text(), 30.0)
        always_served(engine, kept)
        assert server.log_text().count("is not used") == 0
        disk.resume()

        def is_written() -> bool:
            engine.store(engine.chain(2))
            return the_tier(engine).state == "open"

        eventually(is_written, 90.0)
        assert not the_tier(engine).error
        engine.close()


def always_served(engine: TierEngine, keys: list[bytes]) -> None:
    """From the tier, for longer than a probe takes, while stores fail."""
    until_s, names = time.monotonic() + 4.0, itertools.count()
    while time.monotonic() < until_s:
        engine.store(engine.chain(2))
        clear_pool(engine.client.address)
        found = engine.awaited(keys, f"reads {next(names)}")
        assert found.hit_tokens == len(keys) * CHUNK_TOKENS
        engine.read(keys, found)
        engine.release(found)


def test_parts_that_a_disk_never_takes_are_said_and_others_are_kept(tmp_path: Path) -> None:
    """Its limit gives segments that are shorter than a part of one of the two models."""
    with (
        ServerProcess(
            pool_bytes=POOL, segment_bytes=POOL, tier_asks=1, heartbeat_s=0.1, disk_path=str(tmp_path / "disk"),
            disk_bytes=4 * MIB,
        ) as server,
        closing(TierEngine(server.unix, manifest(MIB, model="large"))) as large,
        closing(TierEngine(server.unix, manifest(PART // 8, model="small"), "another")) as small,
    ):
        is_served(server, 2)
        has_state(server.unix, "open")
        keys, kept = large.chain(2), small.chain(2)

        def is_said() -> bool:
            large.store(keys)
            small.store(kept)
            return the_tier(large).why == "some parts are longer than it takes"

        eventually(is_said, 30.0)
        eventually(lambda: the_tier(small).counters["store_done"] == 2, 30.0)
        for number in range(4):
            large.release(large.awaited(keys, f"asks {number}"))
        said = the_tier(large)
        assert said.state == "open" and f"found a part of {MIB:,} bytes, wanted at most " in said.error
        assert said.counters["failures"] == said.counters["left_out_failed"] == 0
        assert said.counters["left_out_too_large"] == 2, "each is tried once"
        (finding,) = [one for one in large.client.verdict().findings if one.code == "tier_not_written"]
        assert finding.text == "Not all is written to the tier disk: some parts are longer than it takes."
        clear_pool(server.unix)
        assert small.awaited(kept, "comes back").hit_tokens == 2 * CHUNK_TOKENS


@contextmanager
def takes_nothing(store: Store, how: str) -> Iterator[None]:
    """As after a failover, while it cannot save, or with keys that may only read."""
    if isinstance(store, S3Store):
        store.server.flag.write_text(how)
        yield
        store.server.flag.unlink()
        return
    assert isinstance(store, RedisStore)
    with store.client() as client:
        if how == "a replica":
            client.replicaof("127.0.0.1", 1)
            yield
            client.replicaof("NO", "ONE")
        else:
            client.config_set("min-replicas-to-write", 1)
            yield
            client.config_set("min-replicas-to-write", 0)


@pytest.mark.parametrize(("kind", "how"), [
    (RedisStore, "a replica"), (RedisStore, "without replicas"), (S3Store, "403 Forbidden"),
    (S3Store, "500 Internal Server Error"),
])
def test_a_store_that_only_takes_nothing_says_so_and_is_read(
    kind: type[RedisStore | S3Store], how: str, tmp_path: Path
) -> None:
    with (
        opened(kind, tmp_path) as store,
        SteppedServer(
            tmp_path / "armed", store.environment, pool_bytes=POOL, segment_bytes=POOL, tier_asks=1, heartbeat_s=0.1,
            **store.settings,
        ) as server,
        closing(TierEngine(server.unix, manifest(PART))) as engine,
    ):
        is_served(server, 1)
        has_state(server.unix, "open")
        kept = engine.chain(4)
        engine.store(kept)
        clear_once_written(server.unix)
        with takes_nothing(store, how):

            def is_said() -> bool:
                engine.store(engine.chain(2))
                return the_tier(engine).state == "read_only"

            eventually(is_said, 30.0)
            assert the_tier(engine).error
            said = [finding for finding in engine.client.verdict().findings if finding.code == "tier_not_written"]
            assert [finding.text for finding in said] == [
                f"Nothing is written to the tier {store.name}: it cannot be written."
            ]
            always_served(engine, kept)
            assert server.log_text().count("is not used") == 0

        def is_written() -> bool:
            engine.store(engine.chain(2))
            return the_tier(engine).state == "open"

        eventually(is_written, 90.0)


def test_a_redis_without_space_for_a_note_is_full_and_is_read(tmp_path: Path) -> None:
    """An engine of another model attaches."""
    usual = {"pool_bytes": POOL, "segment_bytes": POOL, "tier_asks": 1, "heartbeat_s": 0.1}
    with (
        opened(RedisStore, tmp_path) as store,
        SteppedServer(tmp_path / "armed", store.environment, **usual, **store.settings) as server,
        closing(TierEngine(server.unix, manifest(PART))) as engine, store.client() as client,
    ):
        is_served(server, 1)
        has_state(server.unix, "open")
        kept = engine.chain(4)
        engine.store(kept)
        clear_once_written(server.unix)
        client.config_set("maxmemory", 1)
        with closing(TierEngine(server.unix, manifest(PART, model="other"), "other")):
            eventually(lambda: the_tier(engine).state == "full", 30.0)
            assert "OOM" in the_tier(engine).error
            always_served(engine, kept)
        assert server.log_text().count("is not used") == 0
