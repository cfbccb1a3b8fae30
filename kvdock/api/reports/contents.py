"""What the pool holds, by namespace and prefix, from a census of all chunks (csrc/table/census.h): the event loop makes
it in slices when a call asks for it, and later calls get the same census for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvdock._core import Census, Table
from kvdock.api.access.peer import Peer
from kvdock.api.clock import ServerClock
from kvdock.api.pool.registry import Registry
from kvdock.protocol.reports import Prefixes, PrefixView

SLICE_CHUNKS = 4096
"""The chunks of one slice, which take less than a millisecond."""
FRESH_S = 1.0
MOST_SHARE = 0.005
"""The share of the event loop's time that censuses may take: one that took longer counts as fresh for longer."""


class Count(NamedTuple):
    """What a namespace holds. Times are the server clock's in milliseconds; 0: not known."""

    chunks: int
    bytes: int
    oldest_ms: int
    newest_ms: int


NOTHING = Count(0, 0, 0, 0)


class Contents:
    def __init__(
        self, table: Table, registry: Registry, clock: ServerClock, now_s: Callable[[], float]
    ) -> None:
        self._table, self._registry, self._clock, self._now_s = table, registry, clock, now_s
        self._census: Census | None = None
        self._counts: dict[int, Count] = {}
        self._counted_s = self._took_s = 0.0
        self._is_stale = True
        self._making: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Counts, unless that was done a moment ago. Calls that ask meanwhile wait for the same count."""
        if self._making is None or self._making.done():
            lasts_s = max(FRESH_S, self._took_s / MOST_SHARE)
            if not self._is_stale and self._now_s() - self._counted_s < lasts_s:
                return
            self._making = asyncio.create_task(self._count())
        await asyncio.shield(self._making)

    def forget(self) -> None:
        """An operator took chunks out of use: the next call gets a new count."""
        self._is_stale = True

    async def _count(self) -> None:
        self._is_stale = False
        census, worked_s = Census(self._table), 0.0
        while True:
            began_s = self._now_s()
            is_whole = census.step(SLICE_CHUNKS)
            worked_s += self._now_s() - began_s
            if is_whole:
                break
            await asyncio.sleep(0)
        self._counts = {space: Count(*counted) for space, *counted in census.spaces()}
        self._census, self._counted_s, self._took_s = census, self._now_s(), worked_s

    def of(self, space: int) -> Count:
        """What the namespace held when it was last counted."""
        return self._counts.get(space, NOTHING)

    async def prefixes(self, peer: Peer, limit: int) -> Prefixes:
        """The most used prefixes of the namespaces that the caller sees."""
        await self.refresh()
        assert self._census is not None, "it was counted"
        seen = {one.table_id: one for one in self._registry.namespaces() if peer.sees(one.tenant)}
        found, count = self._census.prefixes(list(seen), limit)
        return Prefixes(
            prefixes=[
                PrefixView(
                    namespace=seen[space].digest.hex(), tenant=seen[space].tenant, model=seen[space].manifest.model,
                    weights=seen[space].use.weights,
                    key=first.hex(), tokens=chunks * seen[space].manifest.chunk_tokens, chunks=chunks, bytes=held,
                    age_s=self._clock.since_s(born_ms), unused_s=self._clock.since_s(used_ms), uses=uses,
                    last_key=last.hex(), last_tokens=last_chunks * seen[space].manifest.chunk_tokens,
                )
                for space, first, chunks, held, born_ms, used_ms, uses, last, last_chunks in found
            ],
            prefix_count=count,
            counted_s=max(0.0, self._now_s() - self._counted_s),
        )
