"""The ranks that compute one model together: which one this process is, and how partial sums are added up.

Invariant: `total` adds in the order of the ranks, so every rank gets the same bits, every time.
"""

from __future__ import annotations

from datetime import timedelta
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo

LOOPBACK = "127.0.0.1"


class RankLost(RuntimeError):
    """A process of the team has ended or does not answer, so what needs all of them cannot continue."""


class Team(Protocol):
    rank: int
    size: int

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, equal in all of them. All must call it, in the same order. Raises RankLost."""


class Alone:
    rank, size = 0, 1

    def total(self, part: Tensor) -> Tensor:
        return part


class GlooTeam:
    """Processes of this machine that meet at `store`. Waits until all `size` are there; raises RankLost if not."""

    def __init__(self, store: TCPStore, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        # torch's type stubs know neither this class nor the collectives.
        options = vars(ProcessGroupGloo)["_Options"]()
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._gloo: Any = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RankLost(f"rank {rank} of {size} did not find the others: {error}") from error

    def total(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            self._gloo.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} cannot reach the others: {error}") from error
        return reduce(torch.add, parts)
