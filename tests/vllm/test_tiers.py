"""Prompts that a lower tier loads while a whole vLLM engine on the CPU runs a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from server_fixtures import server_of_all
from stories import with_figures
from tier_server import leave_in_the_tier
from whole_engines import HITS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

server = server_of_all


def test_tiers_load_for_a_request_while_the_step_runs_in_which_it_comes(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    with Engine(models["llama"], server.unix, **with_figures(tmp_path)) as engine:
        engine.generate(PROMPTS)
        leave_in_the_tier(server, engine)
        assert engine.generate(PROMPTS, admitted="during a step")[1] == HITS
        waits = {value for name, value in engine.figures().items() if name.startswith("kvdock_tier_waits_")}
        assert waits == {0}, "all of it was there when the scheduler came to them"
