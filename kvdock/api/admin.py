"""What an operator may do: clear, delete, evict, pin, drain, change limits. None of these frees memory that an engine
holds.

Every call is idempotent: if it is repeated because its answer was lost, it leaves the same state. Long walks over the
table are done in slices, with other calls answered in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from kvdock.api.access.peer import Peer
from kvdock.api.convert import key_bytes
from kvdock.api.errors import SettingsError
from kvdock.api.log import set_level
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.pool.sessions import Sessions
from kvdock.api.record.journal import Journal
from kvdock.api.record.labels import Labels
from kvdock.api.record.troubles import Troubles
from kvdock.api.settings import Settings
from kvdock.api.sizes import Whole, parse_size
from kvdock.api.tiers.clears import Clears
from kvdock.api.turns import next_slice
from kvdock.protocol import events as e
from kvdock.protocol.admin_schemas import (
    Acknowledge,
    Acknowledged,
    AskedQuota,
    ClearCache,
    Cleared,
    Config,
    DeleteChunks,
    Deleted,
    Drained,
    DrainServer,
    EmptyTier,
    EvictChunks,
    Evicted,
    PatchConfig,
    PinChunks,
    Pinned,
    Quota,
    TierEmptied,
    TierList,
)
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import KEY_BYTES, OWN_TENANT

KEYS_SLICE = 256
EVICT_SLICE = 16


class Admin:
    """One method for each call that operators make."""

    def __init__(
        self, settings: Settings, sessions: Sessions, journal: Journal, clears: Clears, troubles: Troubles,
        labels: Labels, forget_count: Callable[[], None],
    ) -> None:
        """`forget_count` is called when chunks were taken out of use, or kept: the last census is stale then."""
        self._troubles, self._labels = troubles, labels
        self._settings, self._journal, self._clears, self._forget_count = settings, journal, clears, forget_count
        self._pool, self._registry = sessions.pool, sessions.registry
        self._quotas, self._clock, self._drain = sessions.quotas, sessions.clock, sessions.drain

    def allow_clear(self, peer: Peer, body: ClearCache) -> None:
        """An operator of a tenant clears what is that tenant's; one of the server's own user clears everything. Raises
        ApiError: forbidden, unknown_namespace."""
        if peer.tenant == OWN_TENANT:
            return
        tenant = body.tenant if body.namespace is None else self._namespace(body.namespace).tenant
        if tenant != peer.tenant:
            raise ApiError(
                "forbidden", "an operator of a tenant clears what is that tenant's",
                found="all tenants" if tenant is None else f"tenant {tenant!r}", wanted=f"tenant {peer.tenant!r}",
            )

    async def clear(self, body: ClearCache) -> Cleared:
        """Raises ApiError: unknown_namespace, invalid_body."""
        if body.namespace is not None and body.tenant is not None:
            raise ApiError("invalid_body", "a namespace has its tenant", found="$.tenant", wanted="$.namespace alone")
        space = None if body.namespace is None else self._namespace(body.namespace)
        found, answers = await self._clears.clear(space, body.tenant)
        self._forget_count()
        return Cleared(chunks=found.chunks, namespaces=found.namespaces, pending_tiers=answers.pending)

    async def delete(self, body: DeleteChunks) -> Deleted:
        """Raises ApiError: unknown_namespace, invalid_body."""
        space = self._namespace(body.namespace)
        chunks, answers = await self._clears.delete(space, key_bytes(body.keys), KEYS_SLICE * KEY_BYTES)
        self._forget_count()
        return Deleted(
            chunks=chunks, tier_chunks=answers.chunks, pending_tiers=answers.pending, is_cleared=answers.is_cleared
        )

    def allow_tiers(self, peer: Peer, _: object = None) -> None:
        """Lower tiers have chunks of the server's own user alone. Raises ApiError(forbidden)."""
        if peer.tenant != OWN_TENANT:
            raise ApiError(
                "forbidden", "an operator of a tenant has no chunks in lower tiers", found=f"tenant {peer.tenant!r}",
                wanted="an operator of the server's own user",
            )

    async def tiers(self) -> TierList:
        contents = self._clears.contents
        return TierList(tiers=[
            msgspec.structs.replace(one, pending_orders=self._clears.pending_orders(one.tier))
            for one in await contents.of(contents.tiers)
        ])

    async def empty_tier(self, body: EmptyTier) -> TierEmptied:
        """Raises ApiError(bad_argument)."""
        contents = self._clears.contents
        if body.tier not in contents.tiers:
            raise ApiError(
                "bad_argument", "the server has no such tier", found=body.tier,
                wanted=f"one of {', '.join(contents.tiers)}" if contents.tiers else "a server with lower tiers",
            )
        (done,) = await contents.of([body.tier], body.namespaces)
        left = sum(one.objects for one in done.namespaces if one.namespace in body.namespaces)
        return TierEmptied(objects=done.removed, left_objects=left, error=done.error)

    async def acknowledge(self, _: Acknowledge) -> Acknowledged:
        """Engines that died and chunks that were damaged so far are no findings of the verdict any more."""
        return Acknowledged(troubles=self._troubles.acknowledge())

    async def evict(self, body: EvictChunks) -> Evicted:
        """Raises ApiError(bad_argument)."""
        table, wanted = self._pool.table, body.free_bytes
        if wanted > self._pool.limit_bytes:
            raise ApiError(
                "bad_argument", "more than the pool may have", found=wanted, wanted=f"at most {self._pool.limit_bytes}"
            )
        missing = wanted - self._pool.free_bytes  # not raised by stores meanwhile, or the call might never end
        chunks = freed = evictions = 0
        while freed < missing:
            before = table.free_bytes()
            gone = table.evict(before + missing - freed, 1, by_operator=True)  # one by one: hardly more than needed
            if not gone:
                break
            chunks, freed = chunks + gone, freed + table.free_bytes() - before
            evictions += 1
            if evictions % EVICT_SLICE == 0:
                await next_slice()
        self._forget_count()
        return Evicted(chunks=chunks, bytes=freed, free_bytes=self._pool.free_bytes)

    async def pin(self, body: PinChunks) -> Pinned:
        """Raises ApiError: unknown_namespace, invalid_body, bad_argument."""
        space, keys = self._namespace(body.namespace), key_bytes(body.keys)
        if body.name:
            self._labels.require_name(space, body.name)
        # A duration that rounds to nothing still pins: only 0 itself unpins.
        until_ms = self._clock.now_ms() + max(1, round(body.duration_s * 1000)) if body.duration_s else 0
        chunks, last = 0, None
        for some in _slices(keys):
            chunks += self._pool.table.pin(space.table_id, some, until_ms)
            if not body.duration_s:
                self._labels.unname(space, some)
            elif body.name:
                last = self._labels.last_stored(space, some) or last
            await next_slice()
        if last is not None and body.name:
            self._labels.name(space, last, body.name)
        self._forget_count()
        return Pinned(chunks=chunks)

    async def drain(self, body: DrainServer) -> Drained:
        """From now on, or no longer, the server gives out nothing new."""
        self._drain.is_asked_for = body.is_drained
        stats = self._pool.table.stats()
        return Drained(
            is_drained=self._drain.refuses_new, leases=stats["leases"], reservations=stats["reservations"]
        )

    async def configure(self, body: PatchConfig) -> Config:
        """All changes take effect, or none. Raises ApiError: bad_argument, no_memory."""
        changes = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
        asked: dict[str, AskedQuota | None] = changes.pop("tenants", {})
        quotas = {tenant: quota and self._quota(quota) for tenant, quota in asked.items()}
        self._quotas.check_count(quotas)
        await self.change_limits(changes, "call")
        for tenant, quota in quotas.items():
            if quota is None:
                self._quotas.put_back(tenant)
            else:
                self._quotas.put(tenant, quota)
        await next_slice()
        if quotas:
            await self._quotas.keep()
        return await self.config()

    def _quota(self, asked: AskedQuota) -> Quota:
        """Raises ApiError(bad_argument)."""
        amounts, text = msgspec.structs.asdict(asked), asked.bytes
        if isinstance(text, str):
            try:
                amounts["bytes"] = parse_size(text, lambda: Whole("pool_bytes", self._pool.limits.pool_bytes))
            except SettingsError as error:
                wanted = "a size like 8GiB, or a share above 0% and up to 100%"
                raise ApiError("bad_argument", "bytes of a quota", found=text, wanted=wanted) from error
        try:
            return msgspec.convert(amounts, Quota)
        except msgspec.ValidationError as error:
            raise ApiError("bad_argument", "bytes of a quota", found=text, wanted="less than 2^60") from error

    async def change_limits(self, changes: dict[str, object], source: Literal["call", "settings"]) -> None:
        """Makes all changes, or none. Raises ApiError: bad_argument, no_memory."""
        before = msgspec.structs.asdict(self._pool.limits)
        await self._pool.change_limits(changes)
        after = msgspec.structs.asdict(self._pool.limits)
        if after["log_level"] != before["log_level"]:
            set_level(self._pool.limits.log_level)
        if changed := {name: [was, after[name]] for name, was in before.items() if after[name] != was}:
            self._journal.publish(e.LimitsChanged(changed=changed, source=source))

    async def config(self) -> Config:
        return Config(
            limits=self._pool.limits,
            settings=msgspec.structs.asdict(self._settings),
            retiring=self._pool.retiring,
            tenants=await self._quotas.views(),
        )

    def _namespace(self, digest: str) -> NamespaceRecord:
        return self._registry.namespace(key_bytes([digest]), sees=lambda tenant: True)


def _slices(keys: bytes) -> Iterator[bytes]:
    step = KEYS_SLICE * KEY_BYTES
    for start in range(0, len(keys), step):
        yield keys[start : start + step]
