"""What prompts go on asking for stays in lower tiers, although the pool answers it and nothing loads it from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from disk_helpers import opened, store_in_turn, there
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_helpers import Part, Parts, assert_loads, patient, store_all
from tier_server import PART, SETTINGS, is_served, is_written
from tier_stores import RedisStore

from kvdock.protocol.reports import TierView
from kvdock.tiers.stores import objects
from kvdock.tiers.stores.redis import open_tier
from kvdock.tiers.tier import Tier

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

HOT, COLD, ROUNDS = 4, 4, 24
DISK_BYTES = 16 * MIB
"""Less than a third of what the rounds store."""
TTL_S = 2


def engine_of(server: ServerProcess) -> TierEngine:
    engine = TierEngine(server.unix, manifest(PART))
    is_served(server, 1)
    eventually(lambda: [tier.state for tier in engine.client.status().tiers] == ["open"], 60.0)
    return engine


def the_tier(engine: TierEngine) -> TierView:
    (tier,) = engine.client.status().tiers
    return tier


def has_stored(engine: TierEngine, parts: int) -> bool:
    return the_tier(engine).counters["store_done"] >= parts


def asks(engine: TierEngine, keys: list[bytes]) -> None:
    """A prompt finds all in the pool."""
    found = engine.lookup(keys, engine.rng.randbytes(8).hex())
    assert found.hit_tokens == len(keys) * CHUNK_TOKENS and found.lease
    engine.release(found)


def settles(engine: TierEngine) -> None:
    """The mover has followed what it was sent, and has written what it wanted to."""
    for _ in range(2):
        began_s = time.monotonic()

        def has_reported(since_s: float = began_s) -> bool:
            mover = engine.client.status().mover
            return mover is not None and mover.silent_s < time.monotonic() - since_s

        eventually(has_reported, 30.0)
    eventually(lambda: the_tier(engine).queued_bytes == 0, 60.0)


def test_a_prefix_that_the_pool_always_has_is_on_disk_after_a_restart(tmp_path: Path) -> None:
    settings = {**SETTINGS, "disk_path": str(tmp_path / "disk"), "disk_bytes": DISK_BYTES}
    with ServerProcess(**settings) as server:
        engine = engine_of(server)
        hot = engine.chain(HOT)
        engine.store(hot)
        is_written(engine, hot)
        for number in range(1, ROUNDS + 1):
            engine.store(engine.chain(COLD))
            eventually(partial(has_stored, engine, HOT + number * COLD), 30.0)
            asks(engine, hot)
        for _ in range(2):
            settles(engine)
            asks(engine, hot)
        settles(engine)
        engine.close()
    with ServerProcess(**settings) as server:
        engine = engine_of(server)
        assert engine.awaited(hot).hit_tokens == HOT * CHUNK_TOKENS
        engine.close()


def test_the_disk_says_what_is_gone(tmp_path: Path) -> None:
    stored = Parts("gone").many(64, PART)
    with opened(tmp_path / "disk", DISK_BYTES) as tier:
        store_in_turn(tier, stored)
        has = there(tier, stored)
        assert 0 < sum(has) < len(stored)
        assert set(tier.gone()) == {part.name for part, is_there in zip(stored, has, strict=True) if not is_there}
        assert not tier.gone()


def parts_in(store: RedisStore) -> list[bytes]:
    with store.client() as client:
        return [key for key in client.scan_iter(_type="string") if client.strlen(key) > PART]


def test_what_others_evict_from_redis_is_found_out_and_written_again(tmp_path: Path) -> None:
    store = RedisStore(tmp_path)
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("disk")}
    try:
        with ServerProcess(**settings, redis_url=f"{store.settings['redis_url']}?ttl_s={TTL_S}") as server:
            engine = engine_of(server)
            hot = engine.chain(HOT)
            engine.store(hot)
            is_written(engine, hot)
            with store.client() as client:
                client.unlink(*parts_in(store))

            def is_back() -> bool:
                asks(engine, hot)
                return len(parts_in(store)) == HOT

            eventually(is_back, 60.0)
            engine.close()
    finally:
        store.end()


def is_asked_for(tier: Tier, part: Part) -> None:
    assert tier.exists([part.name], patient()) == [True]


def is_loaded(tier: Tier, part: Part) -> None:
    assert_loads(tier, [part])


USES = pytest.mark.parametrize("use", [is_asked_for, is_loaded])


@USES
@pytest.mark.parametrize(("ttl_s", "length"), [(0, PART), (1000, PART), (1000, 9 * MIB)])
def test_what_is_used_lives_on_in_redis(
    tmp_path: Path, use: Callable[[Tier, Part], None], ttl_s: int, length: int
) -> None:
    store, part = RedisStore(tmp_path), Parts("used").make(length)
    tier = open_tier(str(store.settings["redis_url"]) + (f"?ttl_s={ttl_s}" if ttl_s else ""), patient())
    try:
        store_all(tier, [part])
        with store.client() as client:
            if ttl_s:
                client.expire(part.name.text(), 100)
            use(tier, part)
            assert client.ttl(part.name.text()) > 100 if ttl_s else client.ttl(part.name.text()) == -1
    finally:
        tier.close(patient())
        store.end()


@USES
def test_what_is_used_is_young_in_a_folder(tmp_path: Path, use: Callable[[Tier, Part], None]) -> None:
    part, tier = Parts("used").make(PART), objects.open_tier(f"file://{tmp_path}", patient())
    try:
        store_all(tier, [part])
        os.utime(tmp_path / part.name.text(), (0, 0))
        use(tier, part)
        (holding,) = tier.holdings(patient())
        assert list(holding.by_age) == [0]
    finally:
        tier.close(patient())


def test_no_more_is_written_to_a_disk_than_a_day_allows(tmp_path: Path) -> None:
    hour = 8 * PART
    with ServerProcess(**SETTINGS, disk_path=str(tmp_path / "disk"), disk_day_bytes=24 * hour) as server:
        engine = engine_of(server)
        for number in range(1, 6):

            def is_written_or_spent(parts: int = 4 * number) -> bool:
                tier = the_tier(engine)
                return tier.counters["store_done"] >= parts or tier.day_left_bytes == 0

            engine.store(engine.chain(4))
            eventually(is_written_or_spent, 30.0)
        eventually(lambda: the_tier(engine).counters["left_out_day_spent"] >= 4, 30.0)
        tier = the_tier(engine)
        assert tier.day_limit_bytes == 24 * hour and tier.counters["store_done"] <= 12
        engine.close()
