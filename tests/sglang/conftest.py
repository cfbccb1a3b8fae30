"""What tests of the SGLang linker need: a server, and tiny models."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE, TP2

KINDS = ("llama", "window", "states", "mla", "adapter-a", "adapter-b", "llama-b", "llama-c")
"""What models.py makes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole engines, one by one, go to whoever is free. Tests that fill two cores by themselves run in one worker, one
    after the other: each rank of an engine keeps a core busy, even while it waits for work. Those that ask about one
    story share its engines."""
    for number, item in enumerate(items):
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group(_group(item, number)))


def _group(item: pytest.Item, number: int) -> str:
    if _fills_two_cores(item):
        return "sglang"
    told = [name for name in getattr(item, "fixturenames", ()) if name.endswith("_story")]
    return f"sglang {told[0]}" if told else f"sglang {number}"


def _fills_two_cores(item: pytest.Item) -> bool:
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return TP2 in given or item.path.name in ("test_bench.py", "test_example.py")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """One for each test."""
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as process:
        yield process
        assert process.stop() == 0, process.log_text()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind, weights and all. Workers of pytest-xdist share them."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folders = {kind: shared / f"model-{kind}" for kind in KINDS}
    words = [str(word) for pair in folders.items() for word in pair]
    with (shared / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "models.made").exists():
            for folder in folders.values():
                folder.mkdir()
            subprocess.run([ENGINE_PYTHON, HERE / "models.py", *words], check=True, capture_output=True)
            (shared / "models.made").touch()
    return folders
