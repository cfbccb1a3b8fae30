"""A whole vLLM engine on the CPU with prompts that come from a lower tier: the bits are those of a local hit."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from server_fixtures import server_of_all
from tier_server import clear_once_written, mover
from whole_engines import HITS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

server = server_of_all


def leave_in_the_tier(server: ServerProcess, engine: Engine) -> None:
    """What was stored: neither the pool nor the engine has it any more."""
    clear_once_written(server)
    assert engine.do("reset")["reset"]


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.sweep), "gemma"])
def test_what_a_tier_brings_has_the_bits_of_local_hits(
    kind: str, models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(
        models[kind], server.unix, extra={"tier_wait_s": 5.0, "load_if_cheaper": False},
        engine={"disable_log_stats": False},
    ) as engine:
        assert engine.generate(PROMPTS)[1] == [0, 0, 0]
        engine.do("drain")
        local, at_hand = engine.generate(PROMPTS)
        assert at_hand == HITS
        leave_in_the_tier(server, engine)
        assert engine.generate(PROMPTS) == (local, HITS)

        # With the tier frozen, requests are computed once their time is over.
        leave_in_the_tier(server, engine)
        process = mover(server)
        process.send_signal(signal.SIGSTOP)
        try:
            computed, at_hand = engine.generate(PROMPTS[:1])
            assert at_hand == [0] and computed
        finally:
            process.send_signal(signal.SIGCONT)
        exported = engine.do("metrics")["text"]
        waits = dict(re.findall(r"^vllm:kvdock_tier_(waits?_\w+)\{.*\} (\S+)$", exported, re.MULTILINE))
        ends = ("waits_fulfilled_total", "waits_shortened_total", "waits_expired_total", "wait_seconds_count")
        assert [float(waits[name]) for name in ends] == [3, 0, 1, 4]
        assert float(waits["wait_seconds_sum"]) > 5.0
        assert engine.close() == 0, engine.log_text()


def test_tiers_load_for_a_request_while_the_step_runs_in_which_it_comes(
    models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(
        models["llama"], server.unix, extra={"load_if_cheaper": False}, engine={"disable_log_stats": False},
    ) as engine:
        engine.generate(PROMPTS)
        engine.do("drain")
        leave_in_the_tier(server, engine)
        assert engine.generate(PROMPTS, during_a_step=True)[1] == HITS
        exported = engine.do("metrics")["text"]
        waits = re.findall(r"^vllm:kvdock_tier_waits_\w+_total\{.*\} (\S+)$", exported, re.MULTILINE)
        assert [float(count) for count in waits] == [0, 0, 0], "all of it was there when the scheduler came to them"
        assert engine.close() == 0, engine.log_text()
