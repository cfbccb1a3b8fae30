"""In a worker's process: carries out the scheduler's orders and reports what ended.

Loads are submitted, and found to have ended, by vLLM's own thread: a thread of ours would wait for the interpreter
while vLLM's loop keeps it. What is said to the server afterwards runs in the background. So does a store: one thread
submits its copies, and another sees to their end, so that no store waits for the end of the one before.

A step may be given blocks that a store still reads. Then the CPU waits until the store's copies are submitted, and the
GPU's later work comes after them; on the CPU the step waits for their end.

A load in the background that begins in a step that computes nothing is reported in such a step once it is verified
(Loading.verified): on a GPU while its last layers are on their way. The next step's work is ordered after them.

Invariants: every load is reported once, also one that fails; what is put on the streams after a fence named a store,
and fence() returned, writes after the store has read; blocks that a failed load leaves behind are reported no later
than its end; nothing that was computed from a load is published before its copies have ended and hashed to what was
promised.

Threads: vLLM's worker thread calls everything; `_lock` guards what stores hand over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from kvdock.connectors.background import Background
from kvdock.connectors.engine_connector import ConnectorSettings, open_worker, start
from kvdock.connectors.errors import ConnectorError
from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.session import Attachment, Identity, ServerEpoch
from kvdock.connectors.vllm.figures import CopyFigures
from kvdock.connectors.vllm.setup import EngineTraits, Settings
from kvdock.connectors.vllm.steps import IDLE_WAIT_S, NOWHERE, LoadOrder, Orders, Report, StoreOrder
from kvdock.connectors.worker import Layers, Loading, Storing
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout
from kvdock.protocol.schemas import Manifest

log = logging.getLogger("kvdock.vllm")

BESIDE_STEPS = 4
"""Thread blocks of a load: others are computed beside it, by kernels that want nearly all multiprocessors. A load
loses less than a hundredth of its speed."""
TELL_AFTER_S = 0.02
"""A step of an eager engine is launched in some 10 ms."""


class LoadLostError(ConnectorError, RuntimeError):
    """vLLM cannot be told that this load failed, so the engine is stopped instead of computing on missing KV."""


@dataclass
class _Load:
    """`loading`: None when it could not begin. `is_early`: it may be reported before it has ended; `reported`: it was.
    `ordered`: the engine's later work runs after it, or each layer's work after that layer's KV."""

    order: LoadOrder
    loading: Loading | None
    is_early: bool
    reported: bool = False
    ordered: bool = False
    is_of_old_weights: bool = False
    """The weights have changed since it began: it fails."""


class _Store:
    """`submitted`: ends once its copies are known, if there are any."""

    def __init__(self, order: StoreOrder) -> None:
        self.order, self.is_late = order, False
        """vLLM may have zeroed its blocks before its copies had read them."""
        self.copies: Storing | None = None
        self.submitted: Future[None]


def beside_steps(measured: CopyTuning, hash_threads: int) -> CopyTuning:
    """What was measured for copies alone, for loads that others are computed beside."""
    return replace(measured, load_ctas=min(measured.load_ctas, BESIDE_STEPS), hash_threads=hash_threads)


class VllmWorker:
    """`device`: "cpu" or "cuda:N", where `layouts` are. `planes`: as Layers has it. `stream`: as WorkerConnector has
    it. `computed`: a stream that holds, when begin() is called, what comes before the step's stores; None: `stream` is
    it. `aside`: a stream on which nothing is computed, for copies that need not wait for steps."""

    def __init__(
        self, settings: Settings, manifest: Manifest, identity: Identity, layouts: Sequence[PagedLayout],
        planes: Sequence[Mapping[str, int]], traits: EngineTraits, *, device: str, stream: int | None,
        computed: int | None = None, aside: int | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        where, self.device = Device.named(device), device
        self._traits = traits
        self._reports_early = where.cuda is not None and traits.reports_early
        tuning = where.tuning(layouts, chunk_tokens=manifest.chunk_tokens)
        of_engine = ConnectorSettings(
            settings.address, settings.access_token_file, settings.timeout_s, device, settings.copy_threads,
            None if tuning is None else beside_steps(tuning, traits.hash_threads),
        )
        self._session, self._connector = open_worker(of_engine, manifest, identity, layouts, stream=stream)
        self._groups, self._layers = len(layouts), Layers(planes)
        self.figures, self._clock = CopyFigures(manifest, identity.ranks[0]), clock
        self._stream, self._computed, self._aside = stream, computed, aside
        self._telling = Background("kvdock-tell")
        self._storing, self._publishing = Background("kvdock-store"), Background("kvdock-publish")
        self._stores: dict[str, _Store] = {}
        self._lock = threading.Lock()
        self._stored: Counter[str] = Counter()
        self._fell_short: dict[str, int] = {}
        self._took_s: dict[str, tuple[int, float]] = {}
        self._running: list[_Load] = []
        self._reported_epoch: ServerEpoch | None = None
        self._ended: deque[Loading] = deque()
        self._is_idle = False
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._lost: LoadLostError | None = None
        self._weights, self._wrote_weights = 0, False
        """The epoch in the last orders, and whether something was loaded into the model since then."""
        start(self._session, self._connector)

    # ------------------------------------------------------------------ the worker's thread

    def fence(self, orders: Orders, stream: int | None) -> None:
        """Before anything of the step is put on `stream`: what is, and later loads, come after `orders.fences`."""
        fences = set(orders.fences)
        if self._traits.zeroes_blocks:  # also those that are loaded into
            fences.update(store_id for load in orders.loads for store_id in load.after)
        for order in orders.stores:
            if order.store_id in fences:  # this step is given their blocks: they come before it
                self._begin_store(order, self._stream)
        if fenced := self._submitted(fences):
            began = self._clock()
            for store in fenced:
                store.is_late = self._traits.zeroes_blocks
                for later in {stream, self._stream}:
                    self._come_after(store.copies, later)
            self.figures.add("fence_seconds", self._clock() - began)
        if not orders.is_idle:
            self._order_reported(orders.alone, stream)

    def _submitted(self, store_ids: Iterable[str]) -> list[_Store]:
        """Those that are under way, when it is known what they copy."""
        stores = [self._stores[store_id] for store_id in store_ids if store_id in self._stores]
        wait([store.submitted for store in stores])
        return stores

    def _come_after(self, copies: Storing | None, stream: int | None) -> None:
        if copies is None:
            return
        if stream is None or self._stream is None:
            copies.wait(None)
        else:
            copies.order(stream)

    def begin(self, orders: Orders) -> None:
        """Submits copies, before the step's forward pass or, if it reads none of them, after its launch. Those that it
        reads have ended when it returns."""
        self._raise_what_was_lost()  # first: nothing is stored of a step that read what was lost
        self._is_idle = orders.is_idle
        is_unheard = self._wrote_weights and orders.weights == self._weights  # the scheduler's side plans as before
        if is_unheard or orders.weights != self._weights:
            for load in self._running:
                load.is_of_old_weights |= not load.reported and self._may_fail(load.order)
        self._weights, self._wrote_weights = orders.weights, is_unheard
        for stored in orders.stores:
            if stored.store_id not in self._stores:  # else fence() has begun it
                self._begin_store(stored, self._computed)
        for order in orders.loads:  # one by one: should one raise, those before it are known to close()
            # Beside requests that run it is not reported early, and the CPU need not hash ahead.
            is_early = order.is_async and orders.is_idle and self._reports_early
            is_refused = is_unheard and self._may_fail(order)
            self._running.append(_Load(order, None if is_refused else self._submit(order, is_early), is_early))
        # Of a request that is gone, who knows when there is another step: what it loads is seen to its end now.
        self._take_ended(
            lambda load: not load.order.is_async or (load.reported and load.order.plan.request_id in orders.gone)
        )
        self._raise_what_was_lost()

    def _begin_store(self, order: StoreOrder, after: int | None) -> None:
        unended = [load.loading for load in self._running if load.reported and load.loading is not None]
        store = self._stores[order.store_id] = _Store(order)
        after = after if order.waits else self._aside
        store.submitted = self._storing.run(self._submit_store, store, after, unended)

    def _order_reported(self, alone: str | None, stream: int | None) -> None:
        """The step may read what was reported, or write to its blocks if its request is gone."""
        loads = [load for load in self._running if load.reported and not load.ordered]
        by_layer = self._traits.loads_by_layer and [load.order.plan.request_id for load in loads] == [alone]
        for load in loads:
            assert load.loading is not None and stream is not None, "loads are verified on a GPU only"
            if not by_layer:
                load.loading.order(stream)
            load.ordered = True
        self._layers.watch([load.loading for load in loads if load.loading is not None] if by_layer else [])

    @property
    def waits_for_layers(self) -> bool:
        return self._layers.any_watched

    def wait_for_layer(self, layer: str, stream: int | None) -> None:
        """What is put on `stream` (a CUstream) from now on finds that layer's KV of this step's loads."""
        assert stream is not None, "loads are verified on a GPU only"
        self._layers.order(layer, stream)

    def ended(self) -> tuple[set[str], set[str]]:
        """(async loads that ended, those of them to be reported as failed), since the last call."""
        if not self._layers.all_ordered:
            self._lost = LoadLostError("vLLM ran a step without asking for each layer's KV: set load_by_layer to never")
        self._layers.watch([])
        self._take_ended(lambda load: False)
        if self._is_idle:
            self._report_verified()
        self._raise_what_was_lost()
        loaded, self._loaded = self._loaded, set()
        failed, self._failed_requests = self._failed_requests, set()
        return loaded, failed

    def _report_verified(self) -> None:
        """Nothing is computed, and nobody else waits for the step that a verified load holds up."""
        waits_s = IDLE_WAIT_S  # for the first: the loop had better wait than spin
        for load in self._running:
            if load.loading is not None and not load.reported:
                if load.is_early:
                    load.reported = load.loading.verified(waits_s)
                    self._loaded |= {load.order.plan.request_id} if load.reported else set()
                else:
                    load.loading.wait(waits_s)
                waits_s = 0.0
        self._take_ended(lambda load: False)

    def failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> Report:
        with self._lock:
            stored, self._stored = self._stored, Counter()
        for store_id in stored:
            self._stores.pop(store_id, None)
        report, self._fell_short, self._took_s = Report(self._fell_short, stored, took_s=self._took_s), {}, {}
        attachment = self._session.attachment
        epoch = attachment.epoch if attachment is not None else NOWHERE
        if epoch != self._reported_epoch:
            report.epochs[self._connector.rank] = self._reported_epoch = epoch
        if self._wrote_weights:
            report.wrote_weights.add(self._weights)
        return report

    def weights_written(self) -> None:
        """Something was loaded into this worker's model. If a call did that which the scheduler's side has heard of,
        the next orders are of another epoch."""
        self._wrote_weights = True

    def rest(self) -> None:
        """Returns once no copy is under way."""
        self._take_ended(lambda load: True)
        for store in self._submitted(list(self._stores)):
            self._come_after(store.copies, None)

    def close(self) -> None:
        try:
            self._take_ended(lambda load: True)
        finally:
            for background in (self._telling, self._storing, self._publishing):
                background.close()
            self._connector.close()
            self._session.close()
            self._session.client.close()

    def _raise_what_was_lost(self) -> None:
        if self._lost is not None:
            self._tell_of_ended()  # the next engine must not meet the same damage
            raise self._lost

    def _submit(self, order: LoadOrder, is_early: bool) -> Loading | None:
        attachment = self._session.attachment_to(order.epoch)
        if attachment is None:
            return None
        bands = self._layers.bands if is_early else None
        waits, stores = order.waits or self._traits.zeroes_blocks, self._submitted(order.after)
        for store in stores:
            self._come_after(store.copies, self._stream if waits else self._aside)
        after = self._aside if stores else None
        return self._connector.submit_load(attachment, order.plan, bands, waits=waits, after=after)

    def _take_ended(self, awaited: Callable[[_Load], bool]) -> None:
        """Files the loads that have ended, and waits for those that are `awaited`."""
        running, self._running = deque(self._running), []
        try:
            while running:
                load = running.popleft()
                if load.loading is None:
                    self._file(load.order, load.order.plan.local_tokens)
                elif awaited(load) or load.loading.done():
                    self._finish(load, load.loading)
                else:
                    self._running.append(load)
        finally:
            self._running += running  # none, but when one of them raised

    def _finish(self, load: _Load, loading: Loading) -> None:
        valid, plan = self._connector.finish_load(loading), load.order.plan
        if load.is_of_old_weights:
            valid = plan.local_tokens
        self.figures.loaded(plan, valid, self._clock() - loading.began_s)
        took_s = loading.took_s()
        if valid == plan.hit_tokens and took_s is not None:
            self._took_s[plan.request_id] = valid - plan.local_tokens, took_s
        if not load.reported:
            self._file(load.order, valid)
        elif valid < plan.hit_tokens:
            self._lost = LoadLostError(
                f"request {plan.request_id}: the server's memory changed while it was being copied"
            )
        self._ended.append(loading)
        self._telling.run(self._tell, 0.0 if loading.damaged else TELL_AFTER_S)

    def _file(self, order: LoadOrder, valid: int) -> None:
        plan = order.plan
        if order.is_async:
            self._loaded.add(plan.request_id)
        if valid == plan.hit_tokens:
            return
        log.warning("load request=%s: %d of %d tokens", plan.request_id, valid, plan.hit_tokens)
        self._fell_short[plan.request_id] = valid
        if self._fails_by_block(order):
            self._failed_blocks |= _blocks_behind(plan, valid)
        elif self._may_fail(order):
            self._failed_requests.add(plan.request_id)
        else:
            what = "after several KV cache groups" if order.is_async else "in the step that runs the request"
            self._lost = LoadLostError(
                f"request {plan.request_id}: {plan.hit_tokens - valid} tokens could not be loaded, and {what} this "
                "vLLM has no way to compute them again"
            )

    def _fails_by_block(self, order: LoadOrder) -> bool:
        return self._groups == 1 and (order.is_async or self._traits.undoes_steps)

    def _may_fail(self, order: LoadOrder) -> bool:
        """Whether vLLM computes what a load did not bring."""
        return self._fails_by_block(order) or (self._traits.takes_failed_requests and order.is_async)

    def _tell_of_ended(self) -> None:
        """Says to the server what became of the loads that were filed."""
        while self._ended:
            try:
                loading = self._ended.popleft()
            except IndexError:
                return  # the other thread was quicker
            try:
                self._connector.end_load(loading)
                if not self._ended:
                    self._connector.settle(loading.attachment)
            finally:
                loading.attachment.release()

    # ------------------------------------------------------------------ background

    def _tell(self, after_s: float) -> None:
        if self._ended:  # else an earlier call has told of it
            time.sleep(after_s)  # the step that runs the request is being launched: leave it the interpreter
            self._tell_of_ended()

    def _submit_store(self, store: _Store, after: int | None, unended: Sequence[Loading]) -> None:
        """`unended`: loads that what is stored may have been computed from."""
        attachment = self._session.attachment_to(store.order.epoch)
        try:
            if attachment is not None and self._connector.writes and self._lost is None:
                store.copies = self._connector.submit_store(attachment, store.order.plan, after=after)
        finally:
            self._publishing.run(self._publish, store, attachment, unended)

    def _publish(self, store: _Store, attachment: Attachment | None, unended: Sequence[Loading]) -> None:
        plan, copies = store.order.plan, store.copies
        try:
            if copies is not None:
                is_sound = all(loading.is_whole() for loading in unended) and self._lost is None and not store.is_late
                ready = self._connector.finish_store(copies, is_sound=is_sound)
                self.figures.stored(plan, ready, self._clock() - copies.began_s)
        finally:
            if attachment is not None:
                attachment.release()
            with self._lock:
                self._stored[store.order.store_id] += 1


def _blocks_behind(plan: LoadPlan, valid: int) -> set[int]:
    """The blocks that were to be filled with tokens from `valid` on."""
    return {
        block
        for piece in plan.pieces if (piece.chunk + 1) * plan.chunk_tokens > valid  # local tokens may end inside a chunk
        for block in piece.block_ids[piece.skip_blocks :]
    }


# --------------------------------------------------------------------------------
# Which blocks the steps under way may still use, although they may have been given to another request since.
#
# vLLM plans steps ahead. It keeps the blocks of a request that ended or was preempted until the steps are over that
# were planned before (defer_block_free in its scheduler; since 0.24), but gives away at once what a window has left
# behind. A load into such a block must come after those steps on the GPU. All other loads need not wait for what is
# computed.
#
# What a step uses of a group lies behind what its request has computed, less the window.
#
# Threads: vLLM's scheduler thread, alone.

class InFlight:
    """`steps`: the most that may be under way when another one begins. `keeps_back`: vLLM keeps back what requests lose
    when they end or are preempted, so that only what windows leave behind is to be noted."""

    def __init__(self, steps: int, *, keeps_back: bool) -> None:
        self.keeps_back = keeps_back
        self._used: deque[set[int] | None] = deque([set()], maxlen=steps)
        """By step; None: it may use any."""

    def begin_step(self) -> None:
        self._used.append(set())

    def uses(self, blocks: Iterable[int | None]) -> None:
        """The newest step writes these, or steps under way may read them although their request has lost them."""
        used = self._used[-1]
        if used is not None:
            used.update(block for block in blocks if block is not None)

    def uses_any(self) -> None:
        """It is not known what the newest step writes."""
        self._used[-1] = None

    def touches(self, blocks: Set[int]) -> bool:
        return any(used is None or not used.isdisjoint(blocks) for used in self._used)
