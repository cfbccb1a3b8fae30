"""Whole vLLM engines on the CPU: what is loaded gives the bits that a local prefix hit gives.

A loaded run is compared with a local hit of the same length, never with a cold run: other chunks of prefill change
the last bits by themselves.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from adoption_helpers import mortal, next_at
from api_helpers import ServerProcess
from engines import Engine

pytestmark = pytest.mark.vllm

HITS = [128, 320, 512]
"""Whole chunks of the prompts below: 64 tokens a chunk."""
PROMPTS = [[random.Random(seed).randrange(5, 590) for _ in range(n)] for seed, n in enumerate((150, 333, 530))]
OTHERS = [[random.Random(100 + seed).randrange(5, 590) for _ in range(n)] for seed, n in enumerate((150, 333, 530))]


@pytest.mark.parametrize(("kind", "groups"), [("llama", 1), ("gemma", 3), ("mla", 1)])
def test_loaded_runs_have_the_bits_of_local_hits(
    kind: str, groups: int, models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(models[kind], server.unix) as first:
        assert first.about["groups"] == groups
        assert first.generate(PROMPTS)[1] == [0, 0, 0]
        local, at_hand = first.generate(PROMPTS)
        assert at_hand == HITS
        assert first.do("reset")["reset"]
        again, loaded = first.generate(PROMPTS)
        assert loaded == HITS and again == local
        assert first.close() == 0, first.log_text()
    for how in ({"load_async": True}, {"load_async": False}):
        with Engine(models[kind], server.unix, extra=how) as second:
            other, loaded = second.generate(PROMPTS)
            assert loaded == HITS and other == local


def restarted_hits(engine: Engine) -> tuple[list[int], object]:
    assert engine.do("reset")["reset"]
    runs, loaded = engine.generate(PROMPTS)
    return loaded, runs


def eventually(holds: Callable[[], bool], times: int = 50) -> bool:
    """An engine attaches again within 1.5 s of a server's return; each try takes some tenths of a second."""
    return any(holds() for _ in range(times))


def test_the_server_is_killed_and_restarted_between_a_store_and_a_load(
    models: dict[str, Path],
) -> None:
    pool = {"pool_bytes": 64 << 20, "segment_bytes": 64 << 20}
    with mortal(**pool) as server, Engine(models["llama"], server.unix) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        assert engine.do("reset")["reset"]
        server.stop(signal.SIGKILL)
        lost, at_hand = engine.generate(OTHERS)  # nobody there: computed
        assert at_hand == [0, 0, 0] and lost
        with next_at(server) as restarted:
            assert eventually(lambda: restarted_hits(engine) == (HITS, local)), restarted.log_text()


def test_other_weights_share_nothing(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix) as first:
        first.generate(PROMPTS)
        first.do("drain")
    with Engine(models["llama"], server.unix, extra={"weights_digest": "others"}) as second:
        assert second.generate(PROMPTS)[1] == [0, 0, 0]
