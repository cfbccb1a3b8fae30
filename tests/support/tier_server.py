"""A server with a mover and a tier on disk, with room for few chunks, and what tests ask of them."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]  # it has no stubs here
from api_helpers import MIB, ServerProcess, eventually
from tier_engine import TierEngine

from kvdock.client.client import Client

PART = MIB // 2
POOL_CHUNKS = 32
POOL = POOL_CHUNKS * PART
SETTINGS = {
    "pool_bytes": POOL, "segment_bytes": POOL, "disk_bytes": 256 * MIB, "tier_asks": 1, "heartbeat_s": 0.2,
    "missed_heartbeats": 25,
    "settle_s": 0.2, "watch_s": 0.05,
}


def mover(server: ServerProcess) -> psutil.Process:
    """The server's own."""
    (found,) = movers(server)
    return found


def movers(server: ServerProcess) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(server.process.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE and "kvdock.tiers.mover" in child.cmdline()
    ]


def is_served(server: ServerProcess, namespaces: int) -> None:
    """The mover has a session in so many."""
    with Client(server.unix) as client:
        eventually(lambda: sum(one.label == "lower tiers" for one in client.sessions().sessions) == namespaces, 30.0)


def is_written(engine: TierEngine, keys: list[bytes]) -> None:
    """Lower tiers have the chunks."""
    eventually(lambda: written(engine) >= len(keys), 30.0)


def written(engine: TierEngine) -> int:
    return sum(report.objects for report in engine.client.status().tiers)


def flood(engine: TierEngine) -> None:
    """Evicts all that nobody holds."""
    for _ in range(3):
        engine.store(engine.chain(POOL_CHUNKS // 2))


def stored_and_gone(engine: TierEngine, count: int) -> list[bytes]:
    """Chunks that lower tiers have and the pool has not."""
    keys = engine.chain(count)
    engine.store(keys)
    is_written(engine, keys)
    flood(engine)
    assert engine.lookup(keys, "gone?").hit_tokens == 0
    return keys


def loads(engine: TierEngine) -> int:
    return sum(report.counters.get("load_done", 0) for report in engine.client.status().tiers)
