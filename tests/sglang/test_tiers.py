"""What SGLang's own scheduler does with prompts of which a load takes longer than to compute them."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from frozen import frozen
from server_fixtures import server_of_all
from stories import with_figures
from tier_server import leave_in_the_tier, mover
from whole_engines import HITS, PROMPTS, comes_back

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

server = server_of_all


def test_what_takes_longer_to_load_than_to_compute_is_computed(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Nobody waits longer for a tier that is frozen, either."""
    dear = {"linker": ["DearLinker", "odd_linkers"], "extra": {"tier_wait_s": 60.0, "load_if_cheaper": True}}
    with Engine(models["llama"], server.unix, **dear, **with_figures(tmp_path)) as engine:
        engine.generate(PROMPTS)
        engine.drain()
        found = [HITS[:1]]
        while found[-1] == HITS[:1]:
            assert len(found) < 20, "a load of half a second"
            found.append(comes_back(engine, PROMPTS[:1])[1])
        assert found[-1] == [0] and len(found) > 3, "three loads say what loads take"
        assert engine.figures()["kvdock_declined_dear_total"] == 1

        leave_in_the_tier(server, engine)
        process = mover(server)
        with frozen(process):
            (took_s,) = engine.do("generate", prompts=PROMPTS[2:])["took_s"]
        assert took_s < 30.0
