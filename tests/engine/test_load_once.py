"""Requests of the small engine that arrive together and lack the same prefix load it once, from a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess
from connector_helpers import CHUNK, engine_over, kvdock_of
from engine_helpers import make_engine, prompt, run, run_one, sampling

from kvdock.connectors.worker import Loading
from kvdock.engine.engine import Engine

STORED = 3 * CHUNK
SHARED = prompt(1, STORED + 8)
NAMES = [f"r{number}" for number in range(8)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with an empty cache of its own, for which the server has STORED tokens."""
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as server:
        first = engine_over(server.unix)
        run_one(first, SHARED)
        assert first.drain(20.0)
        first.close()
        second = engine_over(server.unix)
        yield second
        second.close()


def prompts(own: int) -> dict[str, list[int]]:
    return {name: SHARED + prompt(100 + at, own) for at, name in enumerate(NAMES)}


@pytest.mark.parametrize("own", [0, 5], ids=["samples", "prompts"])
def test_eight_requests_load_their_prefix_once(own: int, engine: Engine) -> None:
    alone = make_engine()
    for name, tokens in prompts(own).items():
        engine.add_request(tokens, sampling(), name)
    found = run(engine)
    assert sum(one.metrics.loaded_tokens for one in found.values()) == STORED
    assert sum(one.metrics.local_hit_tokens >= STORED for one in found.values()) == 7
    for name, tokens in prompts(own).items():
        assert found[name].output_tokens == run_one(alone, tokens).output_tokens


def test_when_the_loaders_request_is_aborted_one_other_loads(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, worker, once = threading.Event(), kvdock_of(engine).worker, kvdock_of(engine).scheduler.lookups.waits.loads
    assert once is not None
    monkeypatch.setattr(once, "_clock", lambda: 5.0)  # however slow this machine is, no wait is over
    finish_load = worker.finish_load

    def finished_later(loading: Loading) -> int:
        assert may_end.wait(20.0)
        return finish_load(loading)

    monkeypatch.setattr(worker, "finish_load", finished_later)
    for name in NAMES:
        engine.add_request(SHARED, sampling(), name)
    while not engine.scheduler.loading:
        engine.step()
    for _ in range(20):
        engine.step()
    assert len(engine.scheduler.loading) == 1, "the others wait"
    loader, = engine.scheduler.loading
    engine.abort(loader)
    while len(engine.scheduler.loading) < 2:
        engine.step()
    for _ in range(20):
        engine.step()
    assert len(engine.scheduler.loading) == 2, "that of the aborted request, and one more"
    may_end.set()
    found = run(engine)
    assert sorted(found) == sorted(set(NAMES) - {loader})
    assert sum(one.metrics.loaded_tokens for one in found.values()) == STORED
