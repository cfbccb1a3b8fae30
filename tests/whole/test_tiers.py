"""Prompts that come from a lower tier into whole engines on the CPU: requests wait for them, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import MARK, Engine
from frozen import frozen
from server_fixtures import server_of_all
from stories import TIERED, with_figures
from tier_server import leave_in_the_tier, mover
from whole_engines import HITS, NOTHING, PROMPTS, prompts_of, tokens_of

pytestmark = [MARK, pytest.mark.timeout(400)]

server = server_of_all


@pytest.mark.same_tokens
@pytest.mark.parametrize(("kind", "how"), TIERED)
def test_what_a_tier_brings_computes_as_a_local_hit_bit_for_bit(
    kind: str, how: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    share = 0.98 if kind == "states" else 1.0  # a recurrent state's bytes are no multiple of what the pool rounds to
    with Engine(models[kind], server.unix, extra={"tier_wait_s": 20.0}, **how) as engine:
        assert engine.generate(PROMPTS)[1] == NOTHING
        local, cached = engine.generate(PROMPTS)
        assert cached == HITS
        leave_in_the_tier(server, engine, share)
        assert engine.generate(PROMPTS) == (local, HITS)
        leave_in_the_tier(server, engine, share)
        runs, cached = engine.generate(PROMPTS, at_once=True)
        assert tokens_of(runs) == tokens_of(local) and cached == HITS


def test_who_waits_for_a_frozen_tier_holds_up_nobody_and_is_computed_in_the_end(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    others = prompts_of(900)
    with Engine(models["llama"], server.unix, extra={"tier_wait_s": 6.0}, **with_figures(tmp_path)) as engine:
        wanted, _ = engine.generate(PROMPTS[:1])
        leave_in_the_tier(server, engine)
        assert engine.generate(PROMPTS[:1])[1] == HITS[:1]
        leave_in_the_tier(server, engine)
        engine.generate(others)
        engine.drain()
        engine.flush()
        process = mover(server)
        with frozen(process):
            found = engine.done(engine.do("generate", prompts=[*PROMPTS[:1], *others], at_once=True))
        assert found["cached"] == [0, *HITS], "the others are in the pool"
        assert found["took_s"][0] > 6.0 and max(found["took_s"][1:]) < found["took_s"][0]
        assert tokens_of(found["runs"][:1]) == tokens_of(wanted)
        waits = {name: engine.figures().get(f"kvdock_tier_{name}") for name in WAITS}
        assert waits == WAITS and engine.figures()["kvdock_tier_wait_seconds_sum"] > 6.0


WAITS = {"waits_fulfilled_total": 1, "waits_shortened_total": 0, "waits_expired_total": 1, "wait_seconds_count": 2}
