"""The server is killed, halted and started again while whole engines are at work: no request fails, or is answered
otherwise."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from adoption_helpers import next_at
from api_helpers import ServerProcess, comes_true
from connector_helpers import mortal
from engines import MARK, Engine
from stories import RANKS
from whole_engines import CROWD, HITS, NOTHING, PROMPTS, comes_back, tokens_of

from kvdock.client.client import Client

pytestmark = [MARK, pytest.mark.timeout(600)]

POOL = {"pool_bytes": 64 << 20, "segment_bytes": 64 << 20}
IMPATIENT = {"timeout_s": 1.0, "lookup_wait_s": 0.05}


def at_work(engine: Engine) -> None:
    """Many requests at once. Returns when the first are being looked up, and not all have been answered."""
    for _ in range(5):
        engine.flush()
        with Client(engine.address) as client:
            before = client.status().counters["lookups"]
            engine.tell("generate", prompts=CROWD, at_once=True)
            while client.status().counters["lookups"] == before:
                time.sleep(0.001)  # until the first of them is at work
        if not engine.has_answered():
            return
        engine.answer()  # we were held up: once more
    pytest.fail("it had always answered before anything could become of the server")


@pytest.mark.parametrize("how", RANKS)
def test_no_request_fails_whatever_becomes_of_the_server(how: dict[str, Any], models: dict[str, Path]) -> None:
    with mortal(**POOL) as server, Engine(models["llama"], server.unix, extra=IMPATIENT, **how) as engine:
        wanted = tokens_of(engine.generate(CROWD, at_once=True)[0])
        engine.generate(PROMPTS)
        local = engine.generate(PROMPTS)
        engine.drain()

        server.stop(signal.SIGKILL)
        assert comes_back(engine)[1] == NOTHING, "nobody is there, and nobody waits"
        with next_at(server) as second:
            assert comes_true(lambda: comes_back(engine) == local), second.log_text()
            at_work(engine)  # loads of what was stored
            second.stop(signal.SIGKILL)
            assert tokens_of(engine.done(engine.answer())["runs"]) == wanted

            with next_at(server) as third:
                assert comes_true(lambda: comes_back(engine) == local), third.log_text()
                at_work(engine)
                third.process.send_signal(signal.SIGSTOP)
                assert tokens_of(engine.done(engine.answer())["runs"]) == wanted
                third.process.send_signal(signal.SIGCONT)
                assert comes_true(lambda: comes_back(engine) == local), third.log_text()
                engine.close()


def test_an_engine_starts_before_its_server(models: dict[str, Path], tmp_path: Path) -> None:
    address = tmp_path / "kvdock.sock"
    with Engine(models["llama"], f"unix:{address}") as engine:
        assert engine.generate(PROMPTS)[1] == NOTHING
        with ServerProcess(**POOL, socket_path=str(address)) as server:
            def stored() -> bool:
                comes_back(engine)
                engine.drain()
                return comes_back(engine)[1] == HITS

            assert comes_true(stored), server.log_text()
            engine.close()
