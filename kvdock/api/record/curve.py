"""What if the pool were larger, or smaller: the hit shares that simulated pools of other sizes have with the lookups of
this server (csrc/curve/). All of it is bounded, and costs a lookup a few microseconds.

Used from the event loop only.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvdock._core import POOL_FACTORS, SLOT_ALIGN, Curve as Simulated, CurveSums
from kvdock.api.access.peer import Peer
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.record.counted import Counted
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


@dataclass(slots=True)
class _Space:
    record: NamespaceRecord
    number: int


class Curves:
    """Counts the chunks that are looked up and stored, and computes how many lookups would find in pools of other
    sizes."""

    def __init__(self, pool: Pool, now_s: Callable[[], float]) -> None:
        self._pool, self._now_s = pool, now_s
        self._salt = int.from_bytes(hashlib.blake2b(pool.secret, digest_size=8, person=b"kvdock curve").digest())
        self._begin(pool.limits)

    def _begin(self, limits: Limits) -> None:
        self._limits = limits
        self._began_s = self._aged_s = self._now_s()
        self._spaces: OrderedDict[bytes, _Space] = OrderedDict()
        """By the digest of the namespace's manifest and tenant, whatever the weights; the least recently used
        comes first."""
        self._simulated = Simulated(
            limits.eviction, limits.pool_bytes, salt=self._salt, most_share=MOST_SHARE, most_entries=MOST_ENTRIES,
            most_work=MOST_WORK,
        )

    # ---------------------------------------------------------------- counting

    def looked_up(self, namespace: NamespaceRecord, keys: bytes, hit_tokens: int) -> None:
        """Not to be called for a repeat of the same lookup. Missing chunks are assumed to be stored afterwards."""
        number = self._number(namespace)
        self._simulated.looked_up(number, keys, hit_tokens // namespace.manifest.chunk_tokens)

    def stored(self, namespace: NamespaceRecord, keys: bytes) -> None:
        number = self._number(namespace)
        self._simulated.stored(number, keys)

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
        slots = sum(-(-group.part_bytes // SLOT_ALIGN) for group in manifest.groups) * manifest.writers
        self._simulated.set_space(number, manifest.chunk_tokens, slots * SLOT_ALIGN)
        space = self._spaces[namespace.base] = _Space(namespace, number)
        return space

    # ---------------------------------------------------------------- reading

    @property
    def distances(self) -> Counted:
        """Of sampled chunks, since the curve began: the bytes of the different chunks that were used between two uses,
        the chunk itself included. A pool of that size that evicts as LRU does would still have had it."""
        return Counted(*self._simulated.distances)


    def view(self, peer: Peer) -> Curve:
        """For the tenants that the caller sees; an administrator's totals include namespaces that are no
        longer counted apart."""
        self._follow_limits()
        sums = [
            (space.record, self._simulated.of_space(space.number)) for space in self._spaces.values()
            if peer.sees(space.record.tenant)
        ]
        by_tenant: dict[str, list[CurveSums]] = {}
        for record, one in sums:
            by_tenant.setdefault(record.tenant, []).append(one)
        total = self._simulated.all if peer.may("admin") else _sum(one for _, one in sums)
        return Curve(
            eviction=self._limits.eviction,
            pool_bytes=self._limits.pool_bytes,
            covers_s=self._now_s() - self._began_s,
            half_life_s=HALF_LIFE_S,
            sampled_share=self._simulated.share,
            total=SpaceCurve(**self._fields(total)),
            tenants=[TenantCurve(tenant=name, **self._fields(_sum(ones))) for name, ones in sorted(by_tenant.items())],
            namespaces=[
                NamespaceCurve(
                    namespace=record.base.hex(), tenant=record.tenant, model=record.manifest.model,
                    chunk_tokens=record.manifest.chunk_tokens, chunk_bytes=record.chunk_bytes, **self._fields(one),
                )
                for record, one in reversed(sums)
            ],
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
