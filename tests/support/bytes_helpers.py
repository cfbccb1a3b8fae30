"""Paged KV for tests: tensors of every format, and a reference that copies block by block with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvdock.datapath.layout import PagedLayout, paged_layout

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "fp32": torch.float32,
}
GUARD = 0x5C


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    blocks: int = 7
    tokens: int = 4
    heads: int = 2
    head_size: int = 24


# Where layer, K/V and block stand in each format: index(tensors, layer, kv, block, tokens a block) → that block.
def _flat(tensor: torch.Tensor, block: int, tokens: int) -> torch.Tensor:
    return tensor[block * tokens : (block + 1) * tokens]


_BLOCK: dict[str, Callable[[Any, int, int, int, int], torch.Tensor]] = {
    "NB_NL_TWO_BS_NH_HS": lambda x, layer, kv, b, n: x[b, layer, kv],
    "NB_NL_TWO_NH_BS_HS": lambda x, layer, kv, b, n: x[b, layer, kv],
    "NL_X_TWO_NB_BS_NH_HS": lambda x, layer, kv, b, n: x[layer][kv, b],
    "NL_X_TWO_NB_NH_BS_HS": lambda x, layer, kv, b, n: x[layer][kv, b],
    "NL_X_NB_TWO_BS_NH_HS": lambda x, layer, kv, b, n: x[layer][b, kv],
    "NL_X_NB_TWO_NH_BS_HS": lambda x, layer, kv, b, n: x[layer][b, kv],
    "NL_X_NB_BS_HS": lambda x, layer, kv, b, n: x[layer][b],
    "TWO_X_NL_X_NBBS_NH_HS": lambda x, layer, kv, b, n: _flat(x[kv][layer], b, n),
    "NL_X_NBBS_ONE_HS": lambda x, layer, kv, b, n: _flat(x[layer], b, n),
}
FORMATS = tuple(_BLOCK)


def kv_of(name: str) -> int:
    return 2 if "TWO" in name else 1


def new_tensors(name: str, dtype: torch.dtype, shape: Shape, device: str = "cpu") -> Any:
    """Uninitialised tensors of that format, nested as it says."""
    n, t, h, d, layers = shape.blocks, shape.tokens, shape.heads, shape.head_size, shape.layers
    inside = (h, t, d) if "NH_BS" in name else (t, h, d)
    if name.startswith("NB_NL_TWO"):
        return torch.empty((n, layers, 2, *inside), dtype=dtype, device=device)
    if name.startswith("TWO_X"):
        return [[torch.empty((n * t, h, d), dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)]
    sizes = {
        "NL_X_NB_BS_HS": (n, t, d),
        "NL_X_NBBS_ONE_HS": (n * t, 1, d),
    }.get(name, (2, n, *inside) if "_TWO_NB_" in name else (n, 2, *inside))
    return [torch.empty(sizes, dtype=dtype, device=device) for _ in range(layers)]


class Paged:
    """Paged KV of one format under test."""

    def __init__(
        self, name: str, dtype: torch.dtype, shape: Shape, tensors: Any = None, *, device: str = "cpu"
    ) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self.tensors = new_tensors(name, dtype, shape, device) if tensors is None else tensors
        self.layout: PagedLayout = paged_layout(name, self.tensors, block_tokens=shape.tokens)

    def block(self, layer: int, kv: int, block: int) -> torch.Tensor:
        """A view of one block of one plane."""
        return _BLOCK[self.name](self.tensors, layer, kv, block, self.shape.tokens)

    def planes(self) -> list[tuple[int, int]]:
        return [(layer, kv) for layer in range(self.shape.layers) for kv in range(kv_of(self.name))]

    def fill_random(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer, kv in self.planes():
            for block in range(self.shape.blocks):
                view = self.block(layer, kv, block)
                size = (view.numel() * view.element_size(),)
                raw = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
                view.copy_(raw.view(self.dtype).view(view.shape))

    def fill_guard(self) -> None:
        for layer, kv in self.planes():
            for block in range(self.shape.blocks):
                view = self.block(layer, kv, block)
                raw = torch.full((view.numel() * view.element_size(),), GUARD, dtype=torch.uint8)
                view.copy_(raw.view(self.dtype).view(view.shape))

    def block_bytes(self, layer: int, kv: int, block: int) -> bytes:
        return bytes(self.block(layer, kv, block).contiguous().view(torch.uint8).cpu().numpy().tobytes())

    def reference(self, block_ids: Sequence[int]) -> bytes:
        """The slot bytes of a part of these blocks, copied the slow way."""
        return b"".join(self.block_bytes(layer, kv, b) for layer, kv in self.planes() for b in block_ids)

    def blocks_now(self) -> dict[tuple[int, int, int], bytes]:
        return {
            (layer, kv, b): self.block_bytes(layer, kv, b)
            for layer, kv in self.planes()
            for b in range(self.shape.blocks)
        }


def host_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Slots:
    """A private buffer of slots with guard bytes around each; addresses are multiples of 4096.

    `allocate(bytes)`: a uint8 tensor of at least that size.
    """

    def __init__(
        self, count: int, slot_bytes: int, allocate: Callable[[int], torch.Tensor] = host_bytes
    ) -> None:
        self._step = -(-slot_bytes // 4096) * 4096 + 4096
        self._slot_bytes = slot_bytes
        self._raw = allocate((count + 1) * self._step + 4096).fill_(GUARD)
        self._shift = -self._raw.data_ptr() % 4096

    def address(self, index: int) -> int:
        return self._raw.data_ptr() + self._shift + index * self._step

    def _range(self, index: int) -> slice:
        start = self._shift + index * self._step
        return slice(start, start + self._slot_bytes)

    def read(self, index: int) -> bytes:
        return self._raw[self._range(index)].cpu().numpy().tobytes()

    def write(self, index: int, data: bytes) -> None:
        self._raw[self._range(index)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def guards_intact(self, count: int) -> bool:
        outside = self._raw.clone()
        for index in range(count):
            outside[self._range(index)] = GUARD
        return bool((outside == GUARD).all())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_objects(pool_id: int) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"kvdock-{pool_id:016x}*"))
