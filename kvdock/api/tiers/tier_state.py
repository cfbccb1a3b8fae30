"""What the server knows of its tiers: their state as the mover last reported it, the chunks that they have, and which
chunks the pool evicts soon and no tier has.

Most chunks are written to a tier soon after they are published. Some are not: the tier was off or too slow then, or no
mover ran. Those are named to the mover while there is still time to write them.

Used from the event loop alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kvdock._core import KeyFilter
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.protocol import mover_schemas as m
from kvdock.protocol.mover_schemas import worth_chunks
from kvdock.protocol.reports import TierView
from kvdock.protocol.wire_types import KEY_BYTES

MOST_KNOWN = 1 << 22
"""About the most chunks known to be in tiers, over all namespaces. Beyond it, tiers are asked."""
MOVER_STARTS = "the mover is being started"
FORECAST_INTERVAL_S = 0.5
NEAR_SHARE = 0.125
"""While more of the pool than this share is free, nothing is evicted soon."""
SOON_SHARE = 0.0625
"""How much of the pool counts as evicted soon, and is written to tiers before the rest."""
MOST_SOON = 4096
"""Chunks that count as such, at most."""


class TierState:
    """`now_s`: a monotonic clock, in seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._reported_s = now_s()
        self.reports: list[TierView] = []
        """As the mover last reported them."""
        self._known = KeyFilter(salt=secrets.randbits(64), most_keys=MOST_KNOWN)
        """What tiers have, by the first KNOWN_BYTES of namespaces and keys."""
        self._is_full = False
        self._lists_all = False

    def follow(self, report: m.MoverReport) -> None:
        if report.tiers is not None:
            self.reports, self._reported_s = report.tiers, self._now_s()
        for known in report.known:
            namespace = bytes.fromhex(known.namespace)
            if not known.is_there:
                self._known.remove(namespace, known.keys, m.KNOWN_BYTES)
            elif not self._known.add(namespace, known.keys, m.KNOWN_BYTES):
                self._is_full = True
        self._lists_all = report.lists_all

    def mover_restarted(self) -> None:
        """A new mover process reports everything anew."""
        self.reports = [TierView(name=report.name, state="off", why=MOVER_STARTS) for report in self.reports]
        self._known = KeyFilter(salt=secrets.randbits(64), most_keys=MOST_KNOWN)
        self._is_full = self._lists_all = False

    def forget(self, space: NamespaceRecord, keys: bytes) -> None:
        """These chunks were deleted, so no tier has them."""
        self._known.remove(space.digest, keys, KEY_BYTES)

    def absent(self, space: NamespaceRecord, keys: bytes) -> bytes:
        """Those of `keys` that no tier is known to have. About one in a thousand others is left out, too."""
        return self._known.missing(space.digest, keys, KEY_BYTES)

    @property
    def silent_s(self) -> float:
        """Seconds since the mover last reported the state of its tiers."""
        return self._now_s() - self._reported_s

    @property
    def is_any_open(self) -> bool:
        return any(report.state != "off" for report in self.reports)

    def may_have(self, space: NamespaceRecord, key: bytes) -> bool:
        """False: certainly no tier has the chunk."""
        return not self._lists_all or self._is_full or not self.absent(space, key)

    def may_be_worth(self, space: NamespaceRecord, chunks: int, wait_s: float, tokens_per_s: float) -> bool:
        """False: certainly no tier loads any of `chunks` chunks sooner than an engine computes them, at the speeds that
        the mover reported last. Where one may, the mover decides (kvdock/protocol/mover_schemas.py says why)."""
        return any(
            worth_chunks(
                chunks, chunk_bytes=space.chunk_bytes, chunk_tokens=space.manifest.chunk_tokens,
                latency_s=report.load_latency_s, bytes_per_s=report.load_bytes_per_s, wait_s=wait_s,
                tokens_per_s=tokens_per_s,
            )
            for report in self.reports if report.state != "off"
        )


class EvictionForecast:
    """`now_s`: a monotonic clock, in seconds."""

    def __init__(self, pool: Pool, registry: Registry, now_s: Callable[[], float]) -> None:
        self._pool, self._registry, self._now_s = pool, registry, now_s
        self._next_s = now_s()

    def evicting_soon(self, absent: Callable[[NamespaceRecord, bytes], bytes]) -> list[m.EvictingSoon]:
        """The chunks that the pool evicts next and no tier is known to have; empty while enough of the pool is free,
        and when the last forecast is more recent than FORECAST_INTERVAL_S. `absent`: as in TierState."""
        if (now_s := self._now_s()) < self._next_s:
            return []
        self._next_s = now_s + FORECAST_INTERVAL_S
        pool_bytes = self._pool.limit_bytes
        if self._pool.free_bytes > NEAR_SHARE * pool_bytes:
            return []
        spaces = {space.table_id: space for space in self._registry.namespaces() if not space.tenant}
        found = []
        for table_id, keys in self._pool.table.next_out(int(SOON_SHARE * pool_bytes), MOST_SOON).items():
            if (space := spaces.get(table_id)) is None:
                continue
            if missing := absent(space, keys):
                found.append(m.EvictingSoon(space.digest.hex(), missing))
        return found
