"""KV of many kinds in a GPU's blocks, and the CPU's codec for its parts."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from bytes_helpers import Paged, Shape

from kvdock import _core
from kvdock.datapath.layout import PagedLayout

TILE = _core.TILE_BYTES
MARKS = 176
Source = np.random.Generator


def fresh_source() -> Source:
    seed = int(np.random.default_rng().integers(1 << 31))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


KINDS: dict[str, Callable[[Source, int], np.ndarray]] = {
    "gaussian": lambda source, n: bf16(source.normal(size=n)),
    "many marks": lambda source, n: bf16(source.normal(size=n) * 2.0 ** (3 * (source.random(n // 2048 + 1) > 0.95))
                                          .repeat(2048)[:n] * 2.0 ** (source.normal(size=n) * 1.2)),
    "heavy tails": lambda source, n: bf16(source.normal(size=n) * 2.0 ** source.normal(0, 2, size=n)),
    "zeros": lambda source, n: np.zeros(n, dtype=np.uint16),
    "negative zeros": lambda source, n: np.full(n, 0x8000, dtype=np.uint16),
    "one value": lambda source, n: np.full(n, 0xC193, dtype=np.uint16),
    "infinities": lambda source, n: source.choice(np.array([0x7F80, 0xFF80], dtype=np.uint16), size=n),
    "NaNs with payloads": lambda source, n: source.integers(0x7F81, 0x8000, size=n).astype(np.uint16),
    "denormals": lambda source, n: source.integers(0, 0x80, size=n).astype(np.uint16),
    "anything": lambda source, n: source.integers(0, 1 << 16, size=n).astype(np.uint16),
    "far ones": lambda source, n: np.where(
        source.random(n) < 0.0015, source.integers(0, 1 << 16, size=n), bf16(source.normal(size=n))
    ).astype(np.uint16),
}


def fill(paged: Paged, kind: str, source: Source) -> None:
    """Each plane of the kind, with an own scale."""
    for layer, kv in paged.planes():
        size = paged.block(layer, kv, 0).numel()
        values = KINDS[kind](source, size * paged.shape.blocks)
        for block in range(paged.shape.blocks):
            view = paged.block(layer, kv, block)
            some = torch.from_numpy(values[block * size : (block + 1) * size].view(np.int16)).to(view.device)
            view.view(torch.int16).copy_(some.view(view.shape))


def shape_of(layout: PagedLayout, blocks: int, units: int, marks: int = MARKS) -> _core.PackedShape:
    planes = [run_bytes * runs * blocks for _, _, run_bytes, runs, _ in layout.planes]
    return _core.PackedShape(planes, marks=marks, units=units)


def unpacked(shape: _core.PackedShape, slot: bytes) -> bytes | None:
    part = bytearray(random.randbytes(shape.raw_bytes))
    return bytes(part) if _core.unpack_part(shape, slot, part) else None


def packed(shape: _core.PackedShape, part: bytes) -> tuple[int, bytes]:
    slot = bytearray(random.randbytes(shape.packed_bytes))
    return _core.pack_part(shape, part, slot), bytes(slot)


SHAPE = Shape(layers=2, blocks=24, tokens=16, heads=2, head_size=128)
"""Blocks of 8 KiB, and of 4 KiB where a format has no heads: tiles of several blocks and blocks of several tiles."""
ODD = Shape(layers=2, blocks=24, tokens=16, heads=2, head_size=72)
"""A plane is no whole number of tiles; runs of 144 bytes, so granules are narrow."""
FORMATS = ("NL_X_NB_TWO_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS", "NB_NL_TWO_NH_BS_HS", "NL_X_NB_BS_HS")
