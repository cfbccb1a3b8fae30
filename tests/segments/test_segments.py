"""Segments are made whole or not at all, each unusable one has its own error, closed ones are gone; chunk keys."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
from api_helpers import eventually
from bytes_helpers import open_descriptors, shared_objects
from hypothesis import given, settings, strategies as st

from kvdock import _core
from kvdock.api.pool.capacity import Capacity
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import Prefault, SegmentPool
from kvdock.datapath.segments import AttachedSegments
from kvdock.protocol.errors import ManifestError
from kvdock.protocol.keys import HashedChain, KeyChain, canonical_manifest, chunk_keys, namespace_digest
from kvdock.shm import objects as shm
from kvdock.shm.errors import (
    PoolFull,
    PoolTooSmall,
    SegmentAbsent,
    SegmentCorrupt,
    SegmentNotReady,
    SegmentWrongVersion,
    SlotOutOfBounds,
)
from kvdock.shm.objects import create_region, open_region
from kvdock.shm.segment import SegmentInfo

MIB = 1 << 20


@pytest.fixture
def pool_id() -> Iterator[int]:
    """Live for the test's duration, so that no server starting meanwhile takes its objects for stale."""
    chosen = random.SystemRandom().getrandbits(64)
    lock = PoolLock.create(chosen)
    yield chosen
    left = segments_left(chosen)
    for name in left:
        shm.unlink(f"/{name}")
    lock.close(unlink=True)
    assert left == []


def segments_left(pool_id: int) -> list[str]:
    return [name for name in shared_objects(pool_id) if not name.endswith(".lock")]


@pytest.fixture
def pool(pool_id: int) -> Iterator[SegmentPool]:
    made = SegmentPool(pool_id, limit_bytes=20 * MIB, segment_bytes=8 * MIB)
    yield made
    made.close()


def test_a_pool_grows_to_its_limit_in_private_fully_allocated_segments(pool: SegmentPool) -> None:
    sizes = []
    while pool.can_grow():
        info = pool.grow()
        sizes.append(info.bytes)
        found = Path(f"/dev/shm{info.name}").stat()
        assert (found.st_mode & 0o777, found.st_size) == (0o600, info.bytes)
        assert found.st_blocks * 512 >= info.bytes
    assert sizes == [8 * MIB, 8 * MIB, 4 * MIB]
    assert pool.allocated_bytes == 20 * MIB
    with pytest.raises(PoolFull, match=f"found {20 * MIB}, wanted less than {20 * MIB}"):
        pool.grow()
    assert [info.id for info in pool.segments] == [0, 1, 2]


def test_prefault_reaches_every_byte_and_says_how_far_it_is(pool_id: int) -> None:
    pool = SegmentPool(pool_id, limit_bytes=64 * MIB, segment_bytes=64 * MIB, prefault_threads=3)
    info = pool.grow()
    assert 0 <= pool.prefaulted_bytes(info.id) <= info.bytes
    eventually(lambda: pool.prefaulted_bytes() == 64 * MIB, 30.0)
    assert pool.prefaulted_bytes() == pool.prefaulted_bytes(info.id) == 64 * MIB
    mapped = next(line for line in _smaps_of(info.name) if line.startswith("Rss:"))
    assert int(mapped.split()[1]) << 10 == 64 * MIB
    pool.close()


def test_prefault_that_the_kernel_refuses_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fd = os.memfd_create("kvdock-test")
    os.ftruncate(fd, 64 * MIB)
    mapping = _core.Mapping(fd, 64 * MIB)
    os.ftruncate(fd, 0)
    os.close(fd)
    prefault = Prefault(mapping, 1, "-test")
    eventually(lambda: "prefault ends at 0 of 67108864 bytes: " in caplog.text)
    prefault.stop()
    assert prefault.done_bytes == 0


def _smaps_of(name: str) -> list[str]:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(f"/dev/shm{name}"))
    return lines[start : start + 32]


def test_segments_are_not_mapped_in_forked_children(pool: SegmentPool) -> None:
    flags = next(line for line in _smaps_of(pool.grow().name) if line.startswith("VmFlags:"))
    assert "dc" in flags.split()


@pytest.mark.security
def test_a_segment_that_was_cut_short_is_corrupt_before_a_copy_touches_it(pool: SegmentPool) -> None:
    engine = AttachedSegments(pool.pool_id)
    info = engine.attach(pool.grow())
    engine.require_whole(info.id)
    for left in (info.bytes - 1, 4096, 0):
        os.truncate(f"/dev/shm{info.name}", left)
        assert engine.mapping(info.id).reaches_end() is (left == info.bytes - 1), "the kernel cuts whole pages"
    with pytest.raises(SegmentCorrupt, match=f"found fewer bytes, wanted {info.bytes} bytes"):
        engine.require_whole(info.id)
    engine.close()


def test_close_leaves_no_descriptor_thread_mapping_or_name(pool_id: int) -> None:
    before = (open_descriptors(), threading.active_count())
    for _ in range(3):
        pool = SegmentPool(pool_id, limit_bytes=16 * MIB, segment_bytes=8 * MIB)
        engine = AttachedSegments(pool_id)
        for _ in range(2):
            engine.attach(pool.grow())
        engine.close()
        pool.close()
        assert segments_left(pool_id) == []
    assert (open_descriptors(), threading.active_count()) == before
    assert f"{pool_id:016x}" not in Path("/proc/self/maps").read_text()


def test_engines_see_the_servers_bytes_and_nothing_outside_a_segment(pool: SegmentPool) -> None:
    info = pool.grow()
    engine = AttachedSegments(pool.pool_id)
    assert engine.attach(info, populate=True) == engine.attach(info) == info
    with memoryview(pool._segments[0].mapping) as theirs, memoryview(engine.mapping(0)) as ours:
        theirs[info.bytes - 3 :] = b"end"
        assert bytes(ours[info.bytes - 3 :]) == b"end"
        with pytest.raises(BufferError):
            engine.close()
    engine = AttachedSegments(pool.pool_id)
    engine.attach(info)
    base = engine.mapping(0).address
    assert engine.address(0, info.data_offset, info.data_bytes) == base + info.data_offset
    first, end = info.data_offset, info.bytes
    for offset, length in ((first - 1, 1), (first, info.data_bytes + 1), (end, 1), (end + 1, 0), (8192, -1)):
        with pytest.raises(SlotOutOfBounds):
            engine.address(0, offset, length)
    engine.close()
    with pytest.raises(SlotOutOfBounds, match="segment: found 0"):
        engine.address(0, info.data_offset, 1)


# ------------------------------------------------------------------ headers


@pytest.fixture
def info(pool: SegmentPool) -> SegmentInfo:
    return pool.grow()


def _flip(pool: SegmentPool, at: int) -> None:
    with memoryview(pool._segments[0].mapping) as view:
        view[at] ^= 1


def test_an_absent_segment_is_named_as_absent(pool: SegmentPool) -> None:
    with pytest.raises(SegmentAbsent, match="no such object"):
        AttachedSegments(pool.pool_id).attach(SegmentInfo(5, shm.segment_name(pool.pool_id, 5, 0), MIB, 4096))


@pytest.mark.parametrize("size", [0, 100, 8192])
def test_a_segment_without_its_header_is_not_ready(pool_id: int, size: int) -> None:
    name = shm.segment_name(pool_id, 0, 0)
    fd = shm.create(name, 8192)
    os.ftruncate(fd, size)
    os.close(fd)
    with pytest.raises(SegmentNotReady):
        AttachedSegments(pool_id).attach(SegmentInfo(0, name, 8192, 4096))
    shm.unlink(name)


def test_another_builds_version_is_not_called_corrupt(pool: SegmentPool, info: SegmentInfo) -> None:
    _flip(pool, 8)
    with pytest.raises(SegmentWrongVersion) as caught:
        AttachedSegments(pool.pool_id).attach(info)
    assert str(_core.SEGMENT_VERSION) in str(caught.value)


def test_any_other_flipped_header_bit_is_corrupt(pool: SegmentPool, info: SegmentInfo) -> None:
    covered = [*range(8), *range(12, 56)]
    for at in covered:
        _flip(pool, at)
        with pytest.raises(SegmentCorrupt):
            AttachedSegments(pool.pool_id).attach(info)
        _flip(pool, at)
    AttachedSegments(pool.pool_id).attach(info)


def test_a_segment_of_another_pool_id_or_size_is_corrupt(pool: SegmentPool, info: SegmentInfo) -> None:
    stranger = AttachedSegments(pool.pool_id ^ 1)
    with pytest.raises(SegmentCorrupt, match="found pool"):
        stranger.attach(info)
    for described in (replace(info, bytes=info.bytes - 4096), replace(info, id=1), replace(info, data_offset=8192)):
        with pytest.raises(SegmentCorrupt):
            AttachedSegments(pool.pool_id).attach(described)


def test_a_truncated_segment_is_corrupt_and_never_faults(pool: SegmentPool, info: SegmentInfo) -> None:
    eventually(lambda: pool.prefaulted_bytes() == pool.allocated_bytes, 30.0)
    os.truncate(f"/dev/shm{info.name}", MIB)
    with pytest.raises(SegmentCorrupt):
        AttachedSegments(pool.pool_id).attach(info)


# ------------------------------------------------------------------ memory that is not there


def _v2(root: Path, limit: str, usage: int) -> Capacity:
    group = root / "a" / "b"
    group.mkdir(parents=True)
    (root / "proc").write_text("0::/a/b\n")
    (root / "a" / "memory.max").write_text(limit)  # the limit may sit above the process's own group
    (root / "a" / "memory.current").write_text(f"{usage}\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{usage}\n")
    (root / "a" / "memory.stat").write_text(f"anon 5\ninactive_file {MIB}\n")
    return Capacity(proc_cgroup=root / "proc", cgroup_root=root)


def _v1(root: Path, limit: str, usage: int) -> Capacity:
    group = root / "memory" / "a"
    group.mkdir(parents=True)
    (root / "proc").write_text("5:devices:/a\n4:memory:/a\n")
    (group / "memory.limit_in_bytes").write_text(limit)
    (group / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"total_inactive_file {MIB}\n")
    return Capacity(proc_cgroup=root / "proc", cgroup_root=root)


@pytest.mark.parametrize("make", [_v1, _v2])
def test_a_control_group_too_small_for_the_pool_is_told_before_anything_is_made(
    tmp_path: Path, pool_id: int, make: object
) -> None:
    capacity = (_v1 if make is _v1 else _v2)(tmp_path, f"{40 * MIB}\n", 11 * MIB)
    capacity.require(30 * MIB)  # the page cache counts as free
    with pytest.raises(PoolTooSmall, match=r"control group .*/a") as caught:
        SegmentPool(pool_id, limit_bytes=30 * MIB + 4096, capacity=capacity).require_limit()
    assert (caught.value.found, caught.value.wanted) == (30 * MIB, 30 * MIB + 4096)


@pytest.mark.parametrize(("make", "none"), [(_v1, str((1 << 63) - 4096)), (_v2, "max")])
def test_no_limit_is_no_limit(tmp_path: Path, make: object, none: str) -> None:
    capacity = (_v1 if make is _v1 else _v2)(tmp_path, none, 11 * MIB)
    assert [where for where, _ in capacity.limits()] == ["/dev/shm"]


def test_a_pool_larger_than_dev_shm_is_refused_with_both_sizes(pool_id: int) -> None:
    there = os.statvfs("/dev/shm")
    wanted = there.f_bavail * there.f_frsize + (1 << 40)
    with pytest.raises(PoolTooSmall, match="/dev/shm") as caught:
        SegmentPool(pool_id, limit_bytes=wanted).require_limit()
    assert caught.value.wanted == wanted


_IN_A_SMALL_SHM = """
import os, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", "/dev/shm"], check=True)
from pathlib import Path
from kvdock.api.pool.capacity import Capacity
from kvdock.shm.errors import PoolTooSmall
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import SegmentPool
from kvdock.shm.objects import create_region
try:
    SegmentPool(7, limit_bytes=16 << 20).require_limit()
    print("made")
except PoolTooSmall as error:
    print("early", error.found == 12 << 20, error.wanted == 16 << 20, os.listdir("/dev/shm"))
capacity = Capacity(shm_dir=Path("/"))
pool = SegmentPool(7, limit_bytes=16 << 20, segment_bytes=8 << 20, capacity=capacity, randbits=lambda k: k)
pool.grow()
for attempt in (pool.grow, lambda: create_region("/kvdock-0000000000000007-table", 8 << 20)):
    try:
        attempt()
        print("made")
    except PoolTooSmall as error:
        print("late", error.wanted == 8 << 20, os.listdir("/dev/shm"))
pool.close()
print("end", os.listdir("/dev/shm"))
"""


def test_a_full_dev_shm_is_an_error_with_sizes_and_leaves_no_object() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small /dev/shm needs root")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("this system allows no private mount namespace")
    command = ["unshare", "-m", sys.executable, "-c", _IN_A_SMALL_SHM]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    name = "['kvdock-0000000000000007-0000-0000000000000040']"
    assert ran.stdout.splitlines() == ["early True True []", f"late True {name}", f"late True {name}", "end []"]


def test_sizes_out_of_range_are_refused(pool_id: int) -> None:
    for limit, segment, threads in ((100, MIB, 1), (MIB, (1 << 30) + 1, 1), (MIB, 4096, 1), (MIB, MIB, 0)):
        with pytest.raises(ValueError, match=r"found .*, wanted"):
            SegmentPool(pool_id, limit_bytes=limit, segment_bytes=segment, prefault_threads=threads)


# ------------------------------------------------------------------ restart and regions


def test_a_later_server_adopts_segments_with_their_bytes_and_ids(pool_id: int) -> None:
    first = SegmentPool(pool_id, limit_bytes=24 * MIB, segment_bytes=8 * MIB)
    infos = [first.grow(), first.grow()]
    with memoryview(first._segments[1].mapping) as view:
        view[-4:] = b"kept"
    first.close(unlink=False)
    second = SegmentPool(pool_id, limit_bytes=24 * MIB, segment_bytes=8 * MIB)
    second.adopt()
    assert second.segments == infos
    with memoryview(second._segments[1].mapping) as view:
        assert bytes(view[-4:]) == b"kept"
    assert second.grow().id == 2
    second.close()


def test_regions_are_zeroed_private_and_found_again(pool_id: int) -> None:
    name = shm.region_name(pool_id)
    region = create_region(name, 3 * MIB)
    with memoryview(region) as view:
        assert bytes(view) == bytes(3 * MIB)
        view[0] = 7
    with pytest.raises(FileExistsError):
        create_region(name, MIB)
    again = open_region(name)
    with memoryview(again) as view:
        assert (view[0], again.bytes) == (7, 3 * MIB)
    shm.unlink(name)
    shm.unlink(name)
    with pytest.raises(FileNotFoundError):
        open_region(name)


# ------------------------------------------------------------------ identity


def test_equal_manifests_share_a_namespace_whatever_their_key_order() -> None:
    one = {"model": "m", "groups": [{"kind": "full", "part_bytes": 4}], "seed": None}
    two = {"seed": None, "groups": ({"part_bytes": 4, "kind": "full"},), "model": "m"}
    assert canonical_manifest(one) == b'{"groups":[{"kind":"full","part_bytes":4}],"model":"m","seed":null}'
    assert namespace_digest(one) == namespace_digest(two)
    for changed in ({**one, "model": "M"}, {**one, "extra": 0}, {**one, "seed": ""}, {**one, "groups": []}):
        assert namespace_digest(changed) != namespace_digest(one)


@pytest.mark.parametrize("bad", [{"a": 1.5}, {"a": b"x"}, {"a": {1: 2}}, {"a": [object()]}])
def test_what_has_no_one_spelling_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ManifestError):
        canonical_manifest(bad)


def test_keys_are_the_documented_chain() -> None:
    space = namespace_digest({"model": "m"})
    tokens = list(range(70_000, 70_011))
    parent = blake2b(space, digest_size=32, person=b"kvdock root").digest()
    wanted = []
    for start in (0, 4):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 4])
        parent = blake2b(parent + packed, digest_size=32, person=b"kvdock chunk").digest()
        wanted.append(parent)
    assert chunk_keys(space, tokens, 4) == wanted


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    size=st.integers(1, 9),
)
def test_a_growing_chain_gives_the_same_keys_as_one_call(tokens: list[int], cuts: list[int], size: int) -> None:
    space = bytes(32)
    chain = KeyChain(space, size)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    fresh = [key for a, b in itertools.pairwise(edges) for key in chain.extend(tokens[a:b])]
    assert fresh == chain.keys == chunk_keys(space, tokens, size)
    assert chain.tokens == len(tokens)


def test_keys_of_an_engine_that_hashes_itself_come_from_the_last_hash_of_each_chunk() -> None:
    space, hashes = namespace_digest({"model": "m"}), [bytes([n]) * 32 for n in range(7)]
    wanted = [blake2b(space + hashes[n], digest_size=32, person=b"kvdock hashed").digest() for n in (2, 5)]
    chain = HashedChain(space, 12, known := hashes[:2], 4)
    for count, keys in ((2, []), (3, wanted[:1]), (5, wanted[:1]), (7, wanted)):
        known.extend(hashes[len(known) : count])
        chain.follow(range(100))  # the hashes may lag behind
        assert chain.keys == keys
    with pytest.raises(ManifestError, match="chunk_tokens: found 12, wanted a multiple of 5"):
        HashedChain(space, 12, hashes, 5)


@pytest.mark.parametrize("prefix", [0, 1, 32, 127, 128, 129, 1000])
def test_the_cores_keys_are_pythons_blake2b_for_every_length_and_either_form_of_a_hash(prefix: int) -> None:
    drawn = random.Random(prefix)
    before, hashes = drawn.randbytes(prefix), [drawn.randbytes(size) for size in (*range(0, 300, 7), 32, 128, 256)]
    for person in (b"", b"kvdock hashed", b"sixteen bytes...", b"\0after a zero"):
        wanted = [blake2b(before + one, digest_size=32, person=person).digest() for one in hashes]
        assert _core.hashed_keys(person, before, hashes) == wanted
        assert _core.hashed_keys(person, before, [one.hex() for one in hashes]) == wanted
        assert _core.hashed_keys(person, before, [one.hex().upper() for one in hashes]) == wanted
    assert _core.hashed_keys(b"", before, ()) == []


@pytest.mark.parametrize("text", ["a", "0g", "00x0", "aé"])
def test_a_hash_that_is_not_hex_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"hash: found '{text}', wanted bytes or hex digits"):
        _core.hashed_keys(b"", b"", ["00", text])


@pytest.mark.parametrize("bad", [[1, -1], [1 << 32], ["a"], [1.5], [None]])
def test_tokens_outside_32_bits_are_refused_and_change_nothing(bad: list[int]) -> None:
    chain = KeyChain(bytes(32), 2)
    chain.extend([1])
    with pytest.raises(ManifestError, match="token: found"):
        chain.extend(bad)
    assert (chain.tokens, chain.keys) == (1, [])
    with pytest.raises(ManifestError, match=r"namespace \(bytes\): found 3, wanted 32"):
        KeyChain(b"abc", 2)
    with pytest.raises(ManifestError, match="chunk_tokens: found 0"):
        KeyChain(bytes(32), 0)
