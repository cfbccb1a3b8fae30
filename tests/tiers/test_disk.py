"""The disk tier beside what all tiers do: its limit, the order in which parts go, and storage that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_helpers import ENVIRONMENT, LIMIT, PROCESSES, allocated_bytes, opened, store_in_turn, there
from little_mount import fill, little_mount, make_read_only
from tier_helpers import ARENA, KIB, MIB, Part, Parts, assert_loads, load, outcomes_of, patient, store, store_all
from tier_subjects import DiskSubject

from kvdock.tiers.disk.copies import Move, copy_all
from kvdock.tiers.disk.files import File
from kvdock.tiers.disk.folder import FolderInUse
from kvdock.tiers.disk.io import MOST_RUN, Io
from kvdock.tiers.disk.log import key_of, record_bytes
from kvdock.tiers.disk.tier import LEAST_LIMIT_BYTES, DiskTier
from kvdock.tiers.notes import begins
from kvdock.tiers.tier import PAGE_BYTES, Deadline, NoSpace, Outcome, ReadOnly, TierError, ToLoad, ToStore

pytestmark = pytest.mark.tiers


# --------------------------------------------------------------------------- room


def test_a_full_disk_has_what_it_had_also_when_it_is_opened_again(folder: Path, parts: Parts) -> None:
    """Others have filled it, so the index cannot be changed, and no segment can be emptied."""
    folder.mkdir()
    with little_mount(folder, 8 * MIB):
        batch, other = parts.many(8, 100 * KIB), Parts("another namespace")
        with opened(folder, LEAST_LIMIT_BYTES) as tier:
            store_all(tier, [*batch, *other.many(8, 100 * KIB)])
            fill(folder)
            assert Outcome.FULL in store(tier, parts.many(32, 100 * KIB))
            assert_loads(tier, batch)
        (folder / "filling").unlink()
        with opened(folder, LEAST_LIMIT_BYTES) as tier:
            tier.change(other.namespace, begins(1), patient())
            assert_loads(tier, batch)
        fill(folder)
        with opened(folder, LEAST_LIMIT_BYTES) as tier:
            assert_loads(tier, batch)


@pytest.mark.parametrize("is_lock_lost", [False, True])
@pytest.mark.parametrize("index", ["lost", "damaged"])
def test_a_full_disk_whose_index_cannot_be_used_is_read(
    folder: Path, parts: Parts, index: str, is_lock_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is made again in memory, and in a file at the next start with space."""
    folder.mkdir()
    with little_mount(folder, 8 * MIB):
        batch = parts.many(8, 100 * KIB)
        with opened(folder, LEAST_LIMIT_BYTES) as tier:
            store_all(tier, batch)
        path = folder / "index.db"
        if index == "lost":
            path.unlink()
        else:
            path.write_bytes(b"\xff" * path.stat().st_size)
        if is_lock_lost:
            (folder / "lock").unlink()
        fill(folder)
        for has_space in (False, True, True):
            caplog.clear()
            if has_space:
                (folder / "filling").unlink(missing_ok=True)
            with opened(folder, LEAST_LIMIT_BYTES) as tier:
                assert ("is in memory until the next start" in caplog.text) is not has_space
                assert_loads(tier, batch)
                assert tier.delete([batch.pop().name], patient()) == [Outcome.DONE]
                assert tier.usage().bytes_used <= LEAST_LIMIT_BYTES
        assert not caplog.text, "the second start with space found the index"


def test_a_disk_that_is_read_only_at_the_start_is_read(folder: Path, parts: Parts) -> None:
    """As the kernel makes it after errors."""
    folder.mkdir()
    with little_mount(folder, 8 * MIB):
        batch = parts.many(8, 100 * KIB)
        with opened(folder, LEAST_LIMIT_BYTES) as tier:
            known = tier.change(bytes(32), begins(1), patient())
            store_all(tier, batch)
        make_read_only(folder)
        with opened(folder, LEAST_LIMIT_BYTES) as tier:
            assert tier.notes([bytes(32)], patient()) == [known]
            for refused in (
                lambda: tier.change(bytes(32), begins(2), patient()),
                lambda: store(tier, parts.many(1, 100 * KIB)),
            ):
                with pytest.raises(ReadOnly):
                    refused()
            assert_loads(tier, batch)
            with pytest.raises(FolderInUse):
                DiskTier.open(folder, LEAST_LIMIT_BYTES)


def test_a_full_disk_that_takes_no_note_is_read(folder: Path, parts: Parts) -> None:
    """That is no failure of the tier, which would take it off."""
    folder.mkdir()
    with little_mount(folder, 8 * MIB), opened(folder, LEAST_LIMIT_BYTES) as tier:
        known = tier.change(parts.namespace, begins(1), patient())
        batch = parts.many(4, 100 * KIB)
        store_all(tier, batch)
        fill(folder)
        with pytest.raises(NoSpace, match="No space left on device"):
            tier.change(bytes(32), begins(1), patient())
        assert tier.notes([parts.namespace, bytes(32)], patient()) == [known, None]
        assert_loads(tier, batch)


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


def test_a_part_that_fits_no_segment_is_too_large_and_harms_nothing(folder: Path, parts: Parts) -> None:
    with opened(folder) as tier:
        small, large = parts.make(1000), parts.make(LIMIT // 4)
        assert store(tier, [large, small]) == [Outcome.TOO_LARGE, Outcome.DONE]
        largest = parts.make(tier.longest_part)
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
    """Everything is loaded once: a quarter of a segment is copied at most, and that is counted as wear."""
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


def test_copies_that_are_used_again_make_room_for_more(folder: Path, parts: Parts) -> None:
    """A hot set of half the log, with as much that is asked for once: at first a quarter of a segment is copied."""
    hot = parts.many(LIMIT // (2 * MIB), 500 * KIB)
    with opened(folder) as tier:
        store_in_turn(tier, hot)
        found = []
        for _ in range(40):
            has = there(tier, hot)
            found.append(sum(has) / len(hot))
            store_in_turn(tier, [part for part, is_there in zip(hot, has, strict=True) if not is_there])
            store_in_turn(tier, parts.many(8, 500 * KIB))
        assert sum(found[-10:]) / 10 > 0.95 > sum(found[:10]) / 10


def test_a_record_that_is_being_loaded_is_not_overwritten(folder: Path, parts: Parts) -> None:
    subject = DiskSubject(folder.parent)
    held = parts.make(MIB)
    with opened(folder) as tier:
        store_all(tier, [held])
        path, offset = subject.find(held.name)
        (entry,) = tier._space.hold_all([(key_of(held.name), held.record.length)])
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
    first, second = parts.many(7, MIB), parts.many(7, MIB)  # a segment has room for seven
    with opened(folder) as tier:
        store_in_turn(tier, first + second)
        tier.delete([part.name for part in second], patient())
        store_in_turn(tier, parts.many(12, MIB))
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
    seen, log = run_apart("ramfs", folder)
    assert seen == {"loaded": 4}
    assert log.count("has no direct input and output") == 2 == len(log.splitlines()), "one line for each opening"


def test_a_record_that_storage_takes_only_a_piece_of_is_full(folder: Path, parts: Parts) -> None:
    first, cut = parts.make(5000), parts.make(MIB)
    with opened(folder) as tier:
        store_all(tier, [first])
        with DiskSubject(folder.parent).exhausted():  # the kernel writes up to that size, and no more
            assert store(tier, [cut]) == [Outcome.FULL]
        assert there(tier, [first, cut]) == [True, False]
        store_all(tier, [cut])
        assert_loads(tier, [first, cut])


# --------------------------------------------------------------------------- records that follow one another


def test_records_that_follow_one_another_are_moved_by_one_call(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    move = {"read": Io.read, "write": Io.write}

    def counted(kind: str, io: Io, file: File, buffers: Sequence[memoryview], offset: int) -> bool:
        calls.append((kind, len(buffers)))
        return move[kind](io, file, buffers, offset)

    monkeypatch.setattr(Io, "read", lambda *given: counted("read", *given))
    monkeypatch.setattr(Io, "write", lambda *given: counted("write", *given))
    small, large = parts.many(300, 3000), parts.make(3 * MIB)
    with opened(folder, 256 * MIB) as tier:
        store_all(tier, [small[0]])  # a segment is begun
        calls.clear()
        store_all(tier, small[1:])
        assert sorted(calls) == [("write", 2 * (299 - MOST_RUN)), ("write", 2 * MOST_RUN)]
        calls.clear()
        assert_loads(tier, [*small[40:50], *reversed(small[20:40]), small[60]])
        assert sorted(calls) == [("read", 2), ("read", 60)]
        calls.clear()
        assert_loads(tier, small)
        assert sorted(calls) == [("read", 2 * (300 - MOST_RUN)), ("read", 2 * MOST_RUN)]
        ARENA.reset()
        store_all(tier, [large])
        calls.clear()
        assert_loads(tier, [large])
        assert calls == [("read", 2)]


def test_of_records_read_together_each_is_judged_by_itself(folder: Path, parts: Parts) -> None:
    subject, batch = DiskSubject(folder.parent), parts.many(6, 50_000)
    with opened(folder) as tier:
        store_all(tier, batch)
        subject.corrupt_header(batch[1].name)
        expected = [Outcome.DONE, Outcome.DAMAGED, *[Outcome.DONE] * 4]
        assert outcomes_of(tier, batch) == expected
        assert there(tier, batch) == [outcome is Outcome.DONE for outcome in expected]
        subject.truncate(batch[4].name)
        found = load(tier, batch)
        assert [got.answer.outcome for got in found] == [
            Outcome.DONE, Outcome.MISSING, Outcome.DONE, Outcome.DONE, Outcome.DAMAGED, Outcome.DAMAGED
        ]
        assert all(got.data == part.data for got, part in zip(found, batch, strict=True) if got.is_accepted)
        assert there(tier, batch) == [True, False, True, True, False, False]


def test_records_that_are_late_let_go_of_their_segment(folder: Path, parts: Parts) -> None:
    batch, now_s = parts.many(5, 5000), iter([0.0, 0.0, 0.0, *[1.0] * 9])
    with opened(folder) as tier:
        store_all(tier, batch)
        deadline = Deadline(0.5, clock=lambda: next(now_s))  # is over after the first run has begun
        found = [got.answer.outcome for got in load(tier, batch[::2], deadline)]
        assert found == [Outcome.DONE, Outcome.LATE, Outcome.LATE]
        assert [segment.readers for segment in tier._log.segments.values()] == [0]


def test_of_records_written_together_those_are_kept_for_which_there_was_room(folder: Path, parts: Parts) -> None:
    first, batch = parts.make(5000), parts.many(5, 20_000)
    with opened(folder) as tier:
        store_all(tier, [first])
        with DiskSubject(folder.parent).exhausted():  # the first 64 KiB of the segment can be written
            assert store(tier, batch) == [Outcome.DONE, Outcome.DONE, *[Outcome.FULL] * 3]
        assert there(tier, batch) == [True, True, False, False, False]
        assert_loads(tier, [first, *batch[:2]])
        store_all(tier, batch)
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert_loads(tier, [first, *batch])


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
        entry = tier._space.entry(key_of(one.name))
        assert entry is not None
        file = entry.segment.file
        working, file.fd = file.fd, os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert outcomes_of(tier, [one]) == [Outcome.FAILED]
            with pytest.raises(TierError, match="storage is lost"):
                store(tier, [other])
        finally:
            os.close(file.fd)
            file.fd = working
        store_all(tier, [other])
        assert_loads(tier, [one, other])


def test_a_path_that_is_no_folder_and_a_limit_that_is_too_small_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be opened"):
        DiskTier.open(tmp_path / "file", LIMIT)
    with pytest.raises(TierError, match=f"{LEAST_LIMIT_BYTES - 1:,} bytes, wanted at least {LEAST_LIMIT_BYTES:,}"):
        DiskTier.open(tmp_path / "new", LEAST_LIMIT_BYTES - 1)
    assert not (tmp_path / "new").exists()


# --------------------------------------------------------------------------- copies


def moves_of(tier: DiskTier, batch: list[Part]) -> list[Move]:
    """Copies of parts, in this order, to space that follows them."""
    moves = []
    for part in batch:
        entry, extent = tier._space.entry(key_of(part.name)), tier._space.take(part.record.length)
        assert entry is not None and extent is not None
        tier._space.leave([extent])
        moves.append(Move(key_of(part.name), entry, extent))
    return moves


def test_copies_share_calls_and_are_whole(folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [*parts.many(20, 3000), *parts.many(20, 70_000), parts.make(5 * MIB), *parts.many(2, 3000)]
    calls: list[tuple[str, int]] = []
    read, write = Io.read, Io.write

    def counted(kind: str, io: Io, file: File, buffers: Sequence[memoryview], offset: int) -> bool:
        calls.append((kind, len(buffers)))
        return (read if kind == "read" else write)(io, file, buffers, offset)

    with opened(folder, 256 * MIB) as tier:
        store_all(tier, batch)
        mixed = [*batch[20:40], *reversed(batch[:20]), batch[40], *batch[41:]]
        moves = moves_of(tier, mixed)
        with monkeypatch.context() as patch:
            patch.setattr(Io, "read", lambda *given: counted("read", *given))
            patch.setattr(Io, "write", lambda *given: counted("write", *given))
            assert copy_all(tier._io, moves, patient()) == moves
        assert sorted(calls[:2]) == [("read", 40), ("write", 1)] and calls[-2:] == [("read", 2), ("write", 1)]
        assert copy_all(tier._io, moves, Deadline(0.0)) == []
    (folder / "index.db").unlink()
    with opened(folder, 256 * MIB) as tier:
        places = [(move.to.segment.sequence, move.to.offset) for move in moves]
        found = [tier._space.entry(move.key) for move in moves]
        assert [(entry.segment.sequence, entry.offset) for entry in found if entry] == places
        ARENA.reset()
        assert_loads(tier, batch)


def test_what_lies_between_copies_stays(folder: Path, parts: Parts) -> None:
    batch, between = parts.many(2, 50_000), parts.make(50_000)
    with opened(folder) as tier:
        store_all(tier, batch)
        first = moves_of(tier, batch[:1])
        store_all(tier, [between])
        moves = first + moves_of(tier, batch[1:])
        assert copy_all(tier._io, moves, patient()) == moves
        assert_loads(tier, [between, *batch])


def test_what_cannot_be_read_is_not_copied(folder: Path, parts: Parts) -> None:
    subject, batch = DiskSubject(folder.parent), parts.many(8, 50_000)
    with opened(folder) as tier:
        store_all(tier, batch)
        moves = moves_of(tier, batch)
        subject.corrupt_header(batch[2].name)
        assert copy_all(tier._io, moves, patient()) == moves[:2] + moves[3:]
        more, cut = parts.many(3, 50_000), parts.make(50_000)
        store_all(tier, [*more, cut])
        subject.truncate(cut.name)
        assert copy_all(tier._io, moves_of(tier, [*more, cut]), patient()) == [], "they were read together"
        file = moves[0].old.segment.file
        working, file.fd = file.fd, os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert copy_all(tier._io, moves, patient()) == []
        finally:
            os.close(file.fd)
            file.fd = working
    (folder / "index.db").unlink()
    with opened(folder) as tier:
        assert there(tier, [*batch, *more]) == [at != 2 for at in range(11)]
        assert outcomes_of(tier, [cut]) == [Outcome.DAMAGED]
        assert_loads(tier, batch[:2] + batch[3:])


@pytest.mark.parametrize(("pages", "writes"), [(1, 1), (1024, 1), (1025, 2), (2048, 2), (2560, 3), (8192, 8)])
def test_the_header_of_a_record_takes_no_write_of_its_own(tmp_path: Path, pages: int, writes: int) -> None:
    io = Io(direct=False, threads=2)
    header, part = (memoryview(bytearray(os.urandom(PAGE_BYTES * count))) for count in (1, pages))
    file = io.files.open(tmp_path / "file", create=True)
    begun = io.begin(io.write, file, [header, part], 0)
    assert begun.end() and len(begun) == writes
    back = [memoryview(bytearray(len(one))) for one in (header, part)]
    assert io.begin(io.read, file, back, 0).end() and back == [header, part]
    io.files.close(file)
    io.close()
