"""Proof of life: real processes that die, and what is left of their pools."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from adoption_helpers import remove_stale_of
from bytes_helpers import open_descriptors, shared_objects

from kvdock import _core
from kvdock.api.pool.lock import LeftPool, PoolLock, remove_stale, server_alive
from kvdock.api.pool.segments import SegmentPool
from kvdock.datapath.liveness import MemberLiveness
from kvdock.shm import objects as shm
from kvdock.shm.errors import ForeignObject, PoolGone, PoolInUse
from kvdock.shm.objects import create_region

_MEMBER = """
import os, random, signal, sys
from kvdock.datapath.liveness import MemberLiveness
held = MemberLiveness(sys.argv[1], source=random.SystemRandom(), with_children=sys.argv[2] == "gpu")
child = os.fork() if sys.argv[2] != "alone" else -1
if child != 0:
    print(held.offset, child, flush=True)
signal.pause()
"""

_SERVER = """
import signal, sys, time
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import SegmentPool
pool_id = int(sys.argv[1])
lock = PoolLock.create(pool_id, address=sys.argv[2])
pool = SegmentPool(pool_id, limit_bytes=8 << 20, segment_bytes=4 << 20)
pool.grow()
while pool.prefaulted_bytes() < pool.allocated_bytes:
    time.sleep(0.001)
print("up", flush=True)
signal.pause()
"""


@pytest.fixture
def pool_id() -> Iterator[int]:
    chosen = random.SystemRandom().getrandbits(64)
    yield chosen
    left = shared_objects(chosen)
    for name in left:
        Path("/dev/shm", name).unlink()
    assert left == []


@pytest.fixture
def address(tmp_path: Path) -> str:
    """That of the test's pools: servers elsewhere that start meanwhile leave them alone, dead or not."""
    return str(tmp_path / "kvdock.sock")


@pytest.fixture
def lock(pool_id: int) -> Iterator[PoolLock]:
    made = PoolLock.create(pool_id)
    yield made
    made.close(unlink=True)


@contextmanager
def running(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A child and the words of the one line it printed; killed at the end if it still lives."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().split()
        finally:
            child.kill()


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(10)


def kill_and_see_it_gone(pid: int) -> None:
    """For a process that is not our child: its pidfd becomes readable when it has ended."""
    handle = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([handle], [], [], 10)[0]
    finally:
        os.close(handle)


def test_a_killed_members_byte_is_free(lock: PoolLock) -> None:
    with running(_MEMBER, str(lock.path), "alone") as (child, (offset, _)):
        assert lock.member_alive(int(offset))
        kill(child)
        assert not lock.member_alive(int(offset))


@pytest.mark.security
@pytest.mark.parametrize(("copies_with", "keeps"), [("cpu", False), ("gpu", True)])
def test_a_child_keeps_its_dead_parents_byte_only_if_that_copied_with_a_gpu(
    copies_with: str, keeps: bool, lock: PoolLock
) -> None:
    """The child sleeps, as a helper of some library may. It has no slots; but a GPU may still copy for its parent."""
    with running(_MEMBER, str(lock.path), copies_with) as (child, (offset, grandchild)):
        assert lock.member_alive(int(offset))
        kill(child)
        held_after_parent = lock.member_alive(int(offset))
        kill_and_see_it_gone(int(grandchild))
        assert held_after_parent is keeps
        assert not lock.member_alive(int(offset))


def test_a_members_lock_needs_no_descriptor_and_ends_with_close(lock: PoolLock) -> None:
    before = open_descriptors()
    member = MemberLiveness(lock.path, source=random.Random(1))
    assert open_descriptors() == before
    assert 4096 <= member.offset < 1 << 62
    assert lock.member_alive(member.offset) and not lock.member_alive(member.offset + 1)
    member.close()
    assert not lock.member_alive(member.offset)


def test_two_members_never_share_a_byte_even_with_one_random_source(lock: PoolLock) -> None:
    first = MemberLiveness(lock.path, source=random.Random(1))
    second = MemberLiveness(lock.path, source=random.Random(1))
    assert first.offset != second.offset
    with pytest.raises(BlockingIOError):
        _core.MemberLock(str(lock.path), first.offset)
    first.close()
    second.close()


def test_a_lock_file_shorter_than_a_page_or_missing_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x")
    with pytest.raises(ForeignObject, match="wanted -rw-------"):
        MemberLiveness(short, source=random.Random(1))
    short.chmod(0o600)
    with pytest.raises(ValueError, match="found 1 bytes, wanted at least 4096"):
        MemberLiveness(short, source=random.Random(1))
    with pytest.raises(FileNotFoundError):
        MemberLiveness(tmp_path / "none", source=random.Random(1))
    with pytest.raises(ValueError, match="lock offset: found -1"):
        _core.MemberLock(str(short), -1)


def test_the_lock_file_is_private_whole_and_held_from_its_first_moment(pool_id: int, address: str) -> None:
    before = open_descriptors()
    lock = PoolLock.create(pool_id, address=address)
    found = lock.path.stat()
    assert (found.st_mode & 0o777, found.st_size, found.st_ino) == (0o600, 4096, lock.inode)
    assert server_alive(pool_id)
    with pytest.raises(FileExistsError):
        PoolLock.create(pool_id)
    with pytest.raises(PoolInUse):
        PoolLock.adopt(pool_id)
    lock.close(unlink=False)
    assert not server_alive(pool_id)
    adopted = PoolLock.adopt(pool_id)
    assert adopted.inode == lock.inode and server_alive(pool_id)
    adopted.close(unlink=True)
    adopted.close(unlink=True)
    with pytest.raises(PoolGone):
        PoolLock.adopt(pool_id)
    assert open_descriptors() == before


def test_what_a_killed_server_left_is_removed_and_live_pools_stay(pool_id: int, address: str) -> None:
    live = PoolLock.create(pool_id ^ 1)
    pool = SegmentPool(pool_id ^ 1, limit_bytes=1 << 20)
    pool.grow()
    with running(_SERVER, str(pool_id), address) as (child, _):
        create_region(shm.region_name(pool_id), 4096)
        assert remove_stale_of(pool_id, pool_id ^ 1) == []
        kill(child)
    assert len(shared_objects(pool_id)) == 3
    assert remove_stale_of(pool_id, pool_id ^ 1, keep=(pool_id,)) == []
    removed = remove_stale_of(pool_id, pool_id ^ 1)
    assert removed[-1] == f"kvdock-{pool_id:016x}.lock" and len(removed) == 3
    assert shared_objects(pool_id) == []
    assert len(shared_objects(pool_id ^ 1)) == 2
    pool.close()
    live.close(unlink=True)
    assert shared_objects(pool_id ^ 1) == []


def test_a_pool_whose_server_dies_while_others_clear_up_is_judged_by_itself(pool_id: int, tmp_path: Path) -> None:
    """Not by a list made while that server lived. Its lock is left alone: its next server may be looking at it."""
    PoolLock.create(pool_id, tmp_path).close(unlink=False)
    judged = iter([False, True])
    assert remove_stale(tmp_path, spare=lambda left: next(judged)) == []
    assert next(judged, None) is None, "once more when its lock was held"
    assert remove_stale(tmp_path, spare=lambda left: not server_alive(pool_id, tmp_path)) == []
    PoolLock.adopt(pool_id, tmp_path).close(unlink=True)


def test_objects_without_a_lock_file_belong_to_nobody_and_go(pool_id: int, tmp_path: Path) -> None:
    Path(tmp_path, shm.region_name(pool_id).lstrip("/")).touch(mode=0o600)
    assert remove_stale(tmp_path) == [f"kvdock-{pool_id:016x}-table"]
    assert list(tmp_path.iterdir()) == []


def test_what_another_remover_was_faster_with_is_not_called_removed(pool_id: int, tmp_path: Path) -> None:
    lock = PoolLock.create(pool_id, tmp_path)
    lock.close(unlink=False)

    def while_another_removes_it(_left: LeftPool) -> bool:
        lock.path.unlink(missing_ok=True)
        return False

    assert remove_stale(tmp_path, spare=while_another_removes_it) == []
