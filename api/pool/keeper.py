"""What the server does by itself: watches members' locks, lets deadlines pass, keeps memory free, drains
segments that retire, samples.

One task, on the event loop, every `watch_s`. A round is short; eviction goes in small slices so that
calls are answered in between. Time comes from the server clock: a server that was stopped finds nobody
late when it goes on.
"""

from __future__ import annotations

import asyncio
import logging

from kvdock.api.service import CacheService
from kvdock.api.views.views import pool_view

EVICT_SLICE_CHUNKS = 64
log = logging.getLogger("kvdock.api")


class Keeper:
    """`run` until cancelled; `ready` is set once there is memory to give out."""

    def __init__(self, service: CacheService) -> None:
        self.ready = asyncio.Event()
        self._service = service
        self._growth: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Raises StartupError when not even the first segment can be had."""
        service = self._service
        await service.pool.grow_first()
        self.ready.set()
        next_sample_ms = service.clock.now_ms()
        pulse = asyncio.create_task(service.pulse.watch())
        try:
            while True:
                self.watch_members()
                service.forget_closed()
                await self.keep_free()
                await service.pool.drain()
                service.pulse.made_round()
                service.pool.say_alive()
                now_ms = service.clock.now_ms()
                if now_ms >= next_sample_ms:
                    service.history.sample(service.totals(), pool_view(service), now_ms / 1000)
                    next_sample_ms = now_ms + round(service.settings.history_interval_s * 1000)
                until_sample_s = (next_sample_ms - now_ms) / 1000
                await asyncio.sleep(max(0.005, min(service.settings.watch_s, until_sample_s)))
        finally:
            pulse.cancel()
            if self._growth is not None:
                self._growth.cancel()

    def watch_members(self) -> None:
        """A lock seen free is the only proof of death; then time-driven transitions."""
        service = self._service
        now_ms = service.clock.now_ms()
        for session in service.registry.sessions():
            for member in session.members.values():
                if not member.dead and not service.pool.lock_held(member.lock_offset):
                    member.dead = True
                    service.counters.dead_members += 1
                    log.warning("session %s (%s): member %s is dead", session.id, session.label, member.id)
                    service.table.member_dead(member.table_id, now_ms)
        self.watch_unheard(now_ms)
        service.table.tick(now_ms)

    def watch_unheard(self, now_ms: int) -> None:
        """Members of an adopted pool that have not come back: their locks too say whether they live."""
        pool = self._service.pool
        for table_id, lock_offset in tuple(pool.unheard.items()):
            if not pool.lock_held(lock_offset):
                del pool.unheard[table_id]
                self._service.counters.dead_members += 1
                log.warning("a member of the adopted pool is dead, and never came back")
                self._service.table.member_dead(table_id, now_ms)

    async def keep_free(self) -> None:
        """Below the low mark (ahead of it, when told so): grow in the background, or, when full, evict up to the high
        mark."""
        service, pool, limits = self._service, self._service.pool, self._service.limits
        low_bytes = int(limits.low_water * pool.limit_bytes)
        high_bytes = int(limits.high_water * pool.limit_bytes)
        grow_bytes = pool.limit_bytes if service.settings.growth == "ahead" else low_bytes
        free_bytes = service.table.free_bytes()
        if free_bytes < grow_bytes and pool.can_grow():
            if self._growth is None or self._growth.done():
                self._growth = asyncio.create_task(pool.grow_until(grow_bytes))
            return
        if free_bytes >= low_bytes:
            return
        while service.table.free_bytes() < high_bytes and service.table.evict(high_bytes, EVICT_SLICE_CHUNKS):
            await asyncio.sleep(0)
