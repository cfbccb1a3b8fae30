"""Fixtures that several modules have, each with its own settings: `server = fresh_server(pool_bytes=4 * MIB)`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import Engine, ServerProcess, attach, unique
from mover_steps import ForkingServer
from tier_engine import TierEngine, manifest
from tier_server import PART, SETTINGS, is_served, with_disk

from kvdock.client.client import Client


def fresh_server(**settings: object) -> Any:
    """A server for each test."""

    @pytest.fixture
    def server() -> Iterator[ServerProcess]:
        with ServerProcess(**settings) as process:
            yield process

    return server


def attached_engine(*, has_own_model: bool = False, **how: Any) -> Any:
    """An engine that is attached, and leaves at the end. `how`: as attach() has it."""

    @pytest.fixture
    def engine(client: Client) -> Iterator[Engine]:
        model = {"model": unique("model")} if has_own_model else {}
        attached = attach(client, **{**how, **model})
        yield attached
        attached.leave()

    return engine


@pytest.fixture
def server_of_few(tmp_path: Path) -> Iterator[ServerProcess]:
    """With a tier on disk, and room for few chunks in the pool."""
    with ForkingServer(**{**SETTINGS, "disk_path": str(tmp_path / "disk")}) as process:
        yield process


@pytest.fixture
def server_of_all(tmp_path: Path) -> Iterator[ServerProcess]:
    """With a tier on disk, and a pool that holds all that a whole engine stores."""
    with with_disk(tmp_path) as process:
        yield process


@pytest.fixture
def tiered_engine(server: ServerProcess) -> Iterator[TierEngine]:
    """An engine that the mover of `server` serves."""
    made = TierEngine(server.unix, manifest(PART))
    is_served(server, 1)
    yield made
    made.close()
