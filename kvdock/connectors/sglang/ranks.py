"""Messages between the ranks of an engine, in addition to the calls that SGLang makes on all ranks.

SGLang calls each rank's linker in the same order with the same keys, and combines their answers itself. For everything
else, the ranks agree through this class, over SGLang's process group for the CPU.

Invariant: whether a rank calls share() or all_agree() follows from SGLang's calls alone, never from a server's answer
or a clock, which only one rank sees; otherwise the ranks would wait for each other for ever.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Ranks:
    """`group`: a torch.distributed process group, or None for an engine of one rank."""

    def __init__(self, group: Any = None) -> None:
        self._group, self.rank, self.size = group, 0, 1
        if group is not None:
            import torch.distributed as distributed

            self._distributed = distributed
            self.rank, self.size = distributed.get_rank(group=group), distributed.get_world_size(group=group)

    def share(self, value: T) -> T:
        """Returns rank 0's `value` in every rank."""
        if self.size == 1:
            return value
        sent: list[Any] = [value]
        self._distributed.broadcast_object_list(sent, group=self._group, group_src=0)
        received: T = sent[0]
        return received

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` is true in every rank."""
        if self.size == 1:
            return ok
        import torch

        least = torch.tensor([int(ok)])
        self._distributed.all_reduce(least, op=self._distributed.ReduceOp.MIN, group=self._group)
        return bool(least.item())
