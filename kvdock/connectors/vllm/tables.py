"""Tracks, by vLLM's block ids, the blocks that requests have and that steps use."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from kvdock.connectors.plans import LoadPiece, LoadPlan
from kvdock.connectors.vllm.groups import KVGroup, step_tokens
from kvdock.connectors.vllm.request_spans import HEADER
from kvdock.connectors.vllm.setup import drafts_with_kv
from kvdock.connectors.vllm.steps import LoadOrder
from kvdock.protocol.wire_types import traceparent_or_none

Table = list[list[int | None]]
"""For each KV group, the ids of a request's blocks, from its first token on; None where it has no block."""
Handed = tuple[int, int, int]
"""A recurrent state that does not change any more: (KV group, block, number of the request's tokens that it covers)."""


def begun(output: Any) -> Iterator[tuple[str, Table]]:
    """The complete tables of the requests that start in the step, or that resume in it after a preemption."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, [_or_none(column) for column in new.block_ids]
    cached = output.scheduled_cached_reqs
    for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, [_or_none(column) for column in ids]


def grown(output: Any) -> Iterator[tuple[str, Table]]:
    """The blocks that are added to the tables of requests that go on."""
    cached = output.scheduled_cached_reqs
    for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if ids is not None and request_id not in cached.resumed_req_ids:
            yield request_id, [_or_none(column) for column in ids]


def follow(output: Any, tracked: Mapping[str, Any]) -> None:
    """Brings the `table` of each tracked request up to date, with the blocks that it was given by the step's
    `output`."""
    for request_id, table in begun(output):
        if request_id in tracked:
            tracked[request_id].table = table
    for request_id, more in grown(output):
        if request_id in tracked and tracked[request_id].table is not None:
            for column, added in zip(tracked[request_id].table, more, strict=True):
                column.extend(added)


def handed(output: Any, request_id: str) -> Set[Handed]:
    """The states of the request that the step leaves and that vLLM reports; none before vLLM 0.32."""
    states = getattr(output, "kv_connector_block_state", None)
    return frozenset(states.boundary_state_offloads.get(request_id, ())) if states is not None else frozenset()


def settled(
    groups: Sequence[KVGroup], columns: Table, boundaries: Collection[int] = (), states: Set[Handed] = frozenset()
) -> Table:
    """`columns` without recurrent states that may still change (groups.py). It keeps the states at `boundaries`, which
    are numbers of tokens at which a step starts or ends, and those of `states` that are still in their places."""
    left = []
    for index, (column, group) in enumerate(zip(columns, groups, strict=True)):
        if group.state:
            ends = range(group.block_tokens, (len(column) + 1) * group.block_tokens, group.block_tokens)
            column = [
                block if end in boundaries or (index, block, end) in states else None
                for block, end in zip(column, ends, strict=True)
            ]
        left.append(column)
    return left


def blocks_behind(groups: Sequence[KVGroup], table: Table, tokens: int) -> set[int]:
    """The blocks that hold tokens of a request behind its first `tokens`."""
    columns = zip(table, groups, strict=True)
    return {block for column, group in columns for block in column[tokens // group.block_tokens :] if block}


def failing(
    groups: Sequence[KVGroup], chunk_tokens: int, request_id: str, columns: Table, local_tokens: int, hit_tokens: int
) -> LoadPlan:
    """A plan for a load that must fail: it names the blocks to fill, and no slots."""
    sizes = [group.block_tokens for group in groups]
    pieces = tuple(
        LoadPiece(at * size // chunk_tokens, group, (), (block,), 0)
        for group, (size, column) in enumerate(zip(sizes, columns, strict=True))
        for at, block in enumerate(column) if at * size >= local_tokens and block is not None
    )
    return LoadPlan(request_id, "", local_tokens, hit_tokens, chunk_tokens, pieces)


def _or_none(blocks: Sequence[int]) -> list[int | None]:
    """The block ids with None in place of 0, with which vLLM names the null block."""
    return [block or None for block in blocks]


# --------------------------------------------------------------------------------
# The facts that the scheduler's side keeps about a request, from its arrival to its end.

@dataclass
class Tracked:
    """A request. `table`: its blocks in each group; None in place of a block that it does not have."""

    request: Any
    local_tokens: int = 0
    is_async: bool = False
    """Whether the load that it was last promised runs in the background (LoadOrder)."""
    is_new: bool = True
    """Whether it has been in no step since it was given its blocks."""
    table: Table | None = None
    is_old: bool = False
    """Whether its KV may depend on KV from before a reset, or on KV of other weights."""
    given: set[int] = field(default_factory=set)
    """Blocks that it was given, until it is in a step."""
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """(number, tokens computed before it) of the newest steps that it was in since it was given its blocks."""

    @property
    def traceparent(self) -> str:
        """The trace context of vLLM's own span of the request, if it is known, else the one that came with the request;
        "": none. vLLM keeps these headers only if it sends traces itself."""
        headers = getattr(self.request, "trace_headers", None) or {}
        return traceparent_or_none(headers.get(HEADER, headers.get("traceparent")))

    def computed_in(self, tokens: int) -> int | None:
        """The number of the step after whose end the first `tokens` tokens are in their blocks. None: not known."""
        if not self.steps:
            return None
        # Tokens before the oldest recorded step may have been loaded: that load has ended when the step has.
        return next((number for number, before in reversed(self.steps) if before < tokens), self.steps[0][0])


# --------------------------------------------------------------------------------
# Tracks the blocks that the step that is being planned is given, and the blocks that steps in progress may still use,
# although they may belong to another request by now.
#
# vLLM plans steps ahead. It keeps the blocks of a request that ended or was preempted until the steps that were planned
# before have ended (defer_block_free in its scheduler; since 0.24), but reuses at once the blocks that a window has
# left behind. A load into such a block must run after those steps on the GPU. All other loads need not wait for
# computation.
#
# The blocks of a group that a step uses lie behind the tokens that its request has computed, less the window.
#
# Not thread-safe: only vLLM's scheduler thread calls it.

class InFlight:
    """`steps`: the most that may be in progress when another one starts. `keeps_back`: vLLM keeps back the blocks that
    requests lose when they end or are preempted, so that only the blocks that windows leave behind must be recorded."""

    def __init__(self, steps: int, *, keeps_back: bool) -> None:
        self.keeps_back = keeps_back
        self._used: deque[set[int] | None] = deque([set()], maxlen=steps)
        """By step, the blocks that it may use; None: any block."""

    def start_step(self) -> None:
        self._used.append(set())

    def uses(self, blocks: Iterable[int | None]) -> None:
        """The newest step writes these blocks, or steps in progress may read them although their request has lost
        them."""
        used = self._used[-1]
        if used is not None:
            used.update(block for block in blocks if block is not None)

    def uses_any(self) -> None:
        """It is not known which blocks the newest step writes."""
        self._used[-1] = None

    def touches(self, blocks: Set[int]) -> bool:
        return any(used is None or not used.isdisjoint(blocks) for used in self._used)


class NextStep:
    """The step that vLLM plans next: the blocks that its requests are given, and the loads that start with it.
    `groups`: the engine's KV groups."""

    def __init__(self, groups: Sequence[KVGroup], in_flight: InFlight) -> None:
        self._groups, self.in_flight = groups, in_flight
        self._fresh: set[int] = set()
        """Blocks that were given out since the last step was planned."""
        self._loaded_into: set[int] = set()
        """The blocks of `_fresh` that no step writes before a load has ended."""
        self._unnamed: set[str] = set()
        """Requests that were given blocks since then that are not known."""
        self.loads: list[LoadOrder] = []

    def allocated(self, tracked: Tracked, table: Table) -> None:
        """vLLM has given the request the blocks of `table`."""
        if not any(table):  # vLLM up to 0.25 tells the blocks only to the connector that loads
            self._unnamed.add(tracked.request.request_id)
        tracked.given = blocks_behind(self._groups, table, tracked.local_tokens)
        self._fresh |= tracked.given

    def loads_into(self, tracked: Tracked) -> None:
        """A load in the background starts, into the blocks that the request was given."""
        self._loaded_into |= tracked.given

    def planned(self, output: Any, tracked: Mapping[str, Tracked]) -> None:
        """A step is planned: records the blocks that its requests are given, in addition to those of allocated()."""
        for request_id, table in begun(output):
            one = tracked.get(request_id)
            if request_id in self._unnamed and one is not None:
                self._unnamed.remove(request_id)
                one.given = blocks_behind(self._groups, table, one.local_tokens)
            if one is not None:  # including blocks that were loaded into: from now on, steps write them
                self._fresh |= one.given
                one.given = set()
        for _, more in grown(output):
            for column in more:
                self._fresh.update(filter(None, column))

    @property
    def overwritten(self) -> set[int] | None:
        """The blocks that the step may overwrite, because they are given out anew; None: it may be any."""
        return None if self._unnamed else self._fresh - self._loaded_into

    def own(self, columns: Table) -> Table | None:
        """`columns` of a request that has lost its blocks, without those that were given to other requests since. None:
        it is not known which were."""
        if self._unnamed:
            return None
        return [[None if block in self._fresh else block for block in column] for column in columns]

    def start_step(self) -> None:
        self.in_flight.start_step()

    def used(self, tracked: Tracked | None, *, is_preempted: bool = False) -> None:
        """Records the blocks that the step uses for the request. It writes behind the computed tokens, with drafts and
        their KV, and reads blocks that a window may have left behind when the next step is planned. Of a preempted
        request, steps in progress may use all blocks."""
        recorded = [not self.in_flight.keeps_back or group.window_tokens is not None for group in self._groups]
        if not any(recorded):
            return
        if tracked is None or tracked.table is None:  # it was forgotten when the cache was reset
            self.in_flight.uses_any()
            return
        computed = 0 if is_preempted else tracked.request.num_computed_tokens
        for column, group, is_recorded in zip(tracked.table, self._groups, recorded, strict=True):
            if is_recorded:
                first = computed if group.window_tokens is None else group.left_behind(computed)
                self.in_flight.uses(column[first // group.block_tokens :])

    def end_plan(self) -> None:
        """The step is planned. Blocks that are given out from now on are the next step's."""
        for blocks in (self._fresh, self._loaded_into, self._unnamed):
            blocks.clear()


# --------------------------------------------------------------------------------
# Finds out whether requests can use each other's loads from vLLM's own prefix cache, once these have ended
# (kvdock/connectors/waits.py).
#
# vLLM names the blocks of its cache by hashes of its own: they include an adapter's name and a client's name of an
# image, so requests whose KV is the same, and whose keys are equal, may have different hashes. Then neither finds the
# other's blocks.

@dataclass(frozen=True)
class OwnCache:
    """`hash_tokens`: how many tokens each of vLLM's hashes adds; `lost_tokens` and `whole`: see LoadOnce."""

    hash_tokens: int
    lost_tokens: int = 0
    whole: bool = False

    def shares(self, first: Any, second: Any, tokens: int) -> bool:
        """Whether the first `tokens` tokens of two requests have the same name."""
        at = tokens // self.hash_tokens - 1
        names, others = first.block_hashes, second.block_hashes
        return 0 <= at < min(len(names), len(others)) and bool(names[at] == others[at])


def own_cache_of(vllm_config: Any, groups: Sequence[KVGroup], hash_tokens: int) -> OwnCache | None:
    """None: requests do not find the blocks that another request has loaded. So it is without a prefix cache, with
    recurrent states, because a load fills only one of them, and with windows together with drafts' KV, because vLLM
    then needs one more block than the window, which is not loaded."""
    has_windows = any(group.window_tokens is not None for group in groups)
    has_drafts = drafts_with_kv(vllm_config) is not None
    if not vllm_config.cache_config.enable_prefix_caching or any(group.state for group in groups):
        return None
    if has_windows and has_drafts:
        return None
    return OwnCache(hash_tokens, step_tokens(groups) if has_drafts else 0, has_windows)


# --------------------------------------------------------------------------- the budget of blocks

# How much of the block pool may be tied up by loads that vLLM cannot preempt.
#
# A request that loads in the background holds its blocks while it waits, and vLLM preempts only requests that run. If
# such requests held so many blocks that the request at the head of the queue could not be given its own, and no request
# ran, the engine would stand still for ever.
#
# Invariant: blocks of background loads (in full length) + blocks of the largest other request <= blocks of the pool. So
# when all running requests have ended, the request at the head fits: one that has loaded has its blocks, and any other
# fits beside those that load. Later requests queue behind it. With priorities, a later request may be scheduled first:
# then the largest other request is the longest possible one. A request that does not fit is loaded in the step that
# runs it, which ties up no blocks while it waits.

STATE_BLOCKS = 4
"""How many blocks a request may have for its recurrent state: the block that steps write, two before it that steps in
progress may read, and one with a state that vLLM keeps for its own prefix cache."""


class BlockBudget:
    """`blocks`: the size of the pool. `longest_tokens`: the most tokens of a request. `step_tokens`: the most tokens of
    a step. `in_order`: whether requests are scheduled in the order in which they came."""

    def __init__(
        self, groups: Sequence[KVGroup], *, blocks: int, longest_tokens: int, step_tokens: int, in_order: bool = True
    ) -> None:
        self._groups, self._in_order = groups, in_order
        self._blocks, self._longest, self._step = blocks, longest_tokens, step_tokens
        self._needs: dict[str, int] = {}  # by request, the most blocks that it may need
        self._taken: dict[str, int] = {}  # the same for requests that load in the background, until they run

    def add(self, request: Any) -> None:
        """A request that may be scheduled from now on."""
        most = request.num_prompt_tokens + (request.max_tokens or 0)
        self._needs[request.request_id] = self._blocks_for(min(self._longest, most))

    def fits(self, request: Any) -> bool:
        mine = self._needs.get(request.request_id)
        if mine is None:
            return False
        loading = {**self._taken, request.request_id: mine}
        largest = max((blocks for other, blocks in self._needs.items() if other not in loading), default=0)
        if not self._in_order:
            largest = self._blocks_for(self._longest)
        return sum(loading.values()) + largest <= self._blocks

    def take(self, request: Any) -> None:
        self._taken[request.request_id] = self._needs[request.request_id]

    def give_back(self, request_id: str) -> None:
        """The request runs, so vLLM can preempt it."""
        self._taken.pop(request_id, None)

    def remove(self, request_id: str) -> None:
        self._needs.pop(request_id, None)
        self._taken.pop(request_id, None)

    def _blocks_for(self, tokens: int) -> int:
        total = 0
        for group in self._groups:
            if group.state:
                total += STATE_BLOCKS
                continue
            held = tokens
            if group.window_tokens is not None:
                held = min(tokens, group.window_tokens + self._step + group.block_tokens)
            total += -(-held // group.block_tokens) + 1
        return total
