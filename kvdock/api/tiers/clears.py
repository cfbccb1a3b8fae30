"""Clears and deletions, in the pool and in every lower tier: each namespace's generation, and what tiers are owed.

A clear raises the namespace's generation in the pool, which is one store, and orders every tier to raise its own. A
deletion takes the chunks out of the pool and orders every tier to note their keys. An order is kept until the tier was
told, over restarts too, and until then the tier is not used for the namespace (kvdock/tiers/mover/agreed.py). What a
tier says of clears and deletions by other servers is followed here in the same way.

Used from the event loop alone; only the file of what is owed is written in another thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from kvdock._core import Table, TableError
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.api.record.journal import Journal
from kvdock.api.tiers.owed import OwedFile
from kvdock.protocol import events as e, mover_schemas as t
from kvdock.protocol.wire_types import KEY_BYTES

log = logging.getLogger("kvdock.api")

TOLD_S = 2.0
"""How long a call waits for tiers to be told; what they are told later is owed until then."""
MOST_OWED_KEYS = 4096
"""A namespace of which tiers are owed more deletions than this is cleared in them instead, as a tier's note would be
(kvdock/tiers/notes.py)."""
CLEAR_SLICE_RECORDS = 1024


@dataclass
class _Owed:
    order: t.Order
    """`tiers`: those that were not told yet."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    chunks: int = 0
    was_raised: bool = False


@dataclass(frozen=True)
class TiersTold:
    """`untold`: tiers that are owed it. `chunks`: deleted from tiers, counted in each. `is_cleared`: the namespace was
    cleared instead."""

    untold: list[str]
    chunks: int = 0
    is_cleared: bool = False


class Clears:
    """`tiers`: their names; none where there is no mover. `wake`: there is news for the mover."""

    def __init__(
        self, table: Table, registry: Registry, bus: Journal, file: OwedFile, tiers: Sequence[str],
    ) -> None:
        self._table, self._registry, self._bus, self._file = table, registry, bus, file
        self._tiers = list(tiers)
        self.wake: Callable[[], None] = lambda: None
        """The desk's: there is news for the mover."""
        self._numbers = itertools.count(1)
        self._owed: dict[int, _Owed] = {}
        for order in file.read(tiers):
            order.number = next(self._numbers)
            self._owed[order.number] = _Owed(order)
        self._editions: dict[bytes, int] = {}
        self._unsent: deque[int] = deque(self._owed)
        """Numbers of orders that the mover has not heard yet."""
        self._heard: list[int] = []
        self._told_pool: list[t.Generation] | None = None
        self._writing = asyncio.Lock()
        self._walking: set[asyncio.Task[object]] = set()
        self.on_cleared: Callable[[NamespaceRecord, bytes | None], None] = lambda _space, _keys: None
        """The desk's: what it knows of these chunks, or of all of the namespace, is not so any more."""

    # ---------------------------------------------------------------- what people and engines ask for

    async def clear(self, spaces: Sequence[NamespaceRecord], *, all_of_them: bool) -> tuple[int, TiersTold]:
        """Returns how many chunks were taken out of the pool. `all_of_them`: also what tiers have of namespaces that
        this server does not know."""
        if all_of_them:
            spaces = self._registry.namespaces()
        known = {space.table_id for space in spaces}
        others = [one for one in self._table.namespaces() if one.namespace not in known] if all_of_them else []
        served = [(space.digest, space.table_id) for space in spaces if not space.tenant]
        served += [(one.digest, one.namespace) for one in others if not any(one.tenant)]
        owed = [self._owe(digest, self._table.generation(number) + 1) for digest, number in served]
        if all_of_them:
            owed.append(self._owe_all([digest for digest, _ in served]))
        await self._keep()
        for space in spaces:
            self._raise(space, 0)
        for one in others:  # of engines that have not attached again
            if self._table.has_namespace(one.digest):
                self._table.raise_generation(one.namespace)
        for order in owed:
            if order is not None:
                self._send(order)
        chunks = await self._walk()
        return chunks, await self._tell(owed)

    async def delete(self, space: NamespaceRecord, keys: bytes, slice_bytes: int) -> tuple[int, TiersTold]:
        if len(keys) > MOST_OWED_KEYS * KEY_BYTES and self._tiers and not space.tenant:
            chunks, told = await self.clear([space], all_of_them=False)
            return chunks, TiersTold(told.untold, told.chunks, is_cleared=True)
        owed = None if space.tenant else self._owe(space.digest, 0, keys, space)
        await self._keep()
        self._next_edition(space)  # before the first: what the mover reserves from now on was not read before
        chunks = 0
        for start in range(0, len(keys), slice_bytes):
            chunks += self._table.delete(space.table_id, keys[start : start + slice_bytes])
            await asyncio.sleep(0)
        self.on_cleared(space, keys)
        if owed is not None:
            owed.order.least = self._table.generation(space.table_id)
            self._send(owed)
        return chunks, await self._tell([owed])

    def damaged(self, space: NamespaceRecord, keys: bytes) -> None:
        """A reader found other bytes in the pool: what tiers have of the same chunks goes as well, soon."""
        if keys and self._tiers and not space.tenant:
            self._next_edition(space)
            self._run(self._delete_below(space, keys))

    async def _delete_below(self, space: NamespaceRecord, keys: bytes) -> None:
        owed = self._owe(space.digest, self._table.generation(space.table_id), keys, space)
        await self._keep()
        if owed is not None:
            self._send(owed)

    def edition(self, space: NamespaceRecord) -> int:
        return self._editions.get(space.digest, 0)

    def untold(self, tier: str) -> int:
        """How many clears and deletions the tier is owed."""
        return sum(tier in owed.order.tiers for owed in self._owed.values())

    # ---------------------------------------------------------------- for the mover

    def restarted(self) -> None:
        """The mover is a new process: it knows nothing."""
        self._unsent = deque(self._owed)
        self._heard.clear()
        self._told_pool = None

    def news(self) -> tuple[list[t.Order], list[t.Generation] | None, list[int]]:
        orders = [self._owed[number].order for number in self._unsent if number in self._owed]
        self._unsent.clear()
        pool = [
            t.Generation(space.digest.hex(), self._table.generation(space.table_id), self.edition(space))
            for space in self._registry.namespaces() if not space.tenant and self._has(space)
        ]
        heard, self._heard = self._heard, []
        if pool == self._told_pool:
            return orders, None, heard
        self._told_pool = pool
        return orders, pool, heard

    def learned(self, one: t.Learned) -> None:
        """A tier says what other servers have cleared and deleted."""
        space = self._known(one.namespace)
        if space is not None:
            if one.generation > self._table.generation(space.table_id):
                log.info("namespace %s was cleared by another server, as %s says", one.namespace[:12], one.tier)
                self._raise(space, one.generation)
                self._run(self._walk())
            elif one.keys:
                self._next_edition(space)
                self._table.delete(space.table_id, one.keys)
                self.on_cleared(space, one.keys)
        self._heard.append(one.number)
        self.wake()

    def told(self, one: t.Told) -> None:
        owed = self._owed.get(one.number)
        if owed is None or one.tier not in owed.order.tiers:
            return
        owed.order.tiers.remove(one.tier)
        owed.chunks += one.chunks
        # The pool may have followed before: the mover reads the note as well, and says what it has found there.
        owed.was_raised |= bool(owed.order.keys) and one.generation > owed.order.least
        space = self._known(owed.order.namespace) if one.generation else None
        if space is not None and one.generation > self._table.generation(space.table_id):
            self._raise(space, one.generation)
            self._run(self._walk())
        if not owed.order.tiers:
            del self._owed[one.number]
            owed.done.set()
            self._run(self._keep())

    # ---------------------------------------------------------------- helpers

    def _raise(self, space: NamespaceRecord, least: int) -> None:
        self._next_edition(space)
        try:
            generation = self._table.raise_generation(space.table_id, least)
        except TableError:  # the namespace is gone, and with it all that it had
            return
        self._bus.publish(e.GenerationRaised(namespace=space.digest.hex(), generation=generation))
        self.on_cleared(space, None)

    def _next_edition(self, space: NamespaceRecord) -> None:
        self._editions[space.digest] = self.edition(space) + 1
        self.wake()

    async def _walk(self) -> int:
        """Takes out of the pool what nobody finds any more."""
        chunks = cursor = 0
        while cursor >= 0:
            taken, cursor = self._table.clear_old(cursor, CLEAR_SLICE_RECORDS)
            chunks += taken
            await asyncio.sleep(0)
        return chunks

    def _run(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.ensure_future(work)
        self._walking.add(task)
        task.add_done_callback(self._walking.discard)

    def _known(self, namespace: str) -> NamespaceRecord | None:
        digest = bytes.fromhex(namespace)
        return next((space for space in self._registry.namespaces() if space.digest == digest), None)

    def _has(self, space: NamespaceRecord) -> bool:
        return bool(self._table.has_namespace(space.digest))

    def _owe(self, digest: bytes, least: int, keys: bytes = b"", space: NamespaceRecord | None = None) -> _Owed | None:
        """None: there is no tier. What was owed of the namespace before is part of a clear."""
        if not self._tiers:
            return None
        before = [owed for owed in self._owed.values() if owed.order.namespace == digest.hex()]
        is_too_many = sum(len(owed.order.keys) for owed in before) + len(keys) > MOST_OWED_KEYS * KEY_BYTES
        was_raised = bool(keys) and is_too_many
        if is_too_many:
            keys = b""
        tiers = list(self._tiers)
        if not keys:
            for owed in before:
                tiers += [tier for tier in owed.order.tiers if tier not in tiers]
        manifest = space.manifest if space is not None and keys else None
        owed = _Owed(t.Order(
            number=next(self._numbers), namespace=digest.hex(), tiers=tiers, least=least, keys=keys,
            groups=len(manifest.groups) if manifest is not None else 0,
            writers=manifest.writers if manifest is not None else 0,
        ), was_raised=was_raised)
        self._owed[owed.order.number] = owed
        return owed

    def _owe_all(self, but: Sequence[bytes]) -> _Owed | None:
        if not self._tiers:
            return None
        owed = _Owed(t.Order(
            number=next(self._numbers), namespace="", tiers=list(self._tiers), least=0, keys=b"".join(but)
        ))
        self._owed[owed.order.number] = owed
        return owed

    def _send(self, owed: _Owed) -> None:
        self._unsent.append(owed.order.number)
        self.wake()

    async def _keep(self) -> None:
        """For the next server, should this one end before tiers were told."""
        if not self._tiers and not self._owed:
            return
        async with self._writing:
            orders = [msgspec.structs.replace(owed.order, tiers=list(owed.order.tiers)) for owed in self._owed.values()]
            try:
                await asyncio.to_thread(self._file.write, orders)
            except OSError as error:
                log.error("what tiers are owed is not kept for the next server: %s", error)

    async def _tell(self, owed: Sequence[_Owed | None]) -> TiersTold:
        """Waits until all tiers were told, for TOLD_S at most."""
        asked = [one for one in owed if one is not None]
        if asked:
            waits = asyncio.gather(*(one.done.wait() for one in asked))
            with suppress(TimeoutError):
                await asyncio.wait_for(waits, TOLD_S)
        untold = sorted({tier for one in asked for tier in one.order.tiers})
        if untold:
            self._bus.publish(e.TiersUntold(tiers=untold))
        return TiersTold(untold, sum(one.chunks for one in asked), any(one.was_raised for one in asked))
