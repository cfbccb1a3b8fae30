"""Packing in the gather and unpacking in the scatter on a GPU, with few thread blocks.

    python -m bench.pack_cuda --json

For each number of thread blocks: the rate of a packed store and of a packed load as a share of one plain copy of as
many bytes as the slots have, and the same of raw copies, by the GPU's clock. What is stored is unpacked by the CPU and
compared, what is loaded is compared with what was stored. `beside`: what waits while connectors store: the engine's
kernels (a matrix product, and c = a + b), as multiples of their time alone, and a copy of 256 bytes to the host, like
that of an engine's tokens, in microseconds. Planes are Gaussian, with an own scale for each channel, so that about as
many elements are marked as in real KV (bench/LOG.md).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from bench.cuda_rig import GIB, POISON, SHAPES, Case, Clock, Shape, ThreeSegments, in_turns, median_ratio, segments
from kvdock import _core
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning, CudaCopier, CudaHandle

CTAS: Final = (2, 4, 8, 16, 32)
ROUNDS: Final = 5
MARKS: Final = 176
DIRECT: Final = CopyTuning(piece_bytes=1 << 20, direct_load_bytes=1 << 62, direct_store_bytes=1 << 62)
SUM_BYTES: Final = 1 << 28
SMALL_COPIES: Final = 200
cuda: Any = torch.cuda  # its classes have no types


def say(text: str) -> None:
    print(f"bench.pack_cuda: {text}", file=sys.stderr, flush=True)


class PackedCase(Case):
    """A Case whose blocks hold bf16 values, and the copiers for it."""

    def __init__(self, shape: Shape, memory: ThreeSegments, total_bytes: int, device: int, seed: int) -> None:
        super().__init__(shape, memory, total_bytes, device, seed)
        tiles = shape.part_bytes // _core.TILE_BYTES
        planes = [shape.part_bytes // shape.planes] * shape.planes
        self.packed = _core.PackedShape(planes, marks=MARKS, units=max(40, tiles))
        self.fill()

    def fill(self) -> None:
        values: Any = self.paged.view(torch.bfloat16).view(self.paged.shape[0], -1, 128)
        for plane in values:
            plane.normal_()
            plane.mul_(torch.exp2(torch.randn(128, device=plane.device)).to(torch.bfloat16))

    def copier(self, ctas: int, *, packs: bool, staged: bool = False) -> CudaCopier:
        tuning = replace(DIRECT, direct_ctas=ctas)
        if staged:
            room = max(16 << 20, -(-self.packed.packed_bytes // 4096) * 4096 if packs else 0)
            tuning = replace(
                tuning, load_ctas=ctas, store_ctas=ctas, piece_bytes=room, direct_load_bytes=0, direct_store_bytes=0
            )
        return self.copier_with(tuning, packs=packs)

    def copier_with(self, tuning: CopyTuning, *, packs: bool) -> CudaCopier:
        return CudaCopier(
            self.layout, device=self.paged.device.index, part_blocks=self.shape.part_blocks, tuning=tuning,
            packing=self.packed if packs else None,
        )

    def check_store(self, copier: CudaCopier) -> list[int]:
        """Stores over poison; the CPU's codec unpacks what the blocks hold. Returns the checksums."""
        self.poison_slots()
        handle = copier.gather(self.copies([None] * self.parts))
        if not all(handle.fit()):
            raise AssertionError("a part did not fit")
        for i in range(0, self.parts, 5):
            part = bytearray(self.shape.part_bytes)
            slot = self._memory.bytes_at(self.slots[i], self.packed.packed_bytes)
            held = self.paged[:, self.ids[i].to(self.paged.device)].reshape(-1).cpu().numpy().tobytes()
            if not _core.unpack_part(self.packed, memoryview(slot), part) or part != held:
                raise AssertionError(f"part {i}: the CPU unpacks other bytes")
        return [one.checksum for one in handle.result()]

    def check_load(self, copier: CudaCopier, parts: list[PartCopy]) -> None:
        """Loads over poison what check_store() stored."""
        kept = self.paged.clone()
        self.paged.fill_(POISON)
        torch.cuda.synchronize()
        handle = copier.scatter(parts)
        if not all(handle.fit()) or not all(one.ok for one in handle.result()):
            raise AssertionError("a packed part was not recognised")
        if not torch.equal(kept, self.paged):
            raise AssertionError("a load unpacked other bytes")


class Bench:
    def __init__(self, memory: ThreeSegments, device: int) -> None:
        self.memory, self.clock = memory, Clock(device)
        self.on_gpu = _core.CudaBuffer(device=device, bytes=GIB, host=False)
        self.figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(device)}

    def plain_ms(self, size: int, *, to_device: bool) -> float:
        gpu, host = self.on_gpu.address, self.memory.plain_at
        to, from_ = (gpu, host) if to_device else (host, gpu)
        moved = min(size, self.memory.plain_bytes)
        return self.clock.ms(lambda: self.clock.plain(to, from_, moved, to_device=to_device)) * size / moved

    def measure(self, shape: Shape, device: int, seed: int) -> None:
        case = PackedCase(shape, self.memory, GIB, device, seed)
        packed_bytes = case.packed.packed_bytes * case.parts
        self.figures[f"{shape.name}: ratio"] = round(case.bytes / packed_bytes, 4)
        for size, way in ((packed_bytes, "packed"), (case.bytes, "raw")):
            for ctas in CTAS:
                for staged in (False, True):
                    name = f"{way} {'staged ' if staged else ''}"
                    copier = case.copier(ctas, packs=way == "packed", staged=staged)
                    for kind, pairs in self._both_ways(case, copier, size, packs=way == "packed").items():
                        key = f"{shape.name}: {name}{kind}, {ctas} blocks"
                        rate = size / min(ours for _, ours in pairs) / 1e6
                        self.figures[key] = {"share": round(median_ratio(pairs), 3), "gb_s": round(rate, 1)}
                        say(f"{key}: {self.figures[key]}")
                    copier.close()

    def measure_beside(self, device: int, seed: int) -> None:
        """With the copies that connectors make; "raw, packing": of what packing leaves raw."""
        shape = next(shape for shape in SHAPES if shape.name == "32k")
        beside = Beside(self, PackedCase(shape, self.memory, GIB, device, seed), device)
        self.figures["beside nothing"] = beside.small_copies_alone()
        usual = CopyTuning()
        for name, packs_any, packs in (("raw", False, False), ("packed", True, True), ("raw, packing", True, False)):
            self.figures[f"beside {name}"] = beside.measured(usual.for_stores(packs=packs_any), packs=packs)
            say(f"beside {name}: {self.figures[f'beside {name}']}")

    def _both_ways(
        self, case: PackedCase, copier: CudaCopier, size: int, *, packs: bool
    ) -> dict[str, list[tuple[float, float]]]:
        """Milliseconds of plain copies of `size` bytes and of the copier's, in turns."""
        anew = case.copies([None] * case.parts)  # pool units may be taken in another order
        stores = in_turns(
            partial(self.plain_ms, size, to_device=False), partial(self.clock.store_ms, copier, anew), ROUNDS
        )
        if packs:
            parts = case.copies(case.check_store(copier))
            case.check_load(copier, parts)
        else:
            parts = case.copies([one.checksum for one in copier.gather(anew).result()])
        loads = in_turns(
            partial(self.plain_ms, size, to_device=True), partial(self.clock.load_ms, copier, parts), ROUNDS
        )
        return {"store": stores, "load": loads}


class Beside:
    """What waits while connectors store."""

    def __init__(self, bench: Bench, case: PackedCase, device: int) -> None:
        self.bench, self.case, self.stream = bench, case, cuda.Stream(device)
        self.on_gpu, self.on_host = torch.ones(64, device=f"cuda:{device}"), torch.zeros(64).pin_memory()
        square = torch.randn(4096, 4096, device=f"cuda:{device}", dtype=torch.bfloat16)
        long = torch.zeros(SUM_BYTES // 4, device=f"cuda:{device}")
        self.kernels: dict[str, Callable[[], object]] = {
            "product": lambda: torch.mm(square, square),
            "sum": lambda: torch.add(long, long),
        }
        self.alone = {name: self._kernel_us(kernel) for name, kernel in self.kernels.items()}

    def measured(self, tuning: CopyTuning, *, packs: bool) -> dict[str, float]:
        case, bench, clock = self.case, self.bench, self.bench.clock
        copier = case.copier_with(tuning, packs=packs)
        anew = case.copies([None] * case.parts)
        if packs:
            case.check_store(copier)
        size = (case.packed.packed_bytes if packs else case.shape.part_bytes) * case.parts
        pairs = in_turns(partial(bench.plain_ms, size, to_device=False), partial(clock.store_ms, copier, anew), ROUNDS)
        figures = {
            "share": median_ratio(pairs),
            "kv_gb_s": case.bytes / statistics.median(ours for _, ours in pairs) / 1e6,
        }
        for name, kernel in self.kernels.items():
            last = [copier.gather(anew) for _ in range(3)][-1]
            figures[name] = self._kernel_us(kernel, beside=last) / self.alone[name]
            last.wait(None)
        took: list[float] = []
        for _ in range(ROUNDS):
            handle = copier.gather(anew)
            while not handle.done():
                took.append(self._small_copy_us())
        copier.close()
        return {name: round(figure, 3) for name, figure in (figures | shares_of(took)).items()}

    def small_copies_alone(self) -> dict[str, float]:
        return shares_of([self._small_copy_us() for _ in range(SMALL_COPIES)])

    def _kernel_us(self, kernel: Callable[[], object], *, beside: CudaHandle | None = None) -> float:
        """The median time of a kernel, by the GPU's clock."""
        took: list[float] = []
        with torch.cuda.stream(self.stream):
            while len(took) < 30 and not (beside is not None and beside.done()):
                begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                kernel()
                end.record()
                end.synchronize()
                took.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(took[len(took) // 3 :])

    def _small_copy_us(self) -> float:
        began = time.perf_counter()
        with torch.cuda.stream(self.stream):
            self.on_host.copy_(self.on_gpu, non_blocking=True)
        self.stream.synchronize()
        return (time.perf_counter() - began) * 1e6


def shares_of(took_us: list[float]) -> dict[str, float]:
    at = sorted(took_us)
    found = {"p50": at[len(at) // 2], "p90": at[len(at) * 9 // 10], "most": at[-1]}
    return {f"small_copy_us_{name}": round(us, 1) for name, us in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pack_cuda", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--shapes", default="32k,4k", help="of bench.cuda_rig (default 32k,4k)")
    chosen = parser.parse_args()
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")
    with segments() as (pool_id, infos):
        memory = ThreeSegments(pool_id, infos, 0)
        try:
            bench = Bench(memory, 0)
            for shape in SHAPES:
                if shape.name in chosen.shapes.split(","):
                    bench.measure(shape, 0, random.getrandbits(32))
                    torch.cuda.empty_cache()
            bench.measure_beside(0, random.getrandbits(32))
        finally:
            memory.close()
    if chosen.json:
        print(json.dumps(bench.figures))
    else:
        for name, figure in bench.figures.items():
            print(f"{name:36} {figure}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
