"""The linker: SGLang makes one in each rank of an engine. It connects the modules of this folder.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config
        '{"linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang"}'

SGLang calls the linkers of all ranks with the same arguments, and combines the answers of the ranks of a pipeline's
stage: a request may load the pages that all of them promise, and its load has failed if it has failed on one rank. Only
rank 0 looks up at the server. The other ranks promise everything, so rank 0 decides; the later stages of a pipeline
promise what the first one has promised (stages.py).

Threads: SGLang's scheduler thread calls every method.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.utils import get_hash_str

from kvdock.connectors.cost import PrefillSpeed
from kvdock.connectors.engine_connector import ConnectorSettings, open_worker, start
from kvdock.connectors.errors import NotSupportedError, RefusedError
from kvdock.connectors.heads import CannotShareSizes, HeadParts
from kvdock.connectors.packing import with_packing
from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.session import Attachment, Identity, ServerEpoch, SessionObserver
from kvdock.connectors.sglang.afterwards import Afterwards
from kvdock.connectors.sglang.early import EarlyLoads
from kvdock.connectors.sglang.figures import Figures
from kvdock.connectors.sglang.hints import asked_by
from kvdock.connectors.sglang.holding import Holding
from kvdock.connectors.sglang.hooks import PLANS, hook_change, register
from kvdock.connectors.sglang.identity import manifest_of, revision, settings_set, variables_set
from kvdock.connectors.sglang.loads import LayerCounter, Loads, QueuedLoad, Ready
from kvdock.connectors.sglang.offloads import Offloads
from kvdock.connectors.sglang.page_names import About, Naming, with_loadable
from kvdock.connectors.sglang.pools import (
    FULL,
    STATES,
    KVGroup,
    RankPools,
    divided,
    groups_of,
    part_layouts,
    refuse_groups_of_stages,
)
from kvdock.connectors.sglang.rank_zero import RankZero
from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.sglang.setup import Settings, drafts_of, refuse_what_is_not_supported, warn_of_version
from kvdock.connectors.sglang.texts import Texts
from kvdock.connectors.sglang.traces import traceparent_of
from kvdock.connectors.sglang.updates import Changes, Fresh, Guard
from kvdock.connectors.sglang.verdicts import Verdicts
from kvdock.datapath.devices import Device
from kvdock.datapath.errors import NoCuda

log = logging.getLogger("kvdock.sglang")


class KvdockLinker(UnifiedCacheLinker):
    """Raises NotSupportedError when kvdock cannot serve this engine with its settings; RefusedError when a server
    answers and does not accept it. Where kvdock cannot copy on this machine's device, it is an AsideLinker instead."""

    def __new__(cls, server_args: Any, params: Any, *, forward_stream: Any = None, **more: Any) -> Any:
        kvcache, ranks = params.token_to_kv_pool_allocator.get_kvcache(), _ranks_of(server_args, params)
        try:
            Device.named(cls.device_of(kvcache))
        except NoCuda as why:
            log.error("kvdock stands aside, and SGLang runs as without it: %s", why)
            usable = False
        else:
            usable = True
        return super().__new__(cls) if ranks.all_agree_at_start(usable) else AsideLinker(kvcache, forward_stream)

    @staticmethod
    def device_of(kvcache: Any) -> str:
        is_on_gpu = torch.device(kvcache.device).type == "cuda"
        return f"cuda:{torch.cuda.current_device()}" if is_on_gpu else "cpu"

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None,
        nonce: Callable[[], str] = lambda: uuid.uuid4().hex[:12], clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`nonce`: a random name; `clock`: a monotonic clock, in seconds; SGLang passes the others."""
        self._ranks = _ranks_of(server_args, params)
        instance = self._ranks.named(f"sglang-{nonce()}")  # before anything that may be refused on one rank alone
        warn_of_version(sglang.__version__)
        settings, model = Settings.load(extra_config or {}, os.environ), model_config_of(server_args)
        refuse_what_is_not_supported(server_args, params, model, [component.name for component in components])
        _compile_hash(params.page_size)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        groups = groups_of(
            kvcache, params.page_size, params.swa_retain_window, drafts_of(params), params.req_to_token_pool
        )
        if self._ranks.stages > 1:
            refuse_groups_of_stages(groups)
        self.forward_stream, self.pools = forward_stream, {PoolName(group.transfer): kvcache for group in groups}
        self._figures = Figures(_prometheus() if params.enable_metrics else None)
        self._weights = RunningWeights(
            trusts_versions=settings.trust_weight_versions, draw=nonce, renamed=self._weights_named
        )
        self._rank_pools = self._open(settings, server_args, params, model, groups, (instance, nonce()))
        speed = PrefillSpeed(clock, 0 if server_args.disable_overlap_schedule else 1)
        self._zero: RankZero | None = None
        if self._ranks.rank == 0:
            self._zero = RankZero.of(
                self._rank_pools.worker.session, settings, ranks=self._ranks.size, weights=self._weights, speed=speed,
                figures=self._figures, clock=clock, has_events=params.enable_kv_cache_events,
                has_pairs=params.is_eagle,
            )
        self.fresh, self.changes = Fresh(self._weights), Changes(self._weights, self._weights_change)
        self._loads = Loads(
            self._rank_pools, self._ranks, self._weights, ended=self._load_ended, took=self._loads_took, clock=clock
        )
        lookups = self._zero.lookups if self._zero is not None else None
        # SGLang's test of its own counts of slots, in each step, knows none that belong to no request.
        least = 0 if envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get() else settings.early_load_tokens
        early = EarlyLoads(self._loads, self._ranks, self.fresh, lookups, self._plan_for, self._ready, least)
        self.holding = Holding(self._ranks, lookups, speed.step, early=early)
        if self._zero is not None:
            self.holding.shows_speed = self._zero.outcomes.shows_speed
        self._offloads = Offloads(self._rank_pools, self._ranks, self._weights, self._figures, self._zero)
        wants_names = self._zero.wants_names if self._zero is not None else lambda: False
        self.naming = Naming(params.page_size, wants_names, has_pairs=params.is_eagle)
        self.texts = Texts(
            model.vocab_size if getattr(model, "is_multimodal", False) else None, params.page_size,
            has_pairs=params.is_eagle, hashes=self._zero is not None,
        )
        self.guard = Guard(hook_change, PLANS, self.changes.unheard)
        observer = self._zero.observer() if self._zero is not None else SessionObserver()
        start(self._rank_pools.worker.session, self._rank_pools.worker, observer)
        register(self)

    def _open(
        self, settings: Settings, args: Any, params: Any, model: Any, groups: Sequence[KVGroup],
        names: tuple[str, str],
    ) -> RankPools:
        """This rank's worker connector, which is not attached yet, over SGLang's pools. `names`: the engine's, and one
        of this rank's own."""
        kvcache, stream = params.token_to_kv_pool_allocator.get_kvcache(), None
        device = self.device_of(kvcache)
        if device != "cpu":
            stream = int((self.forward_stream or torch.cuda.current_stream()).cuda_stream)  # the default stream is 0
        dependences = settings_set(args, record_fields(type(args))) | variables_set(os.environ)
        shards, stages = self._ranks.shards, self._ranks.stages
        parts = self._head_parts(groups, model, device) if settings.any_tensor_parallel else None
        if self._ranks.nodes > 1:
            dependences["node"] = f"{self._ranks.node} of {self._ranks.nodes}"
        manifest = manifest_of(
            model, sglang.__version__, groups, page_tokens=params.page_size, shards=shards, stages=stages, parts=parts,
            revision=revision(
                args, model, dependences, weights_digest=settings.weights_digest, read_all=settings.read_all_weights
            ), kv_dtype=str(kvcache.dtype),
        )
        own = part_layouts(groups, parts) if parts is not None else [group.layout for group in groups]
        layouts = [replace(layout, token_order=manifest.token_order) for layout in own]
        manifest = with_packing(manifest, layouts[: len(groups)], _pack(settings, device), Device.named(device))
        (instance, member), rank = names, self._ranks.rank
        ranks: tuple[int, ...] = (rank,)
        if parts is not None:
            own_shards = parts.own_ranks(self._ranks.shard, shards)
            ranks = tuple(shard * stages + self._ranks.stage for shard in own_shards)
        name = str(args.served_model_name or args.model_path)[-100:]
        _, worker = open_worker(
            ConnectorSettings(
                settings.address, settings.access_token_file, settings.timeout_s, device, settings.copy_threads,
                trusted_uid=settings.trusted_uid,
            ),
            manifest,
            Identity(instance, f"{instance}-{rank}-{member}", ranks, rank == 0, name, served_model_name=name),
            layouts, stream=stream,
        )
        return RankPools(worker, groups, params.page_size, _current_stream if stream is not None else None)

    def _head_parts(self, groups: Sequence[KVGroup], model: Any, device: str) -> HeadParts | None:
        """None, with a line in the log, if this engine cannot share KV with other tensor-parallel sizes. With latent
        attention every size shares anyway."""
        if all(group.is_latent for group in groups):
            return None
        try:
            if self._ranks.nodes > 1:
                raise CannotShareSizes("its ranks are on several nodes")
            return divided(groups, model.get_total_num_kv_heads(), self._ranks.shards, device)
        except CannotShareSizes as why:
            if self._ranks.rank == 0:
                log.warning("any_tensor_parallel: this engine shares KV only with others of its own size: %s", why)
            return None

    # ------------------------------------------------------------------ lookups and loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        pages = next(list(one.keys) for one in transfers if one.name == FULL)
        may_look_up = self._may_share() and self.texts.may_look_up(rid)
        req = self.texts.matched
        about = About(self.naming.looked_up, traceparent_of(req), asked_by(req).store, self.texts.looked_up)
        if self.holding.arrives:
            if self._zero is not None and may_look_up:
                self._zero.lookups.expect(rid, pages, about)
            return []
        self.holding.looked_up(rid)
        self._early.looked_up(pages)
        if self._zero is not None:
            promised = self._promised(self._zero, rid, pages, about) if may_look_up and self._is_ready() else 0
        else:  # in a pipeline, rank 0 knows what the others may do
            promised = len(pages) if may_look_up or self._ranks.stages > 1 else 0
        promised = self._ranks.of_first_stage(promised)
        if self._ranks.shard > 0 or (self._ranks.nodes > 1 and self._has_every_length):
            return list(range(1, promised + 1))
        return [promised] if promised else []

    def _promised(self, zero: RankZero, rid: str, pages: Sequence[str], about: About) -> int:
        """How many of the first pages SGLang may load with the request's batch."""
        early = self._early
        if early.has_loaded(rid, len(pages)):
            return 0
        found = zero.lookups.ask(rid, pages, about)
        return 0 if early.takes(self.texts.matched, pages, found) else found

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        by_name = {str(one.name): one for one in transfers}
        pages = list(by_name[FULL].keys)
        may_begin, started = self._agree_on_plan(rid, len(pages))
        if not may_begin:
            return False
        if started is None:  # this rank is of a later stage
            self._loads.refuse(rid)
            return True
        indices = {name: one.device_indices for name, one in by_name.items()}
        self._loads.queue(QueuedLoad(rid, *started, indices, self._weights.epoch, pages))
        return True

    def _plan_for(self, rid: str, pages: int) -> tuple[Attachment, LoadPlan] | None:
        """The plan of a load outside of SGLang's batches, in an engine of one stage. None: some rank cannot load."""
        return self._agree_on_plan(rid, pages)[1]

    def _agree_on_plan(self, rid: str, pages: int) -> tuple[bool, tuple[Attachment, LoadPlan] | None]:
        """Whether the load of so many pages may begin, and its plan on this rank; None: this rank takes no part."""
        shared: tuple[ServerEpoch, LoadPlan] | None = None
        started: tuple[Attachment, LoadPlan] | None = None
        may_load = self._may_share()
        if self._zero is not None and may_load and self._is_ready():
            started = self._zero.lookups.begin_load(rid, pages)
            shared = (started[0].epoch, started[1]) if started is not None else None
        shared = self._ranks.share(shared)
        if shared is not None and started is None and may_load:
            attachment = self._rank_pools.worker.session.attachment_to(shared[0])
            started = (attachment, shared[1]) if attachment is not None else None
        if not self._ranks.all_agree(started is not None):
            self._give_up(rid, started)
            return False, None
        return True, started

    @property
    def _has_every_length(self) -> bool:
        """Whether each beginning of what was found can be loaded: nodes then load what all of them have."""
        return all(group.transfer == FULL for group in self._rank_pools.groups)

    def _is_ready(self) -> bool:
        """Whether rank 0 may promise and store: in a pipeline, all ranks must be able to take part."""
        attachment, notes = self._rank_pools.worker.session.attachment, self._ranks.notes
        if notes is None:
            return True
        return attachment is not None and self.verdicts.are_in_force() and notes.all_attached(str(attachment.epoch))

    def _give_up(self, rid: str, started: tuple[Attachment, LoadPlan] | None) -> None:
        """Some rank cannot load, so no rank loads, and SGLang computes the pages."""
        self._figures.add("loads_given_up")
        if started is not None:
            self._loads.give_up(*started)
            if self._zero is not None:
                self._zero.lookups.loaded(rid, None)

    @property
    def _early(self) -> EarlyLoads:
        assert self.holding.early is not None
        return self.holding.early

    @property
    def verdicts(self) -> Verdicts:
        return self._loads.verdicts

    @property
    def afterwards(self) -> Afterwards:
        return self._loads.afterwards

    @property
    def layer_done_counter(self) -> LayerCounter:
        return self._loads.counter

    def start_layer_wise_loading(self) -> int:
        return self._loads.start(self._ready())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    def _load_ended(self, load: QueuedLoad, ok: bool | None) -> None:
        if self._zero is None:
            return
        self._zero.load_ended(load, ok)
        if ok is not None:
            tokens = len(load.pages) * self._rank_pools.page_tokens
            failed = "loads_given_up" if load.is_early else "load_failures"
            self._figures.add("load_tokens" if ok else failed, tokens if ok else 1)
            if load.is_early and ok:
                self._figures.add("loads_early")

    def _loads_took(self, batch_s: float, copies: Sequence[tuple[int, float]]) -> None:
        self._figures.add("load_seconds", batch_s)
        if self._zero is not None:
            for tokens, seconds in copies:
                self._zero.connector.lookups.load_took(tokens, seconds)

    # ------------------------------------------------------------------ stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        by_name = {str(one.name): one for one in transfers}
        if FULL not in by_name or not by_name[FULL].keys:
            return False
        inserts = self.fresh.inserts
        is_known, marked = self.texts.offered(inserts, self.naming.first)
        may_store = self._may_share() and is_known and asked_by(inserts).store
        if self._zero is not None:
            full = by_name[FULL]
            is_fresh = self.fresh.may_store(
                full.keys, self.naming.parent, full.device_indices, has_state=STATES in by_name
            )
            may_store = is_fresh and may_store
            may_store = may_store and self._is_ready()
        about = About(self.naming.offered, traceparent_of(inserts), marked=marked)
        self.afterwards.run(self._offer, by_name, self.naming.parent, may_store, about)
        return True

    def _offer(self, by_name: dict[str, PoolTransfer], parent: str | None, may_store: bool, about: About) -> None:
        self._offloads.offer(
            by_name[FULL].keys, parent, {name: one.device_indices for name, one in by_name.items()},
            {name: len(one.keys) for name, one in by_name.items()}, self._ready().wait, may_store=may_store,
            about=about,
        )

    def num_completed_offloads(self) -> int:
        """SGLang calls this in each iteration of its loop."""
        self._ranks.step()
        if self._ranks.notes is not None:
            attachment = self._rank_pools.worker.session.attachment
            may_take_part = self._may_share() or not self.guard.has_met
            self._ranks.notes.attached(str(attachment.epoch) if attachment is not None and may_take_part else "")
        if self._zero is not None:
            self._zero.lookups.tick(self._loads.counter.batches)
            self._figures.add("attached", int(self._rank_pools.worker.session.attachment is not None))
            self._figures.add("shares", int(self._may_share()))
        return self._offloads.count_ended()

    def pop_completed_offload(self) -> bool:
        return self._offloads.take_ended()

    def _ready(self) -> Ready:
        """Whether the work that SGLang's current stream has now, which computes the indices of pages, has ended. The
        copies are ordered after the forward pass's stream besides."""
        if self._rank_pools.stream is None:
            return Ready()
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not say
        event.record()
        return Ready(event.query, event.synchronize)

    # ------------------------------------------------------------------ weights

    def _may_share(self) -> bool:
        """Whether anything may be looked up, loaded or stored."""
        return self.guard.in_force() and self._weights.may_share

    def planned(self) -> None:
        """See Hooked."""
        self._weights.computed()

    # ------------------------------------------------------------------ requests

    def why_not(self, req: Any) -> str:
        """See Hooked."""
        return self.texts.why_not(req) or ("" if asked_by(req).load else "opted_out")

    def admitted(self, req: Any, device_tokens: int) -> None:
        """See Hooked, as for the next two."""
        early = self._early.admitted(str(req.rid))
        if self._zero is not None:
            self._zero.outcomes.admitted(req, device_tokens, self.why_not(req), early)

    def released(self, req: Any) -> None:
        if self._zero is not None:
            self.afterwards.run(self._released, self._zero, req)

    def _released(self, zero: RankZero, req: Any) -> None:
        zero.lookups.ended(str(req.rid))
        zero.outcomes.released(req)
        if self.texts.is_text(req) and not self.texts.why_not(req) and (call := zero.preferences_of(req)) is not None:
            self._offloads.then(call)

    def aborted(self, rid: str) -> None:
        self._early.forget(rid)
        if self._zero is not None:
            self._zero.lookups.drop(rid)
            self._zero.lookups.ended(rid)
            self._zero.outcomes.aborted(rid)

    def published(self, events: Sequence[Any]) -> Sequence[Any]:
        """See Hooked."""
        announcer = self._zero.announcer if self._zero is not None else None
        return events if announcer is None else with_loadable(events, announcer)

    def _weights_change(self) -> None:
        """From now on, pages that were looked up are not loaded, and offers that have not started are not stored."""
        if self._zero is not None:
            self._zero.weights_change()

    def _weights_named(self, name: str) -> None:
        """The weights that this engine runs have this name from now on; see RunningWeights.name. The server files what
        is stored from now on apart from the chunks of earlier weights, and can let those go."""
        self._rank_pools.worker.session.runs(name)
        self._figures.add("weights_changes")
        self._figures.add("weights_private", int(name.startswith("private")))

    # ------------------------------------------------------------------ ends

    def reset(self) -> None:
        """SGLang empties its cache (/flush_cache). The chunks at the server stay, because that call is about this
        engine's memory."""
        self._loads.reset()
        self._early.reset()
        self._offloads.reset()
        if self._zero is not None:
            self._zero.lookups.reset()
        self.texts.flushed()
        self._weights.flushed()

    def close(self) -> None:
        self._loads.close()
        self._offloads.close()
        if self._zero is not None:
            self._zero.close()
        self.texts.close()
        if self._ranks.notes is not None:
            self._ranks.notes.close()
        self._rank_pools.worker.close()
        self._rank_pools.worker.session.close()
        self._rank_pools.worker.session.client.close()


def _ranks_of(args: Any, params: Any) -> Ranks:
    """The ranks of an engine, which have one linker each."""
    group, pipeline = params.attn_tp_cache_group or params.tp_cache_group, params.pp_cache_group
    return Ranks(group, pipeline if params.pp_size > 1 else None, _nodes_of(group, args) if params.pp_size == 1 else 1)


def _nodes_of(group: Any, args: Any) -> int:
    """Over how many nodes the ranks of a group are spread: SGLang gives each node equally many ranks, in their
    order."""
    import torch.distributed as distributed

    if group is None or args.nnodes == 1:
        return 1
    of_node = distributed.get_world_size() // args.nnodes
    return len({rank // of_node for rank in distributed.get_process_group_ranks(group)})


def _compile_hash(page_tokens: int) -> None:
    """Hashes a page, so that SGLang compiles here what the first lookup would wait for. Raises NotSupportedError."""
    try:
        get_hash_str([0] * page_tokens, None, page_tokens)
    except RuntimeError as why:
        raise NotSupportedError(f"SGLang cannot hash pages here, and a compiler for C++ is wanted: {why}") from why


def _pack(settings: Settings, device: str) -> str:
    """On a GPU, packed pages were tried in SGLang with the shape of one model alone."""
    if settings.pack == "auto" and device != "cpu":
        log.info("KV is not packed: SGLang with packed KV on a GPU was tried with one model alone; pack: on packs it")
        return "off"
    return settings.pack


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _prometheus() -> Any:
    import prometheus_client

    return prometheus_client


# --------------------------------------------------------------------------- an engine that cannot be served


class AsideLinker(UnifiedCacheLinker):
    """The linker of an engine that kvdock cannot serve on this machine: it finds, loads and stores nothing, so SGLang
    runs as without it."""

    def __init__(self, kvcache: Any, forward_stream: Any = None) -> None:
        self.forward_stream, self.pools = forward_stream, {PoolName(FULL): kvcache}
        self.layer_done_counter = LayerCounter(getattr(kvcache, "layer_num", 0), lambda batch, layer: None)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        return []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        return False

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        return False

    def reset(self) -> None: ...

    def close(self) -> None: ...


class KvdockLinkerOrNone(AsideLinker):
    """What the variable SGLANG_KVDOCK names (plugin.py): a KvdockLinker, or an AsideLinker where that one refuses the
    engine. It never ends the engine. All ranks get the same of the two."""

    def __new__(cls, server_args: Any, params: Any, *, forward_stream: Any = None, **more: Any) -> Any:
        linker: Any = None
        try:
            linker = KvdockLinker(server_args, params, forward_stream=forward_stream, **more)
        except (NotSupportedError, RefusedError) as why:
            log.error("kvdock stands aside, and SGLang runs as without it: %s", why)
        except Exception:  # whatever the constructor meets in a SGLang that it does not know
            log.exception("kvdock stands aside, and SGLang runs as without it: the engine is not as kvdock knows it")
        if _ranks_of(server_args, params).all_agree_at_start(linker is not None):
            return linker
        if linker is not None:
            linker.close()
        return AsideLinker(params.token_to_kv_pool_allocator.get_kvcache(), forward_stream)
