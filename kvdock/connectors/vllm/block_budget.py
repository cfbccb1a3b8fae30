"""How much of the block pool may be tied up by loads that vLLM cannot preempt.

A request that loads in the background holds its blocks while it waits, and vLLM preempts only requests that run. If
such requests held so many blocks that the request at the head of the queue could not be given its own, and no request
ran, the engine would stand still for ever.

Invariant: blocks of background loads (in full length) + blocks of the largest other request <= blocks of the pool. So
when all running requests have ended, the request at the head fits: one that has loaded has its blocks, and any other
fits beside those that load. Later requests queue behind it. With priorities, a later request may be scheduled first:
then the largest other request is the longest possible one. A request that does not fit is loaded in the step that runs
it, which ties up no blocks while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdock.connectors.vllm.groups import KVGroup

STATE_BLOCKS = 4
"""How many blocks a request may have for its recurrent state: the block that steps write, two before it that steps in
progress may read, and one with a state that vLLM keeps for its own prefix cache."""


class BlockBudget:
    """`blocks`: the size of the pool. `longest_tokens`: the most tokens of a request. `step_tokens`: the most tokens of
    a step. `in_order`: whether requests are scheduled in the order in which they came."""

    def __init__(
        self, groups: Sequence[KVGroup], *, blocks: int, longest_tokens: int, step_tokens: int, in_order: bool = True
    ) -> None:
        self._groups, self._in_order = groups, in_order
        self._blocks, self._longest, self._step = blocks, longest_tokens, step_tokens
        self._needs: dict[str, int] = {}  # by request, the most blocks that it may need
        self._taken: dict[str, int] = {}  # the same for requests that load in the background, until they run

    def add(self, request: Any) -> None:
        """A request that may be scheduled from now on."""
        most = request.num_prompt_tokens + (request.max_tokens or 0)
        self._needs[request.request_id] = self._blocks_for(min(self._longest, most))

    def fits(self, request: Any) -> bool:
        mine = self._needs.get(request.request_id)
        if mine is None:
            return False
        loading = {**self._taken, request.request_id: mine}
        largest = max((blocks for other, blocks in self._needs.items() if other not in loading), default=0)
        if not self._in_order:
            largest = self._blocks_for(self._longest)
        return sum(loading.values()) + largest <= self._blocks

    def take(self, request: Any) -> None:
        self._taken[request.request_id] = self._needs[request.request_id]

    def give_back(self, request_id: str) -> None:
        """The request runs, so vLLM can preempt it."""
        self._taken.pop(request_id, None)

    def remove(self, request_id: str) -> None:
        self._needs.pop(request_id, None)
        self._taken.pop(request_id, None)

    def _blocks_for(self, tokens: int) -> int:
        total = 0
        for group in self._groups:
            if group.state:
                total += STATE_BLOCKS
                continue
            held = tokens
            if group.window_tokens is not None:
                held = min(tokens, group.window_tokens + self._step + group.block_tokens)
            total += -(-held // group.block_tokens) + 1
        return total
