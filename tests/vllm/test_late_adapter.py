"""An adapter that is written after a whole engine has started, on the CPU: what is loaded is what was computed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine

from kvdock.connectors.vllm.adapters import look_at

pytestmark = pytest.mark.vllm

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
PROMPT = [7 + at * 31 % 400 for at in range(266)]
HIT = 256


def test_a_late_adapter_is_loaded_by_its_engine_and_by_one_that_starts_later(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    with Engine(models["llama"], server.unix, engine=LORA) as engine:
        assert engine.generate([PROMPT])[1] == [0]
        began_ns = time.time_ns()
        shutil.copytree(models["lora"] / "one", late)
        seen = look_at(late)
        assert seen is not None and seen.changed_ns + 10**9 > began_ns, "it is younger than the engine"
        adapter = ["sql", 1, str(late)]
        assert engine.generate([PROMPT], adapter=adapter)[1] == [0]
        engine.drain()
        local, at_hand = engine.generate([PROMPT], adapter=adapter)
        engine.flush()
        assert at_hand == [HIT] and engine.generate([PROMPT], adapter=adapter) == (local, [HIT])
    with Engine(models["llama"], server.unix, engine=LORA) as engine:
        assert engine.generate([PROMPT], adapter=["query", 4, str(late)]) == (local, [HIT])
