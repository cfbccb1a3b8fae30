"""What tests of the vLLM connector need: a server, Schedulers, and tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE
from schedulers import VERSIONS, Schedulers
from whole_engines import make_models

KINDS = (
    "llama", "gemma", "gemma4", "mla", "deep", "mimo", "eagle", "eagle3", "phi3", "qwen3", "gptoss", "blip2", "lfm2",
    "lora",
)
"""What models.py makes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all scenarios of a version, in one process; whole engines, one by one, go to whoever is free,
    but for those that share engines."""
    for number, item in enumerate(items):
        if _needs_schedulers(item):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            item.add_marker(pytest.mark.xdist_group(f"schedulers of {params.get('version', VERSIONS[-1])}"))
        elif item.path.parent == Path(__file__).parent and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"engine {number}"))
    items.sort(key=lambda item: not _needs_schedulers(item))


def _needs_schedulers(item: pytest.Item) -> bool:
    return "schedulers" in getattr(item, "fixturenames", ())


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
def schedulers() -> Iterator[Schedulers]:
    running = Schedulers()
    yield running
    running.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory, ENGINE_PYTHON, HERE / "models.py", KINDS)
