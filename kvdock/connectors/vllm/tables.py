"""Which blocks requests have, as vLLM names them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from kvdock.connectors.plans import LoadPiece, LoadPlan
from kvdock.connectors.vllm.groups import KVGroup, step_tokens
from kvdock.connectors.vllm.setup import drafts_with_kv
from kvdock.protocol.wire_types import traceparent_or_none

Table = list[list[int | None]]
"""Per KV group a request's blocks, from its first token on; None where it has none."""
Handed = tuple[int, int, int]
"""A recurrent state that changes no more: KV group, block, and after how many of the request's tokens it is."""


def begun(output: Any) -> Iterator[tuple[str, Table]]:
    """The whole tables of requests that begin in the step, or begin again."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, [_or_none(column) for column in new.block_ids]
    cached = output.scheduled_cached_reqs
    for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, [_or_none(column) for column in ids]


def grown(output: Any) -> Iterator[tuple[str, Table]]:
    """What is added to the tables of requests that go on."""
    cached = output.scheduled_cached_reqs
    for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if ids is not None and request_id not in cached.resumed_req_ids:
            yield request_id, [_or_none(column) for column in ids]


def follow(output: Any, tracked: Mapping[str, Any]) -> None:
    """Brings the `table` of each tracked request up to date: the step's `output` says what blocks it was given."""
    for request_id, table in begun(output):
        if request_id in tracked:
            tracked[request_id].table = table
    for request_id, more in grown(output):
        if request_id in tracked and tracked[request_id].table is not None:
            for column, added in zip(tracked[request_id].table, more, strict=True):
                column.extend(added)


def handed(output: Any, request_id: str) -> Set[Handed]:
    """The states that vLLM says the step leaves of the request; before 0.32 none."""
    told = getattr(output, "kv_connector_block_state", None)
    return frozenset(told.boundary_state_offloads.get(request_id, ())) if told is not None else frozenset()


def settled(
    groups: Sequence[KVGroup], columns: Table, boundaries: Collection[int] = (), states: Set[Handed] = frozenset()
) -> Table:
    """`columns` without recurrent states that may still change (states.py). What is left: the states at
    `boundaries`, which are numbers of tokens at which a step begins or ends, and those of `states` that are still in
    their places."""
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
    """Those that hold more of a request than its first `tokens` tokens."""
    columns = zip(table, groups, strict=True)
    return {block for column, group in columns for block in column[tokens // group.block_tokens :] if block}


def failing(
    groups: Sequence[KVGroup], chunk_tokens: int, request_id: str, columns: Table, local_tokens: int, hit_tokens: int
) -> LoadPlan:
    """A plan that names the blocks to be filled and nothing to fill them with."""
    sizes = [group.block_tokens for group in groups]
    pieces = tuple(
        LoadPiece(at * size // chunk_tokens, group, (), (block,), 0)
        for group, (size, column) in enumerate(zip(sizes, columns, strict=True))
        for at, block in enumerate(column) if at * size >= local_tokens and block is not None
    )
    return LoadPlan(request_id, "", local_tokens, hit_tokens, chunk_tokens, pieces)


def _or_none(blocks: Sequence[int]) -> list[int | None]:
    """vLLM writes 0 for the null block."""
    return [block or None for block in blocks]


# --------------------------------------------------------------------------------
# What the scheduler's side knows of a request, from its arrival to its end.

@dataclass
class Tracked:
    """`table`: per group its blocks, None where it has none."""

    request: Any
    local_tokens: int = 0
    is_async: bool = False
    """As LoadOrder has it: of the load that it was last promised."""
    is_new: bool = True
    """It was not in any step since it was given its blocks."""
    table: Table | None = None
    is_old: bool = False
    """The cache was reset since it was looked up: what it computes may rest on what was there before."""
    given: set[int] = field(default_factory=set)
    """Blocks that it was given, until it is in a step."""
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """The newest that it was in since it was given its blocks: their numbers, and the tokens computed before each."""

    @property
    def traceparent(self) -> str:
        """As vLLM got it; empty: none. It keeps these headers only if it sends traces itself."""
        headers = getattr(self.request, "trace_headers", None) or {}
        return traceparent_or_none(headers.get("traceparent"))

    def computed_in(self, tokens: int) -> int | None:
        """The number of a step: once it has ended, the first `tokens` tokens are in their blocks. None: not known."""
        if not self.steps:
            return None
        # What was computed before the oldest of these may have been loaded, which has ended when that one has.
        return next((number for number, before in reversed(self.steps) if before < tokens), self.steps[0][0])


# --------------------------------------------------------------------------------
# What one request has loaded, and others find in vLLM's own prefix cache once it has come
# (kvdock/connectors/load_once.py).
#
# vLLM names what its cache has by hashes of its own: an adapter's name and a client's name of an image are in them, so
# that requests whose KV is the same, and whose keys are equal, may have other hashes. Then neither finds what the other
# has loaded.

@dataclass(frozen=True)
class OwnCache:
    """`hash_tokens`: how many tokens each of vLLM's hashes stands for; `lost_tokens` and `whole`: as LoadOnce has
    them."""

    hash_tokens: int
    lost_tokens: int = 0
    whole: bool = False

    def shares(self, first: Any, second: Any, tokens: int) -> bool:
        """Whether the first `tokens` tokens of two requests have one name."""
        at = tokens // self.hash_tokens - 1
        names, others = first.block_hashes, second.block_hashes
        return 0 <= at < min(len(names), len(others)) and bool(names[at] == others[at])


def own_cache_of(vllm_config: Any, groups: Sequence[KVGroup], hash_tokens: int) -> OwnCache | None:
    """None: other requests do not find what one has loaded. Nor is it known of recurrent states, of which a load brings
    one alone; and with drafts' KV vLLM wants one block more before the end than a window needs, which is not loaded."""
    has_windows = any(group.window_tokens is not None for group in groups)
    has_drafts = drafts_with_kv(vllm_config) is not None
    if not vllm_config.cache_config.enable_prefix_caching or any(group.state for group in groups):
        return None
    if has_windows and has_drafts:
        return None
    return OwnCache(hash_tokens, step_tokens(groups) if has_drafts else 0, has_windows)
