"""kvdock as a secondary tier of vLLM's own offload: loaded by `module_path`, beside vLLM's tiers for files and objects.

vLLM copies KV from the GPU into a memory of its own (the primary tier), and hands chunks of it on to secondary tiers.
This one keeps them in kvdock's pool, where every engine with the same namespace finds them. A chunk of the primary tier
is a chunk of kvdock with one part, whatever the model, its layout and its parallel sizes: kvdock does not look into it.

    scheduler's thread   lookup ──► on_schedule_end ──► submit_load      submit_store ──► get_finished_jobs
    "kvdock-ask"                     └► ask                │                  │                 ▲
    "kvdock-load", "kvdock-store"                          └► copy, verify    └► reserve, copy ─┘

A chunk that a lookup finds is leased until it is loaded, or not wanted any more. A server that is away or slow is a
miss. Invariant: each job that vLLM submits ends exactly once, whatever fails, after its copies have ended.

Threads: vLLM calls the tier from one thread at a time. The states of requests belong to these calls; the other threads
send what they have found through queues.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvdock import _core
from kvdock.connectors.background import Background
from kvdock.connectors.engine_connector import ConnectorSettings, open_worker, start
from kvdock.connectors.plans import LoadPiece, LoadPlan, StorePiece, StorePlan
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.session import Attachment, SessionObserver
from kvdock.connectors.settings import EngineSettings, checked, of_environment
from kvdock.connectors.vllm.setup import log_among_theirs
from kvdock.connectors.vllm.tier_identity import identity_of, manifest_of_rows, vllm_config_around
from kvdock.connectors.vllm.tier_lookups import CallFailed, Found, Lease, Lookups, Request, drained, forget
from kvdock.connectors.vllm.weight_changes import hear, hear_model
from kvdock.datapath.layout import PagedLayout
from kvdock.protocol.keys import UNKNOWN_PARENT, HashedChain, tagged
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Reserve
from kvdock.protocol.wire_types import MAX_NAME, MAX_STORE_KEYS

WHERE = "secondary_tiers"
SETTINGS = {
    name: EngineSettings.types()[name] for name in (
        "address", "access_token_file", "trusted_uid", "timeout_s", "tier_wait_s", "copy_threads", "weights_digest",
        "read_all_weights",
    )
}
"""The settings of engines' connectors that the tier has."""


@dataclass(eq=False)
class _Ended:
    """A job that has ended. `loaded`, `failed`: keys that `request` has got, and those that it has not."""

    result: JobResult
    request: Request | None = None
    loaded: Collection[OffloadKey] = ()
    failed: Collection[OffloadKey] = ()


class _Weights:
    """The tag of the weights that the engine runs, in all threads. Changes are heard of where kvdock's connector hears
    of them (weight_changes.py)."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._lock = threading.RLock()
        self._running = RunningWeights(trusts_versions=False)
        self._why_unheard = hear(self, vllm_config)
        if vllm_config.parallel_config.world_size == 1:  # the model may be in this process
            hear_model(self, vllm_config)
        self.prove()

    def kvdock_weights(self, kind: str, version: str) -> None:
        with self._lock:
            self._running.hear(kind, version)

    def kvdock_weights_written(self) -> None:
        """In this process; kvdock_weights is called as well."""

    def prove(self) -> None:
        """Stops sharing while changes may go unnoticed."""
        if (why := self._why_unheard()) != self._running.doubt:
            self.kvdock_weights("unheard" if why else "heard", why)

    @property
    def epoch(self) -> int:
        return self._running.epoch

    def tag_at(self, epoch: int) -> bytes | None:
        """None: the weights have changed since `epoch`, or are being changed, so nothing is shared."""
        with self._lock:
            return self._running.tag if self._running.epoch == epoch and self._running.may_share else None


class KvdockTier(SecondaryTierManager):
    """`given`: the settings of the tier's entry in `secondary_tiers` (SETTINGS). Raises a ConnectorError at start when
    this engine cannot be served with them."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_among_theirs()
        config = offloading_spec.config
        settings = EngineSettings.of(of_environment(os.environ) | checked(given, SETTINGS, WHERE), WHERE)
        vllm_config = vllm_config_around(config)
        manifest = manifest_of_rows(vllm_config, config, self.block_size_bytes, settings, os.environ)
        self._session, self._worker = open_worker(
            ConnectorSettings(
                settings.address, settings.access_token_file, settings.timeout_s, copy_threads=settings.copy_threads,
                trusted_uid=settings.trusted_uid,
            ),
            manifest, identity_of(vllm_config, config.engine_id), [_layout_of(primary_kv_view, manifest.chunk_tokens)],
        )
        self._chunk_tokens = {
            one.group_id: one.tokens_per_block * config.cache.blocks_per_chunk for one in config.groups
        }
        self._lookups = Lookups(self._session, settings.tier_wait_s, _windows(config))
        self._weights = _Weights(vllm_config)
        self._requests: dict[str, Request] = {}
        self._new: list[Request] = []  # they have keys to ask for
        self._read: list[tuple[Request, Lease]] = []  # in this step
        self._ended: SimpleQueue[_Ended] = SimpleQueue()
        self._loading, self._storing = Background("kvdock-load"), Background("kvdock-store")
        self._stores = 0
        start(self._session, self._worker, SessionObserver(self._lookups.keeps_lease))

    # ------------------------------------------------------------------ requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._request_of(req_context)
        return RequestOffloadingContext()

    def _request_of(self, context: ReqContext) -> Request:
        found = self._requests.get(context.req_id)
        if found is None:
            found = self._requests[context.req_id] = Request(context.req_id or "-", self._weights.epoch)
        return found

    def _key_of(self, attachment: Attachment | None, request: Request) -> Callable[[OffloadKey], bytes] | None:
        """Makes kvdock's keys of vLLM's. None: nothing is shared of this request now."""
        tag = self._weights.tag_at(request.epoch)
        if attachment is None or tag is None:
            return None
        return HashedChain(tagged(attachment.namespace, tag), 1, (), 1).key_of

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._lookups.take()
        request, attachment = self._request_of(req_context), self._session.attachment
        if key in request.asked:
            return LookupResult.RETRY
        if key not in request.known and self._key_of(attachment, request) is not None:
            if not request.unasked:
                self._new.append(request)
            request.unasked.append(key)
            request.asked.add(key)
            group = get_offload_group_idx(key)
            request.story.asked(group, req_context.get_offload_key_position(key) or 0, self._chunk_tokens[group])
            return LookupResult.RETRY
        found = request.known.setdefault(key, None)
        if found is None or found.lease.attachment is not attachment or self._key_of(attachment, request) is None:
            return LookupResult.MISS
        if not found.lease.is_read:
            found.lease.is_read = True
            self._read.append((request, found.lease))
        return LookupResult.HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.take()
        self._weights.prove()
        for request, lease in self._read:  # vLLM has submitted this step's loads by now
            if lease in request.leases and not request.is_over:
                forget(request, lease)
                self._lookups.give_up(lease)
        asking, self._new, self._read = self._new, [], []
        attachment = self._session.attachment
        for request in asking:
            key_of = self._key_of(attachment, request)
            if request.is_over:
                continue
            if attachment is not None and key_of is not None:
                self._lookups.ask(request, attachment, key_of)
            else:
                request.asked.difference_update(request.unasked)
                request.known.update(dict.fromkeys(request.unasked))
                request.unasked = []
        self._lookups.ask_again()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.take()
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._report(request)
            self._lookups.over(request)

    def _report(self, request: Request) -> None:
        """To those who read what became of the request (kvdock explain)."""
        story = request.story
        if story.end:
            tokens = self._chunk_tokens[story.group]
            self._session.outcomes.add(Outcome(
                request=request.name[:MAX_NAME], epoch=story.epoch, prompt_tokens=story.end, local_tokens=story.start,
                asked_from=story.start, found_tokens=story.start + story.found * tokens,
                loaded_tokens=story.loaded * tokens,
            ))

    # ------------------------------------------------------------------ loads

    def submit_load(self, job_metadata: TransferJob) -> None:
        request = self._requests.get(job_metadata.req_context.req_id)
        by_lease: dict[Lease, list[tuple[OffloadKey, int, Found]]] = {}
        if request is None:  # it has ended, and its leases with it
            self._ended.put(_Ended(JobResult(job_metadata.job_id, success=False)))
            return
        for key, chunk_id in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            found = request.known.get(key)
            if found is not None:
                by_lease.setdefault(found.lease, []).append((key, chunk_id, found))
        for lease in by_lease:
            forget(request, lease)
        self._loading.run(self._load, job_metadata, request, by_lease)

    def _load(
        self, job: TransferJob, request: Request, by_lease: dict[Lease, list[tuple[OffloadKey, int, Found]]]
    ) -> None:
        """Background."""
        started_s, loaded = time.perf_counter(), dict[OffloadKey, None]()
        try:
            for lease, chunks in by_lease.items():
                loaded.update(dict.fromkeys(self._load_from(lease, request.name, chunks)))
        finally:
            failed = [key for key in job.keys if key not in loaded]
            took_s = time.perf_counter() - started_s
            self._ended.put(_Ended(
                JobResult(
                    job_id=job.job_id, success=not failed,
                    successful_keys=tuple(loaded) if failed and loaded else None, transfer_time=took_s,
                    transfer_bytes=len(loaded) * self.block_size_bytes,
                ),
                request, loaded, failed,
            ))

    def _load_from(
        self, lease: Lease, name: str, chunks: Sequence[tuple[OffloadKey, int, Found]]
    ) -> list[OffloadKey]:
        """Background. Returns the keys whose bytes have come and match their checksums."""
        attachment, tokens = lease.attachment, self._session.manifest.chunk_tokens
        if self._session.attachment is not attachment or not attachment.acquire():
            self._lookups.ended(lease)
            return []
        try:
            pieces = tuple(LoadPiece(found.at, 0, found.parts, (chunk,), 0) for _, chunk, found in chunks)
            end = max(piece.chunk for piece in pieces) + 1
            loading = self._worker.submit_load(
                attachment, LoadPlan(name, lease.id, 0, end * tokens, tokens, pieces)
            )
            try:
                self._worker.finish_load(loading)
            finally:
                self._worker.end_load(loading)
            self._worker.settle(attachment)
            if loading.lost:
                return []
            return [key for key, _, found in chunks if found.at not in loading.damaged]
        finally:
            self._lookups.ended(lease)
            attachment.release()

    # ------------------------------------------------------------------ stores

    def submit_store(self, job_metadata: TransferJob) -> None:
        attachment, request = self._session.attachment, self._requests.get(job_metadata.req_context.req_id)
        key_of = self._key_of(attachment, request) if request is not None else None
        if attachment is None or key_of is None or not attachment.acquire():
            self._ended.put(_Ended(JobResult(job_metadata.job_id, success=False)))
            return
        runs = [[(key_of(key), chunk) for key, chunk in run] for run in self._runs(job_metadata)]
        self._storing.run(self._store, job_metadata, attachment, runs)

    def _runs(self, job: TransferJob) -> Iterator[list[tuple[OffloadKey, int]]]:
        """Chunks that follow each other in their request, for one reservation each: a chunk has one predecessor,
        whoever stores it. A job may lack chunks that the primary tier had already."""
        ends = [
            (get_offload_group_idx(key), job.req_context.get_offload_key_position(key) or 0, key, chunk)
            for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True)
        ]
        run: list[tuple[OffloadKey, int]] = []
        last = (-1, 0)
        for group, end, key, chunk in sorted(ends):
            follows = end and last == (group, end - self._chunk_tokens[group])
            if run and (not follows or len(run) == MAX_STORE_KEYS):
                yield run
                run = []
            run.append((key, chunk))
            last = group, end
        if run:
            yield run

    def _store(self, job: TransferJob, attachment: Attachment, runs: Iterable[list[tuple[bytes, int]]]) -> None:
        """Background."""
        started_s, is_whole = time.perf_counter(), False
        try:
            done = [self._store_run(job, attachment, run) for run in runs]
            is_whole = all(done)
        except CallFailed as error:
            self._session.lost(attachment, error)
        finally:
            attachment.release()
            took_s = time.perf_counter() - started_s
            self._ended.put(_Ended(JobResult(
                job_id=job.job_id, success=is_whole, transfer_time=took_s,
                transfer_bytes=len(job.keys) * self.block_size_bytes,
            )))

    def _store_run(self, job: TransferJob, attachment: Attachment, run: Sequence[tuple[bytes, int]]) -> bool:
        """Background. Whether all of its chunks are stored, or being stored by others. Raises ServerUnavailable,
        ApiError."""
        if self._session.attachment is not attachment:
            return False
        self._stores += 1
        answer = self._session.client.reserve(Reserve(
            session=attachment.session, member=attachment.member, store=f"{attachment.member}-{self._stores}",
            parent=UNKNOWN_PARENT.hex(), keys=b"".join(key for key, _ in run),
        ))
        if answer.reservation is None:
            return answer.limited_by is None
        pieces = tuple(StorePiece(one.index, 0, tuple(one.parts), (run[one.index][1],)) for one in answer.chunks)
        tokens = len(pieces) * self._session.manifest.chunk_tokens
        ready = self._worker.store(
            attachment, StorePlan(job.req_context.req_id, answer.reservation, tokens, pieces)
        )
        return ready == len(pieces) and answer.limited_by is None

    # ------------------------------------------------------------------ both

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended = list(drained(self._ended))
        for one in ended:
            if one.request is not None:  # else vLLM would look it up, find it, and fail to load it again and again
                one.request.known.update(dict.fromkeys(one.failed))
                of_group = [key for key in one.loaded if get_offload_group_idx(key) == one.request.story.group]
                one.request.story.loaded += len(of_group)
        return [one.result for one in ended]

    def drain_jobs(self) -> None:
        for background in (self._loading, self._storing):
            background.run(lambda: None).result()  # calls run in order

    def shutdown(self) -> None:
        for background in (self._loading, self._storing):
            background.close()
        for request in self._requests.values():
            self._lookups.over(request)
        self._lookups.close()
        self._worker.close()
        self._session.close()
        self._session.client.close()


def _windows(config: Any) -> dict[int, int | None]:
    """By group of vLLM, how many of the last chunks a hit needs; None: all. vLLM 0.32 does not say: one of several
    groups is taken for a window, which costs a call where it has not all chunks."""
    unknown = 1 if len(config.groups) > 1 else None
    return {one.group_id: getattr(one, "sliding_window_size_in_chunks", unknown) for one in config.groups}


def _layout_of(view: memoryview, tokens: int) -> PagedLayout:
    """The primary tier as the copier knows paged KV: a block is a chunk. No buffer stays exported: vLLM releases it."""
    chunks, row_bytes = view.shape or (0, 0)
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    planes = ((base, row_bytes, row_bytes, 1, row_bytes),)
    core = _core.PagedLayout(planes, num_blocks=chunks, block_tokens=tokens)
    return PagedLayout("chunks", "ND", planes, chunks, tokens, (), core)
