"""How many CPU threads a worker may hash with, beside whatever else runs on its machine."""

from __future__ import annotations

import os
from pathlib import Path

MOST_HASH_THREADS = 8
"""The most that were tried on an H200's host (bench/LOG.md)."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's CPU quota (control groups, version 2): microseconds of CPU, or "max", and of time."""


def hash_threads(cores: float) -> int:
    """Half of a worker's cores, and one at least."""
    return max(1, min(MOST_HASH_THREADS, int(cores / 2)))


def cores_of(workers: int, *, bound: int | None = None, installed: int | None = None, quota: Path = QUOTA) -> float:
    """CPU cores available to each of `workers` workers on this machine: its share of the machine and of the
    container's quota, but no more cores than it is `bound` to. None: as the operating system reports for this
    process."""
    if bound is None:
        bound = len(os.sched_getaffinity(0))
    shared = min(installed or os.cpu_count() or 1, _cores_within(quota))
    return min(bound, shared / workers)


def _cores_within(quota: Path) -> float:
    try:
        used, period = quota.read_text().split()
        return int(used) / int(period)
    except (OSError, ValueError):
        return float("inf")  # no such control group, or "max"
