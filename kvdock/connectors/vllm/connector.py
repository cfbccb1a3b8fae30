"""The class that vLLM loads. By its role, it has the scheduler's side or a worker's side, and forwards each call to it.

    --kv-transfer-config '{"kv_connector": "KvdockConnector", "kv_role": "kv_both"}'

Start: the workers register their KV tensors, attach, and send the manifest to the scheduler's side as their handshake.
MultiConnector passes one connector's handshake to all connectors, so beside other connectors the manifest comes with
the first step instead, and lookups wait for it. Without the manifest nothing is looked up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None  # such a version never asks for it

from kvdock.client.client import Client
from kvdock.connectors.errors import CannotCacheError, NotSupportedError
from kvdock.connectors.heads import CannotShareSizes, HeadParts
from kvdock.connectors.packing import with_packing
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.session import EngineSession, Identity
from kvdock.connectors.vllm.adapters import LOADS
from kvdock.connectors.vllm.arrivals import in_turn, listen
from kvdock.connectors.vllm.exports import Events, KvdockPromMetrics, KvdockStats, cutter_of, events_of, namer_of
from kvdock.connectors.vllm.groups import (
    KVGroup,
    chunk_tokens,
    groups_of,
    layouts_of,
    planes_of,
    refuse_states,
    refuse_unreconciled_hits,
)
from kvdock.connectors.vllm.heads import divided, part_layouts, placed
from kvdock.connectors.vllm.identity import hashing_of, manifest_of, served_name
from kvdock.connectors.vllm.plugin import register
from kvdock.connectors.vllm.request_spans import name_request_spans
from kvdock.connectors.vllm.request_tag import Tags
from kvdock.connectors.vllm.resets import end_loads_first
from kvdock.connectors.vllm.scheduler import EngineView, VllmScheduler
from kvdock.connectors.vllm.setup import (
    EngineTraits,
    RankPosition,
    Settings,
    keeps_blocks_back,
    loads_by_layer,
    log_among_theirs,
    place_of,
    refuse_what_is_not_supported,
    reports_early,
    undoes_steps,
    warn_of_policy,
    warn_of_version,
    workers_here,
    zeroes_blocks,
)
from kvdock.connectors.vllm.steps import Orders, Report
from kvdock.connectors.vllm.tables import BlockBudget, own_cache_of
from kvdock.connectors.vllm.unfit import UNLOADED, refuse_what_is_no_prefix, why_unfit
from kvdock.connectors.vllm.weight_changes import hear, hear_model
from kvdock.connectors.vllm.worker import VllmWorker, WorkerKV
from kvdock.connectors.worker import cores_of, hash_threads
from kvdock.datapath.devices import Device
from kvdock.datapath.errors import NoCuda
from kvdock.protocol.forms import decoder_of
from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.schemas import Manifest

log = logging.getLogger("kvdock.vllm")

ASIDE = "kvdock stands aside, and vLLM runs as without it: %s"
BY_REQUEST = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Failed loads can be reported by request (since vLLM 0.30)."""
RECONCILES = hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits")
"""As groups.py has it; for connectors that do not ask for anything else."""


@dataclass
class Metadata(KVConnectorMetadata):
    orders: Orders = field(default_factory=Orders)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        self.report.add(other.report)
        return self


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's handshake. `manifest`: in JSON."""

    manifest: bytes
    instance: str


class _Streams(NamedTuple):
    """`computed`: when a step starts, it holds the work that must come before the step's stores. `aside`: has no
    computation, for copies that need not wait for steps. Both are None on a CPU."""

    computed: torch.cuda.Stream | None = None
    aside: torch.cuda.Stream | None = None


@dataclass(frozen=True)
class _Instance:
    """`nonce`: a random name; `started_ns`: since 1970."""

    name: str
    nonce: Callable[[], str]
    started_ns: int


@dataclass
class _Early:
    """Requests and reports that came to the scheduler's side before it had the workers' manifests."""

    requests: list[Any] = field(default_factory=list)
    reports: Report = field(default_factory=Report)
    steps: int = 0
    """How many steps vLLM has planned."""


register()  # MultiConnector finds classes by name alone when it reads their statistics


class KvdockConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises a ConnectorError at start when this engine cannot be served with its settings. For a model whose KV it
    cannot cache it stands aside: nothing is stored or loaded, and vLLM runs as without it."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any, *,
        nonce: Callable[[], str] = lambda: uuid.uuid4().hex[:12], now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`nonce`: a random name; `now_ns`: since 1970; vLLM passes the others."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._instance = _Instance(f"vllm-{vllm_config.kv_transfer_config.engine_id}", nonce, now_ns())
        self.turn = threading.RLock()
        log_among_theirs()
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.load(transfer.kv_connector_extra_config, os.environ)
        if kv_cache_config is None:
            raise NotSupportedError("kvdock needs a vLLM that passes the KV cache configuration to its connectors.")
        refuse_what_is_not_supported(vllm_config, len(kv_cache_config.kv_cache_groups), self._settings)
        self._config, self._cache = vllm_config, kv_cache_config
        self._groups: tuple[KVGroup, ...] = ()
        """Empty: kvdock stands aside."""
        refuse_unreconciled_hits(vllm_config, kv_cache_config, reconciles=RECONCILES)
        try:
            groups = groups_of(kv_cache_config)
            refuse_states(vllm_config, groups, load_async=self._settings.load_async)
            refuse_what_is_no_prefix(vllm_config, kv_cache_config)
            self._groups = groups
        except CannotCacheError as why:
            if role is KVConnectorRole.SCHEDULER:  # once for each engine
                log.warning(ASIDE, why)
        place = place_of(vllm_config.parallel_config, self._groups)
        engine = get_current_vllm_config_or_none()  # known in workers; another connector passes a copy of it
        self._is_beside = engine is None or engine.kv_transfer_config is not transfer
        if self._is_beside and role == KVConnectorRole.WORKER and any(group.state for group in self._groups):
            self._groups = ()  # no worker sends its manifest, so the scheduler's side does not start
            if place.rank == 0:
                log.warning(ASIDE, "it caches recurrent states where no other connector is set, and one is.")
        if role == KVConnectorRole.SCHEDULER:
            warn_of_version(vllm.__version__)
            listen()
            end_loads_first()
            self._why_unheard = hear(self, vllm_config)
            LOADS.listen()
        elif self._groups:
            hear_model(self, vllm_config)
        if role == KVConnectorRole.SCHEDULER and self._settings.recompute_failed_loads:
            transfer.kv_load_failure_policy = "recompute"  # vLLM reads it afterwards, but never in a copy
        elif role == KVConnectorRole.WORKER and (self._is_beside or not self._settings.recompute_failed_loads):
            warn_of_policy((transfer if engine is None else engine.kv_transfer_config).kv_load_failure_policy, place)
        self._weights = RunningWeights(trusts_versions=self._settings.trust_weight_versions, renamed=self._runs)
        self._worker: VllmWorker | None = None
        self._streams = _Streams()
        self._scheduler: VllmScheduler | None = None
        self._handshake: Handshake | None = None
        self._early = _Early()
        self._events: Events | None = None

    # ------------------------------------------------------------------ both

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if loads by layer need it: full CUDA graphs do not ask for each layer's KV."""
        return Settings.load(extra_config, os.environ).load_by_layer == "piecewise"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM refuses sleep mode if this is False. setup.py refuses it where settings decide."""
        return True

    def unregister_kv_caches(self) -> None:
        """vLLM takes the KV memory away, and gives it back at the same addresses."""
        if self._worker is not None:
            self._worker.wait_idle()

    def get_kv_connector_stats(self) -> KvdockStats | None:
        side = self._worker or self._scheduler
        return KvdockStats.taken(side.figures) if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdockStats:
        return KvdockStats.of(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: dict[type, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdockPromMetrics:
        """vLLM calls it in the processes of its API, which also make its spans of requests."""
        log_among_theirs()
        name_request_spans(vllm_config)
        return KvdockPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @in_turn
    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._groups:
            return
        chunk = chunk_tokens(self._groups, self._settings.chunk_tokens)
        blocks, place = self._cache.num_blocks, place_of(self._config.parallel_config, self._groups)
        parts = self._head_parts(kv_caches, place) if self._settings.any_tensor_parallel else None
        if parts is not None:
            place = placed(parts, place)
        manifest = manifest_of(
            self._config, vllm.__version__, self._groups, kv_caches, place, num_blocks=blocks, chunk_tokens=chunk,
            weights_digest=self._settings.weights_digest, hashing=self._hashing(), environ=os.environ,
            read_all=self._settings.read_all_weights, head_parts=parts,
        )
        device = self.device_of(kv_caches)
        try:
            where = Device.named(device)
        except NoCuda as why:  # this worker sends no manifest, so the scheduler's side does not start
            self._groups = ()
            log.error(ASIDE, why)
            return
        if device != "cpu":
            streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]  # so in torch
            self._streams = _Streams(*streams)
        computed, aside = self._streams
        of = self._groups, kv_caches, blocks, manifest.token_order
        layouts = part_layouts(parts, *of) if parts is not None else layouts_of(*of)
        manifest = with_packing(manifest, layouts[: len(self._groups)], self._settings.pack, where)
        self._worker = VllmWorker(
            self._settings, manifest, self._identity(f"rank{place.rank}", ranks=place.own_ranks, scheduler=False),
            WorkerKV(
                layouts, planes_of(self._groups, kv_caches),
                device, _stream_of(device), computed.cuda_stream if computed is not None else None,
                aside.cuda_stream if aside is not None else None,
            ),
            EngineTraits(
                takes_failed_requests=BY_REQUEST, undoes_steps=undoes_steps(self._config),
                loads_by_layer=loads_by_layer(self._config, self._settings, self._groups),
                reports_early=reports_early(self._config, self._cache, place),
                hash_threads=hash_threads(cores_of(workers_here(self._config))),
                zeroes_blocks=zeroes_blocks(self._cache),
            ),
        )
        self._handshake = Handshake(msgspec.json.encode(manifest), self._instance.name)

    def _head_parts(self, kv_caches: dict[str, torch.Tensor], place: RankPosition) -> HeadParts | None:
        """None, with a line in the log, if this engine cannot share KV with other tensor-parallel sizes. With latent
        attention every size shares anyway."""
        if all(group.latent for group in self._groups):
            return None
        try:
            heads = self._config.model_config.get_total_num_kv_heads()
            return divided(self._groups, kv_caches, self._cache.num_blocks, heads=heads, place=place)
        except CannotShareSizes as why:
            if place.rank == 0:
                log.warning("any_tensor_parallel: this engine shares KV only with others of its own size: %s", why)
            return None

    @staticmethod
    def device_of(kv_caches: dict[str, torch.Tensor]) -> str:
        return str(next(iter(kv_caches.values())).device)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._is_beside else self._handshake

    def kvdock_weights_written(self) -> None:
        """Weights were loaded into the model (weight_changes.py)."""
        if self._worker is not None:
            self._worker.weights_written()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Metadata)
        orders = kv_connector_metadata.orders
        if self._worker is None:
            return
        self._worker.fence(orders, _stream_of(self._worker.device))
        computed = self._streams.computed
        if computed is not None and orders.stores:  # they wait for earlier steps, but not for this one
            computed.wait_stream(torch.cuda.current_stream(computed.device))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        if self._worker is not None:
            self._worker.start(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None and self._worker.waits_for_layers:
            self._worker.wait_for_layer(layer_name, _stream_of(self._worker.device))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored in later steps."""

    def wait_for_save(self) -> None:
        """Nothing waits for a store."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded = self._worker.ended() if self._worker is not None else set()
        return None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._worker.failed_requests() if self._worker is not None else set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        report = self._worker.report() if self._worker is not None else Report()
        if self._is_beside and self._handshake is not None:
            rank = place_of(self._config.parallel_config, self._groups).rank
            report.manifests[rank], self._handshake = self._handshake.manifest, None
        return WorkerMetadata(report) if report else None

    # ------------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))  # they are equal

    @in_turn
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Handshakes of other connectors are ignored."""
        encoded = [one.manifest for one in metadata.values() if isinstance(one, Handshake)]
        if encoded:
            self._start(encoded, is_beside=False)

    def _start(self, encoded: Sequence[bytes], *, is_beside: bool) -> None:
        """`encoded`: each worker's manifest. `is_beside`: other connectors may load as well. Raises NotSupportedError.
        """
        manifests = [decoder_of(Manifest, packed=False).decode(one) for one in encoded]
        manifest = manifests[0]
        if any((one.hash_function, one.hash_seed) != self._hashing() for one in manifests):
            raise NotSupportedError(
                "kvdock needs the same PYTHONHASHSEED in vLLM's scheduler and its workers, or none."
            )
        if any(one != manifest for one in manifests):
            raise NotSupportedError(
                "kvdock needs KV of one size and order in all workers of an engine, of the same weights and under the "
                f"same environment variables, and theirs differ in {_differing(manifests)}."
            )
        if self._scheduler is not None:
            return  # vLLM sends it again when it wakes
        own = self._settings
        client = Client(
            own.address, timeout_s=own.timeout_s, access_token_file=own.access_token_file, trusted_uid=own.trusted_uid
        )
        session = EngineSession(client, manifest, self._identity("scheduler", ranks=(), scheduler=True))
        _, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(self._cache, self._config)
        self._events = events_of(self._config, self._cache, self._groups, session, hash_tokens)
        limits = self._config.scheduler_config
        budget = BlockBudget(
            self._groups, blocks=self._cache.num_blocks - 1, longest_tokens=self._config.model_config.max_model_len,
            step_tokens=limits.max_num_batched_tokens, in_order=limits.policy == "fcfs",
        )
        unfit = why_unfit(self._config, manifest.token_order, os.environ)
        if unfit:
            log.warning(UNLOADED, unfit)
        self._scheduler = VllmScheduler(
            session, EngineView(
                self._groups, ranks=len(manifests), steps_ahead=self._config.max_concurrent_batches - 1,
                keeps_back=keeps_blocks_back(self._config), is_beside=is_beside, unfit=unfit,
                hash_tokens=hash_tokens if manifest.hash_function != HASH_FUNCTION else None,
                own_cache=own_cache_of(self._config, self._groups, hash_tokens),
                announcer=self._events.announcer if self._events is not None else None,
                cutter=cutter_of(manifest.chunk_tokens, hash_tokens),
                namer=namer_of(self._groups, manifest.chunk_tokens, hash_tokens),
            ),
            budget, self._settings, tags=Tags(
                _adapters_as(self._config.lora_config), self._instance.started_ns, weights=self._weights,
                trusts_names=self._settings.trust_weight_versions,
            ),
        )
        self._prove_hooks()
        self._scheduler.start()
        for request in self._early.requests:
            self._scheduler.arrived(request)
        self._early.requests.clear()

    @in_turn
    def kvdock_received(self, request: Any) -> None:
        """vLLM's core has received a request, which its scheduler takes in between two steps (arrivals.py)."""
        if self._scheduler is not None:
            self._scheduler.received(request)

    @in_turn
    def kvdock_adapter(self, asked: Any) -> None:
        """vLLM is about to load the adapter of `asked`, a LoRARequest (adapters.py)."""
        if self._scheduler is not None:
            self._scheduler.adapter_loads(asked)
        elif self._groups:
            LOADS.miss()

    @in_turn
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)
        elif self._groups:
            self._early.requests.append(request)
            if getattr(request, "lora_request", None) is not None:
                LOADS.miss()

    @in_turn
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            is_soon = bool(self._groups) and self._early.steps <= self._config.max_concurrent_batches
            return (None if is_soon else 0), False
        return self._scheduler.lookup(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Newer versions of vLLM count cached tokens by their source. kvdock's tokens come from this host's memory."""
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    @in_turn
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            table = [[None if block.is_null else block.block_id for block in column] for column in blocks.blocks]
            self._scheduler.allocated(request, table, num_external_tokens)

    @in_turn
    def kvdock_weights(self, kind: str, version: str) -> None:
        """See weight_changes.Hears."""
        if self._scheduler is not None:
            self._scheduler.weights_change(kind, version)
        else:
            self._weights.hear(kind, version)

    def _runs(self, weights: str) -> None:
        if self._scheduler is not None:
            self._scheduler.runs(weights)

    def _prove_hooks(self) -> None:
        why = self._why_unheard()
        if why != self._weights.doubt:
            self.kvdock_weights("unheard" if why else "heard", why)

    @in_turn
    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        self._early.steps += 1
        self._prove_hooks()
        orders = self._scheduler.build(scheduler_output) if self._scheduler is not None else Orders()
        if orders.loads or scheduler_output.num_scheduled_tokens:
            self._weights.computed()
        return Metadata(orders)

    @in_turn
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, WorkerMetadata) else Report()
        if self._scheduler is None:
            report = self._introduced(report)
        if self._scheduler is None:
            return
        if connector_output.invalid_block_ids or getattr(connector_output, "failed_recving", None):
            self._scheduler.loads_failed()  # perhaps another connector's
        self._scheduler.take(report)

    def _introduced(self, report: Report) -> Report:
        """Starts the scheduler's side once every worker has reported its manifest. Returns all reports of workers so
        far."""
        reports = self._early.reports
        reports.add(report)
        if len(reports.manifests) == place_of(self._config.parallel_config, self._groups).ranks:
            self._start(list(reports.manifests.values()), is_beside=True)
        return reports

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @in_turn
    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            return False, self._scheduler.finished(
                request, has_answered=_has_answered(request),
                has_failed=request.status == RequestStatus.FINISHED_ERROR,
            )
        self._early.requests = [one for one in self._early.requests if one.request_id != request.request_id]
        return False, None

    @in_turn
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    @in_turn
    def reset_cache(self) -> bool:
        """vLLM calls it with reset_connector=True, when it pauses to change weights, and when it sleeps.
        Settings.on_reset says what is done. False: the server was asked to clear and has not, so nothing is loaded
        until it has."""
        return self._scheduler is not None and self._scheduler.reset()

    @in_turn
    def take_events(self) -> Iterable[Any]:
        """KV cache events, when vLLM publishes them: of the server's chunks that this instance knows
        (kvdock/connectors/announcer.py)."""
        return self._events.take() if self._events is not None else ()

    def _hashing(self) -> tuple[str, str]:
        return hashing_of(
            self._config.cache_config.prefix_caching_hash_algo, seed=os.environ.get("PYTHONHASHSEED"),
            fixed_seed=getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None),
        )

    def _identity(self, member: str, *, ranks: tuple[int, ...], scheduler: bool) -> Identity:
        name, short_id = served_name(self._config.model_config), self._instance.name.removeprefix("vllm-")[:8]
        return Identity(
            instance=self._instance.name, member=f"{member}-{self._instance.nonce()}", ranks=ranks, scheduler=scheduler,
            label=f"vLLM {vllm.__version__} {name} {short_id}", served_model_name=name,
        )


def _differing(manifests: Sequence[Manifest]) -> str:
    """The names of the fields that differ. `revision` covers weights, settings and environment variables."""
    fields = [msgspec.to_builtins(one) for one in manifests]
    return ", ".join(name for name in fields[0] if any(one[name] != fields[0][name] for one in fields))


def _has_answered(request: Any) -> bool:
    """Whether the request was answered to its end, and not aborted."""
    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _adapters_as(lora_config: Any) -> str:
    """The part of vLLM's settings for adapters that changes KV. `lora_config` None: this engine has no adapters."""
    if lora_config is None:
        return ""
    return f"{lora_config.lora_dtype} {getattr(lora_config, 'enable_tower_connector_lora', False)}"


def _stream_of(device: str) -> int | None:
    """The CUstream on which this thread puts its work; None on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device != "cpu" else None
