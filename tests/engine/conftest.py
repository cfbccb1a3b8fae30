"""The ranks of engines are forked by the process that forks servers, so it must have imported what they need."""

from __future__ import annotations

import forks
import pytest

forks.preload("kvdock.engine.ranks")
forks.preload("little_scratch")


@pytest.fixture(scope="session", autouse=True)
def forking() -> None:
    """Starts the fork server before an engine of several ranks would start one with only its own modules."""
    forks.start()
