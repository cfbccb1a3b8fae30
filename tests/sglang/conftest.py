"""What tests of the SGLang linker need: a server, and tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE
from whole_engines import make_models

KINDS = ("llama", "window", "states", "mla", "adapter-a", "adapter-b", "llama-b", "llama-c")
"""What models.py makes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole engines, one by one, go to whoever is free; tests that ask about one story share its engines. Programs that
    start engines of their own, which no fork makes quick, run in one worker, one after the other."""
    for number, item in enumerate(items):
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group(_group(item, number)))


def _group(item: pytest.Item, number: int) -> str:
    if item.path.name in ("test_bench.py", "test_example.py"):
        return "sglang"
    told = [name for name in getattr(item, "fixturenames", ()) if name.endswith("_story")]
    return f"sglang {told[0]}" if told else f"sglang {number}"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """One for each test."""
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as process:
        yield process
        assert process.stop() == 0, process.log_text()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory, ENGINE_PYTHON, HERE / "models.py", KINDS)
