"""Fixtures of tests with whole engines: a server for each test, and tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE, KINDS
from whole_engines import make_models
from workers import parameters_of

__all__ = ["models", "pytest_collection_modifyitems", "server", "spare"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share something that is started once, and is slow to start, are one worker's: engines of a story
    (`…_story`), vLLM's schedulers of a version. All others, one by one, go to whoever is free."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_shared(item) or f"engine of {item.name}"))
    items.sort(key=lambda item: "schedulers" not in getattr(item, "fixturenames", ()))


def _shared(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    if "schedulers" in fixtures:
        from schedulers import VERSIONS  # with vLLM's tests on the path

        return f"schedulers of {parameters_of(item).get('version', VERSIONS[-1])}"
    return next((name for name in fixtures if name.endswith("_story")), None)


class Spare:
    """Servers, each started while the one before it is at work."""

    def __init__(self) -> None:
        self._next = self._start()

    def take(self) -> ServerProcess:
        following = self._start()
        taken, self._next = self._next, following
        return taken

    def close(self) -> None:
        with self._next:
            pass  # it ends well once it has begun

    def _start(self) -> ServerProcess:
        return ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20)


@pytest.fixture(scope="session")
def spare() -> Iterator[Spare]:
    servers = Spare()
    yield servers
    servers.close()


@pytest.fixture
def server(spare: Spare) -> Iterator[ServerProcess]:
    """One for each test."""
    with spare.take() as process:
        yield process
        assert process.stop() == 0, process.log_text()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory, ENGINE_PYTHON, HERE / "models.py", KINDS)
