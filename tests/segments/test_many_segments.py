"""How many segments a pool may have, which of those that went are remembered, and which name is a segment's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from bytes_helpers import shared_objects

from kvdock import _core
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import RemovedSegments, SegmentPool
from kvdock.shm import objects as shm
from kvdock.shm.errors import PoolFull, SegmentAbsent, SegmentCorrupt

pytestmark = pytest.mark.security
MIB = 1 << 20


@pytest.fixture
def pool_id() -> Iterator[int]:
    """That of a live pool, so that no server that starts meanwhile removes its objects."""
    chosen = secrets.randbits(64)
    lock = PoolLock.create(chosen)
    yield chosen
    left = [name for name in shared_objects(chosen) if not name.endswith(".lock")]
    for name in left:
        shm.unlink(f"/{name}")
    lock.close(unlink=True)
    assert left == []


def test_a_pool_with_as_many_segments_as_it_may_have_grows_again_when_one_is_gone(
    pool_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "MAX_SEGMENTS", 2)
    pool = SegmentPool(pool_id, limit_bytes=4 * MIB, segment_bytes=MIB)
    first, _ = pool.grow(), pool.grow()
    with pytest.raises(PoolFull, match="segments of a pool: found 2, wanted less than 2: a larger segment_bytes"):
        pool.grow()
    pool.retire(first.id)
    assert pool.grow().id == 2
    pool.close()


def test_of_removed_segments_the_latest_are_told_to_those_that_have_not_heard_of_them() -> None:
    removed = RemovedSegments()
    for segment in range(2 * _core.MAX_SEGMENTS):
        removed.add(segment)
    assert removed.since(removed.count) == []
    assert removed.since(removed.count - 3) == [removed.count - 3, removed.count - 2, removed.count - 1]
    assert removed.since(0) == list(range(_core.MAX_SEGMENTS, 2 * _core.MAX_SEGMENTS))


def test_two_objects_for_one_segment_are_not_adopted(pool_id: int) -> None:
    first = SegmentPool(pool_id, limit_bytes=MIB)
    info = first.grow()
    first.close(unlink=False)
    twin = shm.segment_name(pool_id, info.id, 1)
    os.close(shm.create(twin, info.bytes))
    second = SegmentPool(pool_id, limit_bytes=MIB)
    with pytest.raises(SegmentCorrupt, match=f"found {twin} and {info.name}, wanted one object"):
        second.adopt()
    assert len(shared_objects(pool_id)) == 3
    shm.unlink(twin)
    with pytest.raises(SegmentAbsent, match="segment 7: found no such object"):
        second.adopt(known=[info.id, 7])
    second.adopt(known=[])
    assert len(shared_objects(pool_id)) == 1
