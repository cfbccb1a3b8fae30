"""The scheduler's side of the connector: answers lookups, plans loads, and offers computed chunks.

If few requests wait before it, a request's question is sent before vLLM looks the request up: when vLLM's core receives
the request (arrivals.py) if its KV depends on tokens alone, otherwise when vLLM's scheduler takes it in. A lookup
without an answer costs its request a whole step, so a lookup waits a few milliseconds for the answer
(kvdock/connectors/waits.py). vLLM's allocation of blocks starts the load. Each step offers the chunks that it completes
(scheduler.py).

Invariants: a plan of a load is sent with the step that is being planned, or never; loads that vLLM cannot preempt leave
capacity for the largest other request (tables.py); no chunk is offered that vLLM has not computed, or not
finished loading.

Threads: vLLM's scheduler thread calls every method but received(); `in_turn` admits one thread at a time (arrivals.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvdock.connectors.announcer import Announcer, Announcing
from kvdock.connectors.chunk_statistics import ChunkStatistics
from kvdock.connectors.cost import LoadChoice, LoadOrCompute, PrefillSpeed
from kvdock.connectors.hints import Hints
from kvdock.connectors.interface import Hit, Pending
from kvdock.connectors.lookups import LookupRecord, Verification
from kvdock.connectors.plans import StorePlan
from kvdock.connectors.requests import Chain, RequestCallbacks
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment, EngineSession, SessionObserver
from kvdock.connectors.stores import StoreBatch, StoreOffer, Stores
from kvdock.connectors.verify import ChecksumVerifier
from kvdock.connectors.vllm.arrivals import Arrivals
from kvdock.connectors.vllm.block_names import Cutter, Namer, chunks_of, names_of
from kvdock.connectors.vllm.figures import Figures, Outcomes
from kvdock.connectors.vllm.groups import KVGroup, whole_blocks
from kvdock.connectors.vllm.hints import said_by
from kvdock.connectors.vllm.request_tag import Tags, chain_of, is_plain
from kvdock.connectors.vllm.resets import Resets
from kvdock.connectors.vllm.setup import Attached, Settings
from kvdock.connectors.vllm.steps import IDLE_WAIT_S, NOWHERE, LoadOrder, Orders, Report, StoreOrder
from kvdock.connectors.vllm.tables import (
    BlockBudget,
    Handed,
    InFlight,
    NextStep,
    OwnCache,
    Table,
    Tracked,
    failing,
    follow,
    handed,
    settled,
)
from kvdock.connectors.waits import AwaitTiers, ComputeOnce, EarlyQuestions, LoadOnce, Patience, Waits

LEAST_PROMPT = 64
"""If a step computes fewer tokens of a request, it decodes or computes the end of its prompt: such tokens are not
counted as prefill."""


@dataclass(frozen=True)
class EngineView:
    """The engine around the scheduler's side. `ranks`: how many workers report on each store. `steps_ahead`: how many
    steps are in progress when vLLM plans another one. `keeps_back`: see InFlight."""

    groups: Sequence[KVGroup]
    ranks: int = 1
    steps_ahead: int = 0
    keeps_back: bool = True
    hash_tokens: int | None = None
    """How many tokens each of vLLM's hashes adds, if keys are made from these hashes; None: keys are made from
    tokens."""
    is_beside: bool = False
    """Whether other connectors load, too."""
    own_cache: OwnCache | None = None
    """vLLM's prefix cache; None: requests do not find the loads of others there."""
    announcer: Announcer | None = None
    """None: the engine publishes no KV cache events."""
    cutter: Cutter | None = None
    namer: Namer | None = None
    """Makes the names by which routers know chunks."""
    unfit: str = ""
    """Why nothing may be loaded (unfit.py); "": loads are allowed."""

    @property
    def has_states(self) -> bool:
        return any(group.state for group in self.groups)


class VllmScheduler:
    """`session` is not started yet. `tags`: the tags of requests, and the weights that the engine runs. `clock`: a
    monotonic clock, in seconds."""

    def __init__(
        self, session: EngineSession, engine: EngineView, budget: BlockBudget, settings: Settings, *,
        tags: Tags | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._budget, self._load_async = engine, budget, settings.load_async
        self.figures, ahead = Figures(), engine.steps_ahead
        self._hints = Hints(partial(self.figures.add, "hints_ignored"))
        self._tracked: dict[str, Tracked] = {}
        self._tags = tags if tags is not None else Tags()
        self._speed = PrefillSpeed(clock, ahead)
        self._connector = self._connect(session, settings, clock)
        self._arrivals = Arrivals(EarlyQuestions(self._expect))
        self._outcomes = Outcomes(self._connector.ended, self._speed, clock, epoch_of=self._connector.lookups.epoch_of)
        self._resets = Resets(session, settings.on_reset)
        self._stores = OpenStores(
            self._connector.stores, engine.ranks, partial(self.figures.add, "stores_dropped", 1), steps_ahead=ahead,
            holds=engine.is_beside,
        )
        in_flight = InFlight(ahead + 2, keeps_back=engine.keeps_back)  # one more, for safety
        self._next = NextStep(engine.groups, in_flight)
        self._attached = Attached(engine.ranks, ahead)

    def _connect(
        self, session: EngineSession, settings: Settings, clock: Callable[[], float]
    ) -> SchedulerConnector:
        engine, share, figures = self._engine, settings.compute_once, self.figures
        cost = LoadOrCompute(self._speed, clock) if settings.load_if_cheaper else None
        once = ComputeOnce(share, self._speed, clock, partial(figures.waited, "")) if share > 0 else None
        loads: LoadOnce | None = None
        own_cache = engine.own_cache if settings.load_once else None
        if own_cache is not None:
            loads = LoadOnce(
                session.manifest.chunk_tokens, clock, whole=own_cache.whole, lost_tokens=own_cache.lost_tokens,
                steps_ahead=engine.steps_ahead, shares=partial(self._shares, own_cache),
                count=partial(figures.waited, "load_"),
            )
        speed = self._speed if settings.load_if_cheaper else None
        tiers = AwaitTiers(settings.tier_wait_s, speed, clock, partial(figures.waited, "tier_"))
        statistics = ChunkStatistics(session.manifest.chunk_tokens) if settings.chunk_statistics else None
        return SchedulerConnector(
            session, readers=max(engine.ranks, session.manifest.writers), choice=LoadChoice(settings, cost),
            waits=Waits(Patience(settings.lookup_wait_s, clock, settings.timeout_s), once, tiers, loads, clock),
            callbacks=RequestCallbacks(
                self._chain_of, self._is_stored, lambda name: self._tracked[name].traceparent,
                Announcing(
                    engine.announcer, lambda name: chunks_of(engine.cutter, self._tracked[name].request),
                    lambda name: names_of(engine.namer, self._tracked[name].request),
                ),
            ),
            verification=Verification(ChecksumVerifier(session), is_eager=self._verifies_all),
            record=LookupRecord(partial(figures.add, "lookup_seconds"), self._declined, statistics),
        )

    @property
    def _session(self) -> EngineSession:
        return self._connector.session

    @property
    def _weights(self) -> RunningWeights:
        return self._tags.weights

    @property
    def _chunk_tokens(self) -> int:
        return self._session.manifest.chunk_tokens

    @property
    def _verifies_all(self) -> bool:
        """Whether every load is verified before it is promised, because vLLM may have no way back from a failed one."""
        return len(self._engine.groups) > 1 or not self._load_async

    def start(self) -> None:
        """Attaches, if a server answers. Raises RefusedError when it does not accept this engine."""
        self._session.runs(self._weights.name)
        changed = self._engine.announcer.changed if self._engine.announcer is not None else None
        self._session.start(SessionObserver(self._connector.lookups.keeps_lease, changed))

    def _shares(self, own_cache: OwnCache, loader: str, other: str, tokens: int) -> bool:
        return own_cache.shares(self._tracked[loader].request, self._tracked[other].request, tokens)

    def _declined(self, request_id: str, why: str, tokens: int) -> None:
        self.figures.add(f"declined_{why}", 1)
        self._outcomes.declined(request_id, why, tokens)

    def _is_stored(self, request_id: str) -> bool:
        """Whether the chunks that the request computes may be stored."""
        tracked = self._tracked[request_id]
        if tracked.is_old or not self._weights.may_share:
            return False
        return self._outcomes.asked(tracked.request).store and self._tags.of(tracked.request) is not None

    def _chain_of(self, request_id: str, namespace: bytes, chunk_tokens: int) -> Chain:
        request, hash_tokens = self._tracked[request_id].request, self._engine.hash_tokens
        hashes = request.block_hashes if hash_tokens is not None else ()
        if not self._resets.files_together and self._tags.names_weights(request):
            self._resets.files_together = True
            self._session.runs("")
        namespace = self._tags.namespace_of(request, namespace)
        return chain_of(self._tags.of(request), namespace, chunk_tokens, hashes, hash_tokens)

    # ------------------------------------------------------------------ lookups and loads

    def lookup(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Returns (number of tokens to load beyond `local_tokens`, whether they are loaded in the background). None in
        place of the number: vLLM is to ask again."""
        if self._connector.lookups.still_waits(request.request_id, local_tokens):
            return None, False  # decided early, because in each step vLLM looks up all requests that wait
        self._restarts(request.request_id)
        self._outcomes.looked_up(request.request_id, local_tokens)
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        # vLLM's own cache may have kept KV of earlier weights: KV that is computed behind it belongs to no weights.
        tracked.is_old = not self._weights.may_share or (self._weights.is_stale and local_tokens > 0)
        if tracked.is_old:
            return 0, False
        if not self._may_load(request):
            if not self._engine.unfit:
                self._outcomes.held_back(request.request_id, "opted_out")
            return 0, False
        if self._tags.of(request) is None:
            if self._tags.waits(request):
                return None, False
            if why := self._tags.bypassed(request):
                self.figures.add(f"bypassed_{why}", 1)
                self._outcomes.held_back(request.request_id, f"bypassed_{why}")
            return 0, False
        tracked.request, tracked.local_tokens = request, local_tokens
        if not self._resets.clearing.is_over:
            self._clear_again()
            return 0, False
        usable = self._usable(request)
        if usable // self._chunk_tokens * self._chunk_tokens <= local_tokens:
            return 0, False
        self._arrivals.early.asked(request.request_id)
        late = self._connector.lookups.late
        found = self._connector.lookups.lookup(request.request_id, request.all_token_ids[:usable], local_tokens)
        if self._connector.lookups.late > late:
            self._outcomes.held_back(request.request_id, "late")
        if not isinstance(found, Hit):
            return (None if isinstance(found, Pending) else 0), False
        self._outcomes.found(request.request_id, found.tokens)
        tracked.is_async = self._load_async and self._budget.fits(request)
        if self._engine.has_states and not tracked.is_async:
            return 0, False # see groups.py
        if not self._attached.everywhere(self._session.attachment):
            # A load would fail on a worker that is not attached, and vLLM cannot recover from every failed load.
            # Workers report their attachment with their first steps.
            return (None if self._attached.is_early else 0), False
        if (self._verifies_all or not tracked.is_async) and not self._connector.lookups.is_verified(request.request_id):
            return None, False
        if self._connector.lookups.is_verifying(request.request_id):  # since it did not fit the budget
            return None, False
        return found.tokens - local_tokens, tracked.is_async

    def _restarts(self, request_id: str) -> None:
        """vLLM looks up requests that it computes from the first token. If this one had blocks, it has lost them: vLLM
        may take them without a report, when its cache is reset."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.table is not None:
            tracked.table = None
            self._connector.stores.offer_again([request_id])

    def _may_load(self, request: Any) -> bool:
        is_fit = not self._engine.unfit and not getattr(request, "skip_reading_prefix_cache", False)
        return is_fit and self._outcomes.asked(request).load

    def _usable(self, request: Any) -> int:
        """The last token is always computed: vLLM wants its logits."""
        return int(request.num_tokens) - 1

    def arrived(self, request: Any) -> None:
        self._arrivals.scheduled(request.request_id)
        self._budget.add(request)
        self._tags.arrived(request)
        self._expects(request)

    def received(self, request: Any) -> None:
        """vLLM's core has received the request, and its scheduler has not. A request that is not plain is ignored here,
        because it may be a part of a running request."""
        if is_plain(request) and request.request_id not in self._tracked:
            self._arrivals.received(request.request_id)
            self._expects(request)

    def adapter_loads(self, asked: Any) -> None:
        """vLLM is about to load the adapter of `asked`, a LoRARequest."""
        self._tags.meet_adapter(asked)

    def _expects(self, request: Any) -> None:
        is_long = self._usable(request) >= self._chunk_tokens
        if is_long and self._may_load(request) and self._tags.of(request) is not None:
            self._tracked.setdefault(request.request_id, Tracked(request))
            self._arrivals.early.arrived(request.request_id)

    def _expect(self, request_id: str) -> None:
        if self._resets.clearing.is_over and self._weights.may_share:
            request = self._tracked[request_id].request
            self._connector.lookups.expect(request_id, request.all_token_ids[: self._usable(request)])

    def allocated(self, request: Any, table: Table, external_tokens: int) -> None:
        """The request has its blocks: a load starts when it was promised external tokens."""
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        tracked.request, tracked.table, tracked.is_new = request, table, True
        tracked.steps = deque(maxlen=self._engine.steps_ahead + 2)
        self._next.allocated(tracked, table)
        self._arrivals.early.left(request.request_id)
        self._outcomes.admitted(request.request_id, external_tokens)
        if external_tokens == 0:
            self._connector.lookups.drop_lookup(request.request_id)
            return
        hit = tracked.local_tokens + external_tokens
        if tracked.is_async:
            self._budget.take(request)
            self._next.loads_into(tracked)
        columns = whole_blocks(self._engine.groups, table, hit)
        started = self._connector.lookups.begin_load(
            request.request_id, columns, tracked.local_tokens, hit, is_shared=not tracked.is_async
        )
        if started is None:  # the server was lost since the promise: the workers report a failed load
            plan = failing(
                self._engine.groups, self._chunk_tokens, request.request_id, columns, tracked.local_tokens, hit
            )
            self._next.loads.append(LoadOrder(NOWHERE, plan, tracked.is_async))
            return
        attachment, plan = started
        self._outcomes.loading(request.request_id, self._connector.lookups.bytes_of(plan))
        self._next.loads.append(LoadOrder(attachment.epoch, plan, tracked.is_async))
        attachment.release()  # this process copies nothing

    # ------------------------------------------------------------------ each step

    def build(self, output: Any) -> Orders:
        """Returns the orders for the step that vLLM has scheduled, and records its requests and blocks."""
        self._attached.planned()
        for request_id in self._arrivals.refused():
            self._forget(request_id)
            self._outcomes.forget(request_id)
            self._tracked.pop(request_id, None)
        self._tags.step()
        if self._tags.lost():
            self._stores.drop_unsent()
        self.figures.state("attached", int(self._session.attachment is not None))
        self.figures.add("lookups_late", self._connector.lookups.late)
        self._connector.lookups.late = 0
        self._next.planned(output, self._tracked)
        for request_id in output.preempted_req_ids or ():
            self._next.used(self._tracked.get(request_id), is_preempted=True)
            self._offer_rest(request_id)
            self._forget(request_id)
        follow(output, self._tracked)
        patience = self._connector.lookups.waits.patience
        if self._stores.last is not None and patience is not None and not patience.is_open:
            patience.spend(self._stores.last)  # before more steps are given its blocks
        self._stores.last = None
        stores = self._stores.send()
        fences = self._stores.guard(self._next.overwritten)
        loads = tuple(self._ordered(load) for load in self._next.loads)
        self._next.loads.clear()
        self._next.start_step()
        for request_id, count in output.num_scheduled_tokens.items():
            self._budget.give_back(request_id)
            self._next.used(self._tracked.get(request_id))
            self._offer(request_id, count, handed(output, request_id))
        self._next.end_plan()
        scheduled = list(output.num_scheduled_tokens)
        is_idle, alone = not scheduled, scheduled[0] if len(scheduled) == 1 else None
        self._connector.lookups.step(is_idle)
        counts = output.num_scheduled_tokens
        self._speed.step(self._prefill_tokens(counts), sum(counts.values()))
        if is_idle:
            self._connector.lookups.wait_for_answer(IDLE_WAIT_S)  # waiting costs less than spinning
        return Orders(
            loads, tuple(stores), tuple(fences), is_idle, alone, frozenset(output.finished_req_ids),
            self._weights.epoch,
        )

    def _prefill_tokens(self, scheduled: Mapping[str, int]) -> int:
        """How many tokens of prompts the step computes; 0 if it does not show how fast the engine computes them."""
        prefills = {request_id: count for request_id, count in scheduled.items() if count >= LEAST_PROMPT}
        if not any(self._outcomes.shows_speed(request_id, count) for request_id, count in prefills.items()):
            return 0
        return sum(prefills.values())

    def _ordered(self, load: LoadOrder) -> LoadOrder:
        """The order for a load: it names whether steps in progress may still use blocks that the load writes, and the
        stores that may still read them."""
        blocks = {block for piece in load.plan.pieces for block in piece.block_ids[piece.skip_blocks :]}
        return replace(load, waits=self._next.in_flight.touches(blocks), after=tuple(self._stores.guard(blocks)))

    def _offer(self, request_id: str, count: int, states: Set[Handed]) -> None:
        """Offers the chunks that are complete when this step has computed `count` tokens of the request."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.table is None or tracked.is_old or not self._is_stored(request_id):
            return
        request = tracked.request
        before = request.num_computed_tokens
        computed = min(before + count, request.num_tokens)  # the tokens behind are drafts
        tracked.steps.append((self._stores.step, before))
        for column, group in zip(tracked.table, self._engine.groups, strict=True):
            if group.window_tokens is not None:  # vLLM has freed the blocks behind the window
                gone = min(group.left_behind(before) // group.block_tokens, len(column))
                column[:gone] = [None] * gone
        is_new, tracked.is_new = tracked.is_new, False
        if is_new and computed // self._chunk_tokens <= tracked.local_tokens // self._chunk_tokens:
            return  # all chunks were a local hit: they are offered with the next step
        whole = whole_blocks(self._engine.groups, tracked.table, computed)
        columns = settled(self._engine.groups, whole, (before, before + count), states)
        offer = self._connector.stores.begin_store(request_id, request.all_token_ids, columns, computed)
        self._stores.start(offer, holds=self._tags.may_be_lost(request))

    def _offer_rest(self, request_id: str, computed_tokens: int = 1 << 62) -> None:
        """Offers again the chunks that could not be stored, when a request ends or was preempted with at most
        `computed_tokens` computed tokens. Leaves out blocks that were given to other requests since."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.table is None or tracked.is_old or not self._is_stored(request_id):
            return
        own = self._next.own(settled(self._engine.groups, tracked.table))
        if own is None:
            return
        offer = self._connector.stores.begin_last_store(request_id, own, computed_tokens)
        self._stores.start(
            offer, lambda chunks: tracked.computed_in(chunks * self._chunk_tokens),
            holds=self._tags.may_be_lost(tracked.request), is_last=True,
        )

    # ------------------------------------------------------------------ ends

    def take(self, report: Report) -> None:
        if self._weights.epoch in report.wrote_weights:
            self.weights_change("changed")
        self._attached.reported(report.epochs)
        if report.valid_tokens:
            self.loads_failed()
        for request_id, (tokens, seconds) in report.took_s.items():
            self._outcomes.loaded(request_id, seconds)
            self._connector.lookups.load_ended(request_id)
            self._connector.lookups.load_took(tokens, seconds)
        for request_id, valid in report.valid_tokens.items():
            self._connector.lookups.load_failed(request_id, valid)
            self._connector.lookups.load_ended(request_id, valid)
            self._outcomes.failed(request_id, valid)
            self.figures.add("load_failures", 1)
        self._stores.read(report.stores)
        self._clear_again()

    def loads_failed(self) -> None:
        """Steps have read blocks whose load failed, in whichever connector: vLLM computes them again or ends the
        requests, and the KV that those steps have computed is not stored."""
        self._stores.drop_unsent()
        self._connector.stores.offer_again(self._tracked)

    def finished(self, request: Any, *, has_answered: bool, has_failed: bool = False) -> dict[str, Any] | None:
        """A request has ended. `has_answered`: it ended by itself, so its hints are sent. `has_failed`: it ended in an
        error, so the content of its blocks is not known. Returns the kv_transfer_params of its answer."""
        request_id = request.request_id
        self._arrivals.early.left(request_id)
        if has_failed:
            self._stores.drop_unsent(request_id)
        elif request_id in self._tracked:
            self._offer_rest(request_id, self._tracked[request_id].request.num_computed_tokens)
        if has_answered and self._tags.of(request) is not None:
            self._connector.hint(request_id, self._hints.of(*said_by(request)))
        self._forget(request_id)
        self._tracked.pop(request_id, None)
        self._tags.finished(request_id)
        if not self._tracked:
            self._speed.step(0)  # vLLM builds no step while it has no request
        self._budget.remove(request_id)
        return self._outcomes.answer(request)

    def reset(self) -> bool:
        """vLLM resets the connector; Settings.on_reset chooses the effect. False: the server was to clear the namespace
        of this engine, and has not cleared it yet.

        Waits for the server's answer for up to the client's timeout, because a user asked for the reset."""
        self._leave_behind()
        if self._resets.on_reset == "apart":
            self.weights_change("changed")
        if not self._resets.has_to_clear(self._weights.epoch):
            return True
        cleared = self._resets.clearing.ask()
        self._connector.run(self._resets.clearing.warn_of_others)
        return cleared

    def weights_change(self, kind: str, version: str = "") -> None:
        """See weight_changes.Hears."""
        epoch = self._weights.epoch
        self._weights.hear(kind, version)
        self.figures.state("withheld", int(bool(self._weights.doubt)))
        if self._weights.epoch != epoch:
            self.figures.add("weight_changes", 1)
            self._leave_behind()
            if self._engine.announcer is not None:
                self._engine.announcer.weights_changed()

    def runs(self, weights: str) -> None:
        """See EngineSession.runs. Changes nothing while chunks of all weights are in one namespace."""
        self._session.runs("" if self._resets.files_together else weights)

    def _leave_behind(self) -> None:
        """From now on, chunks that requests have computed or looked up so far are not shared."""
        for request_id, tracked in self._tracked.items():
            self._forget(request_id)
            tracked.is_old = True
        self._stores.drop_unsent()

    def _clear_again(self) -> None:
        if self._resets.clearing.starts_again():
            self._connector.run(self._resets.clearing.again)

    @property
    def busy(self) -> bool:
        """Whether stores are in progress: the engine must make more steps, so that they are sent to the workers."""
        return bool(self._stores)

    def close(self) -> None:
        self._tags.close()
        self._connector.close()
        self._session.close()
        self._session.client.close()

    def _forget(self, request_id: str) -> None:
        self._connector.finished(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.table, tracked.local_tokens = None, 0


# --------------------------------------------------------------------------- stores in progress

# The stores that the scheduler's side has started, from their offer until no worker reads their blocks any more.
#
# A store's slots are reserved in the background, and its plan is sent to the workers with a later step. vLLM may free
# the blocks at any time. If a step gives blocks of a store to another request, the store is fenced: the step writes
# only after the store has read. A store whose slots are not reserved yet is dropped instead. If a load is the first to
# write to the blocks, only that load, and the step in which its request runs, come after the store.
#
# A step may compute KV from a load of another connector, and only the step's outcome shows whether that load failed.
# Workers publish all stores that they get, so with other connectors a store is held back until its steps have ended.
#
# Invariant: every store that may still read its blocks is known here.
#
# Threads: vLLM's scheduler thread calls everything; `_lock` guards the results of background calls.



@dataclass
class _Store:
    """`step`: the number of the step that computes the last of its tokens."""

    request_id: str
    blocks: frozenset[int]
    ranks_left: int
    step: int
    holds: bool = False
    """Whether the store is held back until its tokens are computed."""
    is_sent: bool = False
    is_dropped: bool = False


class OpenStores:
    """`ranks`: how many workers report the end of each store. `count_dropped`: called for each dropped store.
    `steps_ahead`: how many steps are in progress when vLLM plans another one. `holds`: every store is held back until
    its tokens are computed. `step`: the number of the newest step, from 1.
    """

    def __init__(
        self, stores: Stores, ranks: int, count_dropped: Callable[[], None], *, steps_ahead: int, holds: bool
    ) -> None:
        self._offered, self._ranks, self._count_dropped = stores, ranks, count_dropped
        self._steps_ahead, self._holds, self.step = steps_ahead, holds, 0
        self._stores: dict[str, _Store] = {}
        self._lock = threading.Lock()
        self._reserved: list[tuple[str, Attachment, StorePlan | None]] = []
        self.last: Future[None] | None = None
        """Done when slots are reserved for the last stores of the requests that ended since the last step was
        planned."""

    def __bool__(self) -> bool:
        return bool(self._stores)

    def __iter__(self) -> Iterator[frozenset[int]]:
        """For each store, the blocks that it may still read."""
        return (store.blocks for store in self._stores.values())

    def start(
        self, offer: StoreOffer | None, computed_in: Callable[[int], int | None] = lambda chunks: None, *,
        holds: bool = False, is_last: bool = False,
    ) -> None:
        """Reserves the offer's slots in the background. `computed_in(n)`: the number of the step that computes the last
        of the request's first n chunks; None: the newest step. `holds`: this store is held back until its tokens are
        computed, as all are with the constructor's `holds`. `is_last`: its request has ended."""
        if offer is None:
            return
        for batch in offer.batches:
            blocks = frozenset(block for chunk in batch.block_ids for part in chunk for block in part)
            step = computed_in(batch.first + len(batch.keys))
            self._stores[batch.store_id] = _Store(
                offer.request_id, blocks, self._ranks, self.step if step is None else step, holds or self._holds
            )
        reserved = self._offered.store(
            offer, partial(self._take_reserved, offer.attachment),
            is_wanted=lambda batch: not self._stores[batch.store_id].is_dropped,
        )
        if is_last:
            self.last = reserved

    def _take_reserved(self, attachment: Attachment, batch: StoreBatch, plan: StorePlan | None) -> None:
        """Background: passes the plan of a batch to send()."""
        with self._lock:
            self._reserved.append((batch.store_id, attachment, plan))

    def guard(self, given: Set[int] | None) -> list[str]:
        """Called with the blocks that this step, or a load, may overwrite; None: any block. Returns the stores to
        fence, which are those that read one of the blocks and were sent, and drops those that were not sent."""
        fences = []
        for store_id, store in self._stores.items():
            if given is None or not store.blocks.isdisjoint(given):
                if store.is_sent:
                    fences.append(store_id)
                store.is_dropped = True
        return fences

    def drop_unsent(self, request_id: str | None = None) -> None:
        """Drops the stores of one request, or of all, that were not sent to the workers."""
        for store in self._stores.values():
            store.is_dropped |= not store.is_sent and request_id in (None, store.request_id)

    def send(self) -> list[StoreOrder]:
        """A step is planned. Returns orders for the stores whose slots are reserved and that are not held back any
        more."""
        self.step += 1
        with self._lock:
            reserved, self._reserved = self._reserved, []
        orders, held = [], []
        for store_id, attachment, plan in reserved:
            store = self._stores[store_id]
            if plan is None or store.is_dropped:
                del self._stores[store_id]
                if store.is_dropped:
                    self._count_dropped()
                if plan is not None:
                    self._offered.abort(attachment, plan)
                continue
            waits = self.step - store.step <= self._steps_ahead
            if waits and store.holds:
                held.append((store_id, attachment, plan))
            else:
                store.is_sent = True
                orders.append(StoreOrder(store_id, attachment.epoch, plan, waits))
        with self._lock:
            self._reserved[:0] = held
        return orders

    def read(self, ranks: Mapping[str, int]) -> None:
        """`ranks`: by store, how many more ranks have stopped reading its blocks."""
        for store_id, count in ranks.items():
            store = self._stores[store_id]
            store.ranks_left -= count
            if store.ranks_left <= 0:
                del self._stores[store_id]
