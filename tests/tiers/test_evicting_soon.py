"""What the pool is about to evict is written first, if no tier has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import MIB, eventually
from mover_steps import SteppedServer
from redis import Redis
from redis_server import RedisServer
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, POOL_CHUNKS, SETTINGS, flood, is_served, is_written, written

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

LEFT_OUT = ("left_out_full_queue", "left_out_failed")


def is_open(engine: TierEngine) -> bool:
    return [report.state for report in engine.client.status().tiers] == ["open"]


def left_out(engine: TierEngine) -> int:
    (report,) = engine.client.status().tiers
    return sum(report.counters[why] for why in LEFT_OUT)


def has(server: RedisServer, key: bytes) -> bool:
    """`written` does not say which chunks: it counts those that were queued while the tier was away."""
    with Redis(unix_socket_path=str(server.address)) as client:
        return any(key.hex().encode() in name for name in client.scan_iter())


def test_chunks_that_a_tier_was_not_there_for_are_written_before_they_go(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis", str(tmp_path / "redis.sock"))
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("disk")}
    try:
        with SteppedServer(
            tmp_path / "armed", {}, **settings, redis_url=f"unix://{tmp_path}/redis.sock", tier_queue_bytes=MIB
        ) as server:
            engine = TierEngine(server.unix, manifest(PART))
            is_served(server, 1)
            eventually(lambda: is_open(engine), 30.0)
            redis.kill()
            early = [engine.chain(1) for _ in range(12)]
            for one in early:
                engine.store(one)
            eventually(lambda: left_out(engine) + 2 >= len(early), 60.0)  # a queue of 1 MiB has two of them
            redis.start()
            eventually(lambda: is_open(engine), 60.0)
            assert written(engine) <= 2

            later = [engine.chain(1) for _ in range(POOL_CHUNKS - len(early) - 2)]
            for number, one in enumerate(later):
                engine.store(one)
                is_written(engine, [key for chain in later[: number + 1] for key in chain])
            soon = early[:2]  # a sixteenth of the pool
            eventually(lambda: all(has(redis, key) for one in soon for key in one), 30.0)
            flood(engine)
            for number, one in enumerate(soon):
                assert engine.lookup(one, f"gone {number}").hit_tokens == 0
                assert engine.awaited(one, f"waits {number}").hit_tokens == CHUNK_TOKENS
            engine.close()
    finally:
        redis.kill()
