"""What tests of the vLLM connector need: a server, Schedulers, and tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_helpers import ServerProcess
from engine_fixtures import models, pytest_collection_modifyitems, server, spare
from schedulers import VERSIONS, Run, Schedulers

__all__ = ["models", "pytest_collection_modifyitems", "run", "schedulers", "server", "spare", "version"]


@pytest.fixture(scope="session")
def schedulers() -> Iterator[Schedulers]:
    running = Schedulers()
    yield running
    running.close()


@pytest.fixture
def version() -> str:
    """That of vLLM, where the test does not say which."""
    return VERSIONS[-1]


@pytest.fixture
def run(request: pytest.FixtureRequest, version: str, server: ServerProcess, schedulers: Schedulers) -> Run:
    """Runs a scenario with that version at the test's server: of the module that the test's own names as SCENARIOS, or
    the call as `module`."""
    usual = getattr(request.module, "SCENARIOS", "sched_scenarios")

    def scenario(name: str, *arguments: object, module: str = usual, **named: object) -> dict[str, Any]:
        return schedulers.run(version, name, server.unix, *arguments, module=module, **named)

    return scenario
