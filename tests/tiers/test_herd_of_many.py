"""Many nodes that want one prefix at the same time: the store is read about once, and no node serves many others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from redis_server import served

from bench.nodes.herd import Herd, Node
from kvdock.protocol.wire_types import KEY_BYTES
from kvdock.tiers.mover.fetches import Fetch, Wanted
from kvdock.tiers.record import PartName
from kvdock.tiers.stores.peers.claims import READERS_EACH, keeper_of
from kvdock.tiers.stores.peers.tier import FEW
from kvdock.tiers.tier import Deadline

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


def test_a_node_that_follows_asks_the_store_once_for_what_it_lacks(
    herd: Herd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the other nodes are asked, too, because one of them may have the rest."""
    keys, (loader, node, *_) = herd.stored(CHUNKS), herd.nodes
    assert node.agreement.wait_for(node.peers, node.digest, Deadline(30.0)) is not None
    keeper = keeper_among(herd, keys[0])
    assert keeper.leases.tier is not None
    keeper.leases.tier.claimed(keeper.digest, 1, keys[0], loader.name)
    asked: list[PartName] = []
    exists = node.store.tier.exists

    def count(names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        asked.extend(names)
        return exists(names, deadline)

    monkeypatch.setattr(node.store.tier, "exists", count)
    wanted = Wanted(node.space, [*keys, *(bytes([at]) * KEY_BYTES for at in range(8))], 0, ticket=1)
    steps, place = node.fetches._plan(Fetch(wanted, 20.0), [node.peers, node.store])
    assert place.source == loader.name
    assert [(step.handle.name, len(step.found)) for step in steps] == [("redis", CHUNKS)]
    assert asked and max(Counter(asked).values()) == 1


def keeper_among(herd: Herd, key: bytes) -> Node:
    names = [node.name for node in herd.nodes]
    return herd.nodes[names.index(keeper_of(key, names))]


def test_where_the_node_that_loads_is_cut_off_those_next_to_it_load_and_the_others_read_there(herd: Herd) -> None:
    def goes_on() -> bool:
        loader, *others = herd.nodes
        loader.is_cut_off, keys = False, herd.stored(CHUNKS)
        for server in itertools.chain.from_iterable(node.others for node in others):
            server.works()  # again, after a first try
            server.node = server.last_node
        keeper = keeper_among(herd, keys[0])
        if keeper is loader:
            return False
        assert keeper.leases.tier is not None
        keeper.leases.tier.claimed(keeper.digest, 1, keys[0], loader.name)
        loader.is_cut_off = True
        found = herd.load(keys, others)
        assert (found["hit_share"], found["wrong"]) == (1.0, 0)
        return found["store_reads_per_byte"] <= READERS_EACH

    eventually(goes_on, 60.0)
