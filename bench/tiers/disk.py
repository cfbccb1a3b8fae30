"""The disk tier beside fio (O_DIRECT, psync, several jobs, preallocated files) on the same file system."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from bench.tiers.batch import MIB, Batch
from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.tier import Deadline

FIO_BLOCK_MIB = 4
FIO_JOBS = 8
WAYS = ("write", "read")


def fio(folder: Path, what: str, mib: int) -> float:
    """The speed of fio in GB/s. `what`: "read" or "write". The files are written once before, so that neither
    allocates."""
    command = [
        "fio", "--name=bench", f"--directory={folder}", "--direct=1", "--ioengine=psync", f"--rw={what}",
        f"--bs={FIO_BLOCK_MIB}m", f"--numjobs={FIO_JOBS}", f"--size={mib // FIO_JOBS}m", "--group_reporting",
        "--fallocate=posix", "--output-format=json", "--overwrite=1", "--thread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["jobs"][0][what]
    return float(figures["bw_bytes"]) / 1e9


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
    try:
        for warm in range(-4, 0):  # before anything counts, every segment and file was written once
            batch.round(tier, -warm)
        if has_fio:
            fio(folder / "fio", "write", mib)
        for number in range(rounds):
            fio_rates = [fio(folder / "fio", what, mib) for what in WAYS] if has_fio and number % 2 else []
            rates = batch.round(tier, 100 + number)
            note(disk_store_gb_s=rates[0], disk_load_gb_s=rates[1])
            if has_fio:
                fio_rates = fio_rates or [fio(folder / "fio", what, mib) for what in WAYS]
                note(fio_write_gb_s=fio_rates[0], fio_read_gb_s=fio_rates[1])
                note(disk_store_share=rates[0] / fio_rates[0], disk_load_share=rates[1] / fio_rates[1])
    finally:
        tier.close(Deadline())
    return figures | {
        name.replace("_gb_s", "_spread"): [max(rates) / min(rates)]
        for name, rates in figures.items() if name.endswith("_gb_s")
    }
