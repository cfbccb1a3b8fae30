"""The disk tier beside what all tiers do: its limit, its log and index, the folder's owner, and processes killed."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import SUPPORT
from tier_helpers import ARENA, KIB, MIB, Part, Parts, assert_loads, load, outcomes_of, patient, store, store_all
from tier_subjects import DiskSubject

from kvdock.tiers.disk.blocks import key_of, record_bytes
from kvdock.tiers.disk.folder import FolderInUse
from kvdock.tiers.disk.tier import LEAST_LIMIT_BYTES, DiskTier, Sizes
from kvdock.tiers.tier import PAGE_BYTES, Outcome, TierError, ToLoad, ToStore

pytestmark = pytest.mark.tiers

LIMIT = 32 * MIB
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SUPPORT)}
PROCESSES = str(SUPPORT / "disk_processes.py")


@pytest.fixture(autouse=True)
def arena() -> None:
    ARENA.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Parts:
    return Parts(request.node.name)


@contextmanager
def opened(folder: Path, limit_bytes: int = LIMIT) -> Iterator[DiskTier]:
    tier = DiskTier.open(folder, limit_bytes)
    try:
        yield tier
    finally:
        tier.close(patient())


def allocated_bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def store_in_turn(tier: DiskTier, batch: list[Part]) -> None:
    for part in batch:
        ARENA.reset()
        store_all(tier, [part])


def there(tier: DiskTier, batch: list[Part]) -> list[bool]:
    return tier.exists([part.name for part in batch], patient())


# --------------------------------------------------------------------------- room


@pytest.mark.parametrize(("length", "count"), [(900 * KIB, 120), (3000, 400)], ids=["large parts", "small parts"])
def test_the_limit_is_never_exceeded_not_even_for_a_moment(folder: Path, parts: Parts, length: int, count: int) -> None:
    most, samples, ended = 0, 0, threading.Event()

    def sample() -> None:
        nonlocal most, samples
        while not ended.is_set():
            most, samples = max(most, allocated_bytes(folder)), samples + 1

    limit = LIMIT if length > MIB // 2 else LEAST_LIMIT_BYTES
    batch = parts.many(count, length)
    with opened(folder, limit) as tier:
        sampler = threading.Thread(target=sample)
        sampler.start()

        def work(mine: list[Part]) -> None:
            source, target = ARENA.pages(length), ARENA.pages(length)
            for at, part in enumerate(mine):
                source[:length] = part.data
                assert tier.store([ToStore(part.record, source)], patient()) == [Outcome.DONE]
                for old in mine[max(0, at - 3) : at]:  # so that room is made by copying
                    tier.load([ToLoad(old.name, length, target)], patient())
                assert tier.usage().bytes_used <= limit

        with ThreadPoolExecutor(2) as threads:
            try:
                list(threads.map(work, (batch[::2], batch[1::2])))
            finally:
                ended.set()
                sampler.join()
        assert limit / 2 < most <= limit and samples > 10
        assert allocated_bytes(folder) <= tier.usage().bytes_used + 64 * KIB <= limit + 64 * KIB
    assert allocated_bytes(folder) <= limit


def test_a_lower_limit_is_kept_from_the_opening_on(folder: Path, parts: Parts) -> None:
    batch = parts.many(40, MIB)
    with opened(folder, 64 * MIB) as tier:
        store_in_turn(tier, batch)
        assert all(there(tier, batch))
    with opened(folder, 48 * MIB) as tier:
        assert allocated_bytes(folder) <= 48 * MIB
        left = there(tier, batch)
        assert not left[0] and left[-1] and left == sorted(left), "what was written first goes first"
        store_in_turn(tier, parts.many(60, MIB))
        assert allocated_bytes(folder) <= 48 * MIB


def test_a_part_that_fits_no_segment_is_full_and_harms_nothing(folder: Path, parts: Parts) -> None:
    with opened(folder) as tier:
        small, large = parts.make(1000), parts.make(LIMIT // 4)
        assert store(tier, [large, small]) == [Outcome.FULL, Outcome.DONE]
        largest = parts.make(Sizes.of(LIMIT).segment_bytes - 2 * PAGE_BYTES)
        store_all(tier, [largest])
        assert_loads(tier, [small, largest])


def test_parts_that_were_loaded_get_a_second_chance_and_others_go(folder: Path, parts: Parts) -> None:
    loved, others = parts.many(3, 300 * KIB), parts.many(3, 300 * KIB)
    with opened(folder) as tier:
        store_all(tier, [*loved, *others])
        for _ in range(5):
            assert_loads(tier, loved)
            store_in_turn(tier, parts.many(12, MIB))
        assert there(tier, loved + others) == [True] * 3 + [False] * 3
        ARENA.reset()
        assert_loads(tier, loved)
        store_in_turn(tier, parts.many(120, MIB))
        assert there(tier, loved) == [False] * 3, "one load is one chance"


def test_second_chances_have_a_bound(folder: Path, parts: Parts) -> None:
    """Everything is loaded, always: a quarter of a segment is copied at most, and that is counted as wear."""
    stored = 0
    with opened(folder) as tier:
        batch = parts.many(150, 500 * KIB)
        for part in batch:
            ARENA.reset()
            store_all(tier, [part])
            assert_loads(tier, [part])
            stored += record_bytes(part.record.length)
        wear = tier.usage().wear_bytes
        assert stored * 1.05 < wear < stored * 1.4


def test_a_record_that_is_being_loaded_is_not_overwritten(folder: Path, parts: Parts) -> None:
    subject = DiskSubject(folder.parent)
    held = parts.make(MIB)
    with opened(folder) as tier:
        store_all(tier, [held])
        path, offset = subject.find(held.name)
        entry = tier._space.hold(key_of(held.name), held.record.length)
        assert entry is not None
        ended = threading.Event()

        def fill() -> None:
            for _ in range(3 * LIMIT // MIB):
                ARENA.reset()
                store(tier, parts.many(1, MIB))
            ended.set()

        writer = threading.Thread(target=fill)
        writer.start()
        assert not ended.wait(1.0), "what would overwrite the record has not waited"
        begin = offset + PAGE_BYTES
        assert path.read_bytes()[begin : begin + MIB] == held.data
        tier._space.release(entry)
        writer.join(60)
        assert ended.is_set()


def test_room_of_deleted_parts_is_used_before_others_go(folder: Path, parts: Parts) -> None:
    first, second = parts.many(6, MIB), parts.many(6, MIB)
    with opened(folder) as tier:
        store_in_turn(tier, first + second)
        tier.delete([part.name for part in second], patient())
        store_in_turn(tier, parts.many(8, MIB))
        ARENA.reset()
        assert_loads(tier, first)


# --------------------------------------------------------------------------- storage that fails


def run_apart(what: str, folder: Path) -> tuple[dict[str, object], str]:
    folder.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, PROCESSES, what, str(folder)],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, object] = json.loads(done.stdout)
    return seen, done.stderr


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")


@only_root
def test_a_full_disk_refuses_or_uses_the_room_that_it_has(folder: Path) -> None:
    seen, _ = run_apart("small", folder)
    assert seen == {"when_full": ["full"] * 3, "to_the_last_byte": ["full"] * 3, "beside_others": ["done"]}


@only_root
def test_a_file_system_without_direct_input_and_output_is_used_with_one_logged_line(folder: Path) -> None:
    seen, said = run_apart("ramfs", folder)
    assert seen == {"loaded": 4}
    assert said.count("takes no direct input and output") == 2 == len(said.splitlines()), "one for each opening"


@pytest.mark.parametrize("harm", ["removed", "replaced"])
def test_a_folder_that_is_lost_is_an_error_of_the_tier(folder: Path, parts: Parts, harm: str) -> None:
    part = parts.make(5000)
    tier = DiskTier.open(folder, LIMIT)
    store_all(tier, [part])
    folder.rename(folder.with_name("away"))
    if harm == "replaced":
        DiskTier.open(folder, LIMIT).close(patient())
    for call in (
        lambda: store(tier, [part]), lambda: load(tier, [part]), lambda: tier.exists([part.name], patient()),
        lambda: tier.delete([part.name], patient()),
    ):
        with pytest.raises(TierError, match=r"lost|replaced"):
            call()
    tier.usage()
    tier.close(patient())
    with pytest.raises(TierError, match="closed"):
        tier.exists([part.name], patient())


def test_a_segment_that_refuses_input_and_output_fails_for_its_parts_alone(folder: Path, parts: Parts) -> None:
    """Its descriptor is one that can be neither read nor written, as after an error of the device."""
    one, other = parts.make(100_000), parts.make(100_000)
    with opened(folder) as tier:
        store_all(tier, [one])
        segment = tier._space.entries[key_of(one.name)].segment
        working, segment.fd = segment.fd, os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert outcomes_of(tier, [one]) == [Outcome.FAILED]
            with pytest.raises(TierError, match="storage is lost"):
                store(tier, [other])
        finally:
            os.close(segment.fd)
            segment.fd = working
        store_all(tier, [other])
        assert_loads(tier, [one, other])


def test_a_path_that_is_no_folder_and_a_limit_that_is_too_small_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be opened"):
        DiskTier.open(tmp_path / "file", LIMIT)
    with pytest.raises(TierError, match=f"{LEAST_LIMIT_BYTES - 1} bytes was found, at least {LEAST_LIMIT_BYTES}"):
        DiskTier.open(tmp_path / "new", LEAST_LIMIT_BYTES - 1)
    assert not (tmp_path / "new").exists()


# --------------------------------------------------------------------------- the index and the log


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
    batch, gone = [parts.make(length) for length in range(1, 900_000, 50_000)], parts.many(5, 70_000)
    with opened(folder) as tier:
        store_all(tier, batch[:9] + gone)
        store_all(tier, batch[9:])
        tier.delete([part.name for part in gone], patient())
    for _ in range(2):
        harm(folder / "index.db")
        caplog.clear()
        with opened(folder) as tier:
            assert [line.levelname for line in caplog.records] == ["WARNING"]
            assert f"made anew from the log, {len(batch)} parts" in caplog.text
            ARENA.reset()
            assert_loads(tier, batch)
            assert there(tier, gone) == [False] * len(gone)
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
    """As after power was lost: SQLite's last transactions may be gone, and the log has the records."""
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


def test_what_was_copied_is_in_the_log_once(folder: Path, parts: Parts) -> None:
    """A process that ends between copying and wiping leaves two records of a part; deleting it ends both."""
    part = parts.make(200_000)
    with opened(folder) as tier:
        store_all(tier, [part])
        entry = tier._space.entries[key_of(part.name)]
        place = tier._space.take(part.record.length)
        assert place is not None and tier._space._copy(key_of(part.name), entry, place)
        tier._space.leave([place])
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert_loads(tier, [part])
        tier.delete([part.name], patient())
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert there(tier, [part]) == [False]


# --------------------------------------------------------------------------- processes


def child(folder: Path, limit_bytes: int, seed: str, length: int) -> subprocess.Popen[str]:
    command = [sys.executable, PROCESSES, "write", str(folder), str(limit_bytes), seed, str(length)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def killed(process: subprocess.Popen[str], after_lines: int, after_s: float) -> dict[str, list[int]]:
    """Kills it some lines later, and returns the numbers that it had said."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(after_lines)]
    time.sleep(after_s)
    process.kill()
    lines += process.stdout.read().splitlines(keepends=True)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    said: dict[str, list[int]] = {"stored": [], "deleting": [], "deleted": []}
    for line in lines:
        if line.endswith("\n"):
            what, *numbers = line.split()
            said[what] += map(int, numbers)
    return said


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_all_that_was_done_is_there_after_a_process_was_killed(folder: Path, index: str) -> None:
    mine, length = random.Random(index), 150_000
    for life in range(6):
        said = killed(child(folder, 512 * MIB, f"{index} {life}", length), 3 + 3 * life, mine.random() / 50)
        if index == "lost":
            (folder / "index.db").unlink()
        parts = Parts(f"{index} {life}")
        made = parts.many(max(said["stored"]) + 1, length)
        with opened(folder, 512 * MIB) as tier:
            ARENA.reset()
            assert_loads(tier, [made[number] for number in said["stored"] if number not in said["deleting"]])
            assert not any(there(tier, [made[number] for number in said["deleted"]]))


def test_a_process_killed_while_it_makes_room_leaves_nothing_wrong(folder: Path) -> None:
    mine, length = random.Random("room"), 300_000
    for life in range(6):
        said = killed(child(folder, LIMIT, f"room {life}", length), 150, mine.random() / 20)
        if life % 2:
            (folder / "index.db").unlink()
        made = Parts(f"room {life}").many(max(said["stored"]) + 1, length)
        with opened(folder) as tier:
            assert allocated_bytes(folder) <= LIMIT
            latest = [number for number in said["stored"][-10:] if number not in said["deleting"]]
            assert_loads(tier, [made[number] for number in latest])
            for number in said["stored"]:
                ARENA.reset()
                (got,) = load(tier, [made[number]])
                if got.is_accepted:
                    assert got.data == made[number].data and number not in said["deleted"]
                else:
                    assert number not in latest
            store_in_turn(tier, Parts(f"after {life}").many(10, MIB))


def test_a_folder_belongs_to_one_process_until_it_ends(folder: Path, parts: Parts) -> None:
    process = child(folder, LIMIT, "owner", 5000)
    assert process.stdout is not None and process.stdout.readline().startswith("stored")
    with pytest.raises(FolderInUse, match=f"belongs to process {process.pid}") as refused:
        DiskTier.open(folder, LIMIT)
    assert refused.value.pid == process.pid
    killed(process, 1, 0.0)
    with opened(folder) as tier:
        store_all(tier, [parts.make(5000)])
        with pytest.raises(FolderInUse, match=f"belongs to process {os.getpid()}"):
            DiskTier.open(folder, LIMIT)
