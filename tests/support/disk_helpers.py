"""Folders of a disk tier in tests: opening, filling, and what they take of storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paths import SUPPORT
from tier_helpers import ARENA, MIB, Part, patient, store_all

from kvdock.tiers.disk.tier import DiskTier

LIMIT: Final = 32 * MIB
ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": str(SUPPORT)}
PROCESSES: Final = str(SUPPORT / "disk_processes.py")


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
