"""The server is killed, stopped and started again while SGLang's engines are at work: no request fails."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from adoption_helpers import next_at
from api_helpers import ServerProcess, comes_true
from connector_helpers import mortal
from engines import TP2, Engine
from whole_engines import CROWD, HITS, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

IMPATIENT = {"timeout_s": 1.0, "lookup_wait_s": 0.05}


def at_work(engine: Engine, address: str) -> None:
    """Many requests at once; returns when the first are being looked up."""
    with Client(address) as client:
        before = client.status().counters["lookups"]
        engine.tell("generate", prompts=CROWD, at_once=True)
        while client.status().counters["lookups"] == before:
            time.sleep(0.001)  # until the first of them is at work


def hits(engine: Engine) -> list[int]:
    engine.flush()
    return engine.generate(PROMPTS)[1]


@pytest.mark.sweep("how")
@pytest.mark.parametrize("how", [TP2, {}], ids=["two ranks", "one rank"])
def test_no_request_fails_whatever_becomes_of_the_server(how: dict[str, object], models: dict[str, Path]) -> None:
    with mortal(pool_bytes=64 << 20, segment_bytes=64 << 20) as server, (
        Engine(models["llama"], server.unix, extra=IMPATIENT, **how)
    ) as engine:
        wanted, _ = engine.generate(CROWD)
        engine.generate(PROMPTS)
        engine.drain(server)
        engine.flush()

        at_work(engine, server.unix)  # loads of what was stored
        server.stop(signal.SIGKILL)
        answer = engine.answer()
        assert answer["why"] == ["length"] * len(CROWD), engine.log_text()[-4000:]
        assert tokens_of(answer["runs"]) == tokens_of(wanted)
        assert hits(engine) == [0, 0, 0], "nobody is there, and nobody waits"

        with next_at(server) as second:
            assert comes_true(lambda: hits(engine) == HITS), second.log_text()
            engine.flush()
            at_work(engine, second.unix)
            second.process.send_signal(signal.SIGSTOP)
            answer = engine.answer()
            assert answer["why"] == ["length"] * len(CROWD), engine.log_text()[-4000:]
            assert tokens_of(answer["runs"]) == tokens_of(wanted)
            second.process.send_signal(signal.SIGCONT)
            assert comes_true(lambda: hits(engine) == HITS), second.log_text()
            assert engine.close() == 0, engine.log_text()


def test_an_engine_starts_before_its_server(models: dict[str, Path], tmp_path: Path) -> None:
    address = tmp_path / "kvdock.sock"
    with Engine(models["llama"], f"unix:{address}") as engine:
        assert engine.generate(PROMPTS)[1] == [0, 0, 0]
        with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20, socket_path=str(address)) as server:
            def stored() -> bool:
                engine.do("flush")
                engine.generate(PROMPTS)
                engine.drain(server)
                return hits(engine) == HITS

            assert comes_true(stored), server.log_text()
            assert engine.close() == 0, engine.log_text()
