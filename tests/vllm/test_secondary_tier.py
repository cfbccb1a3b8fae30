"""kvdock as a secondary tier of vLLM's own offload, in whole engines on the CPU. All of the offload is vLLM's, but for
the copies between KV and its primary tier (support/cpu_offload.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import Engine
from whole_engines import NOTHING, PROMPTS, tokens_of

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


def test_what_one_engine_offloads_another_loads(models: dict[str, Path], server: ServerProcess) -> None:
    kind = "llama"
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
        assert hits == [128, 320, 512]
        assert tokens_of(stored) == tokens_of(loaded) == tokens_of(wanted)
