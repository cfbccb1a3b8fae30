"""Many nodes that want one prefix at the same time: the store is read about once, and no node serves many others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from redis_server import served

from bench.nodes.herd import Herd
from kvdock.tiers.stores.peers.claims import READERS_EACH, keeper_of
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
        found = herd.load(herd.stored(CHUNKS), herd.nodes)
        assert (found["hit_share"], found["wrong"]) == (1.0, 0)
        return found["store_reads_per_byte"] == 1.0 and found["most_readers"] <= READERS_EACH

    eventually(passes, 60.0)


def test_where_the_node_that_loads_is_cut_off_those_next_to_it_load_and_the_others_read_there(herd: Herd) -> None:
    def goes_on() -> bool:
        loader, *others = herd.nodes
        loader.is_cut_off, keys = False, herd.stored(CHUNKS)
        for server in itertools.chain.from_iterable(node.others for node in others):
            server.works()  # again, after a first try
            server.node = server.last_node
        names = [node.name for node in herd.nodes]
        keeper = herd.nodes[names.index(keeper_of(keys[0], names))]
        if keeper is loader:
            return False
        assert keeper.leases.tier is not None
        keeper.leases.tier.claimed(keeper.digest, 1, keys[0], loader.name)
        loader.is_cut_off = True
        found = herd.load(keys, others)
        assert (found["hit_share"], found["wrong"]) == (1.0, 0)
        return found["store_reads_per_byte"] <= READERS_EACH

    eventually(goes_on, 60.0)
