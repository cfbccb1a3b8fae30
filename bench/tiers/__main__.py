"""How fast the disk tier stores and loads, compared with fio on the same file system.

    python -m bench.tiers --json --path FOLDER

fio (O_DIRECT, psync, several jobs, preallocated files) and the tier take turns in going first. Each figure is the
median of its rounds, a share the median of the paired ratios: 1.0 means as fast as fio. Parts lie in POSIX shared
memory, are 2 to 32 MiB large, and are compared with what was stored. Neither goes through the page cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvdock.datapath.checksum import checksum
from kvdock.shm import objects as shm
from kvdock.tiers.disk.io import THREADS
from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import Deadline, Outcome, ToLoad, ToStore

MIB = 1 << 20
SIZES_MIB = (2, 4, 8, 16, 32)
FIO_BLOCK_MIB = 4
FIO_JOBS = 8
WAYS = ("write", "read")


def fio(folder: Path, what: str, mib: int) -> float:
    """GB/s. `what`: "read" or "write". The files are written once before, so neither allocates anything."""
    command = [
        "fio", "--name=bench", f"--directory={folder}", "--direct=1", "--ioengine=psync", f"--rw={what}",
        f"--bs={FIO_BLOCK_MIB}m", f"--numjobs={FIO_JOBS}", f"--size={mib // FIO_JOBS}m", "--group_reporting",
        "--fallocate=posix", "--output-format=json", "--overwrite=1", "--thread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["jobs"][0][what]
    return float(figures["bw_bytes"]) / 1e9


class Batch:
    """Parts of all sizes, `mib` in sum, in one piece of shared memory: once to store, once to load into."""

    def __init__(self, mib: int, seed: int) -> None:
        self._name = f"/kvdock-bench-{os.getpid():x}"
        fd = shm.create(self._name, 2 * mib * MIB)
        self._memory = mmap.mmap(fd, 2 * mib * MIB)
        os.close(fd)
        shm.unlink(self._name)
        view, draw = memoryview(self._memory), random.Random(seed)
        for begin in range(0, mib * MIB, MIB):
            view[begin : begin + MIB] = draw.randbytes(MIB)
        sizes: list[int] = []
        while (left := mib - sum(sizes)) > 0:
            sizes.append(min(SIZES_MIB[len(sizes) % len(SIZES_MIB)], left))
        self.source, self.target, begin = [], [], 0
        for size in sizes:
            end = begin + size * MIB
            self.source.append(view[begin:end])
            self.target.append(view[mib * MIB + begin : mib * MIB + end])
            begin = end
        self.sums = [checksum(part) for part in self.source]
        self.bytes = mib * MIB

    def round(self, tier: DiskTier, number: int) -> tuple[float, float]:
        """(store, load) in GB/s; the parts are deleted afterwards. AssertionError if anything differs."""
        names = [PartName(number.to_bytes(32, "big"), at.to_bytes(32, "big"), 0, 0) for at in range(len(self.source))]
        stores = [
            ToStore(Record(name, len(pages), total), pages)
            for name, pages, total in zip(names, self.source, self.sums, strict=True)
        ]
        loads = [ToLoad(name, len(pages), pages) for name, pages in zip(names, self.target, strict=True)]
        for pages in self.target:
            pages[:: len(pages) // 64] = bytes(len(pages[:: len(pages) // 64]))
        began = time.perf_counter()
        stored = tier.store(stores, Deadline())
        between = time.perf_counter()
        loaded = tier.load(loads, Deadline())
        ended = time.perf_counter()
        assert set(stored) == {Outcome.DONE} == {answer.outcome for answer in loaded}, "not all of it was moved"
        assert self.source == self.target, "other bytes came back"
        tier.delete(names, Deadline())
        return self.bytes / (between - began) / 1e9, self.bytes / (ended - between) / 1e9


def measure(folder: Path, mib: int, rounds: int, threads: int) -> dict[str, float]:
    """`folder`: an empty one. Raises TierError."""
    has_fio = shutil.which("fio") is not None
    figures: dict[str, list[float]] = {}

    def note(**found: float) -> None:
        for name, figure in found.items():
            figures.setdefault(name, []).append(figure)

    (folder / "fio").mkdir()
    tier, batch = DiskTier.open(folder / "tier", 4 * mib * MIB, threads=threads), Batch(mib, seed=7)
    try:
        for warm in range(-4, 0):  # every segment and file was written once before anything counts
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
    return {name: round(statistics.median(found), 3) for name, found in sorted(figures.items())}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, required=True, help="a folder on the file system that is to be measured")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--mib", type=int, default=1024, help="MiB stored and loaded in a round (default 1024)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds for each figure (default 7)")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"of the tier (default {THREADS})")
    chosen = parser.parse_args(arguments)
    chosen.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-", dir=chosen.path) as folder:
        figures = measure(Path(folder), chosen.mib, chosen.rounds, chosen.threads)
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, figure in figures.items():
            print(f"{name:36} {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
