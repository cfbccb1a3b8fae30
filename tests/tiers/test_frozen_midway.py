"""A store that freezes when some of a part has come: the wait ends, and no slot is anybody's that bytes may come to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import eventually, unique
from midway_stores import MIDWAY, MidwayStore
from mover_steps import SteppedServer
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_stores import clear_once_written, clear_pool, has_state, opened

from kvdock.tiers.mover.tier_handle import FIRST_RATE

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

POOL_CHUNKS = 4
WAIT_S = 1.0


@pytest.fixture(params=MIDWAY, ids=lambda kind: kind.name)
def store(request: pytest.FixtureRequest) -> Iterator[MidwayStore]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(request.param, Path(name)) as one:
        yield one


@pytest.fixture
def server(store: MidwayStore, tmp_path: Path) -> Iterator[SteppedServer]:
    pool = POOL_CHUNKS * store.part_bytes
    with SteppedServer(
        tmp_path / "armed", store.environment, pool_bytes=pool, segment_bytes=pool, tier_asks=1, heartbeat_s=0.1,
        **store.settings,
    ) as one:
        has_state(one.unix, "open")
        yield one


@pytest.fixture
def engine(server: SteppedServer, store: MidwayStore) -> Iterator[TierEngine]:
    one = TierEngine(server.unix, manifest(store.part_bytes))
    yield one
    one.close()


def hits(engine: TierEngine, keys: list[bytes], wait_s: float = 0.0) -> int:
    """How many chunks, each of which is right."""
    found = engine.awaited(keys, unique("hits"), wait_s)
    engine.read(keys, found)
    if found.lease is not None:
        engine.release(found)
    return found.hit_tokens // CHUNK_TOKENS


def test_a_store_that_freezes_in_the_midst_of_a_part_harms_nobody(
    server: SteppedServer, store: MidwayStore, engine: TierEngine
) -> None:
    keys = engine.chain(2)
    engine.store(keys)
    clear_once_written(server.unix)
    eventually(lambda: engine.client.status().tiers[0].load_bytes_per_s != FIRST_RATE, 30.0)  # else that would freeze
    store.arm(server)
    assert engine.lookup(keys, "waits", WAIT_S).pending is not None
    store.freezes(server)
    assert engine.client.status().reservations > 0
    found = engine.awaited(keys, "waits", WAIT_S)
    assert found.hit_tokens < len(keys) * CHUNK_TOKENS
    engine.read(keys, found)
    if found.lease is not None:
        engine.release(found)
    if store.returns:  # long before a client gives up by itself
        eventually(lambda: engine.client.status().reservations == 0, 15.0)
    else:
        assert engine.client.status().reservations > 0

    others = [engine.chain(1) for _ in range(2 * POOL_CHUNKS)]
    for one in others:  # in all slots that can be had
        engine.store(one)
    kept = [one for one in others if hits(engine, one)]
    assert kept
    store.resume()
    eventually(lambda: engine.client.status().reservations == 0, 30.0)
    assert all(hits(engine, one) for one in kept), "late bytes have come, or slots were lost"

    has_state(server.unix, "open")

    def comes_back() -> bool:
        clear_pool(server.unix)
        return hits(engine, keys, 20.0) == len(keys)

    eventually(comes_back, 60.0)
    mover = engine.client.status().mover
    assert mover is not None and mover.restarts == 0
    assert "Traceback" not in server.log_text()
