"""A tier under test: `subject` is its storage, emptied before each test, and `tier` is open over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from tier_helpers import ARENA, Parts
from tier_subjects import SUBJECTS, TierSubject, opened

from kvdock.tiers.tier import Tier

for module in ("psutil", "redis", "kvdock.tiers.mover.run", "kvdock.tiers.disk.tier", "kvdock.tiers.stores.redis",
               "kvdock.tiers.stores.objects", "kvdock.tiers.stores.mooncake.tier"):
    forks.preload(module)  # movers are forked from servers (tests/support/forked_mover.py)


@pytest.fixture(autouse=True)
def arena() -> None:
    ARENA.reset()


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda kind: kind.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    subject: TierSubject = request.param(tmp_path_factory.mktemp(request.param.name))
    yield subject
    subject.end()


@pytest.fixture
def subject(made: TierSubject) -> TierSubject:
    made.reset()
    return made


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Parts:
    return Parts(request.node.name)


@pytest.fixture
def tier(subject: TierSubject) -> Iterator[Tier]:
    with opened(subject) as tier:
        yield tier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a disk tier may be made."""
    return tmp_path / "store"
