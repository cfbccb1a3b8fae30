"""Packing in the gather and unpacking in the scatter on a GPU, with few thread blocks.

    python -m bench.pack_cuda --json

For each number of thread blocks: the rate of a packed store and of a packed load as a share of one plain copy of as
many bytes as the slots have, and the same of raw copies, by the GPU's clock. What is stored is unpacked by the CPU and
compared, what is loaded is compared with what was stored. Planes are Gaussian, with an own scale for each channel, so
that about as many elements are marked as in real KV (bench/LOG.md).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from bench.cuda_rig import GIB, POISON, SHAPES, Case, Clock, Shape, ThreeSegments, in_turns, median_ratio, segments
from kvdock import _core
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning, CudaCopier

CTAS: Final = (2, 4, 8, 16, 32)
ROUNDS: Final = 5
MARKS: Final = 176
DIRECT: Final = CopyTuning(piece_bytes=1 << 20, direct_load_bytes=1 << 62, direct_store_bytes=1 << 62)


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
            tuning = replace(tuning, load_ctas=ctas, piece_bytes=room, direct_load_bytes=0)
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
                copier = case.copier(ctas, packs=way == "packed")
                anew = case.copies([None] * case.parts)  # pool units may be taken in another order
                stores = in_turns(
                    partial(self.plain_ms, size, to_device=False), partial(self.clock.store_ms, copier, anew), ROUNDS
                )
                if way == "packed":
                    parts = case.copies(case.check_store(copier))
                    case.check_load(copier, parts)
                else:
                    parts = case.copies([one.checksum for one in copier.gather(anew).result()])
                loads = in_turns(
                    partial(self.plain_ms, size, to_device=True), partial(self.clock.load_ms, copier, parts), ROUNDS
                )
                staging = case.copier(ctas, packs=way == "packed", staged=True)
                if way == "packed":
                    case.check_load(staging, parts)
                staged = in_turns(
                    partial(self.plain_ms, size, to_device=True), partial(self.clock.load_ms, staging, parts), ROUNDS
                )
                staging.close()
                for name, pairs in (("store", stores), ("load", loads), ("staged load", staged)):
                    key = f"{shape.name}: {way} {name}, {ctas} blocks"
                    ours_ms = min(ours for _, ours in pairs)
                    self.figures[key] = {"share": round(median_ratio(pairs), 3), "gb_s": round(size / ours_ms / 1e6, 1)}
                    say(f"{key}: {self.figures[key]}")
                copier.close()


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
