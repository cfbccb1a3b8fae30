"""How fast parts are copied between paged KV and slots, compared with plain memcpy of the same pieces.

    python -m bench.copy --device cpu --json

For each fragment size, libc memcpy and gather (or scatter) with checksums take turns in copying the same pieces, in
the same shuffled order and with the same threads. The share is the median of the paired ratios: 1.0 means as fast as
memcpy. Slots are in a real, prefaulted segment. Destinations are poisoned once and compared byte by byte, so a fast
copy of the wrong bytes does not count.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdock import _core
from kvdock.api.pool.segments import SegmentPool
from kvdock.datapath.cuda import require_cuda
from kvdock.datapath.errors import NoCuda
from kvdock.datapath.segments import AttachedSegments
from kvdock.shm.checksum import checksum, ensure_keys

FRAGMENTS_KIB = (4, 16, 32, 72)
PLANES = 8
BLOCKS_PER_PART = 16
POISON = 0xA5


@dataclass(frozen=True)
class Case:
    """One fragment size: where the pieces lie, and the calls that move them."""

    layout: _core.PagedLayout
    slots: Any
    block_ids: Any
    starts: Any
    paged_at: Any
    """uint64 [pieces], in slot order: the paged address of each piece; `slot_at`: its address in the slot."""
    slot_at: Any
    fragment_bytes: int

    @property
    def total_bytes(self) -> int:
        return len(self.slot_at) * self.fragment_bytes


def make_case(fragment_bytes: int, budget_bytes: int, paged_address: int, slot_address: int) -> Case:
    """Blocks in a shuffled order, PLANES planes, as many whole parts as the budget holds."""
    parts = budget_bytes // (fragment_bytes * PLANES * BLOCKS_PER_PART)
    blocks = parts * BLOCKS_PER_PART
    plane_bytes = blocks * fragment_bytes
    bases = [paged_address + plane * plane_bytes for plane in range(PLANES)]
    planes = [(base, fragment_bytes, fragment_bytes, 1, fragment_bytes) for base in bases]
    layout = _core.PagedLayout(planes, num_blocks=blocks, block_tokens=16)
    ids = np.array(random.Random(7).sample(range(blocks), blocks), dtype=np.int64)
    part_bytes = layout.block_bytes * BLOCKS_PER_PART
    slots = slot_address + np.arange(parts, dtype=np.uint64) * np.uint64(part_bytes)
    starts = np.arange(parts + 1, dtype=np.int64) * BLOCKS_PER_PART
    by_part = ids.reshape(parts, 1, BLOCKS_PER_PART) * fragment_bytes
    paged_at = paged_address + np.arange(PLANES).reshape(1, PLANES, 1) * plane_bytes + by_part
    slot_at = slot_address + np.arange(blocks * PLANES, dtype=np.uint64) * np.uint64(fragment_bytes)
    return Case(layout, slots, ids, starts, paged_at.reshape(-1).astype(np.uint64), slot_at, fragment_bytes)


def gather(case: Case, threads: int) -> list[int]:
    return _core.gather(case.layout, case.slots, case.block_ids, case.starts, threads=threads)


def scatter(case: Case, threads: int) -> list[int]:
    skips = array("q", bytes(8 * len(case.slots)))
    return _core.scatter(case.layout, case.slots, case.block_ids, case.starts, skips, threads=threads)


def verify(case: Case, paged: Any, slots: Any, threads: int) -> None:
    """Gathers into poison and scatters into poison: every byte and every checksum must be right."""
    size = case.total_bytes
    order = ((case.paged_at - case.paged_at.min()) // np.uint64(case.fragment_bytes)).astype(np.int64)
    before = paged[:size].copy()
    wanted = before.reshape(-1, case.fragment_bytes)[order].reshape(-1)
    slots[:size] = POISON
    sums = gather(case, threads)
    if not np.array_equal(slots[:size], wanted):
        raise AssertionError(f"gather of {case.fragment_bytes}-byte fragments moved wrong bytes")
    paged[:size] = POISON
    again = scatter(case, threads)
    if not np.array_equal(paged[:size], before):
        raise AssertionError(f"scatter of {case.fragment_bytes}-byte fragments moved wrong bytes")
    part_bytes = size // len(sums)
    plain = [checksum(memoryview(wanted[i * part_bytes : (i + 1) * part_bytes])) for i in range(len(sums))]
    if not sums == again == plain:
        raise AssertionError(f"checksums of {case.fragment_bytes}-byte fragments differ")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def share(plain: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(median of plain time / our time, median plain time in s). The two take turns in running first."""
    plain()
    ours()
    pairs: list[tuple[float, float]] = []
    for index in range(rounds):
        if index % 2:
            ours_s, plain_s = timed(ours), timed(plain)
        else:
            plain_s, ours_s = timed(plain), timed(ours)
        pairs.append((plain_s, ours_s))
    return statistics.median(a / b for a, b in pairs), statistics.median(a for a, _ in pairs)


def both_shares(case: Case, rounds: int, threads: int) -> dict[str, tuple[float, float]]:
    size = case.fragment_bytes
    return {
        "gather": share(
            lambda: _core.memcpy_pieces(case.slot_at, case.paged_at, size, threads=threads),
            lambda: gather(case, threads),
            rounds,
        ),
        "scatter": share(
            lambda: _core.memcpy_pieces(case.paged_at, case.slot_at, size, threads=threads),
            lambda: scatter(case, threads),
            rounds,
        ),
    }


def measure(budget_bytes: int, rounds: int, threads: int) -> dict[str, object]:
    pool = SegmentPool(random.getrandbits(64), limit_bytes=budget_bytes + (1 << 20))
    attached = AttachedSegments(pool.pool_id)
    figures: dict[str, object] = {}
    rates: list[float] = []
    try:
        info = pool.grow()
        while pool.prefaulted_bytes() < pool.allocated_bytes:
            time.sleep(0.001)
        attached.attach(info, populate=True)
        slot_address = attached.address(info.id, info.data_offset, budget_bytes)
        slots = np.frombuffer(memoryview(attached.mapping(info.id)), dtype=np.uint8)[info.data_offset :]
        paged = np.frombuffer(mmap.mmap(-1, budget_bytes), dtype=np.uint8)
        paged[:] = np.frombuffer(np.random.default_rng(7).bytes(budget_bytes), dtype=np.uint8)
        for kib in FRAGMENTS_KIB:
            case = make_case(kib << 10, budget_bytes, paged.ctypes.data, slot_address)
            ensure_keys(case.layout.block_bytes * BLOCKS_PER_PART)
            verify(case, paged, slots, threads)
            for name, (ratio, plain_s) in both_shares(case, rounds, threads).items():
                figures[f"{name}_share_{kib}k"] = round(ratio, 3)
                rates.append(case.total_bytes / plain_s / 1e9)
        del slots
    finally:
        attached.close()
        pool.close()
    return {"memcpy_gb_s": round(statistics.median(rates), 2), **figures}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.copy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="2: also measure two workers at once")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--mib", type=int, default=256, help="MiB of KV copied in a round (default 256)")
    parser.add_argument("--rounds", type=int, default=15, help="paired rounds for each figure (default 15)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--path", default="", help=f"copy loop, one of {', '.join(_core.cpu_paths())}")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda":
        try:
            require_cuda(chosen.gpus - 1)
        except NoCuda as error:
            print(f"bench.copy: {error}", file=sys.stderr)
            return 2
        from bench import copy_cuda  # it imports torch

        figures = copy_cuda.measure(random.getrandbits(32))
        if chosen.gpus > 1:
            from bench import cuda_gpus

            figures |= cuda_gpus.measure(random.getrandbits(32))
    else:
        _core.use_cpu_path(chosen.path)
        figures = measure(chosen.mib << 20, chosen.rounds, chosen.threads)
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, figure in figures.items():
            print(f"{name:36} {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
