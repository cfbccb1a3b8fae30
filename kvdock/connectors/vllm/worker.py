"""A worker's side of the connector: carries out the scheduler's orders and reports which loads and stores have ended.

vLLM's own thread submits loads and notices their end, because another thread would wait for the GIL while vLLM's loop
holds it. The reports to the server that follow run in the background. Stores run in the background, too: one thread
submits a store's copies, and another waits for their end, so that no store waits for the end of the one before.

A step may be given blocks that a store still reads. Then the CPU waits until the store's copies are submitted, and the
GPU's later work comes after them; on the CPU the step waits for their end.

A load in the background that starts in a step that computes nothing is reported in such a step once it is verified
(Loading.verified): on a GPU while its last layers are still being copied. The next step's work is ordered after these
copies.

Invariants: every load is reported once, also one that fails; work that is put on the streams after a fence named a
store, and fence() returned, writes after the store has read; blocks that a failed load leaves behind are reported no
later than its end; nothing that was computed from a load is published before its copies have ended and their hashes
match what was promised.

Threads: vLLM's worker thread calls every method but those marked "Background" or under "background".
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from kvdock.connectors.worker import Layers, Loading, Storing, WorkerConnector
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout
from kvdock.protocol.schemas import Manifest

log = logging.getLogger("kvdock.vllm")

BESIDE_STEPS = 4
"""The most thread blocks of a load. Other requests are computed at the same time, by kernels that need nearly all
multiprocessors. The load loses less than a hundredth of its speed."""
REPORT_AFTER_S = 0.02
"""The pause before a load's end is reported to the server: an eager engine launches a step in some 10 ms."""


class LoadLostError(ConnectorError, RuntimeError):
    """vLLM has no way to learn that this load failed, so the engine is stopped instead of computing on missing KV."""


@dataclass
class _Load:
    """`loading`: None when it could not start. `is_early`: it may be reported before it has ended; `reported`: it was.
    `ordered`: the engine's later work runs after it, or each layer's work after that layer's KV."""

    order: LoadOrder
    loading: Loading | None
    is_early: bool
    reported: bool = False
    ordered: bool = False
    is_of_old_weights: bool = False
    """Whether the weights have changed since the load started; then it fails."""


class _Outcomes:
    """The outcomes of loads, until they are reported to vLLM and the scheduler's side."""

    def __init__(self, traits: EngineTraits, groups: int) -> None:
        self._traits, self._groups = traits, groups
        self.loaded: set[str] = set()
        """Requests whose load in the background has ended."""
        self.failed_blocks: set[int] = set()
        self.failed_requests: set[str] = set()
        self.fell_short: dict[str, int] = {}
        self.took_s: dict[str, tuple[int, float]] = {}
        """For these two see Report: `fell_short` is its `valid_tokens`."""
        self.lost: LoadLostError | None = None

    def add(self, order: LoadOrder, valid: int) -> None:
        """A load has ended with `valid` valid tokens, counted from token 0."""
        plan = order.plan
        if order.is_async:
            self.loaded.add(plan.request_id)
        if valid == plan.hit_tokens:
            return
        log.warning("load request=%s: %d of %d tokens", plan.request_id, valid, plan.hit_tokens)
        self.fell_short[plan.request_id] = valid
        if self._fails_by_block(order):
            self.failed_blocks |= _blocks_behind(plan, valid)
        elif self.may_fail(order):
            self.failed_requests.add(plan.request_id)
        else:
            what = "after several KV cache groups" if order.is_async else "in the step that runs the request"
            self.lost = LoadLostError(
                f"request {plan.request_id}: {plan.hit_tokens - valid} tokens could not be loaded, and {what} this "
                "vLLM has no way to compute them again"
            )

    def _fails_by_block(self, order: LoadOrder) -> bool:
        return self._groups == 1 and (order.is_async or self._traits.undoes_steps)

    def may_fail(self, order: LoadOrder) -> bool:
        """Whether vLLM computes the tokens that a load did not bring."""
        return self._fails_by_block(order) or (self._traits.takes_failed_requests and order.is_async)

    def take_report(self) -> Report:
        """A report for the scheduler's side about the loads that have ended since the last call."""
        report = Report(self.fell_short, took_s=self.took_s)
        self.fell_short, self.took_s = {}, {}
        return report


class _LoadReports:
    """Reports loads that have ended to the server, in the background: nothing waits for that."""

    def __init__(self, connector: WorkerConnector) -> None:
        self._connector, self._reporting = connector, Background("kvdock-report")
        self._ended: deque[Loading] = deque()

    def add(self, loading: Loading) -> None:
        self._ended.append(loading)
        self._reporting.run(self._run, 0.0 if loading.damaged else REPORT_AFTER_S)

    def _run(self, after_s: float) -> None:
        """Background: reports the loads that have ended."""
        if self._ended:  # else an earlier call has reported it
            time.sleep(after_s)  # leaves the GIL to the thread that launches the request's step
            self.send()

    def send(self) -> None:
        """Reports the loads that have ended. May be called from any thread."""
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

    def close(self) -> None:
        self._reporting.close()


class _Store:
    """`submitted`: done once `copies` is set, if the store copies anything."""

    def __init__(self, order: StoreOrder) -> None:
        self.order, self.is_late = order, False
        """`is_late`: vLLM may have zeroed its blocks before its copies read them."""
        self.copies: Storing | None = None
        self.submitted: Future[None]


class _Stores:
    """The stores whose end was not reported to the scheduler's side yet. `is_lost`: whether a load has failed in a way
    that cannot be reported to vLLM, so that nothing is published any more. `_lock` guards the results of background
    calls."""

    def __init__(
        self, connector: WorkerConnector, aside: int | None, figures: CopyFigures, is_lost: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._connector, self._aside, self._figures = connector, aside, figures
        self._is_lost, self._clock = is_lost, clock
        self._storing, self._publishing = Background("kvdock-store"), Background("kvdock-publish")
        self._stores: dict[str, _Store] = {}
        self._lock = threading.Lock()
        self._ended: Counter[str] = Counter()

    def __contains__(self, store_id: str) -> bool:
        return store_id in self._stores

    def __len__(self) -> int:
        return len(self._stores)

    def start(self, order: StoreOrder, after: int | None, unended: Sequence[Loading]) -> None:
        """Submits the store's copies in the background, ordered after the work on the stream `after` if the store must
        wait for steps. `unended`: loads from which the stored KV may have been computed."""
        store = self._stores[order.store_id] = _Store(order)
        after = after if order.waits else self._aside
        store.submitted = self._storing.run(self._submit, store, after, unended)

    def submitted(self, store_ids: Iterable[str]) -> list[_Store]:
        """Waits until the copies of `store_ids` are submitted. Returns the stores of them that are in progress."""
        stores = [self._stores[store_id] for store_id in store_ids if store_id in self._stores]
        wait([store.submitted for store in stores])
        return stores

    def all_submitted(self) -> list[_Store]:
        return self.submitted(list(self._stores))

    def take_ended(self) -> Counter[str]:
        """The stores that have stopped reading since the last call."""
        with self._lock:
            ended, self._ended = self._ended, Counter()
        for store_id in ended:
            self._stores.pop(store_id, None)
        return ended

    def close(self) -> None:
        for background in (self._storing, self._publishing):
            background.close()

    # ------------------------------------------------------------------ background

    def _submit(self, store: _Store, after: int | None, unended: Sequence[Loading]) -> None:
        attachment = self._connector.session.attachment_to(store.order.epoch)
        try:
            if attachment is not None and self._connector.writes and not self._is_lost():
                store.copies = self._connector.submit_store(attachment, store.order.plan, after=after)
        finally:
            self._publishing.run(self._publish, store, attachment, unended)

    def _publish(self, store: _Store, attachment: Attachment | None, unended: Sequence[Loading]) -> None:
        plan, copies = store.order.plan, store.copies
        try:
            if copies is not None:
                is_sound = all(load.is_whole() for load in unended) and not self._is_lost() and not store.is_late
                ready = self._connector.finish_store(copies, is_sound=is_sound)
                self._figures.stored(plan, ready, self._clock() - copies.started_s)
        finally:
            if attachment is not None:
                attachment.release()
            with self._lock:
                self._ended[store.order.store_id] += 1


def beside_steps(measured: CopyTuning, hash_threads: int) -> CopyTuning:
    """Changes `measured`, the tuning for copies alone, for loads that run while other requests are computed."""
    return replace(measured, load_ctas=min(measured.load_ctas, BESIDE_STEPS), hash_threads=hash_threads)


@dataclass(frozen=True)
class WorkerKV:
    """The engine's KV in this worker. `layouts`: see WorkerConnector. `device`: "cpu" or "cuda:N", where these are.
    `planes`: see Layers."""

    layouts: Sequence[PagedLayout]
    planes: Sequence[Mapping[str, int]]
    device: str
    stream: int | None = None
    """See WorkerConnector."""
    computed: int | None = None
    """A stream that holds, when start() is called, the work that comes before the step's stores; None: `stream`."""
    aside: int | None = None
    """A stream without computation, for copies that need not wait for steps."""


class VllmWorker:
    """`clock`: a monotonic clock, in seconds."""

    def __init__(
        self, settings: Settings, manifest: Manifest, identity: Identity, kv: WorkerKV, traits: EngineTraits, *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        where = Device.named(kv.device)
        tuning = where.tuning(kv.layouts, chunk_tokens=manifest.chunk_tokens)
        of_engine = ConnectorSettings(
            settings.address, settings.access_token_file, settings.timeout_s, kv.device, settings.copy_threads,
            None if tuning is None else beside_steps(tuning, traits.hash_threads), trusted_uid=settings.trusted_uid,
        )
        _, self._connector = open_worker(of_engine, manifest, identity, kv.layouts, stream=kv.stream)
        self._kv, self._traits, self._clock = kv, traits, clock
        self._reports_early = where.cuda is not None and traits.reports_early
        self._layers, self.figures = Layers(kv.planes), CopyFigures(manifest, identity.ranks)
        self._running: list[_Load] = []
        self._outcomes, self._reports = _Outcomes(traits, len(manifest.groups)), _LoadReports(self._connector)
        self._stores = _Stores(
            self._connector, kv.aside, self.figures, lambda: self._outcomes.lost is not None, clock
        )
        self._reported_epoch: ServerEpoch | None = None
        self._is_idle = False
        self._weights, self._wrote_weights = 0, False
        """The epoch of weights in the last orders, and whether weights were loaded into the model since then."""
        start(self._connector.session, self._connector)

    @property
    def device(self) -> str:
        return self._kv.device

    # ------------------------------------------------------------------ the worker's thread

    def fence(self, orders: Orders, stream: int | None) -> None:
        """Called before any work of the step is put on `stream`: orders that work, and later loads, after
        `orders.fences`."""
        fences = set(orders.fences)
        if self._traits.zeroes_blocks:  # vLLM zeroes the blocks that are loaded into, too
            fences.update(store_id for load in orders.loads for store_id in load.after)
        for order in orders.stores:
            if order.store_id in fences:  # this step is given the store's blocks: the store must read first
                self._stores.start(order, self._kv.stream, self._unended())
        if fenced := self._stores.submitted(fences):
            started_s = self._clock()
            for store in fenced:
                store.is_late = self._traits.zeroes_blocks
                for later in {stream, self._kv.stream}:
                    self._come_after(store.copies, later)
            self.figures.add("fence_seconds", self._clock() - started_s)
        if not orders.is_idle:
            self._order_reported(orders.alone, stream)

    def _come_after(self, copies: Storing | None, stream: int | None) -> None:
        if copies is None:
            return
        if stream is None or self._kv.stream is None:
            copies.wait(None)
        else:
            copies.order(stream)

    def start(self, orders: Orders) -> None:
        """Submits copies, before the step's forward pass or, if the pass reads none of the loaded blocks, after its
        launch. The loads that the pass reads have ended when this returns, or the pass was ordered after them."""
        self._raise_lost()  # first, so that nothing is stored from a step that read lost KV
        self._is_idle = orders.is_idle
        is_unheard = self._wrote_weights and orders.weights == self._weights  # the scheduler's side plans as before
        if is_unheard or orders.weights != self._weights:
            for load in self._running:
                load.is_of_old_weights |= not load.reported and self._outcomes.may_fail(load.order)
        self._weights, self._wrote_weights = orders.weights, is_unheard
        for stored in orders.stores:
            if stored.store_id not in self._stores:  # else fence() has started it
                self._stores.start(stored, self._kv.computed, self._unended())
        for order in orders.loads:  # one by one: if one raises, close() knows those before it
            # While other requests run, a load is not reported early, and the CPU need not hash the rest of it.
            is_early = order.is_async and orders.is_idle and self._reports_early
            is_refused = is_unheard and self._outcomes.may_fail(order)
            self._running.append(_Load(order, None if is_refused else self._submit(order, is_early), is_early))
        # A request that is gone may have no further step: its load is waited for now.
        self._take_ended(
            lambda load: not load.order.is_async or (load.reported and load.order.plan.request_id in orders.gone)
        )
        self._raise_lost()

    def _order_reported(self, alone: str | None, stream: int | None) -> None:
        """Orders the step after the loads that were reported early: it may read them, or write to their blocks if their
        requests are gone."""
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
        """Work that is put on `stream` (a CUstream) from now on runs after the copies of that layer's KV by this step's
        loads."""
        assert stream is not None, "loads are verified on a GPU only"
        self._layers.order(layer, stream)

    def ended(self) -> set[str]:
        """Requests whose loads in the background have ended, since the last call."""
        if not self._layers.all_ordered:
            self._outcomes.lost = LoadLostError(
                "vLLM ran a step without asking for each layer's KV: set load_by_layer to never"
            )
        self._layers.watch([])
        self._take_ended(lambda load: False)
        if self._is_idle:
            self._report_verified()
        self._raise_lost()
        loaded, self._outcomes.loaded = self._outcomes.loaded, set()
        return loaded

    def failed_requests(self) -> set[str]:
        """Requests whose loads in the background have failed, since the last call."""
        failed, self._outcomes.failed_requests = self._outcomes.failed_requests, set()
        return failed

    def _report_verified(self) -> None:
        """Reports the verified loads early. Nothing is computed now, so a next step that waits for such a load delays
        no other request."""
        waits_s = IDLE_WAIT_S  # for the first load only: waiting costs less than spinning
        for load in self._running:
            if load.loading is not None and not load.reported:
                if load.is_early:
                    load.reported = load.loading.verified(waits_s)
                    self._outcomes.loaded |= {load.order.plan.request_id} if load.reported else set()
                else:
                    load.loading.wait(waits_s)
                waits_s = 0.0
        self._take_ended(lambda load: False)

    def failed_blocks(self) -> set[int]:
        failed, self._outcomes.failed_blocks = self._outcomes.failed_blocks, set()
        return failed

    def report(self) -> Report:
        report = self._outcomes.take_report()
        report.stores = self._stores.take_ended()
        attachment = self._connector.session.attachment
        epoch = attachment.epoch if attachment is not None else NOWHERE
        if epoch != self._reported_epoch:
            report.epochs[self._connector.rank] = self._reported_epoch = epoch
        if self._wrote_weights:
            report.wrote_weights.add(self._weights)
        return report

    def weights_written(self) -> None:
        """Weights were loaded into this worker's model. The next report names the epoch of weights in the last orders.
        If the scheduler's side has noticed the change by itself, it has begun another epoch and ignores the report."""
        self._wrote_weights = True

    def wait_idle(self) -> None:
        """Returns once no copy is in progress."""
        self._take_ended(lambda load: True)
        for store in self._stores.all_submitted():
            self._come_after(store.copies, None)

    def close(self) -> None:
        try:
            self._take_ended(lambda load: True)
        finally:
            self._reports.close()
            self._stores.close()
            self._connector.close()
            self._connector.session.close()
            self._connector.session.client.close()

    def _raise_lost(self) -> None:
        if self._outcomes.lost is not None:
            self._reports.send()  # so that no other engine loads the same damaged chunks
            raise self._outcomes.lost

    def _unended(self) -> list[Loading]:
        """Loads that were reported before they have ended, so that the next steps may compute from them."""
        return [load.loading for load in self._running if load.reported and load.loading is not None]

    def _submit(self, order: LoadOrder, is_early: bool) -> Loading | None:
        attachment = self._connector.session.attachment_to(order.epoch)
        if attachment is None:
            return None
        bands = self._layers.bands if is_early else None
        waits, stores = order.waits or self._traits.zeroes_blocks, self._stores.submitted(order.after)
        for store in stores:
            self._come_after(store.copies, self._kv.stream if waits else self._kv.aside)
        after = self._kv.aside if stores else None
        return self._connector.submit_load(attachment, order.plan, bands, waits=waits, after=after)

    def _take_ended(self, awaited: Callable[[_Load], bool]) -> None:
        """Records the loads that have ended, and waits for those that are `awaited`."""
        running, self._running = deque(self._running), []
        try:
            while running:
                load = running.popleft()
                if load.loading is None:
                    self._outcomes.add(load.order, load.order.plan.local_tokens)
                elif awaited(load) or load.loading.done():
                    self._finish(load, load.loading)
                else:
                    self._running.append(load)
        finally:
            self._running += running  # empty unless one of them raised

    def _finish(self, load: _Load, loading: Loading) -> None:
        valid, plan = self._connector.finish_load(loading), load.order.plan
        if load.is_of_old_weights:
            valid = plan.local_tokens
        self.figures.loaded(plan, valid, self._clock() - loading.started_s)
        took_s = loading.took_s()
        if valid == plan.hit_tokens and took_s is not None:
            self._outcomes.took_s[plan.request_id] = valid - plan.local_tokens, took_s
        if not load.reported:
            self._outcomes.add(load.order, valid)
        elif valid < plan.hit_tokens:
            self._outcomes.lost = LoadLostError(
                f"request {plan.request_id}: the server's memory changed while it was being copied"
            )
        self._reports.add(loading)


def _blocks_behind(plan: LoadPlan, valid: int) -> set[int]:
    """The blocks that were to be filled with tokens from `valid` on."""
    return {
        block
        for piece in plan.pieces if (piece.chunk + 1) * plan.chunk_tokens > valid  # local tokens may end inside a chunk
        for block in piece.block_ids[piece.skip_blocks :]
    }
