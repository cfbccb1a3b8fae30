"""Engines' reports of damaged chunks, judged by the bytes in shared memory.

No report is believed: the server hashes the reported chunk itself. A chunk with a wrong part is taken out of use, as a
whole and at once. A chunk whose bytes are right stays: then what is damaged is the reporter's own memory or its copies.
The check is done in a thread, a chunk at a time, for one report after another.
Invariant: a chunk is judged only while its lease holds its bytes, so that no later chunk is taken for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import SessionRecord
from kvdock.api.pool.segments import LeasedPart
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import KEY_BYTES

WINDOW_S: Final = 3600.0
SESSION_MOST: Final = 16
"""So many chunks may a session report in WINDOW_S whose bytes are right. A bad DIMM has some six errors an hour: 8 % of
DIMMs have all errors, which are nearly 4,000 a year for each of all DIMMs (Schroeder, Pinheiro and Weber, "DRAM Errors
in the Wild", 2009). Who reports more has worse than a bad DIMM, or lies; and each report costs the hash of a chunk."""
CALLER_MOST: Final = 16 * SESSION_MOST
"""The same for all sessions of one access token or user: those of 16 engines, or of one that attaches anew 16 times."""
CALL_S: Final = 1.0
"""A call judges chunks for that long, half of the time that connectors wait. A later report may name the others."""
Key = tuple[str, ...]


@dataclass
class Judged:
    space: int = 0
    """The number of the damaged chunks' namespace."""
    keys: bytes = b""
    """Their keys."""
    whole: int = 0
    """How many chunks have the bytes that were stored."""

    @property
    def damaged(self) -> int:
        return len(self.keys) // KEY_BYTES


class DamageReports:
    """`now_s`: a clock that nobody sets. `on_damaged` gets the number of a namespace, and keys of its chunks that were
    taken out of use."""

    def __init__(self, pool: Pool, now_s: Callable[[], float], on_damaged: Callable[[int, bytes], None]) -> None:
        self._pool, self._table, self._now_s, self._on_damaged = pool, pool.table, now_s, on_damaged
        self._one_at_a_time = asyncio.Lock()
        self._whole: dict[Key, deque[float]] = {}
        """When chunks were reported whose bytes were right, within the last WINDOW_S."""

    async def judge(self, session: SessionRecord, caller: str, lease: int, chunks: Sequence[int]) -> Judged:
        """Takes the damaged ones of `chunks`, which the lease has, out of use. `caller`: Peer.name. A call that was
        accepted tells what it found even if it uses up what the session may report.

        Raises ApiError(reports_refused) if the session or its caller has no such report left; TableError.
        """
        found, until_s = Judged(), self._now_s() + CALL_S
        keys: tuple[tuple[Key, int], ...] = (
            (("session", session.id), SESSION_MOST), (("caller", session.tenant, caller), CALLER_MOST),
        )
        self._require(keys)
        try:
            for chunk in dict.fromkeys(chunks):
                async with self._one_at_a_time:
                    if self._used_up(keys) or self._now_s() >= until_s:
                        break
                    await self._judge_one(session, lease, chunk, found, [key for key, _ in keys])
        finally:
            if found.keys:
                self._on_damaged(found.space, found.keys)
        return found

    def is_refused(self, session: SessionRecord) -> bool:
        """Whether the session has reported as many chunks as it may."""
        return self._count(("session", session.id)) >= SESSION_MOST

    async def _judge_one(
        self, session: SessionRecord, lease: int, chunk: int, found: Judged, keys: Sequence[Key]
    ) -> None:
        parts = self._table.leased_parts(session.table_id, lease, [chunk])
        if not parts:
            return  # it is out of use already
        if await self._pool.are_whole([LeasedPart(*part) for _, *part in parts]):
            found.whole += 1
            self._add(keys)
            return
        # The table takes only what the lease still holds, and so has held all the time.
        space, damaged = self._table.mismatch(session.table_id, lease, [chunk])
        if damaged:
            found.space, found.keys = space, found.keys + damaged

    def _require(self, keys: Sequence[tuple[Key, int]]) -> None:
        """Raises ApiError(reports_refused)."""
        for key, most in keys:
            if (count := self._count(key)) >= most:
                raise ApiError(
                    "reports_refused", f"the {key[0]} reported chunks as damaged whose bytes are right: check the "
                    "engine's memory and device", found=f"{count} in the last hour", wanted=f"less than {most}",
                )

    def _used_up(self, keys: Sequence[tuple[Key, int]]) -> bool:
        return any(self._count(key) >= most for key, most in keys)

    def _count(self, key: Key) -> int:
        since_s = self._now_s() - WINDOW_S
        return sum(at > since_s for at in self._whole.get(key, ()))

    def _add(self, keys: Iterable[Key]) -> None:
        """Adds one chunk to each, and forgets what does not count any more."""
        now_s = self._now_s()
        for key in keys:
            self._whole.setdefault(key, deque(maxlen=CALLER_MOST)).append(now_s)
        self._whole = {key: times for key, times in self._whole.items() if times[-1] > now_s - WINDOW_S}
