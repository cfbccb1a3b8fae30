"""What the scheduler's side tells the workers each step, and what they report. Data: picklable, complete."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvdock.connectors.plans import LoadPlan, StorePlan


@dataclass(frozen=True)
class Life:
    """One server life as the scheduler's side sees it: a worker that sees another one cannot follow its plans."""

    pool_id: str
    session: str


NOWHERE = Life("", "")
"""No worker is ever attached there: a load from it fails."""


@dataclass(frozen=True)
class LoadOrder:
    life: Life
    plan: LoadPlan
    is_async: bool


@dataclass(frozen=True)
class StoreOrder:
    number: int
    life: Life
    plan: StorePlan


@dataclass(frozen=True)
class Orders:
    """Of one step. `fences`: stores that must have ended before this step writes anything."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    fences: tuple[int, ...] = ()


@dataclass
class Report:
    """Of one step, of one worker or summed over some."""

    valid_tokens: dict[str, int] = field(default_factory=dict)
    """Loads that fell short, by request: the least of the ranks."""
    stores: Counter[int] = field(default_factory=Counter)
    """How many ranks no longer read for a store."""

    def add(self, other: Report) -> None:
        for request_id, valid in other.valid_tokens.items():
            self.valid_tokens[request_id] = min(valid, self.valid_tokens.get(request_id, valid))
        self.stores.update(other.stores)

    def __bool__(self) -> bool:
        return bool(self.valid_tokens or self.stores)
