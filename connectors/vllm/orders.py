"""What the scheduler's side tells the workers each step, and what they report. Data: picklable, complete."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvdock.connectors.plans import LoadPlan, StorePlan
from kvdock.connectors.session import Attachment


@dataclass(frozen=True)
class Life:
    """One server life as the scheduler's side sees it: a worker that sees another one cannot follow its plans."""

    pool_id: str
    session: str

    @classmethod
    def of(cls, attachment: Attachment) -> Life:
        return cls(attachment.pool_id, attachment.session)


IDLE_WAIT_S = 0.001
"""What a side may wait in a step that computes nothing: as long as vLLM's own loop sleeps then."""

NOWHERE = Life("", "")
"""No worker is ever attached there: a load from it fails."""


@dataclass(frozen=True)
class LoadOrder:
    """`is_async`: the request does not run in this step."""

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
    """Of one step. `fences`: stores that must have ended before this step writes anything. `is_idle`: the step
    computes nothing. `alone`: the one request that it computes. `gone`: requests that have ended since the last."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    fences: tuple[int, ...] = ()
    is_idle: bool = False
    alone: str | None = None
    gone: frozenset[str] = frozenset()


@dataclass
class Report:
    """Of one step, of one worker or summed over some."""

    valid_tokens: dict[str, int] = field(default_factory=dict)
    """Loads that fell short, by request: the least of the ranks."""
    stores: Counter[int] = field(default_factory=Counter)
    """How many ranks no longer read for a store."""
    lives: dict[int, Life] = field(default_factory=dict)
    """What ranks are attached to, when that has changed; NOWHERE: to nothing."""

    def add(self, other: Report) -> None:
        for request_id, valid in other.valid_tokens.items():
            self.valid_tokens[request_id] = min(valid, self.valid_tokens.get(request_id, valid))
        self.stores.update(other.stores)
        self.lives.update(other.lives)

    def __bool__(self) -> bool:
        return bool(self.valid_tokens or self.stores or self.lives)
