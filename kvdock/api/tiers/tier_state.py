"""What the server knows of its tiers: their state as the mover last reported it, the chunks that they have, and which
chunks the pool evicts soon and no tier has.

Most chunks are written to a tier soon after they are published. Some are not: the tier was off or too slow then, or no
mover ran. Those are named to the mover while there is still time to write them.

Used from the event loop alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping

from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.protocol import mover_schemas as m
from kvdock.protocol.mover_schemas import worth_chunks
from kvdock.protocol.reports import TierView
from kvdock.protocol.wire_types import KEY_BYTES

MOST_KNOWN = 1 << 21
"""The most chunks known to be in tiers, over all namespaces. Beyond it, tiers are asked."""
MOST_KNOWN_NAMESPACES = 4096
"""Each set of weights has a namespace of its own. Beyond this many, the one that was reported on longest ago is
forgotten, and tiers are asked about it."""
MOVER_STARTS = "the mover is being started"
FORECAST_INTERVAL_S = 0.5
NEAR_SHARE = 0.125
"""While more of the pool than this share is free, nothing is evicted soon."""
SOON_SHARE = 0.0625
"""How much of the pool counts as evicted soon, and is written to tiers before the rest."""


class TierState:
    """`now_s`: a monotonic clock, in seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._reported_s = now_s()
        self.reports: list[TierView] = []
        """As the mover last reported them."""
        self._known: OrderedDict[bytes, set[bytes]] = OrderedDict()
        """The first KNOWN_BYTES of the keys that tiers have, by namespace. The namespace that was reported on longest
        ago comes first."""
        self._has_forgotten = False
        self._lists_all = False

    def follow(self, report: m.MoverReport) -> None:
        if report.tiers is not None:
            self.reports, self._reported_s = report.tiers, self._now_s()
        for known in report.known:
            namespace = bytes.fromhex(known.namespace)
            has = self._known.setdefault(namespace, set())
            (has.update if known.is_there else has.difference_update)(_beginnings(known.keys, m.KNOWN_BYTES))
            self._known.move_to_end(namespace)
        while len(self._known) > MOST_KNOWN_NAMESPACES:
            self._known.popitem(last=False)
            self._has_forgotten = True
        self._lists_all = report.lists_all

    def mover_restarted(self) -> None:
        """A new mover process reports everything anew."""
        self.reports = [TierView(name=report.name, state="off", why=MOVER_STARTS) for report in self.reports]
        self._known.clear()
        self._has_forgotten = self._lists_all = False

    def forget(self, space: NamespaceRecord, keys: bytes | None) -> None:
        """These chunks were cleared or deleted, so no tier has them. None: all of the namespace."""
        if keys is None:
            self._known.pop(space.digest, None)
        elif (known := self._known.get(space.digest)) is not None:
            known.difference_update(_beginnings(keys, KEY_BYTES))

    @property
    def known(self) -> Mapping[bytes, Container[bytes]]:
        """The first KNOWN_BYTES of the keys that tiers have, by namespace."""
        return self._known

    @property
    def silent_s(self) -> float:
        """Seconds since the mover last reported the state of its tiers."""
        return self._now_s() - self._reported_s

    @property
    def is_any_open(self) -> bool:
        return any(report.state == "open" for report in self.reports)

    def may_have(self, space: NamespaceRecord, key: bytes) -> bool:
        """False: certainly no tier has the chunk."""
        if not self._lists_all or sum(map(len, self._known.values())) > MOST_KNOWN:
            return True
        known = self._known.get(space.digest)
        if known is None:
            return self._has_forgotten
        return key[: m.KNOWN_BYTES] in known

    def may_be_worth(self, space: NamespaceRecord, chunks: int, wait_s: float, tokens_per_s: float) -> bool:
        """False: certainly no tier loads any of `chunks` chunks sooner than an engine computes them, at the speeds that
        the mover reported last. Where one may, the mover decides (kvdock/protocol/mover_schemas.py says why)."""
        return any(
            worth_chunks(
                chunks, chunk_bytes=space.chunk_bytes, chunk_tokens=space.manifest.chunk_tokens,
                latency_s=report.load_latency_s, bytes_per_s=report.load_bytes_per_s, wait_s=wait_s,
                tokens_per_s=tokens_per_s,
            )
            for report in self.reports if report.state == "open"
        )


class EvictionForecast:
    """`now_s`: a monotonic clock, in seconds."""

    def __init__(self, pool: Pool, registry: Registry, now_s: Callable[[], float]) -> None:
        self._pool, self._registry, self._now_s = pool, registry, now_s
        self._next_s = now_s()

    def evicting_soon(self, known: Mapping[bytes, Container[bytes]]) -> list[m.EvictingSoon]:
        """The chunks that the pool evicts next and no tier is known to have; empty while enough of the pool is free,
        and when the last forecast is more recent than FORECAST_INTERVAL_S. `known`: as in TierState."""
        if (now_s := self._now_s()) < self._next_s:
            return []
        self._next_s = now_s + FORECAST_INTERVAL_S
        pool_bytes = self._pool.limit_bytes
        if self._pool.free_bytes > NEAR_SHARE * pool_bytes:
            return []
        spaces = {space.table_id: space for space in self._registry.namespaces() if not space.tenant}
        found = []
        for table_id, keys in self._pool.table.next_out(int(SOON_SHARE * pool_bytes)).items():
            if (space := spaces.get(table_id)) is None:
                continue
            has = known.get(space.digest, ())
            missing = [key for key in m.split_keys(keys) if key[: m.KNOWN_BYTES] not in has]
            if missing:
                found.append(m.EvictingSoon(space.digest.hex(), b"".join(missing)))
        return found


def _beginnings(keys: bytes, step: int) -> Iterator[bytes]:
    """The first KNOWN_BYTES of each key. `step`: how many bytes of each key `keys` has."""
    return (keys[at : at + m.KNOWN_BYTES] for at in range(0, len(keys), step))
