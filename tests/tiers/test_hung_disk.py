"""A disk whose writes, index or all calls hang: it is off, no request waits for it, and the server ends in time."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs here
import pytest
from api_helpers import MIB, eventually, unique
from hung_mount import hung_mount
from mover_steps import LATE_STORE_S, SteppedServer
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_stores import DiskStore, clear_once_written, clear_pool, has_state, opened

from kvdock.protocol.schemas import LookupAnswer

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

POOL_CHUNKS = 32
PART = MIB // 4
EVERYTHING = "read write sync stat"


@pytest.fixture
def disk() -> Iterator[DiskStore]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(DiskStore, Path(name)) as one:
        yield one


def over(disk: DiskStore, armed: Path) -> SteppedServer:
    pool = POOL_CHUNKS * PART
    return SteppedServer(
        armed, disk.environment | {LATE_STORE_S: "1"}, pool_bytes=pool, segment_bytes=pool, tier_asks=1,
        heartbeat_s=0.1, tier_drain_s=0.5, **disk.settings,
    )


def reads_all(engine: TierEngine, keys: list[bytes], request: str) -> None:
    found = engine.awaited(keys, request)
    assert found.hit_tokens == len(keys) * CHUNK_TOKENS
    engine.read(keys, found)
    engine.release(found)


@pytest.mark.parametrize("kinds", ["write", "sync", EVERYTHING])
def test_a_disk_that_hangs_is_off_until_it_goes_on_and_holds_up_nobody(
    disk: DiskStore, tmp_path: Path, kinds: str
) -> None:
    with over(disk, tmp_path / "armed") as server:
        engine = TierEngine(server.unix, manifest(PART))
        has_state(server.unix, "open")
        kept = engine.chain(4)
        engine.store(kept)
        clear_once_written(server.unix)
        hangs(disk, engine, kept, kinds)
        disk.resume()
        is_used_again(server, engine, kept)
        engine.close()


def test_a_server_whose_disk_hangs_ends_and_the_next_one_finds_what_was_stored(disk: DiskStore, tmp_path: Path) -> None:
    with over(disk, tmp_path / "armed") as server:
        engine = TierEngine(server.unix, manifest(PART))
        has_state(server.unix, "open")
        kept = engine.chain(4)
        engine.store(kept)
        clear_once_written(server.unix)
        hangs(disk, engine, kept, EVERYTHING)
        more = engine.chain(POOL_CHUNKS - 8)  # of the slots that no hung call has
        engine.store(more)
        reads_all(engine, more, "more")
        mover = server.mover()
        engine.close()
        assert server.stop() == 0, "while its disk hangs"
        assert not psutil.pid_exists(mover.pid) and not server.shared_memory()
    disk.resume()
    with over(disk, tmp_path / "armed") as server:
        engine = TierEngine(server.unix, manifest(PART))
        has_state(server.unix, "open")
        reads_all(engine, kept, "after")
        engine.close()


def hangs(disk: DiskStore, engine: TierEngine, kept: list[bytes], kinds: str) -> None:
    """Until the tier is off; then no request waits, and chunks in the pool are hits."""
    disk.stop(kinds)
    stored, names = engine.chain(4), (unique("hangs") for _ in itertools.count())
    engine.store(stored)

    def is_off() -> bool:
        let_go(engine, engine.awaited(kept, next(names), 0.5))
        return [one.state for one in engine.client.status().tiers] == ["off"]

    eventually(is_off, 30.0)
    found = engine.lookup(kept, next(names), 20.0)
    assert found.pending is None
    let_go(engine, found)
    reads_all(engine, stored, next(names))


def let_go(engine: TierEngine, found: LookupAnswer) -> None:
    if found.lease is not None:
        engine.release(found)


def is_used_again(server: SteppedServer, engine: TierEngine, keys: list[bytes]) -> None:
    """And no slot is lost."""
    has_state(server.unix, "open")
    names = (unique("again") for _ in itertools.count())
    eventually(lambda: not engine.client.status().leases and not engine.client.status().reservations, 30.0)
    clear_pool(server.unix)
    pool = engine.client.status().pool
    assert (pool.reserved_bytes, pool.ready_bytes, pool.quarantined_bytes) == (0, 0, 0)

    def comes() -> bool:
        found = engine.awaited(keys, next(names))
        engine.read(keys, found)
        let_go(engine, found)
        return found.hit_tokens == len(keys) * CHUNK_TOKENS

    eventually(comes, 30.0)


def test_a_server_ends_whose_mover_hangs_in_the_kernel_and_cannot_be_killed(tmp_path: Path) -> None:
    """The file system hangs from the beginning: the tier is never opened."""
    mount = tmp_path / "mount"
    mount.mkdir()
    with hung_mount(mount) as asked, SteppedServer(
        tmp_path / "armed", pool_bytes=8 * MIB, segment_bytes=8 * MIB, tier_asks=1, heartbeat_s=0.1,
        tier_drain_s=0.5, disk_path=str(mount / "disk"), disk_bytes=64 * MIB,
    ) as server:
        engine = TierEngine(server.unix, manifest(PART))
        has_state(server.unix, "off")
        mover = server.mover()
        assert asked.wait(30.0)
        keys = engine.chain(8)
        engine.store(keys)
        assert engine.lookup(engine.chain(1), "none", 20.0).pending is None
        reads_all(engine, keys, "stored")
        engine.close()
        assert server.stop() == 0
        assert "it is left behind" in server.log_text() and psutil.pid_exists(mover.pid)
        assert not server.shared_memory()
    eventually(lambda: not psutil.pid_exists(mover.pid), 30.0)
