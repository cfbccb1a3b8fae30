"""Totals since the server's start. They only rise."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta


class Counters(msgspec.Struct):
    """Totals since start, with their descriptions in `/metrics`. A lookup repeated within its epoch counts as a
    renewal, not as a lookup."""

    lookups: Annotated[int, Meta(description="Lookups, repeats within an epoch not counted")] = 0
    lookup_renewals: Annotated[int, Meta(description="Lookups repeated within their epoch")] = 0
    lookup_tokens: Annotated[int, Meta(description="Tokens asked for, in whole chunks")] = 0
    peeks: Annotated[int, Meta(description="Lookups without a session")] = 0
    limited_lookups: Annotated[int, Meta(description="Lookups shortened by a byte cap")] = 0
    unpinned_lookups: Annotated[int, Meta(
        description="Lookups shortened because a rank had not registered the segment of the hit"
    )] = 0
    unpinned_chunks: Annotated[int, Meta(description="Chunks that hits lost in this way")] = 0
    unpinned_tokens: Annotated[int, Meta(description="Tokens that hits lost in this way")] = 0
    loaded_chunks: Annotated[int, Meta(description="Chunks that engines leased and read")] = 0
    loaded_bytes: Annotated[int, Meta(description="Bytes of these chunks, counted once per fetch")] = 0
    prompt_tokens: Annotated[int, Meta(description="Tokens of prompts whose requests have ended")] = 0
    local_tokens: Annotated[int, Meta(description="Tokens of these that engines had in their own caches")] = 0
    loaded_tokens: Annotated[int, Meta(description="Tokens of these that engines loaded")] = 0
    computed_tokens: Annotated[int, Meta(description="Tokens of these that engines computed")] = 0
    reloaded_tokens: Annotated[int, Meta(
        description="Tokens that preempted requests loaded when they came back, in no other count"
    )] = 0
    reservations: Annotated[int, Meta(description="Reservations asked for")] = 0
    short_reservations: Annotated[int, Meta(description="Reservations cut short for want of memory")] = 0
    unpinned_reservations: Annotated[int, Meta(
        description="Reservations cut short for want of memory that every rank had registered"
    )] = 0
    quota_reservations: Annotated[int, Meta(description="Reservations cut short by their tenant's quota")] = 0
    attached_members: Annotated[int, Meta(description="Attach calls that succeeded")] = 0
    dead_members: Annotated[int, Meta(description="Members whose lock was seen free")] = 0
    refusals: Annotated[int, Meta(description="Answers that were problems")] = 0
    refused_connections: Annotated[int, Meta(description="Connections refused because too many were open")] = 0
    stored_chunks: Annotated[int, Meta(description="Chunks published")] = 0
    stored_bytes: Annotated[int, Meta(description="Bytes published")] = 0
    aborted_chunks: Annotated[int, Meta(description="Chunks reserved and never published")] = 0
    evicted_chunks: Annotated[int, Meta(description="Chunks evicted")] = 0
    refused_retains: Annotated[int, Meta(
        description="Chunks that hints did not retain because as much of the pool was as may be"
    )] = 0
    prefetches: Annotated[int, Meta(description="Calls that ask lower tiers to load ahead of requests")] = 0
    prefetches_refused: Annotated[int, Meta(
        description="Prefetches that were refused or shortened because as much was loaded ahead as may be"
    )] = 0
    prefetches_dropped: Annotated[int, Meta(
        description="Prefetches that were not done in time, or that were lost with the mover"
    )] = 0
    prefetched_chunks: Annotated[int, Meta(description="Chunks that lower tiers loaded ahead of requests")] = 0
    outcomes: Annotated[int, Meta(description="Ended requests that engines reported")] = 0
    dropped_outcomes: Annotated[int, Meta(
        description="Ended requests that engines did not report, because they did not fit into heartbeats"
    )] = 0
    mismatches: Annotated[int, Meta(description="Chunks taken out of use after a checksum mismatch")] = 0
    refuted_mismatches: Annotated[int, Meta(
        description="Chunks that engines reported as damaged, and whose bytes were right"
    )] = 0


TABLE_COUNTERS = (
    "stored_chunks", "stored_bytes", "aborted_chunks", "evicted_chunks", "refused_retains", "mismatches"
)
"""Counted by the table."""


# --------------------------------------------------------------------------- histograms of the core

# A histogram that the core counts.



class Counted(NamedTuple):
    """Values by their size. `bounds`: the largest value of each bucket, rising; `counts`: how many values are in each,
    and in one more bucket beyond the last bound; `total`: the sum of the values."""

    bounds: list[int]
    counts: list[int]
    total: int
