"""What if the pool were larger, or smaller: the hit shares that simulated pools of other sizes have with the lookups of
this server (csrc/curve/). All of it is bounded, and costs a lookup a few microseconds.

Used from the event loop only.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import msgspec

from kvdock._core import POOL_FACTORS, SLOT_ALIGN, Curve as Simulated, CurveSums, TableError
from kvdock.api.access.peer import Peer
from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.record.counters import Counted
from kvdock.api.turns import Slices, next_slice
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.reports import Curve, CurvePoint, NamespaceCurve, SpaceCurve, TenantCurve

MOST_SHARE = 1.0
"""The share of chunks that is sampled at first: while there are few chunks, nothing has to be estimated."""
MOST_ENTRIES = 16384
"""Chunks in all bounded simulated pools together; as many more in the one without bound."""
MOST_WORK = 13.0
"""How much a lookup may cost on average, in chunks stored in a simulated pool, which take about 0.2 µs each."""
HALF_LIFE_S = 6 * 3600.0
AGE_S = 600.0
"""How often older lookups are made to count for less."""
MOST_NAMESPACES = 256
ENOUGH_SAMPLES = 500
"""How many sampled chunks a curve needs: with fewer, it shows the samples rather than the pool."""
NORMAL_95 = 1.96
"""Standard deviations of a normal distribution that have 95 % of it on both sides."""
ENOUGH_ROOM = 16
"""The capacity of a simulated pool in sampled chunks, at least: one prompt would fill a smaller one."""
KEEP_S: Final = 60.0
"""How often the curve is kept for the next server of the pool."""
log = logging.getLogger("kvdock.api")


class _Space(msgspec.Struct, frozen=True):
    """A namespace, whatever the weights. `base`: the digest of its manifest and tenant. `number`: in the simulation."""

    base: bytes
    tenant: str
    model: str
    chunk_tokens: int
    chunk_bytes: int
    number: int


class _Kept(msgspec.Struct):
    """`at_boot_s`: when, by boot_s. `spaces`: the least recently used comes first."""

    at_boot_s: float
    eviction: str
    pool_bytes: int
    covers_s: float
    spaces: list[_Space]
    simulated: bytes


_NO_BYTES = msgspec.msgpack.encode(b"")


class Curves:
    """Counts the chunks that are looked up and stored, and computes how many lookups would find in pools of other
    sizes."""

    def __init__(
        self, pool: Pool, now_s: Callable[[], float], boot_s: Callable[[], float], kept: KeptObject | None = None
    ) -> None:
        """`boot_s`: the time since this machine was started. `kept`: the object that keeps the curve for the next
        server of the pool; None: it ends with this one."""
        self._pool, self._now_s, self._boot_s, self._kept = pool, now_s, boot_s, kept
        self._salt = int.from_bytes(hashlib.blake2b(pool.secret, digest_size=8, person=b"kvdock curve").digest())
        self._begin(pool.limits)
        self._kept_s = now_s()
        content = kept.read() if kept is not None else b""
        if content:
            try:
                self._take_over(msgspec.msgpack.decode(content, type=_Kept))
            except (msgspec.MsgspecError, TableError) as error:
                log.warning("the curve of hit shares begins anew: %s", error)

    def _begin(self, limits: Limits) -> None:
        self._limits = limits
        self._began_s = self._aged_s = self._now_s()
        self._spaces: OrderedDict[bytes, _Space] = OrderedDict()
        """By `base`; the least recently used comes first."""
        self._simulated = self._simulation(b"")

    def _simulation(self, kept: bytes) -> Simulated:
        return Simulated(
            self._pool.policy_of(self._limits), self._limits.pool_bytes, salt=self._salt, most_share=MOST_SHARE,
            most_entries=MOST_ENTRIES, most_work=MOST_WORK, kept=kept,
        )

    # ---------------------------------------------------------------- kept with the pool

    async def keep_when_due(self, catch_up: Callable[[], Awaitable[None]]) -> None:
        """In a turn of its own: it makes at most a megabyte. `catch_up`: shows the curve what waits for it."""
        if self._now_s() - self._kept_s >= KEEP_S and self._kept is not None:
            await catch_up()
            await next_slice()
            await self._kept.write_aside(*self._content())

    def keep(self) -> None:
        """Writes the curve for the next server of the pool."""
        if self._kept is not None:
            self._kept.write(*self._content())

    def _content(self) -> tuple[bytes, bytes]:
        """A _Kept in two pieces, so that the megabyte at its end is not copied."""
        self._kept_s = self._now_s()
        self._follow_limits()
        simulated = self._simulated.keep()
        head = msgspec.msgpack.encode(_Kept(
            at_boot_s=self._boot_s(), eviction=self._pool.policy_of(self._limits), pool_bytes=self._limits.pool_bytes,
            covers_s=self._now_s() - self._began_s, spaces=list(self._spaces.values()), simulated=b"",
        ))
        return head.removesuffix(_NO_BYTES) + b"\xc6" + len(simulated).to_bytes(4, "big"), simulated

    def _take_over(self, kept: _Kept) -> None:
        """Leaves the curve as it is if the pool has another size or policy now. Raises TableError."""
        if (kept.pool_bytes, kept.eviction) != (self._limits.pool_bytes, self._pool.policy_of(self._limits)):
            return
        simulated = self._simulation(kept.simulated)
        for space in kept.spaces:
            simulated.of_space(space.number)  # there is such a number
        self._simulated = simulated
        self._spaces.update((space.base, space) for space in kept.spaces)
        away_s = max(0.0, self._boot_s() - kept.at_boot_s)
        self._began_s -= max(0.0, kept.covers_s) + away_s
        self._aged_s -= away_s

    # ---------------------------------------------------------------- counting

    def looked_up(self, namespace: NamespaceRecord, keys: bytes, hit_tokens: int) -> None:
        """Not to be called for a repeat of the same lookup. Missing chunks are assumed to be stored afterwards."""
        number = self._number(namespace)
        self._simulated.looked_up(number, keys, hit_tokens // namespace.manifest.chunk_tokens)

    def stored(self, namespace: NamespaceRecord, keys: bytes) -> None:
        number = self._number(namespace)
        self._simulated.stored(number, keys)

    def go_on(self) -> bool:
        """Shows what was last looked up or stored to one more simulated pool; whoever reads shows it to all of them.
        Returns whether there are more."""
        return self._simulated.go_on()

    def _follow_limits(self) -> None:
        steps, rest_s = divmod(self._now_s() - self._aged_s, AGE_S)
        if steps:
            self._simulated.age(0.5 ** min(1000.0, steps * AGE_S / HALF_LIFE_S))
            self._aged_s = self._now_s() - rest_s
        limits = self._pool.limits
        if limits is self._limits:
            return
        if (limits.pool_bytes, limits.eviction) != (self._limits.pool_bytes, self._limits.eviction):
            self._begin(limits)
        self._limits = limits

    def _number(self, namespace: NamespaceRecord) -> int:
        self._follow_limits()
        space = self._spaces.get(namespace.base)
        if space is None:
            space = self._add(namespace)
        self._spaces.move_to_end(namespace.base)
        return space.number

    def _add(self, namespace: NamespaceRecord) -> _Space:
        number = len(self._spaces)
        if number == MOST_NAMESPACES:
            _, longest_ago = self._spaces.popitem(last=False)
            number = longest_ago.number
        manifest = namespace.manifest
        slots = sum(-(-group.slot_bytes // SLOT_ALIGN) for group in manifest.groups) * manifest.writers
        self._simulated.set_space(number, manifest.chunk_tokens, slots * SLOT_ALIGN)
        space = self._spaces[namespace.base] = _Space(
            namespace.base, namespace.tenant, namespace.model, manifest.chunk_tokens, namespace.chunk_bytes, number
        )
        return space

    # ---------------------------------------------------------------- reading

    @property
    def distances(self) -> Counted:
        """For sampled chunks, since the curve began: the bytes of the different chunks that were used between two uses,
        the chunk itself included. A pool of that size that evicts as LRU does would still have had it."""
        return Counted(*self._simulated.distances)

    async def total(self, peer: Peer) -> SpaceCurve:
        """For all that the caller sees, in slices; an administrator's includes namespaces that are no longer counted
        apart."""
        self._follow_limits()
        return self._total(peer, [] if peer.may("admin") else await self._seen(peer, Slices()))

    def _total(self, peer: Peer, seen: list[tuple[_Space, CurveSums]]) -> SpaceCurve:
        return SpaceCurve(**self._fields(
            self._simulated.all if peer.may("admin") else _sum(one for _, one in seen)
        ))

    async def _seen(self, peer: Peer, slices: Slices) -> list[tuple[_Space, CurveSums]]:
        seen = list[tuple[_Space, CurveSums]]()
        for space in list(self._spaces.values()):
            # Its number may have become another one's meanwhile.
            if peer.sees(space.tenant) and self._spaces.get(space.base) is space:
                seen.append((space, self._simulated.of_space(space.number)))
            await slices.give_turn()
        return seen

    async def view(self, peer: Peer) -> Curve:
        """For the tenants that the caller sees, in slices."""
        self._follow_limits()
        slices = Slices()
        sums = await self._seen(peer, slices)
        total = self._total(peer, sums)
        by_tenant: dict[str, CurveSums] = {}
        for space, one in sums:
            of_tenant = by_tenant.setdefault(space.tenant, CurveSums())
            of_tenant += one
            await slices.give_turn()
        tenants, namespaces = list[TenantCurve](), list[NamespaceCurve]()
        for name, of_tenant in sorted(by_tenant.items()):
            tenants.append(TenantCurve(tenant=name, **self._fields(of_tenant)))
            await slices.give_turn()
        for space, one in reversed(sums):
            namespaces.append(NamespaceCurve(
                namespace=space.base.hex(), tenant=space.tenant, model=space.model,
                chunk_tokens=space.chunk_tokens, chunk_bytes=space.chunk_bytes, **self._fields(one),
            ))
            await slices.give_turn()
        return Curve(
            eviction=self._limits.eviction,
            pool_bytes=self._limits.pool_bytes,
            covers_s=self._now_s() - self._began_s,
            half_life_s=HALF_LIFE_S,
            sampled_share=self._simulated.share,
            total=total,
            tenants=tenants,
            namespaces=namespaces,
        )

    def _fields(self, sums: CurveSums) -> dict[str, Any]:
        return {
            "lookups": sums.lookups,
            "tokens": sums.asked,
            "sampled_chunks": sums.samples,
            "hit_share": 1 - sums.missed / sums.asked if sums.asked else None,
            "points": self._points(sums) if sums.samples >= ENOUGH_SAMPLES else [],
        }

    def _points(self, sums: CurveSums) -> list[CurvePoint]:
        """A pool that is larger finds no less, and none finds more than the one without bound. Samples show otherwise
        now and then, by chance: then a share takes the value of its neighbour."""
        ever = sums.found_ever or 0.0
        points, least = [], 0.0
        for factor, share, room in zip(POOL_FACTORS, sums.found_at, self._simulated.capacities, strict=True):
            is_known = room is None or room >= ENOUGH_ROOM
            if is_known:
                least = share = min(max(share, least), ever)
            points.append(CurvePoint(
                factor=factor, pool_bytes=int(factor * self._limits.pool_bytes), hit_share=share if is_known else None,
                error=self._error(share, sums.samples) if is_known else 0.0,
            ))
        return [
            *points,
            CurvePoint(factor=None, pool_bytes=None, hit_share=ever, error=self._error(ever, sums.samples)),
        ]

    def _error(self, share: float, samples: int) -> float:
        """Half the width of a share's 95 % interval (Wald) for as many samples; 0 where all chunks are sampled."""
        if self._simulated.share >= 1.0:
            return 0.0
        return NORMAL_95 * math.sqrt(max(share * (1 - share), 1 / samples) / samples)


def _sum(ones: Iterable[CurveSums]) -> CurveSums:
    total = CurveSums()
    for one in ones:
        total += one
    return total
