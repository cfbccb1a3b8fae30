"""Messages between the ranks of an engine, in addition to the calls that SGLang makes on all ranks.

SGLang calls each rank's linker in the same order with the same keys, and combines the answers of the ranks of a stage
itself. For everything else, the ranks agree through this class, over SGLang's process groups for the CPU. In a pipeline
the ranks of the first stage agree, and the later stages follow (stages.py).

A stage may be spread over several nodes, each with a server of its own. The first rank of each node looks up and
reserves at its node's server, for the ranks of its node: what follows calls it rank 0. So what a node has stored is
shared in the node (share(), node_agrees()), and what the engine does with a request is agreed on by all ranks.

Invariant: whether a rank calls a method that asks other ranks follows from SGLang's calls alone, never from a server's
answer or a clock, which only one rank sees; otherwise the ranks would wait for each other for ever. What share() has
returned may decide about calls inside the node alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from kvdock.connectors.sglang.stages import Decisions, Notes

T = TypeVar("T")


class Ranks:
    """`group`: a torch.distributed process group of the ranks of a stage, or None for stages of one rank; `pipeline`:
    that of the ranks at the same place in each stage, or None for an engine of one stage. `nodes`: over how many nodes
    the ranks of a stage are spread, equally many on each, in the order of their ranks; more than 1 in an engine of one
    stage alone.

    A rank's number counts the stages first, as under vLLM: where all ranks of a stage hold the same bytes (MLA), the
    first ranks are one of each stage."""

    def __init__(self, group: Any = None, pipeline: Any = None, nodes: int = 1) -> None:
        self._group, self._pipeline, self.shard, self.shards = group, pipeline, 0, 1
        self.node, self.nodes, self._of_node = 0, nodes, group
        if group is not None:
            import torch.distributed as distributed

            self._distributed = distributed
            self.shards = distributed.get_world_size(group=group) // nodes
            self.node, self.shard = divmod(distributed.get_rank(group=group), self.shards)
            if nodes > 1:
                first = self.node * self.shards
                ranks = distributed.get_process_group_ranks(group)[first : first + self.shards]
                self._of_node = _group_of(tuple(ranks))
        self._decisions = Decisions(pipeline) if pipeline is not None else None
        self.stage, self.stages = 0, 1
        if self._decisions is not None:
            self.stage, self.stages = self._decisions.stage, self._decisions.stages
        self.rank, self.size = self.shard * self.stages + self.stage, self.shards * self.stages
        self.notes: Notes | None = None

    def share(self, value: T) -> T:
        """Returns rank 0's `value` in every rank; with several nodes, that of the node's first rank in its ranks."""
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
            found = self._reduced(found, self._group, self.shards * self.nodes)
        return self._passed_on(found)

    def node_agrees(self, ok: bool) -> bool:
        """Whether `ok` is true in every rank of this rank's stage and node."""
        return bool(self._reduced([int(ok)], self._of_node, self.shards)[0])

    def most(self, value: int) -> int:
        """The greatest `value` of the first ranks of all nodes, in an engine of one stage."""
        return -self.least([-value if self.shard == 0 else 0])[0]

    def of_any_node(self, names: frozenset[str]) -> frozenset[str]:
        """What is in `names` on the first rank of some node; in an engine of one node, rank 0's."""
        if self.nodes == 1:
            return self.share(names)
        found: list[Any] = [None] * (self.shards * self.nodes)
        self._distributed.all_gather_object(found, names, group=self._group)
        return frozenset[str]().union(*found[:: self.shards])

    def of_first_stage(self, value: T) -> T:
        """In the first rank of each stage, rank 0's `value`; in the others, their own."""
        return value if self._decisions is None or self.shard > 0 else self._decisions.passed_on(value)

    def all_agree_at_start(self, ok: bool) -> bool:
        """Whether `ok` is true in every rank of all stages. Only before SGLang has launched its first batch: later the
        first stage must not wait for the others."""
        found = self._reduced([int(ok)], self._group, self.shards * self.nodes)
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
        self._distributed.broadcast_object_list(sent, group=self._of_node, group_src=0)
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


@cache
def _group_of(ranks: tuple[int, ...]) -> Any:
    """A group of some of the engine's ranks, made once."""
    import torch.distributed as distributed

    return distributed.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
