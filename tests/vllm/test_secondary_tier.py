"""kvdock as a secondary tier of vLLM's own offload, in whole engines on the CPU. All of the offload is vLLM's, but for
the copies between KV and its primary tier (support/cpu_offload.py)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from adoption_helpers import next_at
from api_helpers import ServerProcess, comes_true
from connector_helpers import mortal
from engines import Engine
from tier_server import leave_in_the_tier, with_disk
from whole_engines import HITS, NOTHING, PROMPTS, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
OFFLOAD = ["OffloadingConnector", "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"]


def offload(address: str, chunks: int = 64, **tier: Any) -> dict[str, Any]:
    """What an engine is told: a primary tier of about so many chunks, and kvdock behind it."""
    return {"connector": OFFLOAD, "extra": {
        "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offload", "cpu_bytes_to_use": chunks << 18,
        "blocks_per_chunk": 2,
        "secondary_tiers": [{
            "type": "KvdockTier", "module_path": "kvdock.connectors.vllm.secondary_tier", "address": address,
            "timeout_s": 20.0, **tier,
        }],
    }}


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_one_engine_offloads_another_loads(kind: str, models: dict[str, Path], server: ServerProcess) -> None:
    told = offload(server.unix)
    with (
        Engine(models[kind], server.unix, **told) as first, Engine(models[kind], server.unix, **told) as second,
        Engine(models[kind], None) as plain,
    ):
        wanted, _ = plain.generate(PROMPTS)
        stored, cold = first.generate(PROMPTS)
        assert cold == NOTHING
        first.drain()
        loaded, hits = second.generate(PROMPTS)
        assert hits == HITS
        assert tokens_of(stored) == tokens_of(loaded) == tokens_of(wanted)


def test_without_a_server_it_computes_and_with_one_again_it_loads(models: dict[str, Path]) -> None:
    """vLLM's own caches are emptied each time, the primary tier's, too."""
    with mortal() as server, Engine(models["llama"], server.unix, **offload(server.unix, timeout_s=1.0)) as engine:
        wanted = tokens_of(engine.generate(PROMPTS)[0])

        def again() -> list[int]:
            engine.flush(connector=True)
            runs, hits = engine.generate(PROMPTS)
            assert tokens_of(runs) == wanted
            return hits

        assert again() == HITS
        server.stop(signal.SIGKILL)
        assert again() == NOTHING
        with next_at(server) as second:
            assert comes_true(lambda: again() == HITS), second.log_text()


def test_what_the_pool_has_not_comes_from_the_servers_lower_tiers(models: dict[str, Path], tmp_path: Path) -> None:
    with with_disk(tmp_path) as server, Engine(models["llama"], server.unix, **offload(server.unix)) as engine:
        wanted = engine.generate(PROMPTS)[0]
        leave_in_the_tier(server, engine)
        engine.flush(connector=True)
        runs, hits = engine.generate(PROMPTS)
        assert hits == HITS and tokens_of(runs) == tokens_of(wanted)
