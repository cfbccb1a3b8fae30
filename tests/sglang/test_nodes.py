"""An engine on two nodes, each of which has a server: whole engines, of which both halves run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engine_fixtures import Spare
from engines import Engine
from ports import held_port
from whole_engines import HITS, NOTHING, PROMPTS, comes_back, tokens_of

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@contextmanager
def two_nodes(model: Path, servers: list[ServerProcess], ranks: int = 2, **said: Any) -> Iterator[list[Engine]]:
    """The halves of an engine. The first one is asked; the second one ends with it."""
    more = {"tp_size": ranks, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{held_port()}", **said.get("engine", {})}
    environ = {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[at % 2] for at in range(ranks)),
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0", **said.get("environ", {}),
    }
    halves = [
        Engine(model, server.unix, **{**said, "engine": {**more, "node_rank": node}, "environ": environ})
        for node, server in enumerate(servers)
    ]
    try:
        yield halves
    finally:
        halves[0].close()  # with it, the ranks of the other one end
        halves[1].close()


@pytest.mark.parametrize(("kind", "ranks"), [("llama", 2), ("four-heads", 4)], ids=["a rank each", "two ranks each"])
def test_each_node_stores_and_loads_the_parts_of_its_ranks_at_its_own_server(
    kind: str, ranks: int, models: dict[str, Path], server: ServerProcess, spare: Spare
) -> None:
    """What one of the servers does not have is computed."""
    with spare.take() as second, two_nodes(models[kind], [server, second], ranks) as (asked, other):
        assert asked.generate(PROMPTS)[1] == NOTHING
        local, cached = asked.generate(PROMPTS)
        assert cached == HITS
        asked.drain()
        other.drain()
        for _ in range(2):
            assert comes_back(asked) == (local, HITS)
        for one in (server, second):
            with Client(one.unix) as client:
                (space,) = client.namespaces().namespaces
                assert (space.manifest.writers, client.status().sessions) == (ranks // 2, 1)
                assert client.status().counters["loaded_chunks"] == 2 * sum(HITS) // 64
        assert second.stop() == 0
        computed, cached = comes_back(asked)
        assert (tokens_of(computed), cached) == (tokens_of(local), NOTHING)


def test_what_a_node_lacks_no_node_loads_until_it_is_stored_anew(
    models: dict[str, Path], server: ServerProcess, spare: Spare
) -> None:
    with spare.take() as second, two_nodes(models["llama"], [server, second]) as (asked, other):
        local, _ = asked.generate(PROMPTS[2:])
        asked.drain()
        other.drain()
        with Client(second.unix) as client:
            pool = client.status().pool
            free = pool.limit_bytes - pool.ready_bytes // 2 - pool.ready_bytes // 16
            assert client.evict(EvictChunks(free_bytes=free)).chunks == 4
        loaded, (cached,) = comes_back(asked, PROMPTS[2:])
        assert tokens_of(loaded) == tokens_of(local) and cached == 256, "the ends of prompts are evicted first"
        asked.drain()
        other.drain()
        loaded, (cached,) = comes_back(asked, PROMPTS[2:])
        assert tokens_of(loaded) == tokens_of(local) and cached == 512
