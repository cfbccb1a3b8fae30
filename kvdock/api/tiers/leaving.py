"""What the pool is about to evict and no tier has: the mover is told of it while there is still time to write it.

Most chunks are written soon after they were published. These were not: the tier was off or too slow then, or there was
no mover.

Used from the event loop alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from kvdock._core import Table
from kvdock.api.pool.registry import Registry
from kvdock.protocol import mover_schemas as t
from kvdock.protocol.wire_types import KEY_BYTES

EVERY_S = 0.5
NEAR_SHARE = 0.125
"""Once less of the pool is free than this share, something goes soon."""
SOON_SHARE = 0.0625
"""So much of the pool is looked at: what a tier writes in about a second."""


class Leaving:
    """`room`: the pool's bytes that nothing is in, and all of them."""

    def __init__(
        self, table: Table, registry: Registry, room: Callable[[], tuple[int, int]], now_s: Callable[[], float]
    ) -> None:
        self._table, self._registry, self._room, self._now_s = table, registry, room, now_s
        self._next_s = now_s()

    def news(self, known: Mapping[bytes, Container[bytes]]) -> list[t.Leaving]:
        """`known`: the beginnings of the keys that tiers have, by namespace."""
        if (now_s := self._now_s()) < self._next_s:
            return []
        self._next_s = now_s + EVERY_S
        free, pool_bytes = self._room()
        if free > NEAR_SHARE * pool_bytes:
            return []
        spaces = {space.table_id: space for space in self._registry.namespaces() if not space.tenant}
        found = []
        for table_id, keys in self._table.next_out(int(SOON_SHARE * pool_bytes)).items():
            if (space := spaces.get(table_id)) is None:
                continue
            has = known.get(space.digest, ())
            lacked = [
                keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)
                if keys[at : at + t.KNOWN_BYTES] not in has
            ]
            if lacked:
                found.append(t.Leaving(space.digest.hex(), b"".join(lacked)))
        return found
