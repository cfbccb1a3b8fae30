"""Bundles: where the parts of all writers are one record, in each store that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis_subject import RedisSubject
from tier_helpers import ARENA, Part, Parts, load, patient
from tier_subjects import SUBJECTS, TierSubject, opened

from kvdock.shm.checksum import checksum
from kvdock.tiers.mover.bundles import Bundles
from kvdock.tiers.record import ALL_WRITERS, PartName, Record
from kvdock.tiers.tier import Gathers, Loaded, Outcome, Tier, sum_of

pytestmark = pytest.mark.tiers

WRITERS = 8
GATHER = [kind for kind in SUBJECTS if kind.name != "disk"]


@pytest.fixture(scope="module", params=GATHER, ids=lambda kind: kind.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    subject: TierSubject = request.param(tmp_path_factory.mktemp(request.param.name))
    yield subject
    subject.end()


@pytest.fixture
def inner(made: TierSubject) -> Iterator[Tier]:
    made.reset()
    with opened(made) as tier:
        assert isinstance(tier, Gathers)
        yield tier


@pytest.fixture
def tier(inner: Tier) -> Bundles:
    return Bundles(inner, lambda _: WRITERS)


def chunk(parts: Parts, length: int = 70_001, group: int = 0) -> list[Part]:
    """The parts of all writers."""
    name = parts.name(group)
    return [parts.make(length, replace(name, writer=writer)) for writer in range(WRITERS)]


def bundle_of(part: Part) -> PartName:
    return replace(part.name, writer=ALL_WRITERS)


def store(tier: Bundles, parts: list[Part]) -> list[Outcome]:
    return tier.store([part.to_store() for part in parts], patient())


def answers(tier: Bundles, parts: list[Part]) -> list[tuple[Loaded, bool]]:
    """Each answer, and whether the bytes and their checksum are those that were stored."""
    wanted = [part.to_load() for part in parts]
    found = tier.load(wanted, patient())
    assert ARENA.guards_are_whole()
    return [
        (answer, bytes(one.pages[: one.length]) == part.data and sum_of(one, answer) == checksum(part.data))
        for answer, one, part in zip(found, wanted, parts, strict=True)
    ]


def assert_all_come(tier: Bundles, parts: list[Part]) -> None:
    wanted = [((Outcome.DONE, part.record.checksum), True) for part in parts]
    assert [(answer[:2], is_right) for answer, is_right in answers(tier, parts)] == wanted


@pytest.mark.parametrize("length", [1, 70_001, 3 << 20])
def test_the_parts_of_all_writers_are_one_record(tier: Bundles, inner: Tier, parts: Parts, length: int) -> None:
    one, other, second_group = chunk(parts, length), chunk(parts, length), chunk(parts, length, group=1)
    batch = [*one, *reversed(other), *second_group]
    before = inner.usage().objects
    assert store(tier, batch) == [Outcome.DONE] * len(batch)
    assert inner.usage().objects - before == 3
    assert inner.exists([bundle_of(some[0]) for some in (one, other, second_group)], patient()) == [True] * 3
    assert not any(inner.exists([part.name for part in batch], patient()))
    assert all(tier.exists([part.name for part in batch], patient()))
    assert_all_come(tier, batch)


def test_a_chunk_that_was_not_stored_is_missing(tier: Bundles, parts: Parts) -> None:
    there, absent = chunk(parts), chunk(parts)
    store(tier, there)
    assert tier.exists([part.name for part in (*there, *absent)], patient()) == [True] * WRITERS + [False] * WRITERS
    assert [answer.outcome for answer, _ in answers(tier, absent)] == [Outcome.MISSING] * WRITERS


def test_some_of_the_parts_come_alone(tier: Bundles, parts: Parts) -> None:
    """As when one of them did not match, and is loaded once more."""
    batch = chunk(parts)
    store(tier, batch)
    assert_all_come(tier, [batch[5], batch[2]])


def test_parts_of_different_lengths_are_records_of_their_own_behind_a_table(
    tier: Bundles, inner: Tier, parts: Parts
) -> None:
    """As where one writer's part could not be packed: it is found to be longer, then loaded as long as it is."""
    batch = chunk(parts)
    batch[3] = parts.make(90_000, batch[3].name)
    alike = [part for part in batch if part is not batch[3]]
    assert store(tier, batch) == [Outcome.DONE] * WRITERS
    assert all(inner.exists([part.name for part in batch], patient()))
    assert all(tier.exists([part.name for part in batch], patient()))
    as_others = parts.make(70_001, batch[3].name)
    assert answers(tier, [as_others])[0][0].outcome is Outcome.DAMAGED
    assert_all_come(tier, alike)
    assert_all_come(tier, [batch[3]])
    assert tier.delete([part.name for part in batch], patient()) == [Outcome.DONE] * WRITERS
    assert not any(tier.exists([part.name for part in batch], patient()))
    assert not any(inner.exists([part.name for part in batch], patient()))
    again = [parts.make(70_001, part.name) for part in batch]
    assert store(tier, again) == [Outcome.DONE] * WRITERS
    assert_all_come(tier, again)


def test_parts_that_are_longer_together_than_a_record_may_be_are_records_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, parts: Parts
) -> None:
    """As 8 parts of 65 MiB in Redis; here at a thousandth of its limit. A part that is longer alone is refused."""
    with closing_subject(RedisSubject, tmp_path_factory.mktemp("redis")) as subject, opened(subject) as inner:
        inner.longest_part = 512 << 10  # type: ignore[attr-defined]  # of this tier alone
        tier = Bundles(inner, lambda _: WRITERS)
        small, batch = chunk(parts, 60_000), chunk(parts, 70_001)
        large = [parts.make((512 << 10) + 1, part.name) for part in chunk(parts, 1)]
        assert store(tier, [*small, *batch, *large]) == [*[Outcome.DONE] * 16, *[Outcome.TOO_LARGE] * 8]
        assert not any(inner.exists([part.name for part in small], patient()))
        assert all(inner.exists([part.name for part in batch], patient()))
        assert_all_come(tier, [*small, *batch])
        assert tier.exists([part.name for part in (*batch, *large)], patient()) == [True] * 8 + [False] * 8


@contextmanager
def closing_subject(kind: type[TierSubject], folder: Path) -> Iterator[TierSubject]:
    subject = kind(folder)
    try:
        yield subject
    finally:
        subject.end()


def test_a_part_that_is_a_record_of_its_own_is_asked_for_with_its_chunk(
    tier: Bundles, inner: Tier, parts: Parts
) -> None:
    """It counts as used, and a store that has evicted it does not have the chunk."""
    whole, batch = chunk(parts), chunk(parts)
    batch[3] = parts.make(90_000, batch[3].name)
    assert store(tier, [*whole, *batch]) == [Outcome.DONE] * 2 * WRITERS
    names = [part.name for part in (*whole, *batch)]
    assert tier.exists(names, patient()) == [True] * 2 * WRITERS
    assert inner.delete([batch[3].name], patient()) == [Outcome.DONE]
    assert tier.exists(names, patient()) == [name != batch[3].name for name in names]


def test_damage_to_one_part_or_to_the_table_is_seen(
    tier: Bundles, inner: Tier, made: TierSubject, parts: Parts
) -> None:
    """A part that differs does not match its checksum; with a table that differs, no part is there."""
    for at, good in ((made.byte_of_body, 0), (made.byte_of_body + 40 * WRITERS, WRITERS - 1)):
        batch = chunk(parts)
        store(tier, batch)
        made.flip(bundle_of(batch[0]), at)
        found = answers(tier, batch)
        whole = [answer.outcome is Outcome.DONE and is_right for answer, is_right in found]
        assert whole.count(True) == good
        hashed = load_and_hash(tier, batch)
        assert hashed == whole, "a part whose bytes differ has the checksum of others"
        assert tier.delete([batch[0].name], patient()) == [Outcome.DONE]
        assert store(tier, batch) == [Outcome.DONE] * WRITERS
        assert_all_come(tier, batch)


def load_and_hash(tier: Bundles, parts: list[Part]) -> list[bool]:
    """Whether the mover would accept each part."""
    wanted = [part.to_load() for part in parts]
    return [
        answer.outcome is Outcome.DONE and sum_of(one, answer) == answer.checksum
        for answer, one in zip(tier.load(wanted, patient()), wanted, strict=True)
    ]


def test_a_chunk_without_the_part_of_a_writer_is_refused(tier: Bundles, parts: Parts) -> None:
    with pytest.raises(ValueError, match="found the parts of 7 writers, wanted those of 8"):
        store(tier, chunk(parts)[1:])


def test_where_there_is_one_writer_a_part_is_a_record(inner: Tier, parts: Parts) -> None:
    tier, batch = Bundles(inner, lambda _: 1), parts.many(3, 5000)
    assert store(tier, batch) == [Outcome.DONE] * 3
    assert [got.answer[:2] for got in load(inner, batch)] == [(Outcome.DONE, one.record.checksum) for one in batch]
    assert_all_come(tier, batch)


def test_without_an_engine_both_are_found_and_deleted(inner: Tier, parts: Parts) -> None:
    """It is not known then how many writers there are."""
    unknown, single, batch = Bundles(inner, lambda _: 0), parts.make(5000), chunk(parts)
    store(Bundles(inner, lambda _: WRITERS), batch)
    store(Bundles(inner, lambda _: 1), [single])
    names = [batch[0].name, single.name, parts.name()]
    assert unknown.exists(names, patient()) == [True, True, False]
    assert unknown.delete(names, patient()) == [Outcome.DONE, Outcome.DONE, Outcome.MISSING]
    assert unknown.exists(names, patient()) == [False] * 3


def test_the_name_of_a_bundle_says_so() -> None:
    name = PartName(bytes(32), bytes(32), 2, ALL_WRITERS, birth=1, generation=3, deletion=4)
    assert name.text().endswith(f"/0000000000000001.3/{'00' * 32}/2.all.4")
    assert Record.read(Record(name, 1, 1).header()).name == name
