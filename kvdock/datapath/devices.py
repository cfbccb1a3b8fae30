"""The device that holds an engine's blocks ("cpu", "cuda" or "cuda:1"), and the copiers for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvdock import _core
from kvdock.datapath.copy import Copier, CpuCopier
from kvdock.datapath.cuda import CopyTuning, CudaCopier, require_cuda
from kvdock.datapath.cuda_packed import PackedCudaCopier
from kvdock.datapath.errors import DeviceUnknown
from kvdock.datapath.layout import PagedLayout
from kvdock.datapath.segments import CudaRegister, Register
from kvdock.datapath.tuning import tuned


@dataclass(frozen=True)
class Device:
    """`cuda`: the index of a GPU as this process counts them; None: the blocks are in host memory."""

    cuda: int | None = None

    @classmethod
    def named(cls, name: str) -> Device:
        """DeviceUnknown for a name that names no device; NoCuda for a GPU that this process cannot use."""
        if name == "cpu":
            return cls()
        match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
        if match is None:
            raise DeviceUnknown("device", found=repr(name), wanted='"cpu", "cuda" or "cuda:N"')
        index = int(match.group(1) or 0)
        require_cuda(index)
        return cls(index)

    @property
    def register(self) -> Register | None:
        """Registers segments with the driver; None on the CPU, which needs no registration."""
        return None if self.cuda is None else CudaRegister(self.cuda)

    def tuning(self, layouts: Sequence[PagedLayout], *, chunk_tokens: int) -> CopyTuning | None:
        """The fastest tuning for the first layout and for chunks of `chunk_tokens` tokens. It is measured once on a
        machine, in well under a second. None on the CPU."""
        if self.cuda is None:
            return None
        return tuned(layouts[0], self.cuda, part_blocks=chunk_tokens // layouts[0].block_tokens)

    def open_copiers(
        self, layouts: Sequence[PagedLayout], *, chunk_tokens: int, threads: int, tuning: CopyTuning | None = None,
        packing: Sequence[_core.PackedShape | None] | None = None,
    ) -> list[Copier]:
        """A copier for each layout, for parts of chunks of `chunk_tokens` tokens. `threads`: how many threads a copy
        with the CPU uses. `tuning`: for copies on a GPU; None: CopyTuning's defaults. On a GPU the copiers share
        staging buffers. `packing`: the shape of each layout's packed parts; None: they are raw. Raises what CudaCopier
        raises."""
        shapes = packing or [None] * len(layouts)
        if self.cuda is None:
            pairs = zip(layouts, shapes, strict=True)
            return [CpuCopier(layout, threads=threads, packing=shape) for layout, shape in pairs]
        first, *others = [(layout, chunk_tokens // layout.block_tokens) for layout in layouts]
        copier = CudaCopier(first[0], device=self.cuda, part_blocks=first[1], tuning=tuning)
        raw = [copier, *(copier.beside(layout, part_blocks=blocks) for layout, blocks in others)]
        copiers: list[Copier] = []
        for layout, one, shape in zip(layouts, raw, shapes, strict=True):
            if shape is None:
                copiers.append(one)
                continue
            packed = one.beside(layout, part_blocks=chunk_tokens // layout.block_tokens, packing=shape)
            copiers.append(PackedCudaCopier(layout, one, packed, shape.packed_bytes))
        return copiers


CPU = Device()
