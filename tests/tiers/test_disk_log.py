"""The disk tier's log and index: damage, opening again, the folder's owner, and processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_helpers import ENVIRONMENT, LIMIT, PROCESSES, allocated_bytes, opened, store_in_turn, there
from tier_helpers import ARENA, MIB, Part, Parts, assert_loads, load, outcomes_of, patient, store, store_all
from tier_subjects import DiskSubject

from kvdock.tiers.disk.folder import FolderInUse
from kvdock.tiers.disk.log import key_of
from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.tier import PAGE_BYTES, Outcome

pytestmark = pytest.mark.tiers


def spoil_header(index: Path) -> None:
    index.write_bytes(b"not a database" + index.read_bytes()[14:])


def spoil_pages(index: Path) -> None:
    data = index.read_bytes()
    index.write_bytes(data[:PAGE_BYTES] + random.Random(1).randbytes(len(data) - PAGE_BYTES))


def other_version(index: Path) -> None:
    with sqlite3.connect(index) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def other_table(index: Path) -> None:
    with sqlite3.connect(index) as db:
        db.execute("UPDATE parts SET name = 'text', length = -1")
    db.close()


@pytest.mark.parametrize("harm", [Path.unlink, spoil_header, spoil_pages, other_version, other_table])
def test_an_index_that_cannot_be_used_is_made_anew_from_the_log(
    folder: Path, parts: Parts, caplog: pytest.LogCaptureFixture, harm: object
) -> None:
    assert callable(harm)
    batch, deleted = [parts.make(length) for length in range(1, 900_000, 50_000)], parts.many(5, 70_000)
    with opened(folder) as tier:
        store_all(tier, batch[:9] + deleted)
        store_all(tier, batch[9:])
        tier.delete([part.name for part in deleted], patient())
    for _ in range(2):
        harm(folder / "index.db")
        caplog.clear()
        with opened(folder) as tier:
            assert [line.levelname for line in caplog.records] == ["WARNING"]
            assert f"made anew from the log, {len(batch)} parts" in caplog.text
            ARENA.reset()
            assert_loads(tier, batch)
            assert there(tier, deleted) == [False] * len(deleted)
            assert tier.usage().objects == len(batch)
    caplog.clear()
    with opened(folder) as tier:
        assert_loads(tier, batch)
    assert not caplog.records


def test_a_new_folder_says_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(folder):
        pass
    assert not caplog.records


def test_records_behind_a_damaged_one_are_found_when_the_index_is_made_anew(folder: Path, parts: Parts) -> None:
    subject, batch = DiskSubject(folder.parent), parts.many(6, 300_000)
    with opened(folder) as tier:
        store_all(tier, batch)
    subject.corrupt_header(batch[2].name)
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert there(tier, batch) == [True, True, False, True, True, True]
        store_all(tier, [batch[2]])
        assert_loads(tier, batch)


def test_bytes_of_a_part_that_look_like_a_record_are_none(folder: Path, parts: Parts) -> None:
    """Someone stores a part that has a copy of another's whole record in it; then the header before it is damaged."""
    subject, victim = DiskSubject(folder.parent), parts.make(PAGE_BYTES)
    with opened(folder) as tier:
        store_all(tier, [victim])
        path, offset = subject.find(victim.name)
        record = bytearray(path.read_bytes()[offset : offset + 2 * PAGE_BYTES])
        record[PAGE_BYTES:] = b"x" * PAGE_BYTES
        forged = parts.make(3 * PAGE_BYTES)
        forger = Part(forged.record, bytes(record) + forged.data[2 * PAGE_BYTES :])
        store_all(tier, [forger])
        path, at = subject.find(forger.name)
    subject.corrupt_header(forger.name)
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert tier.usage().objects == 1
        assert_loads(tier, [victim])
    assert at > offset


def test_an_index_that_is_behind_the_log_learns_the_rest(folder: Path, parts: Parts) -> None:
    """As after power was lost: SQLite's last transactions may be lost, and the log has the records."""
    old, new = parts.many(5, 500_000), parts.many(25, 500_000)
    with opened(folder) as tier:
        store_all(tier, old)
    before = (folder / "index.db").read_bytes()
    with opened(folder) as tier:
        store_all(tier, new)
        tier.delete([new[0].name, old[0].name], patient())
    (folder / "index.db").write_bytes(before)
    with opened(folder) as tier:
        ARENA.reset()
        assert_loads(tier, old[1:] + new[1:])
        assert outcomes_of(tier, [old[0], new[0]]) == [Outcome.MISSING] * 2
        assert there(tier, [old[0]]) == [False]


def test_an_index_that_points_to_another_part_is_damage_and_is_forgotten(folder: Path, parts: Parts) -> None:
    one, other = parts.many(2, 50_000)
    with opened(folder) as tier:
        store_all(tier, [one, other])
    with sqlite3.connect(folder / "index.db") as db:
        named = {one.name: key_of(one.name), other.name: key_of(other.name)}
        db.execute("UPDATE parts SET name = x'00' WHERE name = ?", (named[one.name],))
        db.execute("UPDATE parts SET name = ? WHERE name = ?", (named[one.name], named[other.name]))
        db.execute("UPDATE parts SET name = ? WHERE name = x'00'", (named[other.name],))
    db.close()
    with opened(folder) as tier:
        assert outcomes_of(tier, [one, other]) == [Outcome.DAMAGED] * 2
        assert there(tier, [one, other]) == [False, False]
        store_all(tier, [one, other])
        assert_loads(tier, [one, other])


def test_of_several_writers_one_record_remains(folder: Path, parts: Parts) -> None:
    """Or a part that was deleted might come back when the index is made anew."""
    names = [parts.name() for _ in range(10)]
    rivals = [[parts.make(50_000, name) for name in names] for _ in range(4)]
    with opened(folder) as tier:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda batch: store(tier, batch), rivals)) == [[Outcome.DONE] * 10] * 4
        assert tier.delete(names, patient()) == [Outcome.DONE] * 10
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert tier.usage().objects == 0


# --------------------------------------------------------------------------- processes


def child(folder: Path, limit_bytes: int, seed: str, length: int) -> subprocess.Popen[str]:
    command = [sys.executable, PROCESSES, "write", str(folder), str(limit_bytes), seed, str(length)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def killed(process: subprocess.Popen[str], after_lines: int, after_s: float) -> dict[str, list[int]]:
    """Kills it some lines later, and returns the numbers that it has reported."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(after_lines)]
    time.sleep(after_s)
    process.kill()
    lines += process.stdout.read().splitlines(keepends=True)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    reported: dict[str, list[int]] = {"stored": [], "deleting": [], "deleted": []}
    for line in lines:
        if line.endswith("\n"):
            what, *numbers = line.split()
            reported[what] += map(int, numbers)
    return reported


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_all_that_was_done_is_there_after_a_process_was_killed(folder: Path, index: str) -> None:
    mine, length = random.Random(index), 150_000
    for life in range(6):
        reported = killed(child(folder, 512 * MIB, f"{index} {life}", length), 3 + 3 * life, mine.random() / 50)
        if index == "lost":
            (folder / "index.db").unlink()
        parts = Parts(f"{index} {life}")
        made = parts.many(max(reported["stored"]) + 1, length)
        with opened(folder, 512 * MIB) as tier:
            ARENA.reset()
            assert_loads(tier, [made[number] for number in reported["stored"] if number not in reported["deleting"]])
            assert not any(there(tier, [made[number] for number in reported["deleted"]]))


def test_a_process_killed_while_it_makes_room_leaves_nothing_wrong(folder: Path) -> None:
    mine, length = random.Random("room"), 300_000
    for life in range(6):
        reported = killed(child(folder, LIMIT, f"room {life}", length), 150, mine.random() / 20)
        if life % 2:
            (folder / "index.db").unlink()
        made = Parts(f"room {life}").many(max(reported["stored"]) + 1, length)
        with opened(folder) as tier:
            assert allocated_bytes(folder) <= LIMIT
            latest = [number for number in reported["stored"][-10:] if number not in reported["deleting"]]
            assert_loads(tier, [made[number] for number in latest])
            for number in reported["stored"]:
                ARENA.reset()
                (got,) = load(tier, [made[number]])
                if got.is_accepted:
                    assert got.data == made[number].data and number not in reported["deleted"]
                else:
                    assert number not in latest
            store_in_turn(tier, Parts(f"after {life}").many(10, MIB))


def test_a_folder_belongs_to_one_process_until_it_ends(folder: Path, parts: Parts) -> None:
    process = child(folder, LIMIT, "owner", 5000)
    assert process.stdout is not None and process.stdout.readline().startswith("stored")
    with pytest.raises(FolderInUse, match=f"is used by process {process.pid}") as refused:
        DiskTier.open(folder, LIMIT)
    assert refused.value.pid == process.pid
    killed(process, 1, 0.0)
    with opened(folder) as tier:
        store_all(tier, [parts.make(5000)])
        with pytest.raises(FolderInUse, match=f"is used by process {os.getpid()}"):
            DiskTier.open(folder, LIMIT)
