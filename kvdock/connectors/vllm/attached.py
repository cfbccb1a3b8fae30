"""Which server each worker of an engine is attached to: no load is promised until all are at the scheduler's.

A lease that the scheduler's side has from its server means nothing at another one. A worker is at another if it runs on
another machine, or with another address. A worker that has not heard yet that its server was replaced is behind, and
not elsewhere: it catches up with its next steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvdock.connectors.session import Attachment, ServerEpoch
from kvdock.connectors.vllm.steps import NOWHERE

log = logging.getLogger("kvdock.vllm")


class Attached:
    """`ranks`: how many workers there are."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._epochs: dict[int, ServerEpoch] = {}
        self._own_pools: set[str] = set()
        self._said: set[int] = set()

    def told(self, epochs: Mapping[int, ServerEpoch]) -> None:
        """What workers have said with a step."""
        self._epochs.update(epochs)

    def everywhere(self, attachment: Attachment | None) -> bool:
        """Every worker has said that it is attached to what this side is."""
        if attachment is None:
            return False
        self._own_pools.add(attachment.epoch.pool_id)
        if len(self._epochs) < self._ranks:
            return False
        elsewhere = {rank for rank, epoch in self._epochs.items() if self._is_elsewhere(epoch)}
        if elsewhere - self._said:
            self._said |= elsewhere
            log.warning(
                "nothing is loaded: the workers of ranks %s are attached to another kvdock server than the scheduler. "
                "All of an engine run on one machine and have one address (KVDOCK_ADDRESS)",
                ", ".join(str(rank) for rank in sorted(elsewhere)),
            )
        return set(self._epochs.values()) == {attachment.epoch}

    def _is_elsewhere(self, epoch: ServerEpoch) -> bool:
        return epoch != NOWHERE and epoch.pool_id not in self._own_pools
