"""In a worker's process: carries out the scheduler's orders, in the background, and reports what ended.

Invariants: every load is reported once, also one that fails; no store reads a block after a fence named it and
fence() returned; blocks that a failed load leaves behind are reported no later than its end.

Threads: vLLM's worker thread calls everything; loads and stores run in one background thread each. `_lock` guards
what they hand over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvdock.api.client import Client
from kvdock.api.schemas import Manifest
from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.session import Attachment, EngineSession, Identity
from kvdock.connectors.vllm.config import Settings
from kvdock.connectors.vllm.orders import Life, LoadOrder, Orders, Report, StoreOrder
from kvdock.connectors.worker import WorkerHalf
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout

log = logging.getLogger("kvdock.vllm")


class LoadLost(RuntimeError):
    """A load failed that this vLLM has no way to be told of; the request's blocks hold nothing of use."""


class WorkerSide:
    """`device`: "cpu" or "cuda:N", where `layouts` are. `stream`: as WorkerHalf has it. `by_request`: this vLLM takes
    failed loads by request."""

    def __init__(
        self, settings: Settings, manifest: Manifest, identity: Identity, layouts: Sequence[PagedLayout], *,
        rank: int, device: str, stream: int | None, by_request: bool,
    ) -> None:
        where = Device.named(device)
        self._by_request = by_request
        self._client = Client(settings.address, timeout_s=settings.timeout_s)
        self._session = EngineSession(self._client, manifest, identity, pin=where.pin)
        self._half = WorkerHalf(
            self._session, layouts, rank=rank, device=where, stream=stream, threads=settings.copy_threads
        )
        self._groups = len(layouts)
        self._loading = ThreadPoolExecutor(1, "kvdock-load")
        self._storing = ThreadPoolExecutor(1, "kvdock-store")
        self._stores: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._report = Report()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._lost: LoadLost | None = None
        try:
            self._session.start()
        except BaseException:
            self._half.close()
            self._client.close()
            raise

    # ------------------------------------------------------------------ the worker's thread

    def fence(self, orders: Orders) -> None:
        """Returns when no store in `orders.fences` reads any more."""
        wait([self._stores[number] for number in orders.fences if number in self._stores])

    def begin(self, orders: Orders) -> None:
        """Submits copies. Those that this step's forward pass reads have ended when it returns."""
        for store in orders.stores:
            self._stores[store.number] = self._storing.submit(self._store, store)
        running = [(order, self._loading.submit(self._load, order)) for order in orders.loads]
        for order, load in running:
            if not order.is_async:
                load.result()
        self._raise_what_was_lost()

    def ended(self) -> tuple[set[str], set[str]]:
        """(async loads that ended, those of them to be reported as failed), since the last call."""
        self._raise_what_was_lost()
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            failed, self._failed_requests = self._failed_requests, set()
            return loaded, failed

    def failed_blocks(self) -> set[int]:
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def report(self) -> Report:
        with self._lock:
            report, self._report = self._report, Report()
        for number in report.stores:
            self._stores.pop(number, None)
        return report

    def close(self) -> None:
        for pool in (self._loading, self._storing):
            pool.shutdown(wait=True)
        self._half.close()
        self._session.close()
        self._client.close()

    def _raise_what_was_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    # ------------------------------------------------------------------ background

    def _joined(self, life: Life) -> Attachment | None:
        """Our attachment, if it is to the life that the scheduler's side made its plan in."""
        attachment = self._session.attachment
        if attachment is None or Life(attachment.pool_id, attachment.session) != life or not attachment.acquire():
            return None
        return attachment

    def _load(self, order: LoadOrder) -> None:
        plan, valid = order.plan, order.plan.local_tokens
        attachment = self._joined(order.life)
        try:
            if attachment is not None:
                valid = self._half.load(attachment, plan)
        finally:
            self._file(order, valid)
            if attachment is not None:
                self._half.settle(attachment)
                attachment.release()

    def _file(self, order: LoadOrder, valid: int) -> None:
        plan = order.plan
        with self._lock:
            if valid < plan.hit_tokens:
                log.warning("load request=%s: %d of %d tokens", plan.request_id, valid, plan.hit_tokens)
                self._report.valid_tokens[plan.request_id] = valid
                if self._groups == 1:
                    self._failed_blocks |= _blocks_behind(plan, valid)
                elif self._by_request and order.is_async:
                    self._failed_requests.add(plan.request_id)
                else:
                    self._lost = LoadLost(
                        f"request {plan.request_id}: {plan.hit_tokens - valid} tokens of several KV cache groups "
                        "could not be loaded, and this vLLM cannot compute them again"
                    )
            if order.is_async:
                self._loaded.add(plan.request_id)

    def _store(self, order: StoreOrder) -> None:
        attachment = self._joined(order.life)
        try:
            if attachment is not None:
                self._half.store(attachment, order.plan)
        finally:
            if attachment is not None:
                attachment.release()
            with self._lock:
                self._report.stores[order.number] += 1


def _blocks_behind(plan: LoadPlan, valid: int) -> set[int]:
    """The blocks that were to be filled with tokens from `valid` on."""
    return {
        block
        for piece in plan.pieces if piece.chunk * plan.chunk_tokens >= valid
        for block in piece.block_ids[piece.skip_blocks :]
    }
