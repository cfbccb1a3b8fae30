"""The orders that the scheduler's side sends to the workers with each step, and the workers' reports. All are picklable
data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvdock.connectors.plans import LoadPlan, StorePlan, valid_in_all
from kvdock.connectors.session import ServerEpoch

IDLE_WAIT_S = 0.001
"""How long the scheduler's side or a worker may wait in a step that computes nothing: as long as vLLM's own loop sleeps
then."""

NOWHERE = ServerEpoch("", "")
"""An epoch to which no worker is ever attached, so that a load from it fails."""


@dataclass(frozen=True)
class LoadOrder:
    """`is_async`: the request does not run in this step. `waits`: steps in progress may still use some of its blocks,
    so the load runs after these steps. `after`: stores that may still read some of its blocks."""

    epoch: ServerEpoch
    plan: LoadPlan
    is_async: bool
    waits: bool = True
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoreOrder:
    """`waits`: steps in progress may still compute the blocks that it reads."""

    store_id: str
    epoch: ServerEpoch
    plan: StorePlan
    waits: bool = True


@dataclass(frozen=True)
class Orders:
    """The workers' orders for one step. `fences`: stores that must have ended before this step writes anything.
    `is_idle`: the step computes nothing. `alone`: the one request that it computes. `gone`: requests that have ended
    since the last step. `weights`: RunningWeights.epoch."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    fences: tuple[str, ...] = ()
    is_idle: bool = False
    alone: str | None = None
    gone: frozenset[str] = frozenset()
    weights: int = 0


@dataclass
class Report:
    """The workers' report on one step: of one worker, or of several added up."""

    valid_tokens: dict[str, int] = field(default_factory=dict)
    """By request, how many tokens of a load that fell short are valid: the least of the ranks."""
    stores: Counter[str] = field(default_factory=Counter)
    """By store, how many more ranks have stopped reading its blocks."""
    epochs: dict[int, ServerEpoch] = field(default_factory=dict)
    """The servers to which ranks are attached, when that has changed; NOWHERE: to none."""
    took_s: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By request, the tokens of a complete load, and the seconds that its copies took on the slowest rank."""
    manifests: dict[int, bytes] = field(default_factory=dict)
    """By rank, its manifest in JSON, in its first report unless vLLM's handshake has carried it."""
    wrote_weights: set[int] = field(default_factory=set)
    """Epochs of weights: weights were loaded into a rank's model when its last orders were of this epoch."""

    def add(self, other: Report) -> None:
        for request_id, valid in other.valid_tokens.items():
            joined = valid_in_all([valid, self.valid_tokens.get(request_id, valid)])
            assert joined is not None, "two ranks"
            self.valid_tokens[request_id] = joined
        self.stores.update(other.stores)
        for request_id, (tokens, seconds) in other.took_s.items():
            self.took_s[request_id] = tokens, max(seconds, self.took_s.get(request_id, (tokens, 0.0))[1])
        self.epochs.update(other.epochs)
        self.manifests.update(other.manifests)
        self.wrote_weights |= other.wrote_weights

    def __bool__(self) -> bool:
        return bool(
            self.valid_tokens or self.stores or self.took_s or self.epochs or self.manifests or self.wrote_weights
        )
