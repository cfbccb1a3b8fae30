"""How much packing saves with real KV, and what it costs a CPU: docs/understand/packing.md.

    python -m bench.pack --json

Ratios count headers, reserves and the spill, and a part that does not fit at its raw size. Rates are bytes of raw KV a
second of one core's processor time, for each code path that the processor has: memcpy, packing and unpacking take turns
over the same real parts, and the share is the median of the turns' ratios. `memory`: many parts, several times the last
cache; `cache`: a few tiles. What is unpacked is compared with what was packed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.real_kv import CHUNK_TOKENS, MODELS, Parts, real_kv
from kvdock import _core

Bytes = Any
"""An array of uint8, which mypy does not take for a buffer before Python 3.12."""
MEMORY_BYTES, CACHE_PLANES, TURNS = 256 << 20, 2, 9
TILE, RESERVE_AT = _core.TILE_BYTES, 2816
RAW_TILE = 255


class Ratio(NamedTuple):
    """What packing made of one model's parts."""

    raw_bytes: int
    stored_bytes: int
    parts: int
    raw_parts: int
    tiles: int
    beyond_reserve: int
    raw_tiles: int


def tiles_in(shape: _core.PackedShape, slot: Bytes, planes: list[int]) -> Bytes:
    """How many units each tile of a slot has."""
    tile_bytes = RESERVE_AT + shape.marks // 2 + 8
    at, found = 64 * -(-(16 + 24 * len(planes)) // 64), list[int]()
    for size in planes:
        for _ in range(size // TILE):
            at += tile_bytes
            found.append(int(slot[at - 3]))
        at += size % TILE
    return np.array(found, dtype=np.uint8)


def ratio_of(parts: Parts) -> Ratio:
    planes = [parts.shape[2]] * parts.shape[1]
    shape = _core.PackedShape(planes)
    slot: Bytes = np.zeros(shape.packed_bytes, np.uint8)
    back: Bytes = np.zeros(shape.raw_bytes, np.uint8)
    stored = raw_parts = beyond = raw_tiles = tiles = 0
    part: Bytes
    for part in parts:
        if _core.pack_part(shape, part.reshape(-1), slot) < 0:
            raw_parts, stored = raw_parts + 1, stored + shape.raw_bytes
            continue
        if not _core.unpack_part(shape, slot, back) or not np.array_equal(back, part.reshape(-1)):
            raise AssertionError("a part is not the same after packing and unpacking")
        units = tiles_in(shape, slot, planes)
        stored += shape.packed_bytes
        tiles += len(units)
        raw_tiles += int((units == RAW_TILE).sum())
        beyond += int(((units != 0) & (units != RAW_TILE)).sum())
    return Ratio(parts.size, stored, len(parts), raw_parts, tiles, beyond, raw_tiles)


class Case:
    """Parts to pack, in turn, and where to."""

    def __init__(self, parts: Parts, count: int) -> None:
        """`count`: how many parts lie side by side."""
        self.raw: Bytes = np.ascontiguousarray(np.resize(parts, (count, *parts.shape[1:]))).reshape(count, -1)
        self.shape = _core.PackedShape([parts.shape[2]] * parts.shape[1])
        self.slots: Bytes = np.zeros((count, self.shape.packed_bytes), np.uint8)
        self.back: Bytes = np.zeros_like(self.raw)
        self._views = [(row.data, other.data) for row, other in zip(self.raw, self.back, strict=True)]

    def copy(self) -> None:
        for source, target in self._views:
            target[:] = source  # memmove of libc

    def pack(self) -> None:
        for part, slot in zip(self.raw, self.slots, strict=True):
            if _core.pack_part(self.shape, part, slot) < 0:
                raise AssertionError("a part that is measured does not fit")

    def unpack(self) -> None:
        for slot, part in zip(self.slots, self.back, strict=True):
            _core.unpack_part(self.shape, slot, part)

    def learn(self) -> None:
        for part in self.raw:
            _core.learn_books(self.shape, part)


def on_core_s(call: Callable[[], None], rounds: int) -> float:
    """Processor time: others that run on the machine do not count, as far as they leave the caches alone."""
    start = time.process_time()
    for _ in range(rounds):
        call()
    return time.process_time() - start


def rates(case: Case, rounds: int) -> dict[str, float]:
    """GB/s of each call, and their shares of memcpy's."""
    calls = {"memcpy": case.copy, "pack": case.pack, "unpack": case.unpack, "learn": case.learn}
    turns: dict[str, list[float]] = {name: [] for name in calls}
    case.pack()
    case.unpack()
    if not np.array_equal(case.back, case.raw):
        raise AssertionError("parts are not the same after packing and unpacking")
    for _ in range(TURNS):
        for name, call in calls.items():
            turns[name].append(on_core_s(call, rounds))
    gb = case.raw.nbytes * rounds / 1e9
    figures = {f"{name}_gb_s": round(gb / statistics.median(turns[name]), 2) for name in ("memcpy", "pack", "unpack")}
    for name in ("pack", "unpack"):
        shares = [plain / ours for plain, ours in zip(turns["memcpy"], turns[name], strict=True)]
        figures[f"{name}_share"] = round(statistics.median(shares), 3)
    learning = [one / whole for one, whole in zip(turns["learn"], turns["pack"], strict=True)]
    return figures | {"learn_share_of_pack": round(statistics.median(learning), 3)}


def speeds(parts: Parts) -> dict[str, dict[str, float]]:
    found = {}
    part_bytes = parts.shape[1] * parts.shape[2]
    memory = Case(parts, -(-MEMORY_BYTES // part_bytes))
    cache = Case(np.ascontiguousarray(parts[:1, :CACHE_PLANES]), 1)
    for path in _core.tile_paths():
        _core.use_tile_path(path)
        found[f"{path} memory"] = rates(memory, 1)
        found[f"{path} cache"] = rates(cache, 200 if path != "scalar" else 10)
    _core.use_tile_path("")
    return found


def measure(folder: Path, names: list[str]) -> dict[str, object]:
    figures: dict[str, object] = {"chunk_tokens": CHUNK_TOKENS}
    ratios = {name: ratio_of(real_kv(name, folder)) for name in names}
    for name, ratio in ratios.items():
        figures[f"ratio_{name}"] = round(ratio.raw_bytes / ratio.stored_bytes, 4)
    parts = sum(ratio.parts for ratio in ratios.values())
    figures["parts"] = parts
    figures["raw_parts_share"] = round(sum(ratio.raw_parts for ratio in ratios.values()) / parts, 4)
    figures["escapes"] = {
        name: {
            "tiles_beyond_reserve": round(ratio.beyond_reserve / max(ratio.tiles, 1), 4),
            "raw_tiles": round(ratio.raw_tiles / max(ratio.tiles, 1), 5),
        }
        for name, ratio in ratios.items()
    }
    by_path = speeds(real_kv(names[0], folder))
    fastest = by_path[f"{_core.tile_paths()[0]} memory"]
    for name in ("pack", "unpack"):
        figures[f"cpu_{name}_gb_s"] = fastest[f"{name}_gb_s"]
        figures[f"cpu_{name}_share"] = fastest[f"{name}_share"]
    return figures | {"memcpy_gb_s": fastest["memcpy_gb_s"], "paths": by_path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", type=Path, default=Path("build/kv"), help="where the KV is kept (default build/kv)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="whose KV is packed")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    figures = measure(chosen.kv, chosen.models)
    if chosen.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        for name, value in figures.items():
            sys.stdout.write(f"{name:22} {value}\n")


if __name__ == "__main__":
    main()
