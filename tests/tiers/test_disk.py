"""The disk tier beside what all tiers do: its limit, the order in which parts go, and storage that fails."""

from __future__ import annotations

import json
import os
import random
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

from kvdock.tiers.disk.files import File
from kvdock.tiers.disk.folder import FolderInUse
from kvdock.tiers.disk.index import offset_of
from kvdock.tiers.disk.io import MOST_RUN, Io
from kvdock.tiers.disk.log import Segment, key_of, record_bytes
from kvdock.tiers.disk.space import Space
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
                for old in mine[max(0, at - 3) : at]:  # so that some of a segment stays
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


def test_parts_that_are_used_stay_and_others_go(folder: Path, parts: Parts) -> None:
    loved, others = parts.many(3, 300 * KIB), parts.many(3, 300 * KIB)
    with opened(folder) as tier:
        store_all(tier, [*loved, *others])
        for _ in range(8):
            assert_loads(tier, loved)
            store_in_turn(tier, parts.many(12, MIB))
        assert there(tier, loved + others) == [True] * 3 + [False] * 3
        ARENA.reset()
        assert_loads(tier, loved)
        store_in_turn(tier, parts.many(120, MIB))
        assert there(tier, loved) == [False] * 3


def test_of_a_prompt_the_end_goes_first(folder: Path, parts: Parts) -> None:
    """Without what precedes it, it would not be found."""
    prompt = parts.many(14, 500 * KIB)
    with opened(folder) as tier:
        store_in_turn(tier, prompt)
        assert all(there(tier, prompt))
        lengths = set()
        for _ in range(30):
            store_in_turn(tier, parts.many(4, 500 * KIB))
            has = [tier._space.has(key_of(part.name)) for part in prompt]
            assert has == sorted(has, reverse=True)
            lengths.add(sum(has))
        assert {0, 14} < lengths


def test_what_stays_is_not_written_again(folder: Path, parts: Parts) -> None:
    """A quarter of the log is asked for again and again, and as much is written beside it as the log takes thrice."""
    hot = parts.many(LIMIT // (2 * MIB), 500 * KIB)
    with opened(folder) as tier:
        store_in_turn(tier, hot)
        count = len(hot)
        for _ in range(24):
            assert all(there(tier, hot))
            store_in_turn(tier, parts.many(8, 500 * KIB))
            count += 8
        stored = count * record_bytes(500 * KIB)
        assert stored > 3 * LIMIT and stored <= tier.usage().wear_bytes < stored + 64 * PAGE_BYTES
        ARENA.reset()
        assert_loads(tier, hot)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_parts_of_many_lengths_share_the_gaps_and_none_is_wrong(folder: Path, parts: Parts, index: str) -> None:
    draw, made = random.Random(index), list[Part]()
    for _ in range(3):
        with opened(folder) as tier:
            for _ in range(60):
                new = [parts.make(draw.choice((1, 5000, 70_000, 200_000, MIB))) for _ in range(draw.randint(1, 6))]
                ARENA.reset()
                store_all(tier, new)
                assert_loads(tier, new)
                made += new
                there(tier, draw.sample(made, min(len(made), 9)))
            found = [part for part, is_there in zip(made, there(tier, made), strict=True) if is_there]
            assert 0.6 * LIMIT < sum(record_bytes(part.record.length) for part in found) < LIMIT
            for part in found:
                ARENA.reset()
                assert_loads(tier, [part])
        if index == "lost":
            (folder / "index.db").unlink()
        with opened(folder) as tier:
            assert all(there(tier, found))
            for part in made:
                ARENA.reset()
                (got,) = load(tier, [part])
                assert not got.is_accepted or got.data == part.data


def test_rows_of_what_was_evicted_leave_the_index_before_their_place_is_written(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, evict = [], Space._thinned

    def noted(self: Space, segment: Segment, length: int) -> Segment | None:
        chosen = evict(self, segment, length)
        rows = [offset_of(row[0]) for row in self._index.rows(segment.sequence)]
        seen.append(rows == sorted(entry.offset for some in self.parts() for _, entry in some if entry[0] is segment))
        return chosen

    monkeypatch.setattr(Space, "_thinned", noted)
    with opened(folder) as tier:
        store_in_turn(tier, parts.many(60, MIB))
    assert len(seen) > 5 and all(seen)


def test_what_is_being_loaded_and_stays_keeps_nobody_waiting(folder: Path, parts: Parts) -> None:
    held = parts.make(MIB)
    with opened(folder) as tier:
        store_all(tier, [held])
        (entry,) = tier._space.hold_all([(key_of(held.name), held.record.length)])
        assert entry is not None
        for _ in range(3 * LIMIT // MIB):
            store_in_turn(tier, parts.many(1, MIB))
            assert there(tier, [held]) == [True]
        tier._space.release(entry)


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
        assert [dict(segment.readers) for segment in tier._log.segments.values()] == [{}]


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


# --------------------------------------------------------------------------- input and output


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
