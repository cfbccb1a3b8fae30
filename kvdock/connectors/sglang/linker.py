"""The class SGLang makes in each rank of an engine. It holds the parts of this folder together and hands each call on.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config
        '{"linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang"}'

SGLang calls the linkers of all ranks alike, and joins their answers: a request may load what all of them say, and has
failed if one of them says so. Rank 0 alone asks the server; the others say yes to all of it, so rank 0's word counts.

Threads: SGLang's scheduler thread calls everything.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import LoadChoice, LoadOrCompute, PrefillSpeed
from kvdock.connectors.engine_connector import ConnectorSettings, open_worker, start
from kvdock.connectors.lookups import LookupRecord, Verification
from kvdock.connectors.plans import LoadPlan
from kvdock.connectors.requests import RequestCallbacks
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment, EngineSession, Identity, ServerEpoch, SessionObserver
from kvdock.connectors.sglang.dependences import settings_set, variables_set
from kvdock.connectors.sglang.figures import Figures
from kvdock.connectors.sglang.holding import Holding
from kvdock.connectors.sglang.hooks import PLANS, hook_change, tell
from kvdock.connectors.sglang.identity import manifest_of, revision
from kvdock.connectors.sglang.loads import Loads, QueuedLoad
from kvdock.connectors.sglang.lookups import Chains, PageLookups
from kvdock.connectors.sglang.offloads import Known, Offloads, known_of
from kvdock.connectors.sglang.pools import FULL, groups_of
from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.sglang.setup import Settings, drafts_of, refuse_what_is_not_supported, warn_of_version
from kvdock.connectors.sglang.updates import UNKNOWN, Changes, Fresh, Guard
from kvdock.connectors.verify import ChecksumVerifier, HashAhead, Trust
from kvdock.connectors.waits import AwaitTiers, Patience, Waits
from kvdock.connectors.worker import WorkerConnector, cores_of, hash_threads

log = logging.getLogger("kvdock.sglang")


class KvdockLinker(UnifiedCacheLinker):
    """NotSupportedError when this engine cannot be served as it is set up; RefusedError when a server is there and does
    not accept it."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None,
        nonce: Callable[[], str] = lambda: uuid.uuid4().hex[:12], clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`nonce`: a random name; `clock`: seconds, monotonic; SGLang passes the others."""
        warn_of_version(sglang.__version__)
        self.forward_stream, self._page_tokens, self._clock = forward_stream, params.page_size, clock
        settings, model = Settings.load(extra_config or {}, os.environ), model_config_of(server_args)
        refuse_what_is_not_supported(server_args, params, model, [component.name for component in components])
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._groups = groups_of(
            kvcache, params.page_size, params.swa_retain_window, drafts_of(params), params.req_to_token_pool
        )
        self.pools = {PoolName(group.transfer): kvcache for group in self._groups}
        self._ranks, self._draw = Ranks(params.attn_tp_cache_group or params.tp_cache_group), nonce
        self._figures = Figures(_prometheus() if params.enable_metrics else None)
        device, self._stream = "cpu", None  # a GPU's default stream is 0
        if torch.device(kvcache.device).type == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"
            self._stream = int((forward_stream or torch.cuda.current_stream()).cuda_stream)
        self._session, self._worker = self._open(settings, server_args, model, str(kvcache.dtype), device)
        self._weights = RunningWeights(
            trusts_versions=settings.trust_weight_versions, draw=nonce, told=self._weights_named
        )
        self._chains, self._known, self._trust = Chains(self._weights), Known(), Trust(settings.trust_s, clock)
        self._speed = PrefillSpeed(clock, 0 if server_args.disable_overlap_schedule else 1)
        self._cost = LoadOrCompute(self._speed, clock) if settings.load_if_cheaper else None
        self._connector = self._connect(settings) if self._ranks.rank == 0 else None
        self._lookups, self._ahead = None, None
        if self._connector is not None:
            self._ahead = HashAhead(self._trust) if settings.trust_s > 0 else None
            self._lookups = PageLookups(
                self._connector, self._chains, self._figures, self._page_tokens, settings.verify_wait_s,
                settings.tier_wait_s, clock,
            )
        self.holding = Holding(self._ranks, self._lookups, self._speed.step)
        self._loads = Loads(
            self._worker, self._groups, self._page_tokens, self._weights,
            stream=_current_stream if self._stream is not None else None,
            ended=self._load_ended, took=self._loads_took, clock=clock,
        )
        self.layer_done_counter = self._loads.counter
        self._offloads = Offloads(
            self._worker, self._groups, self._page_tokens, self._ranks, self._connector, self._chains, self._known,
            self._figures, self._weights, self._ahead,
        )
        self._loading: dict[str, tuple[list[str], str, LoadPlan]] = {}
        self.parent: str | None = UNKNOWN
        self.fresh, self.changes = Fresh(self._weights), Changes(self._weights, self._weights_change)
        self.guard = Guard(hook_change, PLANS, self.changes.unheard)
        keeps = self._connector.lookups.keeps_lease if self._connector is not None else lambda lease: False
        start(self._session, self._worker, SessionObserver(keeps))
        tell(self)

    def _open(
        self, settings: Settings, args: Any, model: Any, kv_dtype: str, device: str
    ) -> tuple[EngineSession, WorkerConnector]:
        dependences = settings_set(args, record_fields(type(args))) | variables_set(os.environ)
        manifest = manifest_of(
            model, sglang.__version__, self._groups, page_tokens=self._page_tokens, ranks=self._ranks.size,
            revision=revision(
                args, model, dependences, weights_digest=settings.weights_digest, read_all=settings.read_all_weights
            ), kv_dtype=kv_dtype,
        )
        instance, rank = self._ranks.share(f"sglang-{self._draw()}"), self._ranks.rank
        label = str(args.served_model_name or args.model_path)[-100:]
        return open_worker(
            ConnectorSettings(
                settings.address, settings.access_token_file, settings.timeout_s, device, settings.copy_threads
            ),
            manifest, Identity(instance, f"{instance}-{rank}-{self._draw()}", (rank,), rank == 0, label),
            [replace(group.layout, token_order=manifest.token_order) for group in self._groups], stream=self._stream,
        )

    def _connect(self, settings: Settings) -> SchedulerConnector:
        """Rank 0's."""
        threads = hash_threads(cores_of(self._ranks.size))
        speed = self._speed if settings.load_if_cheaper else None
        verifier = ChecksumVerifier(self._session, threads=threads, trust=self._trust)
        return SchedulerConnector(
            self._session, readers=self._ranks.size, callbacks=RequestCallbacks(self._chains.of),
            waits=Waits(
                Patience(settings.lookup_wait_s, self._clock), clock=self._clock,
                tiers=AwaitTiers(settings.tier_wait_s, speed, self._clock, self._figures.waited),
            ),
            choice=LoadChoice(settings, self._cost), verification=Verification(verifier, is_eager=True),
            record=LookupRecord(
                partial(self._figures.add, "lookup_seconds"),
                lambda rid, why, tokens: self._figures.add(f"declined_{why}"),
                ChunkStatistics(self._page_tokens) if settings.chunk_statistics else None,
            ),
        )

    # ------------------------------------------------------------------ lookups and loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        self.holding.looked_up(rid)
        pages = next(list(one.keys) for one in transfers if one.name == FULL)
        if not self._shares():
            return []
        if self._lookups is None:
            return list(range(1, len(pages) + 1))
        found = self._lookups.ask(rid, pages)
        return [found] if found else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        by_name = {str(one.name): one for one in transfers}
        pages = list(by_name[FULL].keys)
        said: tuple[ServerEpoch, LoadPlan] | None = None
        begun: tuple[Attachment, LoadPlan] | None = None
        shares = self._shares()
        if self._lookups is not None and shares:
            begun = self._lookups.begin_load(rid, len(pages))
            said = (begun[0].epoch, begun[1]) if begun is not None else None
        said = self._ranks.share(said)
        if said is None:
            return self._gives_up(rid, None)
        if begun is None and shares and (attachment := self._session.attachment_to(said[0])) is not None:
            begun = attachment, said[1]
        if not self._ranks.all_agree(begun is not None):
            return self._gives_up(rid, begun)
        assert begun is not None
        indices = {name: one.device_indices for name, one in by_name.items()}
        self._loads.queue(QueuedLoad(rid, *begun, indices, self._weights.epoch))
        self._loading[rid] = pages, begun[0].session, begun[1]
        return True

    def _gives_up(self, rid: str, begun: tuple[Attachment, LoadPlan] | None) -> bool:
        """A rank cannot load: no rank does, and SGLang computes."""
        self._figures.add("loads_given_up")
        if begun is not None:
            self._loads.give_up(*begun)
            if self._lookups is not None:
                self._lookups.loaded(rid, None)
        return False

    def start_layer_wise_loading(self) -> int:
        return self._loads.start(self._ready())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    def _load_ended(self, rid: str, ok: bool | None) -> None:
        pages, epoch, plan = self._loading.pop(rid)
        if self._lookups is None:
            return
        self._lookups.loaded(rid, ok)
        if ok is None:
            return
        if ok:  # what this rank has copied was hashed once more meanwhile
            own = self._ranks.rank % self._session.manifest.writers
            self._known.add(pages, known_of(epoch, self._weights.epoch))
            self._trust.add(epoch, (part for piece in plan.pieces for part in piece.parts if part.writer == own))
        else:
            self._trust.clear()
        self._figures.add("load_tokens" if ok else "load_failures", len(pages) * self._page_tokens if ok else 1)

    def _loads_took(self, batch_s: float, copies: Sequence[tuple[int, float]]) -> None:
        self._figures.add("load_seconds", batch_s)
        if self._cost is not None:
            for tokens, seconds in copies:
                self._cost.loaded(tokens, seconds)

    # ------------------------------------------------------------------ stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        by_name = {str(one.name): one for one in transfers}
        if FULL not in by_name or not by_name[FULL].keys:
            return False
        may_store = self._shares()
        if self._connector is not None:
            full = by_name[FULL]
            may_store = self.fresh.may_store(full.keys, self.parent, full.device_indices) and may_store
        self._offloads.offer(
            by_name[FULL].keys, self.parent, {name: one.device_indices for name, one in by_name.items()},
            {name: len(one.keys) for name, one in by_name.items()}, self._ready(), may_store=may_store,
        )
        return True

    def num_completed_offloads(self) -> int:
        """SGLang asks in each turn of its loop."""
        if self._lookups is not None:
            self._lookups.tick(self._loads.counter.batches)
            self._figures.add("attached", int(self._session.attachment is not None))
            self._figures.add("shares", int(self._shares()))
        return self._offloads.count_ended()

    def pop_completed_offload(self) -> bool:
        return self._offloads.take_ended()

    def _ready(self) -> Callable[[], object]:
        """Waits until the GPU knows the pages that SGLang has named. Copies come after the forward pass's stream."""
        if self._stream is None:
            return lambda: None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not say
        event.record()
        wait: Callable[[], object] = event.synchronize
        return wait

    # ------------------------------------------------------------------ weights

    def _shares(self) -> bool:
        """Whether anything may be looked up, loaded or stored."""
        return self.guard.in_force() and self._weights.may_share

    def planned(self) -> None:
        """As Told has it."""
        self._weights.computed()

    def _weights_change(self) -> None:
        """What was asked for is not loaded from now on, and what was offered and not begun is not stored."""
        if self._lookups is not None:
            self._lookups.reset()

    def _weights_named(self, name: str) -> None:
        """The weights that this engine runs are known by `name` from now on, as RunningWeights has it."""
        self._figures.add("weights_changes")
        self._figures.add("weights_private", int(name.startswith("private")))

    # ------------------------------------------------------------------ ends

    def reset(self) -> None:
        """What the server holds stays: /flush_cache is about this engine's memory."""
        self._loads.reset()
        self._offloads.reset()
        if self._lookups is not None:
            self._lookups.reset()
        self._weights.flushed()

    def close(self) -> None:
        self._loads.close()
        self._offloads.close()
        if self._ahead is not None:
            self._ahead.close()
        if self._connector is not None:
            self._connector.close()
        self._worker.close()
        self._session.close()
        self._session.client.close()


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _prometheus() -> Any:
    import prometheus_client

    return prometheus_client
