"""Where an engine's blocks are, and the copier that goes with it: "cpu", "cuda" or "cuda:1"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvdock.datapath.copy import Copier, CpuCopier
from kvdock.datapath.cuda import CudaCopier, require_cuda
from kvdock.datapath.errors import DeviceUnknown
from kvdock.datapath.layout import PagedLayout
from kvdock.datapath.pinning import CudaPin, Pin
from kvdock.datapath.tuning import tuned


@dataclass(frozen=True)
class Device:
    """`cuda`: the index of a GPU as this process counts them; None: blocks are in host memory."""

    cuda: int | None = None

    @classmethod
    def named(cls, name: str) -> Device:
        """DeviceUnknown for a name that is none; NoCuda for a GPU that this process cannot use."""
        if name == "cpu":
            return cls()
        match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
        if match is None:
            raise DeviceUnknown("device", found=repr(name), wanted='"cpu", "cuda" or "cuda:N"')
        index = int(match.group(1) or 0)
        require_cuda(index)
        return cls(index)

    @property
    def pin(self) -> Pin | None:
        """How segments are made known to the driver; None when nothing needs it."""
        return None if self.cuda is None else CudaPin(self.cuda)

    def open_copier(self, layout: PagedLayout, *, part_blocks: int, threads: int) -> Copier:
        """`part_blocks`: blocks of a chunk; `threads`: of a CPU copy. On a GPU it measures how copies go best, once
        for each layout and machine (well under a second). Raises what CudaCopier raises."""
        if self.cuda is None:
            return CpuCopier(layout, threads=threads)
        return CudaCopier(layout, device=self.cuda, tuning=tuned(layout, self.cuda, part_blocks=part_blocks))


CPU = Device()
