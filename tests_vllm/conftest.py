"""What tests of the vLLM connector need: a server, Schedulers, and tiny models."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE
from schedulers import Schedulers


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as process:
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
