"""A store that stands still: a prompt's first token comes when it would without the store, after its wait at most."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from api_helpers import MIB, PATIENCE_S, eventually, unique
from connector_helpers import engine_over
from engine_helpers import prompt, run_one, sampling
from mover_steps import SteppedServer
from same_tokens_helpers import LENGTH, STORED, TOKENS, Served, assert_same, served
from tier_engine import TierEngine, manifest
from tier_stores import STORES, Store, clear_once_written, clear_pool, has_state, opened

from kvdock.client.client import Client
from kvdock.engine.config import preset
from kvdock.engine.request import Completion

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(180)]

WAIT_S = 1.0
"""How long an engine here waits for a tier."""
MARGIN_S = 15.0
"""A busy machine's. What stands still does so until the test lets it go on, so the margin hides no wait for it."""


@pytest.fixture(params=STORES, ids=lambda kind: kind.name)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(request.param, Path(name)) as one:
        yield one


@pytest.fixture
def server(store: Store, tmp_path: Path) -> Iterator[SteppedServer]:
    with SteppedServer(
        tmp_path / "armed", store.environment, pool_bytes=64 * MIB, segment_bytes=64 * MIB, tier_asks=1,
        heartbeat_s=0.1, **store.settings,
    ) as one:
        has_state(one.unix, "open")
        yield one


class Asker:
    """Prompts of one conversation, each by an engine of its own, so that nothing is in an engine's own cache."""

    def __init__(self, server: SteppedServer) -> None:
        self._server, self._salt, self._tokens = server, unique("frozen"), prompt(11, LENGTH)

    def ask(self, new: int = TOKENS, wait_s: float = WAIT_S) -> tuple[Completion, float]:
        """The completion, and the seconds until its first token at most."""
        engine = engine_over(self._server.unix, preset("tiny"), salt=self._salt, tier_wait_s=wait_s)
        began_s = time.monotonic()
        done = run_one(engine, self._tokens, sampling(new))
        took_s = time.monotonic() - began_s
        engine.drain(20.0)
        engine.close()
        return done, took_s

    def served(self) -> Served:
        """Waits as long as the store needs on a busy machine."""
        return served(self.ask(wait_s=PATIENCE_S)[0])

    def asked_until(self, is_there: threading.Event) -> list[tuple[Completion, float]]:
        """Asks again and again: the wait of one may be over before the mover has come to it."""
        asked = [self.ask()]
        while not is_there.is_set():
            clear_pool(self._server.unix)
            asked.append(self.ask())
        return asked


def is_waited_for(server: SteppedServer) -> bool:
    """Whether a lookup for a chunk that does not exist waits."""
    engine = TierEngine(server.unix, manifest(MIB, model="asks"), unique("asks"))
    pending = engine.lookup(engine.chain(4), "r", 5.0).pending
    engine.close()
    return pending is not None


def test_a_store_that_stands_still_costs_the_wait_at_most_and_nothing_once_it_is_off(
    server: SteppedServer, store: Store
) -> None:
    asker = Asker(server)
    computed, _ = asker.ask()
    clear_once_written(server.unix)
    found = asker.served()
    assert found.at_hand == STORED
    assert_same(found, served(computed))
    clear_once_written(server.unix)

    server.armed.write_text("up.reserved")  # the store has answered what it has, and slots are reserved
    stands = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(asker.asked_until, stands)
        try:
            mover = server.stands("up.reserved", PATIENCE_S)
            store.stop()
            mover.send_signal(signal.SIGCONT)
        finally:
            stands.set()
        asked = waiting.result()
    for done, took_s in asked:
        assert took_s < WAIT_S + MARGIN_S
        assert done.output_tokens == found.output

    def is_off() -> bool:
        """After one more prompt, which may be over before the mover has come to it."""
        clear_pool(server.unix)
        assert asker.ask(1)[1] < WAIT_S + MARGIN_S
        with Client(server.unix) as client:
            return [tier.state for tier in client.status().tiers] == ["off"]

    eventually(is_off)
    assert not is_waited_for(server)

    clear_pool(server.unix)
    store.resume()
    has_state(server.unix, "open")
    again = asker.served()
    until_s = time.monotonic() + 60.0
    while again.at_hand != STORED:
        assert time.monotonic() < until_s, "the store is not hit again"
        clear_pool(server.unix)
        again = asker.served()
    assert_same(again, found)
