"""A rank's loads: queued while SGLang builds a batch, started with it, awaited layer by layer, and ended with it.

    load ──► queue ──► start ──► submit ──► copies ──────────────────► │
                         └► batch ◄── wait_until(layer) …… forward …… finish
                                         SGLang has sent the tokens ──► "kvdock-settle": reports to the server

SGLang's scheduler thread does all of it but the reports. Another thread of Python would need the interpreter lock while
SGLang launches the forward pass: it could wait 5 ms for it (Python's switch interval), and then SGLang's thread would
wait for that thread. A thread of kvdock's submits the copies only where SGLang's thread would have to wait: for the
GPU to compute the indices of the pages, or for the server, which has added a segment. In a pipeline, one more thread
notes for the other stages how the copies have ended (stages.py).

The loads of a batch are one copy for each KV group, which has the first layers of all loads first. The forward pass
asks for each layer's KV before it reads this KV. On a GPU, the forward pass's stream is then ordered after the copy of
the layer's band, so loading and computing overlap; on a CPU, the forward pass waits for the copies of the whole load.
All recurrent states are loaded before the forward pass starts. SGLang asks for the verdict on the loads when it
processes the result of the forward pass (verdicts.py); no copy writes to its pages any more once it has it.

Invariant: every plan that was queued is copied, or given up, exactly once; its lease is released once its copies have
ended (W1 in docs/understand/lifetime_protocol.md).
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvdock.connectors.background import Background
from kvdock.connectors.plans import LoadPlan, Pieces
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.session import Attachment
from kvdock.connectors.sglang.afterwards import Afterwards
from kvdock.connectors.sglang.pools import KVGroup, RankPools
from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.sglang.stages import Notes
from kvdock.connectors.sglang.verdicts import Verdicts
from kvdock.connectors.worker import VERIFIED_BEFORE, Layers, Loading, seconds_of

log = logging.getLogger("kvdock.sglang")


@dataclass
class QueuedLoad:
    """`indices`: SGLang's indices of the memory to fill, by the name of the transfer; `epoch`: the epoch of the weights
    for which the load was promised; `pages`: the hashes of the pages to load; `is_early`: no batch of SGLang's has it
    (early.py). Once it has ended, `took_s`: the seconds that its batch's loads took, to submit and to copy them;
    `copy_s`: those of the copies alone, on this rank; None: not known. `blocks`: by KV group, the ids of the blocks to
    fill, once the GPU has computed them; None: the group is not loaded.
    """

    rid: str
    attachment: Attachment
    plan: LoadPlan
    indices: Mapping[str, Any]
    epoch: int
    pages: Sequence[str] = ()
    is_early: bool = False
    blocks: Sequence[Any] = ()
    took_s: float = 0.0
    copy_s: float | None = None


@dataclass
class _Batch:
    loads: Sequence[QueuedLoad]
    number: int
    is_outdated: bool
    """The weights have changed, or are changing, since a load of the batch was promised, or this rank takes no part in
    one of the loads: nothing is copied, and all its loads fail."""
    started_s: float
    submitted: Future[list[Loading]] = field(default_factory=Future)
    submit_s: float = 0.0
    """Seconds from the start until all copies were submitted."""


class _Threads(NamedTuple):
    """Each has one thread. Notes wait for copies, and reports for the server: no submission must wait for these."""

    submits: Background
    notes: Background
    settles: Background


class Ready(NamedTuple):
    """Whether the GPU has computed the ids of blocks. `wait`: waits until it has."""

    has_come: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None

    def comes_soon(self, clock: Callable[[], float]) -> bool:
        """Whether the GPU has computed them, or does so within SOON_S."""
        end_s = clock() + SOON_S
        while not self.has_come():
            if clock() > end_s:
                return False
        return True


SOON_S = 200e-6
START = -1
"""Used in place of a layer for the time before the forward pass starts."""


def waits(group: KVGroup, count: int) -> dict[str, int]:
    """For each of the `count` layers for which SGLang may ask, the group's last plane that must be loaded by then. The
    planes before that one must be loaded, too, because a CUDA graph of the whole forward pass asks for the last layer
    alone. A draft's forward pass runs after the target's and asks for nothing, so a draft's group is loaded by the
    first layer. A graph of a part of the forward pass may read states without asking for them, so a group of states is
    loaded before the forward pass starts."""
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
        """`wait(batch, layer)`: waits for a layer's KV; `waits_at_start`: whether it is called with START, too."""
        self.num_layers, self.consumer_index, self._wait = num_layers, -1, wait
        self._waits_at_start = waits_at_start
        self.batches = 0
        """How many forward passes have started, with loads or without; a reset counts as one."""

    def set_consumer(self, index: int) -> None:
        """SGLang calls this on the forward pass's stream, before the forward pass."""
        self.consumer_index = index
        self.batches += 1
        if self._waits_at_start:
            self.wait_until(START)

    def wait_until(self, threshold: int) -> None:
        if self.consumer_index >= 0:
            self._wait(self.consumer_index, threshold)


class Loads:
    """`ended`: called with each load, and whether all loads of its batch are complete on all ranks; None: the load was
    cancelled. `took`: called for a complete batch, with the seconds that its loads took, and (tokens, its share of the
    seconds of the copies) of each load. Both wait in `afterwards`. `clock`: a monotonic clock, in seconds."""

    def __init__(
        self, pools: RankPools, ranks: Ranks, weights: RunningWeights, *,
        ended: Callable[[QueuedLoad, bool | None], None],
        took: Callable[[float, Sequence[tuple[int, float]]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pools, self._ranks, self.weights = pools, ranks, weights
        self._ended, self._took, self._clock, self.afterwards = ended, took, clock, Afterwards()
        groups = pools.groups
        count = 1 + max(layer for group in groups if not group.is_draft for layer in group.planes)
        self._layers = Layers([waits(group, count) for group in groups], VERIFIED_BEFORE)
        self.counter = LayerCounter(count, self._wait_for_layer, any(group.has_slots for group in groups))
        self.verdicts = Verdicts(ranks)
        self._threads = _Threads(Background("kvdock-load"), Background("kvdock-note"), Background("kvdock-settle"))
        self._queued: dict[str, QueuedLoad | None] = {}
        """None: this rank takes no part in the load."""
        self._batches: dict[int, _Batch] = {}
        self._started = -1
        self._watched = -1

    def queue(self, load: QueuedLoad) -> None:
        """The ids of blocks begin their way from the GPU here, so that start() need not wait for them."""
        self._read_blocks(load)
        self._queued[load.rid] = load

    def _read_blocks(self, load: QueuedLoad) -> None:
        load.blocks = [
            group.pages_soon(load.indices[group.transfer]) if group.transfer in load.indices else None
            for group in self.pools.groups
        ]

    def refuse(self, rid: str) -> None:
        """The first stage has begun a load in which this rank cannot take part: the loads of its batch fail."""
        self._queued[rid] = None

    def cancel(self, rid: str) -> bool:
        """Gives the load up if it is queued. Returns whether it was."""
        if rid not in self._queued:
            return False
        load = self._queued.pop(rid)
        if load is not None:
            self.give_up(load.attachment, load.plan)
            self._ended(load, None)
        return True

    def give_up(self, attachment: Attachment, plan: LoadPlan) -> None:
        """Gives back a plan of which nothing was or will be copied here."""
        self._threads.settles.run(self._give_back, attachment, plan)

    def start(self, ready: Ready) -> int:
        """Starts the queued loads. Returns the number of the batch; -1: nothing is queued."""
        if not self._queued:
            return -1
        self._started += 1
        loads = tuple(load for load in self._queued.values() if load is not None)
        is_outdated = self.are_outdated(loads)
        if is_outdated:
            log.warning("%s loads were promised for other weights than those of now: their requests end", len(loads))
        if refused := len(self._queued) - len(loads):
            log.warning("%s loads fail: this rank is not attached to the session of %s", len(self._queued), refused)
        batch = _Batch(loads, self._started, is_outdated or refused > 0, self._clock())
        self._batches[self._started] = batch
        self._queued.clear()
        if self._may_submit_now(batch, ready):
            self._submit(batch, ready)
        else:
            self._threads.submits.run(self._submit, batch, ready)
        if (notes := self._ranks.notes) is not None:
            self._threads.notes.run(self._note, batch, notes)
        return self._started

    def start_early(self, load: QueuedLoad, ready: Callable[[], Ready]) -> int:
        """Starts a load that no batch of SGLang's waits for. `ready`: of what the GPU computes by now. Returns the
        load's number, for has_ended() and finish()."""
        self._read_blocks(load)
        self._started += 1
        batch = _Batch((load,), self._started, self.are_outdated([load]), self._clock())
        self._batches[self._started] = batch
        self._threads.submits.run(self._submit, batch, ready())
        return self._started

    def has_ended(self, index: int) -> bool:
        """Whether the copies of a batch have ended here."""
        submitted = self._batches[index].submitted
        return submitted.done() and all(loading.done() for loading in submitted.result())

    def are_outdated(self, loads: Sequence[QueuedLoad]) -> bool:
        """Whether the weights have changed, or are changing, since a load was promised."""
        return not self.weights.may_share or any(load.epoch != self.weights.epoch for load in loads)

    def _may_submit_now(self, batch: _Batch, ready: Ready) -> bool:
        """Whether SGLang's thread would wait for nothing: neither for another thread, nor a server, nor long for the
        GPU."""
        others = [one.submitted.done() for one in self._batches.values() if one is not batch]
        are_mapped = (self.pools.worker.maps(load.attachment, load.plan) for load in batch.loads)
        return all(others) and all(are_mapped) and ready.comes_soon(self._clock)

    def finish(self, index: int) -> bool:
        """Waits for a batch. Returns whether all its loads are complete on all ranks. An early load is not if the
        weights have changed meanwhile."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        if any(load.is_early for load in batch.loads):
            batch.is_outdated |= self.are_outdated(batch.loads)
        loadings, notes = batch.submitted.result(), self._ranks.notes
        landed = (
            self._ranks.all_agree(self._have_landed(batch, loadings)) if notes is None else notes.all_landed(index)
        )
        self.afterwards.run(self._tell, batch, loadings, landed, self._clock())
        return landed

    def _tell(self, batch: _Batch, loadings: Sequence[Loading], landed: bool, ended_s: float) -> None:
        """The batch has ended at `ended_s`."""
        copy_s = seconds_of(copy for loading in loadings for copy in loading.copies)
        took_s = ended_s - batch.started_s if copy_s is None else batch.submit_s + copy_s
        if landed:
            took = zip(batch.loads, [loading.took_s() for loading in loadings], strict=False)
            self._took(took_s, [(_tokens(load), own_s) for load, own_s in took if own_s is not None])
        for load in batch.loads:
            load.took_s, load.copy_s = took_s, copy_s
            self._ended(load, landed)
        self._threads.settles.run(self._settle, batch, loadings)

    def reset(self) -> None:
        """Waits for loads that have started and gives up the others."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._batches):
            self.finish(index)
        self.verdicts.forget()
        self.counter.set_consumer(-1)

    def close(self) -> None:
        for rid in list(self._queued):
            self.cancel(rid)
        self._threads.submits.close()
        self._threads.notes.close()
        for batch in self._batches.values():  # SGLang ends, and asks for no verdict
            loadings = batch.submitted.result()
            if self._ranks.notes is None:
                self._have_landed(batch, loadings)
            self._threads.settles.run(self._settle, batch, loadings)
        self._batches.clear()
        self._threads.settles.close()

    # ------------------------------------------------------------------ the forward pass

    def _wait_for_layer(self, index: int, layer: int) -> None:
        batch = self._batches.get(index)
        if batch is None:
            return
        if self.pools.stream is None:
            for loading in batch.submitted.result():
                loading.wait(None)  # finish() returns the verdict
            return
        if self._watched != index:
            self._layers.watch(batch.submitted.result())
            self._watched = index
        self._layers.order(str(layer), self.pools.stream())

    # ------------------------------------------------------------------ copies

    def _submit(self, batch: _Batch, ready: Ready) -> None:
        """Submits the copies. A load that cannot be submitted fails; if anything else fails, all loads do."""
        has_bands = self.pools.stream is not None and not any(load.is_early for load in batch.loads)
        loadings, bands = list[Loading](), self._layers.bands if has_bands else None
        try:
            ready.wait()
            if not batch.is_outdated:
                placed = [(load.attachment, self._placed(load)) for load in batch.loads]
                loadings = self.pools.worker.submit_together(placed, bands)
        except Exception:  # it must not end SGLang's thread
            log.exception("a load was not submitted")
        finally:
            batch.submit_s = self._clock() - batch.started_s
            batch.submitted.set_result(loadings)

    def _note(self, batch: _Batch, notes: Notes) -> None:
        """In the background: the other stages wait for this note, and this stage's thread may wait for them."""
        notes.landed(batch.number, self._have_landed(batch, batch.submitted.result()))

    def _have_landed(self, batch: _Batch, loadings: Sequence[Loading]) -> bool:
        """Waits for the copies. Whether all loads of the batch are complete here."""
        try:
            for loading in loadings:
                loading.wait(None)  # before any verdict: after a bad one SGLang gives the pages to others
            valid = [self.pools.worker.finish_load(loading) for loading in loadings]
        except Exception:  # it must not end SGLang's thread
            log.exception("a load has no verdict")
            return False
        return not batch.is_outdated and valid == [load.plan.hit_tokens for load in batch.loads]

    def _placed(self, load: QueuedLoad) -> LoadPlan:
        """The plan with block ids of SGLang's pages in place of the numbers of the load's pages."""
        plan, count = load.plan, _tokens(load) // self.pools.page_tokens
        pages = [array("q", ids.tolist() if ids is not None else ()) for ids in load.blocks]
        return replace(plan, pieces=Pieces(plan.arrays.placed(pages, count)))

    # ------------------------------------------------------------------ background

    def _settle(self, batch: _Batch, loadings: Sequence[Loading]) -> None:
        """Reports the end of the loads to the server. A thread of its own does it, because a server that does not
        answer must not delay the next loads."""
        for loading in loadings:
            self.pools.worker.end_load(loading)
        for load in batch.loads[len(loadings) :]:
            self._release(load.attachment, load.plan)
        for load in batch.loads:
            self.pools.worker.settle(load.attachment)
            load.attachment.release()

    def _give_back(self, attachment: Attachment, plan: LoadPlan) -> None:
        self._release(attachment, plan)
        self.pools.worker.settle(attachment)
        attachment.release()

    def _release(self, attachment: Attachment, plan: LoadPlan) -> None:
        session = self.pools.worker.session
        session.client.release_later(plan.lease, attachment.session, self.pools.worker.ranks)


def _tokens(load: QueuedLoad) -> int:
    """How many tokens it loads."""
    return load.plan.hit_tokens - load.plan.local_tokens
