"""A tier under test: `subject` is its storage, emptied before each test, and `tier` is open over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tier_helpers import ARENA, Parts
from tier_subjects import SUBJECTS, TierSubject, opened

from kvdock.tiers.tier import Tier


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda kind: kind.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    subject: TierSubject = request.param(tmp_path_factory.mktemp(request.param.name))
    yield subject
    subject.end()


@pytest.fixture
def subject(made: TierSubject) -> TierSubject:
    ARENA.reset()
    made.reset()
    return made


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Parts:
    return Parts(request.node.name)


@pytest.fixture
def tier(subject: TierSubject) -> Iterator[Tier]:
    with opened(subject) as tier:
        yield tier
