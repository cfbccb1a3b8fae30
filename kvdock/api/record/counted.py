"""A histogram that the core counts."""

from __future__ import annotations

from typing import NamedTuple


class Counted(NamedTuple):
    """Values by their size. `bounds`: the largest value of each bucket, rising; `counts`: how many values are in each,
    and in one more bucket beyond the last bound; `total`: the sum of the values."""

    bounds: list[int]
    counts: list[int]
    total: int
