"""The disk tier while it reads its index: what it serves then, and what is there once all was read."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_helpers import LIMIT, opened, store_in_turn, there
from tier_helpers import ARENA, Part, Parts, assert_loads, patient, store_all

from kvdock.tiers.disk import reader
from kvdock.tiers.disk.index import Index
from kvdock.tiers.disk.log import Log, Segment, key_of
from kvdock.tiers.disk.space import LONG_AGO
from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.notes import begins, raises
from kvdock.tiers.record import Record
from kvdock.tiers.tier import Deadline, Outcome, TierError

LENGTH = 700_000
"""Eleven parts fill a segment."""

pytestmark = pytest.mark.tiers


def filled(folder: Path, parts: Parts, count: int = 30) -> list[Part]:
    batch = parts.many(count, LENGTH)
    with opened(folder) as tier:
        store_in_turn(tier, batch)
    ARENA.reset()
    return batch


@contextmanager
def half_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DiskTier, threading.Event]]:
    """A tier that has read its newest segment, and reads no other until the event is set."""
    goes_on, read = threading.Event(), reader.Reader.read

    def held(self: reader.Reader, segment: Segment) -> None:
        if threading.current_thread().name == "kvdock-disk-index":
            assert goes_on.wait(60)
        read(self, segment)

    with monkeypatch.context() as patch:
        patch.setattr(reader, "READ_AT_ONCE", 1)
        patch.setattr(reader.Reader, "read", held)
        tier = DiskTier.open(folder, LIMIT)
        try:
            yield tier, goes_on
        finally:
            goes_on.set()
            tier.close(patient())


def wait_until_read(tier: DiskTier) -> None:
    assert tier._reader.wait(patient())


def is_listed(tier: DiskTier) -> bool:
    return tier.is_listed


def all_listed(tier: DiskTier) -> list[bytes]:
    found: list[bytes] = []
    while (some := tier.take_listed()) is not None:
        found += [key for _, key in some]
    return found


def test_a_tier_serves_its_newest_parts_while_the_others_are_read(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, new = filled(folder, parts), parts.make(LENGTH)
    with half_read(folder, monkeypatch) as (tier, goes_on):
        known = there(tier, batch)
        assert known == sorted(known) and not known[0] and known[-1]
        assert_loads(tier, [part for part, is_there in zip(batch, known, strict=True) if is_there])
        assert len(all_listed(tier)) == sum(known) and not is_listed(tier)
        store_all(tier, [new])
        assert_loads(tier, [new])
        goes_on.set()
        wait_until_read(tier)
        assert_loads(tier, [*batch, new])
        assert not is_listed(tier)
        assert sorted(all_listed(tier)) == sorted(part.name.key for part in batch[: known.index(True)])
        assert is_listed(tier) and tier.usage().objects == len(batch) + 1


def test_what_is_not_known_yet_is_neither_deleted_nor_counted(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = filled(folder, parts)
    with half_read(folder, monkeypatch) as (tier, goes_on):
        assert tier.delete([batch[0].name], Deadline(0.05)) == [Outcome.LATE]
        with pytest.raises(TierError, match="its index was not read in time"):
            tier.holdings(Deadline(0.05))
        with pytest.raises(TierError, match="its index was not read in time"):
            tier.empty(parts.namespace, 0.0, Deadline(0.05))
        goes_on.set()
        assert tier.delete([batch[0].name], patient()) == [Outcome.DONE]
        assert tier.holdings(patient())[0].objects == len(batch) - 1
    for is_index_lost in (False, True):
        if is_index_lost:
            (folder / "index.db").unlink()
        with opened(folder) as tier:
            assert there(tier, batch) == [False] + [True] * (len(batch) - 1)


def test_a_part_that_is_stored_again_before_it_is_known_is_there_once(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = filled(folder, parts)
    with half_read(folder, monkeypatch) as (tier, goes_on):
        store_all(tier, [batch[0]])
        assert_loads(tier, [batch[0]])
        goes_on.set()
        assert tier.delete([batch[0].name], patient()) == [Outcome.DONE]
    for is_index_lost in (False, True):
        if is_index_lost:
            (folder / "index.db").unlink()
        with opened(folder) as tier:
            assert there(tier, batch) == [False] + [True] * (len(batch) - 1)


def test_a_part_that_is_being_stored_when_it_is_found_is_there_once(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = filled(folder, parts)
    key = key_of(batch[0].name)
    with half_read(folder, monkeypatch) as (tier, goes_on):
        assert tier._space.claim([key], patient()) == ({key}, set())
        goes_on.set()
        wait_until_read(tier)
        tier._space.unclaim({key})
        assert there(tier, batch) == [False] + [True] * (len(batch) - 1)
        store_all(tier, [batch[0]])
        assert tier.delete([batch[0].name], patient()) == [Outcome.DONE]
    with opened(folder) as tier:
        assert there(tier, batch) == [False] + [True] * (len(batch) - 1)


def test_a_segment_is_read_before_it_is_emptied(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that were used before the tier was closed get their second chance, and are listed."""
    batch = filled(folder, parts, 40)
    with opened(folder) as tier:
        hot = [part for part, is_there in zip(batch, there(tier, batch), strict=True) if is_there][:2]
    with sqlite3.connect(folder / "index.db") as db:
        db.execute("UPDATE parts SET used = 0")
        db.executemany("UPDATE parts SET used = 1 WHERE name = ?", [(key_of(part.name),) for part in hot])
    db.close()
    with half_read(folder, monkeypatch) as (tier, goes_on):
        before = all_listed(tier)
        store_in_turn(tier, parts.many(12, LENGTH))
        assert there(tier, hot) == [True] * 2
        goes_on.set()
        wait_until_read(tier)
        assert {part.name.key for part in hot} <= {*before, *all_listed(tier)}


def test_an_empty_segment_goes_before_one_that_was_not_read(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Parts("other")
    batch = filled(folder, parts, 22)
    with opened(folder) as tier:
        note = tier.change(other.namespace, begins(1), patient())
        names = [note.name(other.namespace, other.name().key, 0, 0) for _ in range(11)]
        store_in_turn(tier, [other.make(LENGTH, name) for name in names])
    with half_read(folder, monkeypatch) as (tier, goes_on):
        tier.change(other.namespace, raises(1), patient())
        store_in_turn(tier, parts.many(3, LENGTH))
        goes_on.set()
        wait_until_read(tier)
        assert there(tier, batch) == [True] * 22


def test_parts_of_an_index_that_turns_out_to_be_damaged_are_found_in_the_log(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = filled(folder, parts)
    with sqlite3.connect(folder / "index.db") as db:
        db.execute("UPDATE parts SET name = 'text' WHERE place = (SELECT min(place) FROM parts)")
    db.close()
    with half_read(folder, monkeypatch) as (tier, goes_on):
        new = parts.make(LENGTH)
        store_all(tier, [new])
        goes_on.set()
        wait_until_read(tier)
        assert f"made anew from the log, {len(batch) + 1} parts: found a row with other values" in caplog.text
        assert_loads(tier, [*batch, new])
    caplog.clear()
    with opened(folder) as tier:
        assert there(tier, [*batch, new]) == [True] * (len(batch) + 1)
    assert not caplog.records


def test_an_index_that_was_not_finished_is_made_again(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = filled(folder, parts)
    (folder / "index.db").unlink()
    with half_read(folder, monkeypatch) as (tier, goes_on):
        tier._reader._stopped.set()
        goes_on.set()
    with opened(folder) as tier:
        assert f"{len(batch)} parts: it was not finished" in caplog.text
        assert_loads(tier, batch)


def test_rows_of_segments_that_are_gone_leave_the_index(folder: Path, parts: Parts) -> None:
    batch = filled(folder, parts)
    with opened(folder) as tier:
        sequences = sorted(tier._log.segments)
        paths = [tier._log.segments[sequence].file.path for sequence in sequences]
    paths[0].unlink()
    paths[-1].unlink()
    with opened(folder) as tier:
        left = sum(there(tier, batch))
        assert 0 < left < len(batch)
    with sqlite3.connect(folder / "index.db") as db:
        assert db.execute("SELECT count(*), min(place) >> 20, max(place) >> 20 FROM parts").fetchone() == (
            left, sequences[1], sequences[-2]
        )
    db.close()


def test_parts_that_a_clear_has_left_in_the_index_are_not_read(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as tier:
        note = tier.change(parts.namespace, begins(1), patient())
        names = [note.name(parts.namespace, parts.name().key, 0, 0) for _ in range(30)]
        batch = [parts.make(LENGTH, name) for name in names]
        store_in_turn(tier, batch)
    with half_read(folder, monkeypatch) as (tier, goes_on):
        tier.change(parts.namespace, raises(1), patient())
        goes_on.set()
        wait_until_read(tier)
        assert tier.usage().objects == 0 and all_listed(tier) == []
        assert there(tier, batch) == [False] * len(batch)
    ARENA.reset()


def test_an_index_that_fails_at_the_end_is_made_again_at_the_next_start(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = filled(folder, parts)
    (folder / "index.db").unlink()

    def fail(_: Index) -> None:
        raise TierError("disk", "the index fails")

    monkeypatch.setattr(Index, "finish", fail)
    with half_read(folder, monkeypatch) as (tier, goes_on):
        goes_on.set()
        wait_until_read(tier)
        assert_loads(tier, batch)
    assert "the index is made anew at the next start: disk: the index fails" in caplog.text


def test_a_segment_that_could_not_be_read_is_emptied_like_any_other(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(folder, parts)
    (folder / "index.db").unlink()
    scan = Log.scan

    def failing(self: Log, segment: Segment, begin: int) -> Iterator[tuple[int, Record]]:
        if segment.sequence == 1:
            raise OSError(errno.EIO, "the storage fails")
        return scan(self, segment, begin)

    monkeypatch.setattr(Log, "scan", failing)
    monkeypatch.setattr(reader, "READ_AT_ONCE", 1)
    tier = DiskTier.open(folder, LIMIT)
    try:
        wait_until_read(tier)
        assert "could be read: [Errno 5] the storage fails" in caplog.text
        new = parts.many(40, LENGTH)
        store_in_turn(tier, new)
        assert_loads(tier, new[-5:])
    finally:
        tier.close(patient())


def test_uses_are_kept_in_their_order_when_a_tier_is_closed(folder: Path, parts: Parts) -> None:
    batch = filled(folder, parts, 8)
    for order in ([3, 1, 5], [7, 3]):
        with opened(folder) as tier:
            for at in order:
                assert there(tier, [batch[at]]) == [True]
    with opened(folder) as tier:
        used = {part.name.key: tier._space.entry(key_of(part.name)) for part in batch}
        numbers = [entry.used for part in batch if (entry := used[part.name.key])]
    assert sorted(range(8), key=lambda at: numbers[at])[4:] == [1, 5, 7, 3]
    assert [numbers[at] for at in (0, 2, 4, 6)] == [LONG_AGO] * 4
