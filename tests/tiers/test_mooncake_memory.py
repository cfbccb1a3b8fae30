"""Over RDMA the mover registers the pool with Mooncake's library, so that parts go directly from and to slots. The real
library is used, over TCP (mooncake_mover.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import eventually
from mooncake_mover import RdmaServer
from mooncake_servers import MooncakeServers
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, POOL, SETTINGS, is_written
from tier_stores import clear_pool, has_state

from kvdock.client.client import Client

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(180)]

SEGMENT_CHUNKS = 30
"""They fit into one segment, beside its header."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[MooncakeServers]:
    made = MooncakeServers(tmp_path)
    yield made
    made.end()


def registered_through(server: RdmaServer) -> int:
    """The mover has registered the segments with ids below it; -1: it has not reported any."""
    with Client(server.unix) as client:
        members = [
            member for session in client.sessions().sessions if session.label == "lower tiers"
            for member in session.members
        ]
    return min((-1 if one.pinned_through is None else one.pinned_through for one in members), default=-1)


def copied(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines() if log.exists() else ())


def test_over_rdma_parts_go_directly_from_and_to_segments_until_they_are_unmapped(
    tmp_path: Path, servers: MooncakeServers
) -> None:
    log = tmp_path / "copies"
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("disk")}
    url = servers.url("protocol=rdma&stall_s=1&master_s=2")
    with RdmaServer(log, **{**settings, "pool_bytes": 2 * POOL}, mooncake_url=url) as server:
        engine = TierEngine(server.unix, manifest(PART))
        has_state(server.unix, "open")
        eventually(lambda: registered_through(server) == 1, 30.0)
        first = engine.chain(SEGMENT_CHUNKS)
        engine.store(first)
        is_written(engine, first)
        assert {line for line in copied(log) if line.startswith("write")} == {"write segment"}

        second = engine.chain(SEGMENT_CHUNKS)
        engine.store(second)  # the pool grows by a segment
        eventually(lambda: registered_through(server) == 2, 30.0)
        is_written(engine, [*first, *second])
        clear_pool(server.unix)
        for number, keys in enumerate((first, second)):
            found = engine.awaited(keys, f"waits {number}")
            assert found.hit_tokens == len(keys) * CHUNK_TOKENS
            engine.read(keys, found)
            engine.release(found)
        copies = copied(log)
        assert copies["read segment"] == len(first) + len(second), copies
        # To measure the tier, the mover reads into other memory. It may write before a segment is registered.
        assert set(copies) <= {"write segment", "read segment", "write buffer", "read buffer"}, copies
        engine.close()
    assert copied(log)["unregistered"] == 2, "both segments, before they are unmapped"


def test_a_segment_that_cannot_be_registered_costs_a_copy_and_nothing_else(
    tmp_path: Path, servers: MooncakeServers
) -> None:
    log = tmp_path / "copies"
    log.with_suffix(".refused").touch()
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("disk")}
    url = servers.url("protocol=rdma&stall_s=1&master_s=2")
    with RdmaServer(log, **settings, mooncake_url=url) as server:
        engine = TierEngine(server.unix, manifest(PART))
        has_state(server.unix, "open")
        keys = engine.chain(8)
        engine.store(keys)
        is_written(engine, keys)
        clear_pool(server.unix)
        found = engine.awaited(keys, "waits")
        assert found.hit_tokens == len(keys) * CHUNK_TOKENS
        engine.read(keys, found)
        engine.close()
        assert "a segment of the pool is not registered" in server.log_text()
    assert set(copied(log)) == {"write buffer", "read buffer"}
