"""An engine that computes prompts for another one that decodes (--disaggregation-mode prefill), on the CPU.

What it sends is sent nowhere. Its answer has the first token of each prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import Engine, odd
from whole_engines import HITS, NOTHING, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PREFILL = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "nixl"}
HOW = [
    pytest.param(PREFILL, {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}, id="overlap"),
    pytest.param({**PREFILL, "disable_overlap_schedule": True}, {}, id="no overlap, early sends"),
]
"""With overlap, what SGLang sends early waits for a GPU's event."""


def computed(engine: Engine) -> dict[str, Any]:
    return engine.do("generate", prompts=PROMPTS, new=1, bootstrap_host="127.0.0.1", bootstrap_room=1)


@pytest.mark.parametrize(("engine", "environ"), HOW)
def test_an_engine_that_computes_prompts_loads_what_another_one_stored(
    engine: dict[str, Any], environ: dict[str, str], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    how, damaged = {"engine": engine, "plugin_of_others": "send_kv_nowhere"}, odd("DamagedLinker", tmp_path)
    with (
        Engine(models["llama"], server.unix, **how, environ=environ) as first,
        Engine(
            models["llama"], server.unix, **how, linker=damaged["linker"], environ={**environ, **damaged["environ"]}
        ) as second,
    ):
        assert computed(first)["cached"] == NOTHING
        local = computed(first)
        assert local["cached"] == HITS, local
        first.drain()
        loaded = computed(second)
        assert (loaded["cached"], loaded["runs"]) == (HITS, local["runs"])
        second.flush()
        (tmp_path / "damage").touch()
        failed = computed(second)
        assert failed["why"][0] != "length" and failed["runs"][1:] == local["runs"][1:]
        second.flush()
        assert tokens_of(computed(second)["runs"]) == tokens_of(local["runs"])
    with Client(server.unix) as client:
        status = client.status()
        assert (status.leases, status.reservations) == (0, 0)
