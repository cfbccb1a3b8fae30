"""What tests of the vLLM connector need: a server, Schedulers, and tiny models."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE
from schedulers import Schedulers


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
    """Folders by kind, weights and all."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "gemma", "mla", "eagle")}
    words = [str(word) for pair in folders.items() for word in pair]
    subprocess.run([ENGINE_PYTHON, HERE / "models.py", *words], check=True, capture_output=True)
    return folders
