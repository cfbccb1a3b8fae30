"""Several processes, GPUs and tools: workers that share one segment, and the kernels under compute-sanitizer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from api_helpers import eventually
from cuda_helpers import needs_gpu, needs_two_gpus
from paths import SUPPORT

from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import SegmentPool
from kvdock.shm.segment import SegmentInfo

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


class Peers:
    """Starts cuda_peer.py over one segment."""

    def __init__(self, pool: SegmentPool, info: SegmentInfo) -> None:
        self._common = [f"{pool.pool_id:016x}"]
        self._segment = json.dumps(asdict(info))
        self.seed = int(np.random.default_rng().integers(1 << 31))

    def start(self, verb: str, device: int = 0, sums: object = ()) -> subprocess.Popen[str]:
        program = [sys.executable, str(SUPPORT / "cuda_peer.py"), verb, *self._common, str(device), str(self.seed)]
        return subprocess.Popen([*program, self._segment, json.dumps(sums)], stdout=subprocess.PIPE, text=True)


def answer_of(process: subprocess.Popen[str]) -> dict[str, object]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture
def peers() -> Iterator[Peers]:
    """With a lock, so that no server that starts meanwhile takes the pool for one that was left behind."""
    pool_id = secrets.randbits(64)
    lock = PoolLock.create(pool_id, address="a test's")
    pool = SegmentPool(pool_id, limit_bytes=64 << 20)
    try:
        info = pool.grow()
        eventually(lambda: pool.prefaulted_bytes() == pool.allocated_bytes)
        yield Peers(pool, info)
    finally:
        pool.close()
        lock.close(unlink=True)


class TestOneGpu:
    pytestmark = needs_gpu

    def test_two_processes_read_what_a_third_stored_in_their_segment(self, peers: Peers) -> None:
        sums = answer_of(peers.start("store"))["sums"]
        readers = [peers.start("load", sums=sums) for _ in range(2)]
        assert [answer_of(reader) for reader in readers] == [{"right": True}] * 2

    def test_another_content_is_not_taken_for_it(self, peers: Peers) -> None:
        answer_of(peers.start("store"))
        assert answer_of(peers.start("load", sums=[1] * 6)) == {"right": False}

    @pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
    def test_the_kernels_are_clean_under_compute_sanitizer(self, tool: str) -> None:
        if not Path(SANITIZER).exists():
            pytest.skip("compute-sanitizer is not installed")
        script = str(SUPPORT / "cuda_sanitized.py")
        program = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, script]
        done = subprocess.run(program, capture_output=True, text=True, timeout=170, env=dict(os.environ))
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "all sums agree" in done.stdout and "SUMMARY: 0 " in done.stdout


class TestTwoGpus:
    pytestmark = needs_two_gpus

    def test_two_ranks_read_one_latent_part_at_once(self, peers: Peers) -> None:
        sums = answer_of(peers.start("store", 0))["sums"]
        readers = [peers.start("load", device, sums) for device in (0, 1)]
        assert [answer_of(reader) for reader in readers] == [{"right": True}] * 2
