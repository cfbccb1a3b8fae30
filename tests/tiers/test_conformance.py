"""What every tier does, whatever it stores on: the same tests for each subject of tests/support/tier_subjects.py."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from tier_helpers import (
    ARENA,
    KIB,
    MIB,
    POISON,
    LooksBeforeItEnds,
    Parts,
    assert_loads,
    assert_never_wrong,
    eventually,
    load,
    outcomes_of,
    patient,
    store,
    store_all,
    works,
)
from tier_subjects import TierSubject, opened

from kvdock.shm.checksum import checksum
from kvdock.tiers.notes import begins
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import PAGE_BYTES, Deadline, NoSpace, Outcome, Tier, TierError, ToLoad

pytestmark = pytest.mark.tiers

SIZES = (1, 511, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 72 * KIB + 7, MIB, 2 * MIB + 1, 3 * MIB)
ABSENT = (Outcome.MISSING, Outcome.DAMAGED)


# --------------------------------------------------------------------------- round trip


@pytest.mark.sweep("made")
@pytest.mark.parametrize("length", SIZES)
def test_what_was_stored_comes_back_bit_for_bit(tier: Tier, parts: Parts, length: int) -> None:
    part = parts.make(length)
    store_all(tier, [part])
    assert tier.exists([part.name], patient()) == [True]
    assert_loads(tier, [part])


def test_a_batch_of_many_sizes_comes_back_in_any_order(tier: Tier, parts: Parts) -> None:
    batch = [parts.make(length) for length in SIZES]
    store_all(tier, batch)
    shuffled = random.Random(3).sample(batch, len(batch))
    assert_loads(tier, shuffled)
    assert tier.exists([part.name for part in shuffled], patient()) == [True] * len(batch)


def test_names_differ_in_each_of_their_fields(tier: Tier, parts: Parts) -> None:
    one = parts.name(group=1, writer=2)
    names = [
        one, PartName(bytes(32), one.key, 1, 2), PartName(one.namespace, bytes(32), 1, 2),
        PartName(one.namespace, one.key, 2, 2), PartName(one.namespace, one.key, 1, 1),
        PartName(one.key, one.namespace, 1, 2), PartName(one.namespace, one.key, 255, 255),
    ]
    batch = [parts.make(5000, name) for name in names]
    for count, part in enumerate(batch):
        assert tier.exists(names, patient()) == [True] * count + [False] * (len(names) - count)
        store_all(tier, [part])
    assert_loads(tier, batch)


def test_answers_come_in_the_order_of_the_questions(tier: Tier, parts: Parts) -> None:
    there, absent = parts.many(4, 9000), parts.many(4, 9000)
    store_all(tier, there)
    mixed = [part for pair in zip(there, absent, strict=True) for part in pair]
    assert tier.exists([part.name for part in mixed], patient()) == [True, False] * 4
    found = load(tier, mixed)
    assert [got.answer.outcome for got in found] == [Outcome.DONE, Outcome.MISSING] * 4
    assert [got.data for got in found[::2]] == [part.data for part in there]


def test_nothing_asked_is_nothing_answered(tier: Tier) -> None:
    assert tier.exists([], patient()) == []
    assert tier.load([], patient()) == []
    assert tier.store([], patient()) == []
    assert tier.delete([], patient()) == []


def test_one_name_twice_in_a_batch(tier: Tier, parts: Parts) -> None:
    part = parts.make(20_000)
    store_all(tier, [part, part])
    assert_loads(tier, [part, part])


def test_pages_that_are_stored_stay_as_they_are(tier: Tier, parts: Parts) -> None:
    part = parts.make(PAGE_BYTES + 9)
    one = part.to_store()
    before = bytes(one.pages)
    assert tier.store([one], patient()) == [Outcome.DONE]
    assert bytes(one.pages) == before


def test_what_was_stored_is_independent_of_its_pages(tier: Tier, parts: Parts) -> None:
    part = parts.make(300_000)
    one = part.to_store()
    assert tier.store([one], patient()) == [Outcome.DONE]
    one.pages[:] = bytes(len(one.pages))
    assert_loads(tier, [part])


def test_what_was_deleted_is_gone_and_others_stay(tier: Tier, parts: Parts) -> None:
    going, staying = parts.many(5, 6000), parts.many(5, 6000)
    store_all(tier, going + staying)
    assert tier.delete([part.name for part in going], patient()) == [Outcome.DONE] * 5
    assert tier.exists([part.name for part in going + staying], patient()) == [False] * 5 + [True] * 5
    assert outcomes_of(tier, going) == [Outcome.MISSING] * 5
    assert_loads(tier, staying)
    assert set(tier.delete([part.name for part in going], patient())) <= {Outcome.DONE, Outcome.MISSING}


def test_what_was_deleted_can_be_stored_again(tier: Tier, parts: Parts) -> None:
    first = parts.make(6000)
    second = parts.make(7000, first.name)
    store_all(tier, [first])
    tier.delete([first.name], patient())
    store_all(tier, [second])
    assert_loads(tier, [second])


def test_another_length_than_the_stored_one_is_not_loaded(tier: Tier, parts: Parts) -> None:
    part = parts.make(2 * PAGE_BYTES)
    store_all(tier, [part])
    for length in (PAGE_BYTES, 2 * PAGE_BYTES - 1, 2 * PAGE_BYTES + 1, 4 * PAGE_BYTES):
        (answer,) = tier.load([ToLoad(part.name, length, ARENA.pages(length))], patient())
        assert answer.outcome in ABSENT


# --------------------------------------------------------------------------- reopening, limits, full storage


def test_what_was_stored_is_there_after_the_tier_was_opened_again(subject: TierSubject, parts: Parts) -> None:
    batch, deleted = parts.many(6, 50_001), parts.many(2, 50_001)
    with opened(subject) as tier:
        store_all(tier, batch + deleted)
        tier.delete([part.name for part in deleted], patient())
    with opened(subject) as tier:
        assert_loads(tier, batch)
        assert tier.exists([part.name for part in deleted], patient()) == [False, False]


def test_the_limit_is_kept_and_what_is_found_is_right(subject: TierSubject, parts: Parts) -> None:
    """Twice as much as the limit; 0 where there is none."""
    size = 256 * KIB
    batch = parts.many(2 * subject.limit_bytes // size or 8, size)
    with opened(subject) as tier:
        for begin in range(0, len(batch), 4):
            ARENA.reset()
            some = batch[begin : begin + 4]
            assert set(store(tier, some)) <= {Outcome.DONE, Outcome.FULL}
            usage = tier.usage()
            assert usage.bytes_limit == subject.limit_bytes
            assert usage.bytes_used <= (usage.bytes_limit or usage.bytes_used)
        found = []
        for part in batch:
            ARENA.reset()
            found += load(tier, [part])
        assert_never_wrong(batch, found)
        outcomes = [got.answer.outcome for got in found]
        assert set(outcomes) <= {Outcome.DONE, Outcome.MISSING}
        assert outcomes.count(Outcome.DONE) * size >= subject.limit_bytes / 4
        assert [outcome is Outcome.DONE for outcome in outcomes] == tier.exists([p.name for p in batch], patient())


def test_usage_follows_what_is_stored(tier: Tier, parts: Parts) -> None:
    before = tier.usage()
    batch = parts.many(8, 100_000)
    store_all(tier, batch)
    after = tier.usage()
    assert after.objects == before.objects + 8
    assert after.bytes_used >= before.bytes_used
    assert after.wear_bytes >= before.wear_bytes
    tier.delete([part.name for part in batch[:3]], patient())
    assert tier.usage().objects == before.objects + 5


def test_full_storage_refuses_and_serves_on(subject: TierSubject, parts: Parts) -> None:
    with opened(subject) as tier:
        kept = parts.make(64 * KIB)
        store_all(tier, [kept])
        with subject.exhausted():
            refused: set[Outcome] = set()
            for _ in range(200):
                ARENA.reset()
                try:
                    refused.update(store(tier, parts.many(2, MIB)))
                except TierError:
                    break
                if refused - {Outcome.DONE}:
                    break
            else:
                pytest.fail("200 stores were taken by storage that is full")
            assert refused <= {Outcome.DONE, Outcome.FULL, Outcome.FAILED}
            assert_never_wrong([kept], load(tier, [kept]))
            with suppress(NoSpace):  # any other error would take the tier off
                tier.change(parts.namespace, begins(1), patient())
        after = parts.make(MIB)
        ARENA.reset()
        eventually(lambda: works(lambda: store_all(tier, [after])))
        assert_loads(tier, [after])


# --------------------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["corrupt_header", "truncate"])
def test_a_record_that_is_no_whole_one_is_not_loaded(subject: TierSubject, parts: Parts, damage: str) -> None:
    batch = parts.many(3, 40_000)  # the last one is damaged: where records lie in one file, it ends with that one
    with opened(subject) as tier:
        store_all(tier, batch)
        getattr(subject, damage)(batch[2].name)
        assert outcomes_of(tier, [batch[2]])[0] in ABSENT
        assert_loads(tier, batch[:2])
        tier.delete([batch[2].name], patient())
        store_all(tier, [batch[2]])
        assert_loads(tier, batch)


def test_a_damaged_part_differs_from_its_checksum(subject: TierSubject, parts: Parts) -> None:
    batch = parts.many(3, 40_000)
    with opened(subject) as tier:
        store_all(tier, batch)
        subject.corrupt_body(batch[1].name)
        assert not load(tier, [batch[1]])[0].is_accepted
        assert_loads(tier, [batch[0], batch[2]])
        tier.delete([batch[1].name], patient())
        store_all(tier, [batch[1]])
        assert_loads(tier, batch)


@pytest.mark.parametrize("damage", ["corrupt_header", "corrupt_body", "truncate"])
def test_damage_between_two_lives_is_no_hit(subject: TierSubject, parts: Parts, damage: str) -> None:
    batch = parts.many(3, 40_000)
    with opened(subject) as tier:
        store_all(tier, batch)
    getattr(subject, damage)(batch[2].name)
    with opened(subject) as tier:
        assert not load(tier, [batch[2]])[0].is_accepted
        assert_loads(tier, batch[:2])
        more = parts.make(40_000)
        store_all(tier, [more])
        assert_loads(tier, [more])


def test_a_record_of_another_part_is_not_taken_for_the_right_one(subject: TierSubject, parts: Parts) -> None:
    one, other = parts.many(2, 40_000)
    with opened(subject) as tier:
        store_all(tier, [one, other])
        subject.misplace(one.name, other.name)
        assert outcomes_of(tier, [one])[0] in ABSENT
        assert_loads(tier, [other])


# --------------------------------------------------------------------------- deadlines


def test_nothing_is_begun_when_the_deadline_is_over(tier: Tier, parts: Parts) -> None:
    there, new = parts.many(2, 30_000)
    store_all(tier, [there])
    over = Deadline(0)
    assert tier.store([new.to_store()], over) == [Outcome.LATE]
    (got,) = load(tier, [there], over)
    assert got.answer.outcome is Outcome.LATE
    assert tier.delete([there.name], over) == [Outcome.LATE]
    assert tier.exists([there.name], over) == [False]
    assert tier.exists([there.name, new.name], patient()) == [True, False]
    assert_loads(tier, [there])


@pytest.mark.sweep("made")
@pytest.mark.parametrize("looks", [1, 2, 3, 5, 8, 13, 21])
def test_a_deadline_in_the_midst_leaves_whole_records(tier: Tier, parts: Parts, looks: int) -> None:
    batch = parts.many(12, 70_000)
    outcomes = store(tier, batch, Deadline(5, LooksBeforeItEnds(looks)))
    assert set(outcomes) <= {Outcome.DONE, Outcome.LATE}
    assert_loads(tier, [part for part, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.DONE])
    assert_never_wrong(batch, load(tier, batch))
    store_all(tier, batch)
    found = load(tier, batch, Deadline(5, LooksBeforeItEnds(looks)))
    assert {got.answer.outcome for got in found} <= {Outcome.DONE, Outcome.LATE}
    assert all(got.data == part.data for part, got in zip(batch, found, strict=True) if got.is_accepted)
    assert_loads(tier, batch)


def test_a_load_that_was_cancelled_writes_nothing_more(tier: Tier, parts: Parts) -> None:
    batch = parts.many(12, MIB)
    store_all(tier, batch[:6])
    store_all(tier, batch[6:])
    for wait_s in (0.0, 0.001, 0.004):
        ARENA.reset()
        deadline = patient()
        wanted = [part.to_load() for part in batch]
        threading.Timer(wait_s, deadline.cancel).start()
        answers = tier.load(wanted, deadline)
        assert {answer.outcome for answer in answers} <= {Outcome.DONE, Outcome.LATE}
        for one, part, answer in zip(wanted, batch, answers, strict=True):
            assert answer.outcome is not Outcome.DONE or one.pages[: one.length] == part.data
            one.pages[:] = bytes([POISON]) * len(one.pages)
        time.sleep(0.05)  # nothing says that no write will come: a late one has this long
        assert all(one.pages == bytes([POISON]) * len(one.pages) for one in wanted)


def test_a_store_that_was_cancelled_reads_nothing_more(tier: Tier, parts: Parts) -> None:
    """What it reports DONE has the bytes of before, although the pages change right after it has returned."""
    batch = parts.many(12, MIB)
    deadline = patient()
    sources = [part.to_store() for part in batch]
    threading.Timer(0.002, deadline.cancel).start()
    outcomes = tier.store(sources, deadline)
    for source in sources:
        source.pages[:] = bytes(len(source.pages))
    assert set(outcomes) <= {Outcome.DONE, Outcome.LATE}
    assert_loads(tier, [part for part, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.DONE])
    assert_never_wrong(batch, load(tier, batch))


# --------------------------------------------------------------------------- many at a time


def test_of_two_writers_of_one_name_one_is_kept_whole(tier: Tier, parts: Parts) -> None:
    for length in (5000, 600_000):
        name = parts.name()
        rivals = [parts.make(length, name) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(lambda part: store(tier, [part])[0], rivals))
        assert outcomes == [Outcome.DONE] * 4
        (got,) = load(tier, rivals[:1])
        assert (got.answer.checksum, got.data) in [(part.record.checksum, part.data) for part in rivals]


def test_of_two_tiers_over_one_storage_each_finds_what_the_other_stored(subject: TierSubject, parts: Parts) -> None:
    """Or the second is refused at once, and the first works on."""
    name = parts.name()
    rivals = [parts.make(90_000, name) for _ in range(2)]
    with opened(subject) as first:
        if not subject.is_shared:
            with pytest.raises(TierError):
                subject.open()
            store_all(first, rivals[:1])
            assert_loads(first, rivals[:1])
            return
        with opened(subject) as second, ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(store, tier, [part]) for tier, part in zip((first, second), rivals, strict=True)]
            assert [job.result() for job in jobs] == [[Outcome.DONE]] * 2
            for tier in (first, second):
                (got,) = load(tier, rivals[:1])
                assert (got.answer.checksum, got.data) in [(part.record.checksum, part.data) for part in rivals]


def test_readers_writers_and_deleters_beside_each_other(subject: TierSubject, parts: Parts, sweeps: bool) -> None:
    """More than the limit, so that old records go while others are read."""
    size = 200_000
    pool = parts.many(24 + subject.limit_bytes // size, size)
    known = {part.record.checksum: part.data for part in pool}
    wrong: list[str] = []

    def work(seed: int, tier: Tier) -> None:
        mine = random.Random(seed)
        source, target = ARENA.pages(size), ARENA.pages(size)
        for _ in range(150 if sweeps else 50):
            part = mine.choice(pool)
            what = mine.random()
            if what < 0.45:
                (answer,) = tier.load([ToLoad(part.name, size, target)], patient())
                data = bytes(target[:size])
                if answer.outcome is Outcome.DONE and (checksum(data) != answer.checksum or data != part.data):
                    wrong.append(f"a load gave wrong bytes of {part.name.text()}")
                elif answer.outcome not in (Outcome.DONE, Outcome.MISSING):
                    wrong.append(f"a load answered {answer.outcome}")
            elif what < 0.9:
                source[:size] = part.data
                (outcome,) = tier.store([part.to_store()._replace(pages=source)], patient())
                if outcome not in (Outcome.DONE, Outcome.FULL):
                    wrong.append(f"a store answered {outcome}")
            else:
                tier.delete([part.name], patient())

    with opened(subject) as tier, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: work(seed, tier), range(4)))
        assert not wrong
        for part in pool:
            ARENA.reset()
            (got,) = load(tier, [part])
            assert got.answer.outcome is Outcome.MISSING or known[got.answer.checksum] == got.data == part.data
