"""The server's background work: it watches members' locks, lets deadlines pass, keeps tenants within their quotas and
memory free, empties segments that are being retired, rereads the access file, and takes samples.

It is one task on the event loop, with a round every `watch_s`. A round is short; eviction is done in small slices, so
that calls are answered in between. Time is the server clock's, so no member counts as late after the server itself was
stopped.
"""

from __future__ import annotations

import asyncio
import logging

from kvdock.api.access.access_file import AccessFile
from kvdock.api.background import Background
from kvdock.api.pool.registry import MemberRecord, SessionRecord, digest16, owned
from kvdock.api.pool.sessions import Sessions, work_off
from kvdock.api.record.history import Sampler
from kvdock.api.record.tally import Tally
from kvdock.api.record.timings import Pulse
from kvdock.api.settings import Settings
from kvdock.api.turns import SLICE_WORK, next_slice, sliced
from kvdock.protocol.schemas import MOVER_NAME
from kvdock.protocol.wire_types import OWN_TENANT

EVICT_SLICE_CHUNKS = 64
log = logging.getLogger("kvdock.api")
MOVER_NONCES = frozenset(digest16(owned(OWN_TENANT, f"{MOVER_NAME}-{number}")) for number in range(1, 65))
"""The members of a mover are numbered by how often they have attached."""


class Keeper:
    """`run` works until it is cancelled; `ready` is set once there is memory to give out."""

    def __init__(
        self, settings: Settings, access: AccessFile, sessions: Sessions, tally: Tally, sampler: Sampler, pulse: Pulse,
        background: Background,
    ) -> None:
        self.ready = asyncio.Event()
        self._settings, self._access = settings, access
        self._pool, self._table = sessions.pool, sessions.pool.table
        self._registry, self._quotas, self._clock = sessions.registry, sessions.quotas, sessions.clock
        self._tally, self._sampler, self._pulse, self._background = tally, sampler, pulse, background
        self._growth: asyncio.Task[None] | None = None
        self._old_movers = {member.member for member in self._table.members() if member.nonce in MOVER_NONCES}
        """The members of an adopted pool that were movers of an earlier server."""

    async def run(self) -> None:
        """Raises StartupError when not even the first segment can be allocated."""
        await self._pool.grow_first()
        self.ready.set()
        next_sample_ms = self._clock.now_ms()
        pulse = asyncio.create_task(self._pulse.watch())
        try:
            while True:
                for step in (
                    self._watch_members, self._let_time_pass, self._forget_benches, self._empty_left, self._prune,
                    self._follow_access_file, self._keep_quotas, self._keep_free, self._pool.drain,
                    self._sampler.keep_curve_when_due,
                ):
                    await step()
                    await next_slice()
                self._tally.memory()
                self._pulse.made_round()
                self._pool.touch()
                await next_slice()
                now_ms = self._clock.now_ms()
                if now_ms >= next_sample_ms:
                    await self._sampler.sample()
                    next_sample_ms = now_ms + round(self._settings.history_interval_s * 1000)
                until_sample_s = (next_sample_ms - now_ms) / 1000
                await asyncio.sleep(max(0.005, min(self._settings.watch_s, until_sample_s)))
        finally:
            pulse.cancel()
            if self._growth is not None:
                self._growth.cancel()

    async def _watch_members(self) -> None:
        """Finds dead members: a free lock is the only proof of death."""
        async for session in sliced(self._registry.sessions()):  # to ask for a lock takes longer, the more there are
            if self._registry.of_table_id(session.table_id) is not session:
                continue  # the session has ended meanwhile
            for member in tuple(session.members.values()):
                if not member.dead:
                    await self._watch(session, member)
                elif not self._table.members_named([member.table_id]):
                    self._registry.forget_member(session, member)
        # Members of an adopted pool that have not attached again: their locks also show whether they are alive.
        for table_id, lock_offset in tuple(self._pool.unheard.items()):
            if not self._pool.lock_held(lock_offset):
                del self._pool.unheard[table_id]
                if table_id not in self._old_movers:  # that ended with its server
                    log.warning("a member of the adopted pool is dead, and never attached again")
                    self._tally.died(None)
                await self._end_stores(table_id)

    async def _watch(self, session: SessionRecord, member: MemberRecord) -> None:
        if not self._pool.lock_held(member.lock_offset):
            member.dead = True
            self._tally.died(session, member.id)
            await self._end_stores(member.table_id)
            return
        silent_ms = self._clock.now_ms() - member.heard_ms
        if silent_ms > self._settings.suspect_ms and not member.suspect:
            member.suspect = True
            self._tally.suspected(session, member, silent_ms)

    async def _end_stores(self, dead: int) -> None:
        """Nothing that the dead member was storing is published."""
        await work_off(lambda: self._table.member_dead(dead, self._clock.now_ms(), SLICE_WORK))

    async def _let_time_pass(self) -> None:
        while self._table.tick(self._clock.now_ms(), SLICE_WORK):
            await next_slice()

    async def _prune(self) -> None:
        await self._registry.prune(self._table)

    async def _forget_benches(self) -> None:
        """Removes what benchmarks have stored once the last of them has left; then `prune` drops the namespace."""
        for namespace in await self._registry.left_by_benches():
            at = 0
            while at >= 0:
                _, at = self._table.clear(namespace.table_id, at, EVICT_SLICE_CHUNKS)
                await next_slice()

    async def _empty_left(self) -> None:
        """Empties the oldest of the namespaces that sessions have left, if there are too many, whether capacity is
        needed or not."""
        kept = self._settings.weights_kept
        while self._table.empty_left(kept, EVICT_SLICE_CHUNKS) or self._quotas.empty_left(EVICT_SLICE_CHUNKS):
            await next_slice()

    async def _follow_access_file(self) -> None:
        await self._access.refresh()
        if self._access.changed:
            self._quotas.follow(self._access.caps)
            self._access.changed = False

    async def _keep_quotas(self) -> None:
        """Evicts the chunks that tenants have above their quota, if a quota was lowered."""
        while self._table.evict_over_quota(EVICT_SLICE_CHUNKS):
            await next_slice()

    async def _keep_free(self) -> None:
        """Grows the pool in the background while less than its mark is available; with growth=ahead until it has its
        full size. When it cannot grow and less than the low mark is available, evicts chunks up to the high mark."""
        pool, table = self._pool, self._table
        low_bytes = int(pool.limits.low_water * pool.limit_bytes)
        high_bytes = int(pool.limits.high_water * pool.limit_bytes)
        grow_share = 1.0 if self._settings.growth == "ahead" else pool.limits.grow_water
        grow_bytes = int(grow_share * pool.limit_bytes)
        available_bytes = table.available_bytes()
        if available_bytes < grow_bytes and pool.can_grow():
            if self._growth is None or self._growth.done():
                self._growth = self._background.once("growing the pool", pool.grow_until(grow_bytes))
            return
        if available_bytes >= low_bytes:
            return
        while table.available_bytes() < high_bytes and table.evict(high_bytes, EVICT_SLICE_CHUNKS):
            await next_slice()
