"""A scheduler connector and a worker connector in one process, behind the methods of interface.py, for an engine's rank
0.

    engine thread      lookup ──► begin_load ──► poll … begin_store ──► poll … finished
    background         fetch      load           reserve + store        cancel

The scheduler connector (kvdock/connectors/scheduler.py) calls the server. Loads have a thread of their own, so that no
load waits for a question or a store. poll() returns the loads and stores that have ended.

Invariant: whatever fails, poll() returns exactly one LoadDone for each begin_load, and exactly one StoreDone for each
begin_store that returned blocks, after all ranks have ended their copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdock.connectors.background import Background
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import UNLIMITED, LoadChoice, LoadLimits
from kvdock.connectors.engine_client import EngineClient
from kvdock.connectors.interface import BlocksRead, GroupBlocks, LoadDone, LookupResult, Progress, StoreDone
from kvdock.connectors.lookups import LookupRecord
from kvdock.connectors.outcomes import EngineOutcomes
from kvdock.connectors.plans import LoadPlan, StorePlan
from kvdock.connectors.ranks import Answer, Peers, RankWorker
from kvdock.connectors.requests import ChunkObserver, RequestCallbacks
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment, EngineSession, Identity, SessionObserver
from kvdock.connectors.stores import StoreBatch, StoreOffer
from kvdock.connectors.waits import AwaitTiers, LoadOnce, Waits
from kvdock.connectors.worker import WorkerConnector
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout
from kvdock.protocol.access import NOBODY
from kvdock.protocol.kv_events import BlockNames, named
from kvdock.protocol.schemas import Manifest
from kvdock.protocol.wire_types import traceparent_or_none


@dataclass(frozen=True)
class ConnectorSettings:
    """`address`: unix:/path or http://host:port. `timeout_s` bounds every call to the server."""

    address: str
    access_token_file: str = ""
    """The file that holds the engine's access token. The server's own user needs none over the Unix socket."""
    timeout_s: float = 2.0
    device: str = "cpu"
    """Where the engine's blocks are: "cpu", "cuda" or "cuda:N"."""
    copy_threads: int = 2
    """Threads that copy when the blocks are in host memory."""
    copy_tuning: CopyTuning | None = None
    """For copies on a GPU; None: a measured one. For stores only its `background_store_ctas` counts (for_stores())."""
    max_load_tokens: int = UNLIMITED
    max_load_share: float = 1.0
    min_load_tokens: int = 0
    """For these three see LoadLimits."""
    tier_wait_s: float = 2.0
    """The longest time that a request waits for chunks that the server's lower tiers load; 0: it does not wait."""
    chunk_statistics: bool = False
    """Whether the connector counts how each chunk is used, in its `statistics`."""
    trusted_uid: int = NOBODY
    """The user id of the server, where this engine runs as root and the server does not."""
    pack: str = "auto"
    """Whether KV is packed: "on", "off", or "auto", where it is measured to pay (kvdock/connectors/packing.py)."""


class EngineConnector:
    """A Connector (interface.py). `layouts`: where each KV group of the manifest has its blocks; groups that share
    their memory share a layout. `stream`: see WorkerConnector. `peers`: the connections to the workers of the other
    ranks; this process is rank 0. Raises RefusedError when a server answers and does not accept this engine;
    LayoutMismatchError when `layouts` and `manifest` disagree; NoCuda when there is no such GPU."""

    def __init__(
        self,
        settings: ConnectorSettings,
        manifest: Manifest,
        identity: Identity,
        layouts: Sequence[PagedLayout],
        *,
        stream: int | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.peers = peers if peers is not None else Peers()
        limits = LoadLimits(settings.max_load_tokens, settings.max_load_share, settings.min_load_tokens)
        self.statistics = ChunkStatistics(manifest.chunk_tokens) if settings.chunk_statistics else None
        self.session, self.worker = open_worker(settings, manifest, identity, layouts, stream=stream)
        has_windows = any(group.window_tokens for group in manifest.groups)
        self._traceparents: dict[str, str] = {}
        self._tokens = _KnownByTokens(manifest.chunk_tokens)
        self.scheduler = SchedulerConnector(
            self.session, readers=manifest.tensor_parallel, choice=LoadChoice(limits),
            callbacks=RequestCallbacks(
                traceparent_of=lambda request_id: self._traceparents.get(request_id, ""), observer=self._tokens
            ),
            waits=Waits(
                tiers=AwaitTiers(settings.tier_wait_s, None, time.perf_counter),
                loads=LoadOnce(manifest.chunk_tokens, time.perf_counter, whole=has_windows),
            ),
            record=LookupRecord(
                lambda _seconds: self._report(),
                lambda request_id, why, tokens: self._outcomes.declined(request_id, why, tokens), self.statistics,
            ),
        )
        self._outcomes = EngineOutcomes(self.scheduler.ended, time.perf_counter, self.scheduler.lookups.epoch_of)
        self._reported = threading.Condition()
        self._loads: list[tuple[LoadDone, float | None]] = []
        """The loads that the next poll() returns, each with the seconds that its copies took on the slowest rank; None:
        not known."""
        self._stores: list[StoreDone] = []
        self._woken = False
        self._loading = Background("kvdock-load")
        start(self.session, self.worker, SessionObserver(self.scheduler.lookups.keeps_lease))

    # ------------------------------------------------------------------ the verbs

    def lookup(
        self, request_id: str, token_ids: Sequence[int], local_tokens: int, traceparent: str = ""
    ) -> LookupResult:
        """See Connector.lookup of interface.py."""
        if traceparent:
            self._traceparents[request_id] = traceparent_or_none(traceparent)
        found = self.scheduler.lookups.lookup(request_id, token_ids, local_tokens)
        self._outcomes.lookup(request_id, len(token_ids), local_tokens, found)
        return found

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        """See Connector.begin_load of interface.py."""
        self._outcomes.begin_load(request_id, local_tokens, hit_tokens)
        started = self.scheduler.lookups.begin_load(request_id, block_ids, local_tokens, hit_tokens)
        if started is None:
            self._report(load=(LoadDone(request_id, local_tokens), None))
        else:
            self._outcomes.loading(request_id, self.scheduler.lookups.bytes_of(started[1]))
            self._loading.run(self._load, *started)

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        """See Connector.begin_store of interface.py."""
        self._outcomes.begin_store(request_id, computed_tokens)
        self._tokens.of[request_id] = token_ids
        offer = self.scheduler.stores.begin_store(request_id, token_ids, block_ids, computed_tokens)
        if offer is None:
            return ()
        self.scheduler.stores.store(offer, lambda batch, plan: self._store(offer, batch, plan))
        return offer.reads

    def poll(self, timeout_s: float = 0.0) -> Progress:
        """See Connector.poll of interface.py."""
        with self._reported:
            if not self._woken and timeout_s > 0:
                self._reported.wait(timeout_s)
            self._woken = False
            loads, self._loads = self._loads, []
            stores, self._stores = self._stores, []
        self._outcomes.step(loads)
        for done, _ in loads:
            self.scheduler.lookups.load_ended(done.request_id, done.valid_tokens, is_shared=True)
        self.scheduler.lookups.step(is_idle=False)
        return Progress(tuple(done for done, _ in loads), tuple(stores))

    def finished(self, request_id: str, *, comes_back: bool = False) -> None:
        """See Connector.finished of interface.py."""
        self._outcomes.finished(request_id, comes_back=comes_back)
        self._traceparents.pop(request_id, None)
        self._tokens.of.pop(request_id, None)
        self.scheduler.finished(request_id)

    def close(self) -> None:
        """See Connector.close of interface.py."""
        self._loading.close()
        self.scheduler.close()
        self.peers.close()
        self.worker.close()
        self.session.close()
        self.session.client.close()

    # ------------------------------------------------------------------ background

    def _load(self, attachment: Attachment, plan: LoadPlan) -> None:
        valid, took_s = plan.local_tokens, None
        others = self.peers.send(attachment.epoch, plan, below=self.session.manifest.tensor_parallel)
        try:
            valid, took_s = self._load_here(attachment, plan)
        finally:
            elsewhere, not_started = others.wait()
            if elsewhere is not None:
                valid = max(plan.local_tokens, min(valid, elsewhere))
            if not_started:
                self.session.client.release_later(plan.lease, attachment.session, not_started)
            if valid < plan.hit_tokens:
                self.scheduler.lookups.load_failed(plan.request_id, valid)
            self._report(load=(LoadDone(plan.request_id, valid), took_s))
            self.worker.settle(attachment)
            attachment.release()

    def _load_here(self, attachment: Attachment, plan: LoadPlan) -> tuple[int, float | None]:
        """(tokens valid from token 0 on, seconds that the copies took on the slowest rank, if that is known)."""
        loading = self.worker.submit_load(attachment, plan)
        try:
            valid = self.worker.finish_load(loading)
            return valid, loading.took_s() if self.session.manifest.tensor_parallel == 1 else None
        finally:
            self.worker.end_load(loading)

    def _store(self, offer: StoreOffer, batch: StoreBatch, plan: StorePlan | None) -> None:
        try:
            if plan is not None:
                self._store_everywhere(offer.attachment, plan)
        finally:
            if batch is offer.batches[-1]:
                self._report(store=StoreDone(offer.request_id, offer.reads))

    def _store_everywhere(self, attachment: Attachment, plan: StorePlan) -> None:
        """Every writer stores its parts. The last writer's commit publishes the chunks."""
        others = self.peers.send(attachment.epoch, plan, below=self.session.manifest.writers)
        try:
            self.worker.store(attachment, plan)
        finally:
            _, not_started = others.wait()
            if not_started:
                self.session.abort(attachment, plan.reservation, not_started)

    def _report(self, *, load: tuple[LoadDone, float | None] | None = None, store: StoreDone | None = None) -> None:
        with self._reported:
            if load is not None:
                self._loads.append(load)
            if store is not None:
                self._stores.append(store)
            self._woken = True
            self._reported.notify_all()


class _KnownByTokens(ChunkObserver):
    """Names chunks for routers by their tokens, because the engine has no block hashes of its own. `of`: the tokens of
    each request that stores."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self.of: dict[str, Sequence[int]] = {}

    def names(self, request_id: str, first: int, end: int) -> Sequence[BlockNames | None]:
        tokens, size = self.of[request_id], self._chunk_tokens
        return [named(None, (), tokens[at * size : (at + 1) * size]) for at in range(first, end)]


def open_worker(
    settings: ConnectorSettings, manifest: Manifest, identity: Identity, layouts: Sequence[PagedLayout], *,
    stream: int | None = None,
) -> tuple[EngineSession, WorkerConnector]:
    """Makes a process's session, without starting it, and its worker connector. Raises LayoutMismatchError, NoCuda."""
    device = Device.named(settings.device)
    client = EngineClient(
        settings.address, timeout_s=settings.timeout_s, access_token_file=settings.access_token_file,
        trusted_uid=settings.trusted_uid,
    )
    session = EngineSession(client, manifest, identity, register=device.register)
    worker = WorkerConnector(
        session, layouts, device=device, stream=stream, threads=settings.copy_threads, tuning=settings.copy_tuning
    )
    return session, worker


def start(session: EngineSession, worker: WorkerConnector, observer: SessionObserver | None = None) -> None:
    """Attaches, if a server answers. Raises RefusedError when it does not accept this engine. If this raises, the
    worker and the client are closed."""
    try:
        session.start(observer)
    except BaseException:
        worker.close()
        session.client.close()
        raise


def open_rank(
    settings: ConnectorSettings, manifest: Manifest, identity: Identity, layouts: Sequence[PagedLayout],
    answer: Callable[[Answer], None], *, stream: int | None = None,
) -> RankWorker:
    """Opens the connector of a process whose rank is not 0. `identity`: the instance of rank 0, with a member and a
    rank of its own. Raises what EngineConnector raises."""
    session, worker = open_worker(settings, manifest, identity, layouts, stream=stream)
    start(session, worker)
    return RankWorker(session, worker, answer)
