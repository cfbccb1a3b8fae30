"""Scenarios of block sizes that differ between KV cache groups, beside those of sched_scenarios.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sched_scenarios import warm

from kvdock.connectors.vllm.scheduler import VllmScheduler


def swapped(address: str, windows: Sequence[int | None], sizes: Sequence[int]) -> dict[str, Any]:
    """Negative control: the last two blocks that a load fills change places, in the group with the largest blocks that
    has two."""
    real = VllmScheduler.allocated

    def confused(self: VllmScheduler, request: Any, table: Any, external: int) -> None:
        if external:
            ends = [(size, column, external // size) for size, column in zip(sizes, table, strict=True)]
            _, column, end = max(one for one in ends if one[1][one[2] - 2] is not None)
            column[end - 2], column[end - 1] = column[end - 1], column[end - 2]
        real(self, request, table, external)

    VllmScheduler.allocated = confused  # type: ignore[method-assign]  # the defect that the check must see
    try:
        return warm(address, windows, sizes)
    finally:
        VllmScheduler.allocated = real  # type: ignore[method-assign]  # as it was
