"""Many nodes that want one prefix at the same time: the store is read about once, and no node serves many others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from redis_server import served

from bench.nodes.herd import Herd
from kvdock.tiers.stores.peers.claims import READERS_EACH
from kvdock.tiers.stores.peers.tier import FEW

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

NODES = FEW + 5
CHUNKS = 24


@pytest.fixture
def herd(tmp_path: Path) -> Iterator[Herd]:
    with ExitStack() as stack:
        stack.enter_context(served(tmp_path / "redis"))
        servers = [ServerProcess(pool_bytes=64 * MIB, missed_heartbeats=1000) for _ in range(NODES)]
        for server in servers:
            stack.callback(server.close)
        made = Herd([server.wait_ready().unix for server in servers], f"unix://{tmp_path}/redis/sock")
        stack.callback(made.close)
        yield made


def test_a_prefix_passes_from_node_to_node_and_the_store_is_read_once(herd: Herd) -> None:
    def passes() -> bool:
        """On a busy machine a node may give up waiting: then once more."""
        found = herd.round(CHUNKS)
        assert (found["hit_share"], found["wrong"]) == (1.0, 0)
        return found["store_reads_per_byte"] == 1.0 and found["most_readers"] <= READERS_EACH

    eventually(passes, 60.0)
