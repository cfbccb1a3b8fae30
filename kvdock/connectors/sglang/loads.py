"""A rank's loads: queued while SGLang builds a batch, started with it, awaited layer by layer, and ended with it.

    load ──► queue ──► start ──► "kvdock-load": submit ──► copies ──► verdict, reports to the server
                         └► batch ◄── wait_until(layer) …… forward …… finish

The forward pass asks for a layer's KV before it reads it. On a GPU its stream is ordered after the band of layers that
has it, so loading and computing overlap; on a CPU it waits for the load. Recurrent states are all there before the
forward pass starts. SGLang reads the verdict after the forward pass, and by then no copy writes to its pages.

Invariant: every plan that was queued is copied, or given up, exactly once; its lease is released once its copies have
ended (W1).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from kvdock.connectors.background import Background
from kvdock.connectors.plans import LoadPiece, LoadPlan
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.session import Attachment
from kvdock.connectors.sglang.pools import KVGroup, RankPools
from kvdock.connectors.worker import VERIFIED_BEFORE, Layers, Loading

log = logging.getLogger("kvdock.sglang")


@dataclass(frozen=True)
class QueuedLoad:
    """`indices`: SGLang's, by the name of the transfer; `epoch`: of the weights for which it was promised; `pages`: the
    hashes of what is loaded."""

    rid: str
    attachment: Attachment
    plan: LoadPlan
    indices: Mapping[str, Any]
    epoch: int
    pages: Sequence[str] = ()


@dataclass
class _Batch:
    loads: Sequence[QueuedLoad]
    is_outdated: bool
    """It has a load of KV of other weights: nothing is copied, and all of it fails."""
    submitted: Future[list[Loading]] = field(default_factory=Future)
    landed: Future[bool] = field(default_factory=Future)
    took_s: float = 0.0
    copies: Sequence[tuple[int, float]] = ()


START = -1
"""In place of a layer: before the forward pass starts."""


def waits(group: KVGroup, count: int) -> dict[str, int]:
    """For each of the `count` layers for which SGLang may ask, the group's last plane that must be there. After that
    the layers before it may be read, too: a graph of the whole forward pass asks for the last layer alone. A draft's
    forward pass follows the target's and asks for nothing, and a graph of a part of it may read states without asking
    for them. So a draft's group is there with the first layer, and a group of states before all of them."""
    if group.has_slots:
        return {str(START): max(group.planes.values())}
    if group.is_draft:
        return {str(layer): max(group.planes.values()) for layer in range(count)}
    return {
        str(layer): max(plane for before, plane in group.planes.items() if before <= layer)
        for layer in range(min(group.planes), count)
    }


class LayerCounter:
    """The object on which SGLang's pools wait (its LayerWiseLoadCounter)."""

    def __init__(self, num_layers: int, wait: Callable[[int, int], None], waits_at_start: bool = False) -> None:
        """`wait(batch, layer)`; `waits_at_start`: also for START."""
        self.num_layers, self.consumer_index, self._wait = num_layers, -1, wait
        self._waits_at_start = waits_at_start
        self.batches = 0
        """How many forward passes have started, whether they load or not."""

    def set_consumer(self, index: int) -> None:
        """SGLang calls it on the forward pass's stream, before the pass."""
        self.consumer_index = index
        self.batches += 1
        if self._waits_at_start:
            self.wait_until(START)

    def wait_until(self, threshold: int) -> None:
        if self.consumer_index >= 0:
            self._wait(self.consumer_index, threshold)


class Loads:
    """SGLang's thread calls `ended` with each load and whether it has brought all; None: it was cancelled. It calls
    `took` with the seconds of a batch's loads, counted from their start, and the tokens of each with the seconds of its
    copies. `clock`: seconds, monotonic."""

    def __init__(
        self, pools: RankPools, weights: RunningWeights, *, ended: Callable[[QueuedLoad, bool | None], None],
        took: Callable[[float, Sequence[tuple[int, float]]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pools, self._weights = pools, weights
        self._ended, self._took, self._clock = ended, took, clock
        groups = pools.groups
        count = 1 + max(layer for group in groups if not group.is_draft for layer in group.planes)
        self._layers = Layers([waits(group, count) for group in groups], VERIFIED_BEFORE)
        self.counter = LayerCounter(count, self._wait_for_layer, any(group.has_slots for group in groups))
        self._loading = Background("kvdock-load")
        self._queued: dict[str, QueuedLoad] = {}
        self._batches: dict[int, _Batch] = {}
        self._started = -1
        self._watched = -1

    def queue(self, load: QueuedLoad) -> None:
        self._queued[load.rid] = load

    def cancel(self, rid: str) -> bool:
        """Whether the load was queued; then it is given up."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        self.give_up(load.attachment, load.plan)
        self._ended(load, None)
        return True

    def give_up(self, attachment: Attachment, plan: LoadPlan) -> None:
        """Gives back a plan of which nothing was or will be copied here."""
        self._loading.run(self._give_back, attachment, plan)

    def start(self, ready: Callable[[], object]) -> int:
        """Starts the queued loads. `ready`: waits until the GPU has given out the pages. Returns the number of the
        batch; -1: nothing is queued."""
        if not self._queued:
            return -1
        self._started += 1
        loads, now = tuple(self._queued.values()), self._weights
        is_outdated = not now.may_share or any(load.epoch != now.epoch for load in loads)
        if is_outdated:
            log.warning("%s loads were promised for other weights than those of now: their requests end", len(loads))
        batch = self._batches[self._started] = _Batch(loads, is_outdated)
        self._queued.clear()
        self._loading.run(self._run, batch, ready)
        return self._started

    def finish(self, index: int) -> bool:
        """Waits for a batch. Returns whether all of it is there."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        landed = batch.landed.result()
        if landed:
            self._took(batch.took_s, batch.copies)
        for load in batch.loads:
            self._ended(load, landed)
        return landed

    def reset(self) -> None:
        """Waits for loads that have started and gives up the others."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._batches):
            self.finish(index)
        self.counter.set_consumer(-1)

    def close(self) -> None:
        self.reset()
        self._loading.close()

    # ------------------------------------------------------------------ the forward pass

    def _wait_for_layer(self, index: int, layer: int) -> None:
        batch = self._batches.get(index)
        if batch is None:
            return
        if self._pools.stream is None:
            batch.landed.exception()  # the verdict is finish()'s
            return
        if self._watched != index:
            self._layers.watch(batch.submitted.result())
            self._watched = index
        self._layers.order(str(layer), self._pools.stream())

    # ------------------------------------------------------------------ background

    def _run(self, batch: _Batch, ready: Callable[[], object]) -> None:
        started_s, loadings, landed = self._clock(), list[Loading](), False
        try:
            try:
                ready()
                for load in () if batch.is_outdated else batch.loads:
                    bands = self._layers.bands if self._pools.stream is not None else None
                    loadings.append(self._pools.worker.submit_load(load.attachment, self._placed(load), bands))
            finally:
                batch.submitted.set_result(loadings)
            valid = [self._pools.worker.finish_load(loading) for loading in loadings]
            landed = valid == [loading.plan.hit_tokens for loading in loadings]
            batch.copies = [
                (loading.plan.hit_tokens - loading.plan.local_tokens, took_s)
                for loading in loadings if (took_s := loading.took_s()) is not None
            ]
        finally:
            batch.took_s = self._clock() - started_s
            batch.landed.set_result(landed and len(loadings) == len(batch.loads))
            self._settle(batch, loadings)

    def _placed(self, load: QueuedLoad) -> LoadPlan:
        """The plan with SGLang's pages in place of their numbers."""
        plan, first = load.plan, load.plan.local_tokens // self._pools.page_tokens
        pages: dict[int, list[int]] = {}
        for group, about in enumerate(self._pools.groups):
            if about.transfer in load.indices:
                pages[group] = about.pages_of(load.indices[about.transfer])
        count = plan.hit_tokens // self._pools.page_tokens - first
        pieces = []
        for piece in plan.pieces:
            of_group = pages.get(piece.group, [])
            at = piece.block_ids[-1] - (count - len(of_group))  # a window has the last pages only
            pieces.append(LoadPiece(piece.chunk, piece.group, piece.parts, (of_group[at],), piece.skip_blocks))
        return replace(plan, pieces=tuple(pieces))

    def _settle(self, batch: _Batch, loadings: Sequence[Loading]) -> None:
        """Reports to the server; nothing waits for that."""
        for loading in loadings:
            self._pools.worker.end_load(loading)
        for load in batch.loads[len(loadings) :]:
            self._release(load.attachment, load.plan)
        for load in batch.loads:
            self._pools.worker.settle(load.attachment)
            load.attachment.release()

    def _give_back(self, attachment: Attachment, plan: LoadPlan) -> None:
        self._release(attachment, plan)
        self._pools.worker.settle(attachment)
        attachment.release()

    def _release(self, attachment: Attachment, plan: LoadPlan) -> None:
        session = self._pools.worker.session
        session.client.release_later(plan.lease, attachment.session, [self._pools.worker.rank])
