"""Hostile slots and parts between pages that may not be touched: run as a script, in a process of its own.

`python packed_fuzz.py SEED TRIALS` prints how many slots were unpacked and refused; a crash is its exit status. Each
trial unpacks, on every code path, a slot whose bytes are random, or those of a whole one with a few others, and packs
what came out. The buffers end where the pages begin that may not be touched, or begin where they end. There is no
checksum. `make sanitize` runs it under the address sanitizer, too.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys
from collections import Counter

from kvdock import _core

PAGE = mmap.PAGESIZE
_MPROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_MPROTECT.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fenced:
    """Memory between two pages that cannot be read or written."""

    def __init__(self, size: int) -> None:
        self.size = size
        pages = -(-size // PAGE)
        self._map = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for fence in (start, start + (pages + 1) * PAGE):
            if _MPROTECT(fence, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self._inside = memoryview(self._map)[PAGE : (pages + 1) * PAGE]

    def at_an_end(self, *, last: bool) -> memoryview:
        return self._inside[len(self._inside) - self.size :] if last else self._inside[: self.size]


def hostile(source: random.Random, shape: _core.PackedShape, whole: bytes) -> bytes:
    """Bytes of a slot whose header is right, so that all of it is read."""
    slot = bytearray(whole)
    kind = source.choice(("random", "all ones", "damaged", "trailers"))
    if kind in ("random", "all ones"):
        slot[16:] = source.randbytes(len(slot) - 16) if kind == "random" else b"\xff" * (len(slot) - 16)
    if kind == "damaged":
        for _ in range(source.randrange(1, 60)):
            slot[source.randrange(16, len(slot))] = source.randrange(256)
    if kind != "damaged":
        # Most random trailers would be refused at once.
        tile_bytes = 2824 + shape.marks // 2
        header = len(whole) - shape.units * 32 - TILES * tile_bytes - REST
        for tile in range(TILES):
            end = header + (tile + 1) * tile_bytes
            units = source.choice((0, 1, 31, 32, 33, 255, source.randrange(256)))
            first = source.choice((0, shape.units - min(units, 32), shape.units - 37, source.randrange(1 << 16)))
            slot[end - 3 : end] = bytes([units, first & 255, first >> 8 & 255])
    return bytes(slot)


TILES, REST = 3, 48


def main(seed: int, trials: int) -> Counter[str]:
    found: Counter[str] = Counter()
    source = random.Random(seed)
    for trial in range(trials):
        marks, units = source.choice((16, 176, 496)), source.choice((0, 1, 40, 200))
        shape = _core.PackedShape([TILES * _core.TILE_BYTES + REST], marks, units)
        part, slot = Fenced(shape.raw_bytes), Fenced(shape.packed_bytes)
        last = bool(trial % 2)
        raw, stored = part.at_an_end(last=last), slot.at_an_end(last=last)
        raw[:] = bytes(len(raw))
        _core.pack_part(shape, raw, stored)
        stored[:] = content = hostile(source, shape, bytes(stored))
        unpacked = set()
        for path in _core.tile_paths():
            _core.use_tile_path(path)
            unpacked.add(bytes(raw) if _core.unpack_part(shape, stored, raw) else None)
        if len(unpacked) != 1 or bytes(stored) != content:
            raise AssertionError(f"seed {seed}, trial {trial}: paths differ")
        found["refused" if unpacked == {None} else "unpacked"] += 1
        raw[:] = source.choice((bytes(raw), source.randbytes(len(raw)), bytes(raw[:2]) * (len(raw) // 2)))
        packed = set()
        for path in _core.tile_paths():
            _core.use_tile_path(path)
            packed.add((fits := _core.pack_part(shape, raw, stored), bytes(stored) if fits >= 0 else b""))
        if len(packed) != 1:
            raise AssertionError(f"seed {seed}, trial {trial}: paths pack differently")
        found["packed" if packed.pop()[0] >= 0 else "stored raw"] += 1
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))) + "\n")
