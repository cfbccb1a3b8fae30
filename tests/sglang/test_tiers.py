"""Prompts that come from a lower tier into whole SGLang engines on the CPU: requests wait for them, and nobody else."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import TP2, Engine
from server_fixtures import server_of_all
from tier_server import clear_once_written, mover
from whole_engines import HITS, PROMPTS, prompts_of, tokens_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PATIENT = {"tier_wait_s": 20.0}
STATES_SHARE = 0.98
"""A recurrent state's bytes are no multiple of what the pool rounds to."""

server = server_of_all


def leave_in_the_tier(server: ServerProcess, engine: Engine, share: float = 1.0) -> None:
    """What was stored: neither the pool nor the engine has it any more."""
    engine.drain(server)
    clear_once_written(server, share)
    engine.flush()


@pytest.mark.same_tokens
@pytest.mark.parametrize(("kind", "how"), [
    pytest.param("llama", {}, id="attention", marks=pytest.mark.sweep), pytest.param("window", {}, id="window"),
    pytest.param("states", {}, id="states"), pytest.param("llama", TP2, id="two ranks"),
    pytest.param("mla", TP2, id="latent", marks=pytest.mark.sweep),
])
def test_what_a_tier_brings_computes_as_a_local_hit_bit_for_bit(
    kind: str, how: dict[str, object], models: dict[str, Path], server: ServerProcess
) -> None:
    share = STATES_SHARE if kind == "states" else 1.0
    with Engine(models[kind], server.unix, extra=PATIENT, **how) as engine:
        assert engine.generate(PROMPTS)[1] == [0, 0, 0]
        local, cached = engine.generate(PROMPTS)
        assert cached == HITS
        leave_in_the_tier(server, engine, share)
        assert engine.generate(PROMPTS) == (local, HITS)
        leave_in_the_tier(server, engine, share)
        runs, cached = engine.generate(PROMPTS, at_once=True)
        assert tokens_of(runs) == tokens_of(local) and cached == HITS
        assert engine.close() == 0, engine.log_text()


def test_who_waits_for_a_frozen_tier_holds_up_nobody_and_is_computed_in_the_end(
    models: dict[str, Path], server: ServerProcess
) -> None:
    others = prompts_of(900)
    with Engine(models["llama"], server.unix, extra={**PATIENT, "tier_wait_s": 6.0}) as engine:
        wanted, _ = engine.generate(PROMPTS[:1])
        leave_in_the_tier(server, engine)
        engine.generate(others)
        engine.drain(server)
        engine.flush()
        process = mover(server)
        process.send_signal(signal.SIGSTOP)
        try:
            found = engine.do("generate", prompts=[*PROMPTS[:1], *others], at_once=True)
        finally:
            process.send_signal(signal.SIGCONT)
        assert found["why"] == ["length"] * 4 and found["cached"] == [0, *HITS], "the others are in the pool"
        assert found["took_s"][0] > 6.0 and max(found["took_s"][1:]) < found["took_s"][0]
        assert tokens_of(found["runs"][:1]) == tokens_of(wanted)
        assert engine.close() == 0, engine.log_text()


def test_what_takes_longer_to_load_than_to_compute_is_computed(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Nobody waits longer for a tier that is frozen, either."""
    dear = {
        "linker": ["DearLinker", "odd_linkers"], "extra": {"tier_wait_s": 60.0, "load_if_cheaper": True},
        "engine": {"enable_metrics": True}, "environ": {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    }
    with Engine(models["llama"], server.unix, **dear) as engine:
        engine.generate(PROMPTS)
        engine.drain(server)
        found = [HITS[:1]]
        while found[-1] == HITS[:1]:
            assert len(found) < 20, "a load of half a second"
            engine.flush()
            found.append(engine.generate(PROMPTS[:1])[1])
        assert found[-1] == [0] and len(found) > 3, "three loads say what loads take"
        assert "sglang:kvdock_declined_dear_total 1.0" in engine.do("metrics")["text"]

        leave_in_the_tier(server, engine)
        process = mover(server)
        process.send_signal(signal.SIGSTOP)
        try:
            (took_s,) = engine.do("generate", prompts=PROMPTS[2:])["took_s"]
        finally:
            process.send_signal(signal.SIGCONT)
        assert took_s < 30.0
        assert engine.close() == 0, engine.log_text()
