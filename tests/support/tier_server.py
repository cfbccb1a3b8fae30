"""A server with a mover and a tier on disk, with room for few chunks, and what tests ask of them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs here
from api_helpers import MIB, ServerProcess, eventually
from mover_steps import movers_of
from tier_engine import TierEngine
from tier_stores import clear_once_written
from whole_engines import WholeEngine

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
    return movers_of(server.process.pid)


def with_disk(folder: Path, **settings: object) -> ServerProcess:
    """For whole engines: a pool that holds all that they store, and a tier on disk that each chunk is written to."""
    return ServerProcess(**{
        "pool_bytes": 64 * MIB, "segment_bytes": 64 * MIB, "disk_path": str(folder / "disk"), "disk_bytes": 256 * MIB,
        "tier_asks": 1, "heartbeat_s": 0.2, **settings,
    })


def leave_in_the_tier(server: ServerProcess, engine: WholeEngine, share: float = 1.0) -> None:
    """What was stored: neither the pool nor the engine has it any more."""
    engine.drain()
    clear_once_written(server.unix, share)
    engine.flush()


def is_served(server: ServerProcess, namespaces: int) -> None:
    """The mover has a session in so many, and has reported its tiers, which it does some time after it has attached."""
    with Client(server.unix) as client:
        eventually(lambda: bool(client.status().tiers), 30.0)
        eventually(lambda: sum(one.label == "lower tiers" for one in client.sessions().sessions) == namespaces, 30.0)


def is_written(engine: TierEngine, keys: list[bytes]) -> None:
    """Lower tiers have the chunks."""
    eventually(lambda: written(engine) >= len(keys), 30.0)


def written(engine: TierEngine) -> int:
    return sum(report.objects for report in engine.client.status().tiers)


def flood(engine: TierEngine) -> None:
    """Evicts all chunks that no engine holds."""
    for _ in range(3):
        engine.store(engine.chain(POOL_CHUNKS // 2))


def damage_on_disk(folder: Path, part: bytes) -> None:
    """Overwrites the beginning of the part in the log of the disk below `folder`."""
    for log in (folder / "disk").iterdir():
        if log.is_file() and part[:64] in (data := log.read_bytes()):
            with log.open("r+b") as file:
                file.seek(data.index(part[:64]))
                file.write(bytes(64))
                os.fsync(file.fileno())


def stored_and_gone(engine: TierEngine, count: int) -> list[bytes]:
    """Chunks that lower tiers have and the pool does not."""
    keys = engine.chain(count)
    engine.store(keys)
    is_written(engine, keys)
    flood(engine)
    assert engine.lookup(keys, "gone?").hit_tokens == 0
    return keys


def loads(engine: TierEngine) -> int:
    return sum(report.counters.get("load_done", 0) for report in engine.client.status().tiers)
