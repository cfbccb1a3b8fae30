"""The mover, or its server, is killed at each step of a load and of writing behind: nothing leaks, nothing is wrong."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import MIB, eventually
from mover_steps import DOWN, UP, SteppedServer, has_ended
from tier_engine import CHUNK_TOKENS, TierEngine, manifest

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(180)]

CHUNKS = 4
PATIENCE_S = 60.0


def made(folder: Path) -> SteppedServer:
    """With the same pool and the same disk whenever it is made again."""
    return SteppedServer(
        folder / "armed", socket_path=str(folder / "s.sock"), disk_path=str(folder / "disk"), disk_bytes=64 * MIB,
        pool_bytes=8 * MIB, segment_bytes=8 * MIB, tier_asks=1, heartbeat_s=0.1, watch_s=0.02, settle_s=0.1,
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name:  # a socket's path is short
        yield Path(name)


@pytest.fixture(scope="module")
def server() -> Iterator[SteppedServer]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, made(Path(name)) as one:
        yield one


def attached(server: SteppedServer, seed: int) -> TierEngine:
    """Two ranks, each of which stores half of a chunk."""
    engine = TierEngine(server.unix, manifest(128 << 10, model="kills", writers=2), f"engine-{seed}")
    is_served(engine)
    return engine


def is_served(engine: TierEngine) -> None:
    eventually(lambda: [one.state for one in engine.client.status().tiers] == ["open"], PATIENCE_S)
    eventually(lambda: sum(one.label == "lower tiers" for one in engine.client.sessions().sessions) == 1, PATIENCE_S)


def objects(client: Client) -> int:
    return sum(tier.objects for tier in client.status().tiers)


def is_held_by_none(client: Client) -> bool:
    status = client.status()
    return not (status.leases or status.reservations or status.pool.held_bytes)


def empty(client: Client) -> None:
    """Every slot can be given out again: none is leaked."""
    eventually(lambda: is_held_by_none(client), PATIENCE_S)
    client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))
    pool = client.status().pool
    assert (pool.reserved_bytes, pool.ready_bytes, pool.quarantined_bytes) == (0, 0, 0)


def in_the_tier_alone(engine: TierEngine) -> list[bytes]:
    keys, before = engine.chain(CHUNKS), objects(engine.client)
    engine.store(keys)
    eventually(lambda: objects(engine.client) == before + 2 * CHUNKS, PATIENCE_S)
    empty(engine.client)
    return keys


def comes_back(engine: TierEngine, keys: list[bytes]) -> None:
    """It comes from the tier, whole and right, and is released again."""
    empty(engine.client)
    for number in range(1000):
        found = engine.awaited(keys, f"again-{number}")
        if found.hit_tokens == CHUNKS * CHUNK_TOKENS:
            break
    else:
        pytest.fail("the tier does not give back what it has")
    engine.read(keys, found)
    engine.release(found)
    empty(engine.client)


def begun(server: SteppedServer, engine: TierEngine, step: str) -> list[bytes]:
    """The chunks with which the mover has come to the step."""
    if step in UP:
        keys = in_the_tier_alone(engine)
        server.armed.write_text(step)
        assert engine.lookup(keys, "r", 30.0).pending is not None
    else:
        keys = engine.chain(CHUNKS)
        server.armed.write_text(step)
        engine.store(keys)
    return keys


def is_written(engine: TierEngine, before: int) -> None:
    eventually(lambda: objects(engine.client) >= before + 2 * CHUNKS, PATIENCE_S)


@pytest.mark.parametrize("step", (*UP, *DOWN))
def test_a_mover_that_is_killed_leaves_nothing_and_the_next_goes_on(server: SteppedServer, step: str) -> None:
    engine = attached(server, (*UP, *DOWN).index(step))
    before = objects(engine.client)
    keys = begun(server, engine, step)
    mover = server.stands(step)
    mover.send_signal(signal.SIGKILL)
    eventually(lambda: server.mover().pid != mover.pid, PATIENCE_S)
    is_served(engine)
    is_written(engine, before)
    comes_back(engine, keys)
    engine.close()


@pytest.mark.parametrize("step", ["up.reserved", "up.loading", "up.half", *DOWN[:3]])
def test_a_server_that_is_killed_meanwhile_leaves_nothing_and_the_next_goes_on(folder: Path, step: str) -> None:
    with made(folder) as first:
        engine = attached(first, 0)
        keys = begun(first, engine, step)
        mover = first.stands(step)
        first.process.kill()
        first.process.wait(PATIENCE_S)
        mover.send_signal(signal.SIGCONT)
        eventually(lambda: has_ended(mover), PATIENCE_S)
        engine.close()
    with made(folder) as server:
        assert server.pool_id == first.pool_id
        engine = attached(server, 1)
        if step in DOWN:  # the next server's mover hears of what the pool has when a prompt asks for it
            engine.release(engine.lookup(keys, "asks"))
        is_written(engine, 0)
        comes_back(engine, keys)
        engine.close()
