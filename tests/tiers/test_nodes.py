"""Nodes in network namespaces over one store, or reading each other's pools: what one has stored the others hit, once
over the network, and no byte is wrong while servers, movers, the store and the network go."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT

from bench.nodes.network import missing

pytestmark = [pytest.mark.tiers, pytest.mark.sweep, pytest.mark.timeout(900)]

KILLS = ("after_kill_of_A", "after_kill_of_B", "after_kill_of_mover", "after_kill_of_store")


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("store", ["redis", "s3", "mooncake", "folder"])
def test_nodes_hit_what_one_has_stored_whatever_is_killed(store: str, nodes: int) -> None:
    if why := missing():
        pytest.skip(why)
    found = measured(store, nodes)
    assert found["wrong"] == 0
    assert found["hit_share"] == found["stored_per_byte"] == found["loaded_per_byte"] == 1.0
    assert [found[name] for name in KILLS] == [1.0] * len(KILLS)
    if store != "folder":
        assert 1.0 <= found["received_per_byte"] < 1.1, "it came over the network once"
        assert found["after_partition"] == 1.0
        assert found["cut_off_wait_s"] < 10, "a request without its store does not wait for ever"


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_hit_what_the_pool_of_one_has_whatever_is_killed(nodes: int) -> None:
    if why := missing():
        pytest.skip(why)
    found = measured("peers", nodes)
    assert (found["wrong"], found["stored_per_byte"]) == (0, 0)
    assert found["hit_share"] == found["loaded_per_byte"] == 1.0
    assert 1.0 <= found["received_per_byte"] < 1.1, "it came over the network once"
    assert [found[name] for name in found if name.startswith("after_")] == [1.0] * 7
    assert found["cut_off_wait_s"] < 10, "a request without its peers does not wait for ever"


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("store", ["redis_peers", "s3_peers", "folder_peers"])
def test_a_herd_reads_the_store_once_whatever_is_killed(store: str, nodes: int) -> None:
    if why := missing():
        pytest.skip(why)
    found = measured(store, nodes, rounds=3)
    assert found["wrong"] == 0
    assert found["hit_share"] == found["after_kill"] == found["after_stop"] == 1.0
    assert found["store_reads_per_byte"] == 1.0
    assert found["stop_wait_s"] <= 2.5, "a request waits no longer than it may"


def measured(store: str, nodes: int, rounds: int = 1) -> dict[str, float]:
    """The figures of bench.nodes, by their names without the store."""
    done = subprocess.run(
        [
            sys.executable, "-m", "bench.nodes", "--json", "--nodes", str(nodes), "--stores", store, "--chunks", "32",
            "--rounds", str(rounds),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name.removeprefix(f"{store}_{nodes}_"): figure for name, figure in json.loads(done.stdout).items()}
