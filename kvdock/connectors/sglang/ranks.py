"""Messages between the ranks of an engine, in addition to the calls that SGLang makes on all ranks.

SGLang calls each rank's linker in the same order with the same keys, and combines the answers of the ranks of a stage
itself. For everything else, the ranks agree through this class, over SGLang's process groups for the CPU. In a pipeline
the ranks of the first stage agree, and the later stages follow (stages.py).

Invariant: whether a rank calls share(), all_agree() or least() follows from SGLang's calls alone, never from a server's
answer or a clock, which only one rank sees; otherwise the ranks would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvdock.connectors.sglang.stages import Decisions, Notes

T = TypeVar("T")


class Ranks:
    """`group`: a torch.distributed process group of the ranks of a stage, or None for stages of one rank; `pipeline`:
    that of the ranks at the same place in each stage, or None for an engine of one stage.

    A rank's number counts the stages first, as under vLLM: where all ranks of a stage hold the same bytes (MLA), the
    first ranks are one of each stage."""

    def __init__(self, group: Any = None, pipeline: Any = None) -> None:
        self._group, self._pipeline, self.shard, self.shards = group, pipeline, 0, 1
        if group is not None:
            import torch.distributed as distributed

            self._distributed = distributed
            self.shard, self.shards = distributed.get_rank(group=group), distributed.get_world_size(group=group)
        self._decisions = Decisions(pipeline) if pipeline is not None else None
        self.stage, self.stages = 0, 1
        if self._decisions is not None:
            self.stage, self.stages = self._decisions.stage, self._decisions.stages
        self.rank, self.size = self.shard * self.stages + self.stage, self.shards * self.stages
        self.notes: Notes | None = None

    def share(self, value: T) -> T:
        """Returns rank 0's `value` in every rank."""
        if self.stage == 0:
            value = self._broadcast(value)
        return self._passed_on(value)

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` is true in every rank of the first stage."""
        return bool(self.least([int(ok)])[0])

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each of `values` in the ranks of the first stage."""
        found = list(values)
        if self.stage == 0:
            found = self._reduced(found, self._group, self.shards)
        return self._passed_on(found)

    def of_first_stage(self, value: T) -> T:
        """In the first rank of each stage, rank 0's `value`; in the others, their own."""
        return value if self._decisions is None or self.shard > 0 else self._decisions.passed_on(value)

    def all_agree_at_start(self, ok: bool) -> bool:
        """Whether `ok` is true in every rank of all stages. Only before SGLang has launched its first batch: later the
        first stage must not wait for the others."""
        found = self._reduced([int(ok)], self._group, self.shards)
        return bool(self._reduced(found, self._pipeline, self.stages)[0])

    def named(self, name: str) -> str:
        """Returns rank 0's `name` in every rank: the engine's. Under it the stages have their notes."""
        shared = self.share(name)
        if self._decisions is not None:
            self._decisions.delivered()  # this rank may refuse the engine next, and be gone
            from torch.distributed import distributed_c10d as c10d

            store: Any = c10d.PrefixStore(f"kvdock {shared}", c10d._get_default_store())
            self.notes = Notes(store.clone(), self.rank, self.size)
        return shared

    def step(self) -> None:
        """A step of SGLang's loop begins."""
        if self._decisions is not None:
            self._decisions.step()

    def _passed_on(self, value: T) -> T:
        if self._decisions is None:
            return value
        if self.shard == 0:
            value = self._decisions.passed_on(value)
        return self._broadcast(value) if self.stage > 0 else value

    def _broadcast(self, value: T) -> T:
        """The value of the stage's first rank, in all ranks of the stage."""
        if self.shards == 1:
            return value
        sent: list[Any] = [value]
        self._distributed.broadcast_object_list(sent, group=self._group, group_src=0)
        received: T = sent[0]
        return received

    def _reduced(self, values: list[int], group: Any, size: int) -> list[int]:
        if size == 1:
            return values
        import torch

        least = torch.tensor(values)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
        found: list[int] = least.tolist()
        return found
