"""The disk tier beside fio (O_DIRECT, psync, eight jobs, preallocated files) on the same file system.

How fast storage reads and writes memory depends on how much of it lies in one piece. A pool has huge pages where the
kernel gives them, and fio has small ones. So the tier is also beside fio whose C library asks for huge pages, and
beside plain writes of the tier's own memory, in calls of 4 MiB, which differ from the tier in nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.tiers.batch import MIB, Batch
from kvdock.tiers.disk.io import takes_direct
from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.tier import Deadline

FIO_BLOCK_MIB = 4
FIO_JOBS = 8
WAYS = ("write", "read")


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Since glibc 2.35."""


def fio(folder: Path, what: str, mib: int, more: dict[str, str]) -> float:
    """The speed of fio in GB/s. `what`: "read" or "write". `more`: variables of its environment. The files are written
    once before, so that neither allocates."""
    command = [
        "fio", "--name=bench", f"--directory={folder}", "--direct=1", "--ioengine=psync", f"--rw={what}",
        f"--bs={min(FIO_BLOCK_MIB, mib // FIO_JOBS)}m", f"--numjobs={FIO_JOBS}", f"--size={mib // FIO_JOBS}m",
        "--fallocate=posix", "--output-format=json", "--overwrite=1", "--thread", "--mem=malloc", "--group_reporting",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | more)
    figures = json.loads(done.stdout)["jobs"][0][what]
    return float(figures["bw_bytes"]) / 1e9


def fio_rates(folder: Path, mib: int) -> dict[str, float]:
    kinds = {"fio": {}, "fio_huge": HUGE_PAGES}
    return {f"{kind}_{what}_gb_s": fio(folder, what, mib, more) for kind, more in kinds.items() for what in WAYS}


class PlainWrites:
    """Writes the parts as fio does: with as many threads, each with a preallocated file, and in pieces of its size."""

    def __init__(self, folder: Path, parts: Sequence[memoryview]) -> None:
        folder.mkdir()
        size, flags = FIO_BLOCK_MIB * MIB, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if takes_direct(folder) else 0)
        pieces = [part[at : at + size] for part in parts for at in range(0, len(part), size)]
        self._shares = [share for job in range(FIO_JOBS) if (share := pieces[job::FIO_JOBS])]
        self._files = [os.open(folder / str(number), flags) for number in range(len(self._shares))]
        for file, share in zip(self._files, self._shares, strict=True):
            os.posix_fallocate(file, 0, sum(map(len, share)))

    def round(self) -> float:
        """The speed in GB/s."""
        with ThreadPoolExecutor(FIO_JOBS) as threads:
            began_s = time.perf_counter()
            written = sum(threads.map(_write, self._files, self._shares))
            return written / (time.perf_counter() - began_s) / 1e9

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def _write(file: int, pieces: Sequence[memoryview]) -> int:
    at = 0
    for piece in pieces:
        at += os.pwrite(file, piece, at)
    return at


def measure(folder: Path, mib: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """The figures of each round, by name. `folder`: an empty one. Without fio there are no figures of fio. Raises
    TierError."""
    has_fio = shutil.which("fio") is not None
    figures: dict[str, list[float]] = {}

    def note(**found: float) -> None:
        for name, figure in found.items():
            figures.setdefault(name, []).append(figure)

    (folder / "fio").mkdir()
    tier, batch = DiskTier.open(folder / "tier", 4 * mib * MIB, threads=threads), Batch(mib, seed=7)
    plain = PlainWrites(folder / "plain", batch.source)
    try:
        for warm in range(-4, 0):  # before anything counts, every segment and file was written once
            batch.round(tier, -warm)
        plain.round()
        if has_fio:
            fio_rates(folder / "fio", mib)
        for number in range(rounds):
            by_fio = fio_rates(folder / "fio", mib) if has_fio and number % 2 else {}
            plain_rates = [plain.round()] if number % 2 else []
            rates = batch.round(tier, 100 + number)
            (plain_rate,) = plain_rates or [plain.round()]
            note(disk_store_gb_s=rates[0], disk_load_gb_s=rates[1], plain_write_gb_s=plain_rate)
            note(disk_store_share_of_plain=rates[0] / plain_rate)
            if has_fio:
                by_fio = by_fio or fio_rates(folder / "fio", mib)
                note(**by_fio)
                for kind, ending in (("fio", ""), ("fio_huge", "_of_huge")):
                    note(**{
                        f"disk_store_share{ending}": rates[0] / by_fio[f"{kind}_write_gb_s"],
                        f"disk_load_share{ending}": rates[1] / by_fio[f"{kind}_read_gb_s"],
                    })
    finally:
        plain.close()
        tier.close(Deadline())
    return figures | {
        name.replace("_gb_s", "_spread"): [max(rates) / min(rates)]
        for name, rates in figures.items() if name.endswith("_gb_s")
    }
