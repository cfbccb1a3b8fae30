"""Totals and recent requests for people to read. All of it is bounded. Counters only rise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from kvdock.protocol.explain import Break
from kvdock.protocol.reports import RequestView


class Counters(msgspec.Struct):
    """Totals since start, with their descriptions in `/metrics`. A lookup repeated within its epoch counts as a
    renewal, not as a lookup."""

    lookups: Annotated[int, Meta(description="Lookups, repeats within an epoch not counted")] = 0
    lookup_renewals: Annotated[int, Meta(description="Lookups repeated within their epoch")] = 0
    lookup_tokens: Annotated[int, Meta(description="Tokens looked up")] = 0
    hit_tokens: Annotated[int, Meta(description="Tokens found")] = 0
    peeks: Annotated[int, Meta(description="Lookups without a session")] = 0
    limited_lookups: Annotated[int, Meta(description="Lookups shortened by a byte cap")] = 0
    unpinned_lookups: Annotated[int, Meta(
        description="Lookups shortened because a rank had not registered the segment of the hit"
    )] = 0
    unpinned_chunks: Annotated[int, Meta(description="Chunks that hits lost in this way")] = 0
    unpinned_tokens: Annotated[int, Meta(description="Tokens that hits lost in this way")] = 0
    loaded_chunks: Annotated[int, Meta(description="Chunks in leases")] = 0
    loaded_bytes: Annotated[int, Meta(description="Bytes in leases, counted once per fetch")] = 0
    """Includes leases that were cancelled."""
    loaded_tokens: Annotated[int, Meta(
        description="Tokens that engines loaded instead of computing them, as they tell of ended requests"
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
    outcomes: Annotated[int, Meta(description="Ended requests that engines told of")] = 0
    dropped_outcomes: Annotated[int, Meta(
        description="Ended requests that engines did not tell of, because no heartbeat had room"
    )] = 0
    mismatches: Annotated[int, Meta(description="Chunks taken out of use after a checksum mismatch")] = 0


TABLE_COUNTERS = (
    "stored_chunks", "stored_bytes", "aborted_chunks", "evicted_chunks", "refused_retains", "mismatches"
)
"""Counted by the table."""


@dataclass(slots=True)
class Detail:
    """What a request's explanation has beyond its view."""

    namespace: bytes
    broke: Break | None = None
    loaded_us: int | None = None
    """From a lookup's answer until its ranks had read all that it got."""
    weights: str | None = ""
    """That its engine ran."""


class RecentRequests:
    """The most recent lookups and stores, newest first, and what engines told of requests."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._ring: deque[tuple[str, RequestView, Detail]] = deque()
        """With the tenant of each."""
        self._count = 0
        """How many were added: the newest has this number, and numbers are the cursors of pages."""
        self._untold: dict[tuple[str, str], deque[RequestView]] = {}
        """By session and request, the lookups of the ring that have no outcome yet, oldest first."""
        self._told: dict[tuple[str, str], RequestView] = {}
        """By session and request, the newest of the ring that has one."""

    def add(self, tenant: str, request: RequestView, detail: Detail) -> None:
        if len(self._ring) == self._keep:
            self._forget(self._ring.pop()[1])
        self._count += 1
        self._ring.appendleft((tenant, request, detail))
        if request.outcome is not None:
            self._told[_name(request)] = request
        elif request.kind == "lookup":
            self._untold.setdefault(_name(request), deque()).append(request)

    def _forget(self, oldest: RequestView) -> None:
        name = _name(oldest)
        if self._told.get(name) is oldest:
            del self._told[name]
        if oldest.kind == "lookup" and oldest.outcome is None:
            self._untold[name].popleft()
            if not self._untold[name]:
                del self._untold[name]

    def tell(self, tenant: str, ended: RequestView, detail: Detail) -> None:
        """`ended` has the outcome of a request: its lookups get it. If there are none, it is a row of its own, unless
        it was told before."""
        name = _name(ended)
        lookups = self._untold.pop(name, ())
        for lookup in lookups:
            lookup.outcome = ended.outcome
            self._told[name] = lookup
        if not lookups and (name not in self._told or self._told[name].outcome != ended.outcome):
            self.add(tenant, ended, detail)

    def view(
        self, limit: int, cursor: int, sees: Callable[[str], bool], request: str = ""
    ) -> tuple[list[RequestView], str | None]:
        """From request number `cursor` (0: the newest) backwards, those of tenants that the caller sees whose ids begin
        with `request`; and the cursor of the next page."""
        start = max(0, self._count - cursor) if cursor else 0
        shown: list[RequestView] = []
        for at, (tenant, one, _) in enumerate(islice(self._ring, start, None), start):
            if sees(tenant) and one.request.startswith(request):
                if len(shown) == limit:
                    return shown, str(self._count - at)
                shown.append(one)
        return shown, None


    def named(self, request: str, sees: Callable[[str], bool], most: int) -> list[tuple[RequestView, Detail]]:
        """Those of one request, newest first."""
        found = ((one, detail) for tenant, one, detail in self._ring if one.request == request and sees(tenant))
        return list(islice(found, most))


def _name(request: RequestView) -> tuple[str, str]:
    return request.session, request.request
