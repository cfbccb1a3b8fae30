"""Whole vLLM engines on the CPU: what is loaded beside other requests, and around the death of the server.

test_models.py has what each kind of model loads request by request. A loaded run is compared with a local hit of the
same length, never with a cold run: other chunks of prefill change the last bits by themselves.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from adoption_helpers import next_at
from api_helpers import ServerProcess, comes_true
from connector_helpers import mortal
from engines import Engine
from whole_engines import CROWD, HITS, OTHERS, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]



@contextmanager
def two_engines(model: Path, address: str) -> Iterator[tuple[Engine, Engine]]:
    """Both alive at the same time: one loads in the background, the other in the step that runs the request."""
    with Engine(model, address, extra={"load_async": True}) as first:
        with Engine(model, address, extra={"load_async": False}) as second:
            assert first.about == second.about
            yield first, second
            assert second.close() == 0, second.log_text()
        assert first.close() == 0, first.log_text()


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.sweep), "gemma"])
def test_side_by_side_loaded_runs_have_the_bits_of_local_hits(
    kind: str, models: dict[str, Path], server: ServerProcess
) -> None:
    with two_engines(models[kind], server.unix) as (first, second):
        for prompts, owner, other in ((PROMPTS, first, second), (OTHERS, second, first)):
            assert owner.generate(prompts)[1] == [0, 0, 0]
            owner.do("drain")
            assert other.generate(prompts)[1] == HITS

        # All in one step: as many as run at a time.
        four = [*PROMPTS, OTHERS[0]]
        local, at_hand = second.generate(four, at_once=True, together=True)
        assert at_hand == [*HITS, HITS[0]]
        assert second.generate(four, at_once=True, together=True)[0] == local, "the control: batches are alike"
        assert second.do("reset")["reset"]
        assert second.generate(four, at_once=True, together=True) == (local, at_hand)

        # Loads in the background end when they end, so batches differ, and with them the last bits of what comes first.
        assert first.do("reset")["reset"]
        loaded, at_hand = first.generate(PROMPTS + OTHERS, at_once=True)
        assert at_hand == 2 * HITS
        singly, _ = first.generate(PROMPTS + OTHERS)
        for run, alone in zip(loaded, singly, strict=True):
            (token, found), (wanted_token, wanted) = run[0], alone[0]
            assert token == wanted_token and float.fromhex(found) == pytest.approx(float.fromhex(wanted), abs=1e-3)


def restarted_hits(engine: Engine) -> tuple[list[int], object]:
    assert engine.do("reset")["reset"]
    runs, loaded = engine.generate(PROMPTS)
    return loaded, runs


def test_the_server_is_killed_and_restarted_between_a_store_and_a_load_and_under_load(
    models: dict[str, Path],
) -> None:
    pool = {"pool_bytes": 64 << 20, "segment_bytes": 64 << 20}
    with mortal(**pool) as server, Engine(models["llama"], server.unix) as engine:
        engine.generate(PROMPTS)
        local, _ = engine.generate(PROMPTS)
        wanted, _ = engine.generate(CROWD)
        assert engine.do("reset")["reset"]
        server.stop(signal.SIGKILL)
        lost, at_hand = engine.generate(OTHERS)  # nobody there: computed
        assert at_hand == [0, 0, 0] and lost
        with next_at(server) as restarted:
            assert comes_true(lambda: restarted_hits(engine) == (HITS, local)), restarted.log_text()

            for _ in range(5):
                assert engine.do("reset")["reset"]
                with Client(restarted.unix) as client:
                    before = client.status().counters["lookups"]
                    engine.tell("generate", prompts=CROWD, at_once=True)
                    while client.status().counters["lookups"] == before:
                        time.sleep(0.001)  # until the first of them is at work
                if not engine.has_answered():
                    break
                engine.answer()  # we were held up: once more
            else:
                pytest.fail("it had always answered before the server could be killed")
            restarted.stop(signal.SIGKILL)
            with next_at(server) as third:
                answer = engine.answer()
                assert tokens_of(answer["runs"]) == tokens_of(wanted)
                assert comes_true(lambda: restarted_hits(engine) == (HITS, local)), third.log_text()
        assert engine.close() == 0, engine.log_text()


def test_other_weights_share_nothing(models: dict[str, Path], server: ServerProcess) -> None:
    with (
        Engine(models["llama"], server.unix) as first,
        Engine(models["llama"], server.unix, extra={"weights_digest": "others"}) as second,
    ):
        first.generate(PROMPTS)
        first.do("drain")
        assert second.generate(PROMPTS)[1] == [0, 0, 0]
