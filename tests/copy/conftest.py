"""Each loop that this processor can copy with, one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvdock import _core


@pytest.fixture(params=_core.cpu_paths())
def cpu_path(request: pytest.FixtureRequest) -> Iterator[str]:
    _core.use_cpu_path(request.param)
    yield request.param
    _core.use_cpu_path("")
