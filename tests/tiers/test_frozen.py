"""A store that stands still: a prompt's first token comes when it would without the store, after its wait at most."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import MIB, unique
from connector_helpers import engine_over
from engine_helpers import prompt, run_one, sampling
from mover_steps import SteppedServer
from same_tokens_helpers import LENGTH, STORED, TOKENS, Served, assert_same, served
from tier_engine import TierEngine, manifest
from tier_stores import STORES, Store, clear_once_written, clear_pool, has_state, opened

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

    def ask(self, new: int = TOKENS) -> tuple[Completion, float]:
        """The completion, and the seconds until its first token at most."""
        engine = engine_over(self._server.unix, preset("tiny"), salt=self._salt, tier_wait_s=WAIT_S)
        began_s = time.monotonic()
        done = run_one(engine, self._tokens, sampling(new))
        took_s = time.monotonic() - began_s
        engine.drain(20.0)
        engine.close()
        return done, took_s

    def served(self) -> Served:
        return served(self.ask()[0])


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
    asked: list[tuple[Completion, float]] = []
    waiting = threading.Thread(target=lambda: asked.append(asker.ask()))
    waiting.start()
    mover = server.stands("up.reserved")
    store.stop()
    mover.send_signal(signal.SIGCONT)
    waiting.join()
    ((done, took_s),) = asked
    assert took_s < WAIT_S + MARGIN_S
    assert done.output_tokens == found.output

    for _ in range(3):
        clear_pool(server.unix)
        done, took_s = asker.ask(1)
        assert took_s < WAIT_S + MARGIN_S
    has_state(server.unix, "off")
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
