"""Clears and deletions in the pool and in every lower tier: each namespace's generation, and the orders that tiers have
not carried out yet.

A clear raises the namespace's generation in the pool, with one store, and orders every tier to raise its own. A
deletion takes the chunks out of the pool and orders every tier to note their keys. Until a tier has carried the order
out, it is not used for the namespace (kvdock/tiers/mover/agreement.py). Pending orders are kept in a file, so the next
server gives them to its tiers. When a tier's note shows that another server has cleared or deleted something, the pool
follows here.

Used from the event loop alone; only the file is written in another thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvdock._core import NamespaceView, Table, TableError
from kvdock.api.background import Background
from kvdock.api.pool.quotas import tenant_id
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.api.record.journal import Journal
from kvdock.api.tiers.contents import Contents
from kvdock.api.turns import SLICE_WORK, Slices, next_slice
from kvdock.protocol import events as e, mover_schemas as m
from kvdock.protocol.wire_types import KEY_BYTES
from kvdock.shm.files import read_regular, replace_durably
from kvdock.shm.sealed import seal_of, unsealed

log = logging.getLogger("kvdock.api")

ANSWER_S = 2.0
"""How long a call waits until all tiers have carried out its orders; after that the orders are pending."""
MOST_PENDING_KEYS = 4096
"""Where more deletions than this are pending in a namespace, it is cleared in the tiers instead, as a tier's note would
be (kvdock/tiers/notes.py)."""
CLEAR_SLICE_RECORDS = 1024
OWN_TIERS = ("disk",)
"""The tiers of this node alone. Nobody else deletes there what others delete in a tier that they share, or at other
nodes."""
FILE_VERSION = 1
MOST_FILE_BYTES = 256 << 20
UNSEALED = b"\x82\xa7version\x01"
"""The first bytes of a file of version 1 without a seal, as servers wrote it before there were seals."""


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    orders: list[m.Order]


class OrderFile:
    """Orders that tiers have not carried out, kept in a file beside the server's socket. A tier that is off during a
    clear gets the order from the next server, even if the pool was removed. The file exists while orders are
    pending."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, tiers: Sequence[str]) -> list[m.Order]:
        """The orders that an earlier server has left. A file that cannot be read may have named anything, so then the
        order is to clear all that `tiers` have."""
        try:
            content = read_regular(self._path, MOST_FILE_BYTES)
            plain = content if content.startswith(UNSEALED) else unsealed(content)
            kept = msgspec.msgpack.decode(plain, type=_Kept)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.error("%s cannot be read, so all that lower tiers have is cleared: %s", self._path, error)
            return [m.Order(number=0, namespace="", tiers=list(tiers), least=0)] if tiers else []
        if kept.version != FILE_VERSION:
            log.error("found version %d of %s, wanted %d, so all that lower tiers have is cleared", kept.version,
                      self._path, FILE_VERSION)
            return [m.Order(number=0, namespace="", tiers=list(tiers), least=0)] if tiers else []
        return kept.orders

    def write(self, orders: Sequence[m.Order]) -> None:
        """Durable when it returns. Raises OSError."""
        if not orders:
            self._path.unlink(missing_ok=True)
            return
        content = msgspec.msgpack.encode(_Kept(FILE_VERSION, list(orders)))
        replace_durably(self._path, seal_of([content]) + content)


@dataclass
class _Pending:
    order: m.Order
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all tiers have carried it out."""
    chunks: int = 0
    """How many chunks were deleted from tiers; a chunk counts once for each tier that had it."""
    has_cleared: bool = False
    """The order was a deletion, and a tier has cleared the namespace instead."""


@dataclass(frozen=True)
class InPool:
    """What a clear took out of use in the pool."""

    chunks: int
    namespaces: int
    """With chunks or without."""


@dataclass(frozen=True)
class TierAnswers:
    """What tiers have done about one call. `pending`: the tiers that have not carried it out yet. `chunks`: how many
    were deleted from tiers; a chunk counts once for each tier that had it. `is_cleared`: the namespace was cleared
    instead."""

    pending: list[str]
    chunks: int = 0
    is_cleared: bool = False


class Clears:
    """`tiers`: the names of the server's tiers; empty: there is no mover."""

    def __init__(
        self, table: Table, registry: Registry, bus: Journal, file: OrderFile, tiers: Sequence[str],
        background: Background,
    ) -> None:
        self._table, self._registry, self._bus, self._file = table, registry, bus, file
        self._background = background
        self.contents = Contents(tiers, lambda: self.wake())
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to send to the mover. MoverClient sets it."""
        self.on_cleared: Callable[[NamespaceRecord, bytes | None], None] = lambda _space, _keys: None
        """Called when these chunks, or with None all of the namespace, are cleared or deleted. MoverClient sets it."""
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        for order in file.read(tiers):
            order.number = next(self._numbers)
            self._pending[order.number] = _Pending(order)
        self._editions: dict[bytes, int] = {}
        self._unsent: deque[int] = deque(self._pending)
        """Numbers of the orders that were not sent to the mover yet."""
        self._followed: list[int] = []
        """Numbers of the note changes that the pool has followed since the last update."""
        self._sent_generations: list[m.Generation] | None = None
        self._writing = asyncio.Lock()

    @property
    def has_tiers(self) -> bool:
        return bool(self.contents.tiers)

    # ---------------------------------------------------------------- calls of people and engines

    async def clear(self, space: NamespaceRecord | None, tenant: str | None = None) -> tuple[InPool, TierAnswers]:
        """Returns what was cleared in the pool, and what tiers have done. Without `space`: clears all
        namespaces, of the tenant if there is one, in the tiers also those that this server does not know."""
        spaces, others = [], list[NamespaceView]()
        if space is not None:
            spaces = [space]
        else:
            spaces = [one for one in self._registry.namespaces() if tenant is None or one.tenant == tenant]
            known = {one.table_id for one in self._registry.namespaces()}
            owner = None if tenant is None else tenant_id(tenant)
            others = [
                one for one in self._table.namespaces()
                if one.namespace not in known and (owner is None or one.tenant == owner)
            ]
        served = [(space.digest, space.table_id) for space in spaces if not space.tenant]
        served += [(one.digest, one.namespace) for one in others if not any(one.tenant)]
        pending = [self._order(digest, self._table.generation(number) + 1) for digest, number in served]
        if space is None and not tenant:  # tiers have chunks of the server's own user alone
            pending.append(self._order_all(except_for=[digest for digest, _ in served]))
        await self._save()
        slices = Slices()
        for space in spaces:
            self._raise(space, 0)
            await slices.give_turn()
        for one in others:  # of namespaces whose engines have not attached again
            if self._table.has_namespace(one.digest):
                self._table.raise_generation(one.namespace)
            await slices.give_turn()
        for order in pending:
            if order is not None:
                self._send(order)
        cleared = InPool(await self._remove_cleared(), len(spaces) + len(others))
        return cleared, await self._tiers_answer(pending)

    async def delete(self, space: NamespaceRecord, keys: bytes, slice_bytes: int) -> tuple[int, TierAnswers]:
        """Returns how many chunks were taken out of the pool, and what tiers have done. `slice_bytes`: how much of
        `keys` is deleted before other calls get a turn."""
        if len(keys) > MOST_PENDING_KEYS * KEY_BYTES and self.contents.tiers and not space.tenant:
            cleared, answers = await self.clear(space)
            return cleared.chunks, TierAnswers(answers.pending, answers.chunks, is_cleared=True)
        pending = None if space.tenant else self._order(space.digest, 0, keys, space)
        await self._save()
        self._next_edition(space)  # first, so that no reservation of the mover's from now on is based on earlier reads
        chunks = 0
        for start in range(0, len(keys), slice_bytes):
            chunks += self._table.delete(space.table_id, keys[start : start + slice_bytes])
            await next_slice()
        self.on_cleared(space, keys)
        if pending is not None:
            pending.order.least = self._table.generation(space.table_id)
            self._send(pending)
        return chunks, await self._tiers_answer([pending])

    def damaged(self, number: int, keys: bytes) -> None:
        """Chunks in the pool, of the namespace with that number, did not match their checksums. They are soon deleted
        from the tiers too."""
        space = self._registry.of_number(number)
        if self.contents.tiers and space is not None and not space.tenant:
            self._next_edition(space)
            self._background.once("deleting in tiers", self._delete_in_tiers(space, keys, self.contents.tiers))

    async def _delete_in_tiers(self, space: NamespaceRecord, keys: bytes, tiers: Sequence[str]) -> None:
        pending = self._order(space.digest, self._table.generation(space.table_id), keys, space, tiers)
        await self._save()
        if pending is not None:
            self._send(pending)

    def edition(self, space: NamespaceRecord) -> int:
        return self._editions.get(space.digest, 0)

    def pending_orders(self, tier: str) -> int:
        """How many clears and deletions the tier has not carried out yet."""
        return sum(tier in pending.order.tiers for pending in self._pending.values())

    # ---------------------------------------------------------------- updates for the mover, and its reports

    def mover_restarted(self) -> None:
        """A new mover process has been sent nothing yet."""
        self._unsent = deque(self._pending)
        self._followed.clear()
        self._sent_generations = None

    def update(self) -> tuple[list[m.Order], list[m.Generation] | None, list[int]]:
        """(new orders, all generations or None where they are unchanged, numbers of the note changes followed)."""
        orders = [self._pending[number].order for number in self._unsent if number in self._pending]
        self._unsent.clear()
        generations = [
            m.Generation(space.digest.hex(), self._table.generation(space.table_id), self.edition(space))
            for space in self._registry.namespaces() if not space.tenant and self._is_in_table(space)
        ]
        followed, self._followed = self._followed, []
        if generations == self._sent_generations:
            return orders, None, followed
        self._sent_generations = generations
        return orders, generations, followed

    def still_known(self, known: list[m.KnownKeys], known_bytes: int) -> list[m.KnownKeys]:
        """The mover's reports, without the chunks that a pending order clears or deletes in the tier: the mover may
        have reported them before it knew of the order."""
        if not self._pending:
            return known
        deleted = {(one.namespace, one.tier): set[bytes]() for one in known if one.is_there}
        cleared = set[tuple[str, str]]()
        for order in (pending.order for pending in self._pending.values()):
            for at in deleted.keys() & {(order.namespace, tier) for tier in order.tiers}:
                deleted[at].update(key[:known_bytes] for key in m.split_keys(order.keys))
                if not order.keys:
                    cleared.add(at)
        return [
            one.without(deleted[one.namespace, one.tier], known_bytes) if one.is_there else one
            for one in known if not one.is_there or (one.namespace, one.tier) not in cleared
        ]

    def note_changed(self, change: m.NoteChange) -> None:
        """Other servers have cleared or deleted chunks in a tier: the pool follows."""
        self.follow(change.namespace, change.generation, change.keys, f"the tier {change.tier}")
        self._followed.append(change.number)
        self.wake()

    def follow(self, namespace: str, generation: int, keys: bytes, source: str) -> int:
        """Another server has raised the generation of a namespace, or has deleted `keys`: the pool does the same.
        Returns the namespace's generation in the pool; 0: it is not known, or not of the server's own user."""
        space = self._namespace(namespace)
        if space is None or space.tenant or not self._is_in_table(space):
            return 0
        if generation > self._table.generation(space.table_id):
            log.info("namespace %s was cleared by another server, as %s shows", namespace[:12], source)
            self._raise(space, generation)
            self._background.once("removing what was cleared", self._remove_cleared())
        elif keys:
            self._next_edition(space)
            self._table.delete(space.table_id, keys)
            self.on_cleared(space, keys)
            if own := [tier for tier in self.contents.tiers if tier in OWN_TIERS]:
                self._background.once("deleting in tiers", self._delete_in_tiers(space, keys, own))
        return int(self._table.generation(space.table_id))

    def order_done(self, done: m.OrderDone) -> None:
        pending = self._pending.get(done.number)
        if pending is None or done.tier not in pending.order.tiers:
            return
        pending.order.tiers.remove(done.tier)
        pending.chunks += done.chunks
        # The pool may have followed before: the mover reads the note as well, and reports what it has found there.
        pending.has_cleared |= bool(pending.order.keys) and done.generation > pending.order.least
        space = self._namespace(pending.order.namespace) if done.generation else None
        if space is not None and done.generation > self._table.generation(space.table_id):
            self._raise(space, done.generation)
            self._background.once("removing what was cleared", self._remove_cleared())
        if not pending.order.tiers:
            del self._pending[done.number]
            pending.done.set()
            self._background.once("keeping orders to tiers", self._save())

    # ---------------------------------------------------------------- helpers

    def _raise(self, space: NamespaceRecord, least: int) -> None:
        """Raises the generation in the pool, at least to `least`."""
        self._next_edition(space)
        try:
            generation = self._table.raise_generation(space.table_id, least)
        except TableError:  # the namespace and all its chunks have been removed
            return
        self._bus.publish(e.GenerationRaised(namespace=space.digest.hex(), generation=generation))
        self.on_cleared(space, None)

    def _next_edition(self, space: NamespaceRecord) -> None:
        self._editions[space.digest] = self.edition(space) + 1
        self.wake()

    async def _remove_cleared(self) -> int:
        """Takes the chunks of earlier generations, which no lookup finds and no commit publishes any more, out of the
        pool. Returns how many lookups had found."""
        cursor = 0
        while (cursor := self._table.close_cleared(cursor, SLICE_WORK)) >= 0:
            await next_slice()
        chunks = cursor = 0
        while cursor >= 0:
            taken, cursor = self._table.clear_old(cursor, CLEAR_SLICE_RECORDS)
            chunks += taken
            await next_slice()
        return chunks

    def _namespace(self, namespace: str) -> NamespaceRecord | None:
        digest = bytes.fromhex(namespace)
        return next((space for space in self._registry.namespaces() if space.digest == digest), None)

    def _is_in_table(self, space: NamespaceRecord) -> bool:
        return bool(self._table.has_namespace(space.digest))

    def _order(
        self, digest: bytes, least: int, keys: bytes = b"", space: NamespaceRecord | None = None,
        of: Sequence[str] = (),
    ) -> _Pending | None:
        """A new order to the tiers `of`, or to all; None: there are none. `keys` empty: to clear the namespace, which
        goes also to those tiers for which earlier orders are pending. `space`: needed with `keys`."""
        if not self.contents.tiers:
            return None
        earlier = [pending for pending in self._pending.values() if pending.order.namespace == digest.hex()]
        is_too_many = sum(len(one.order.keys) for one in earlier) + len(keys) > MOST_PENDING_KEYS * KEY_BYTES
        has_cleared = bool(keys) and is_too_many
        if is_too_many:
            keys = b""
        tiers = list(of or self.contents.tiers)
        if not keys:
            for pending in earlier:
                tiers += [tier for tier in pending.order.tiers if tier not in tiers]
        manifest = space.manifest if space is not None and keys else None
        return self._add(m.Order(
            number=next(self._numbers), namespace=digest.hex(), tiers=tiers, least=least, keys=keys,
            groups=len(manifest.groups) if manifest is not None else 0,
            writers=manifest.writers if manifest is not None else 0,
        ), has_cleared=has_cleared)

    def _order_all(self, except_for: Sequence[bytes]) -> _Pending | None:
        """The order to clear all namespaces that tiers know, except some."""
        if not self.contents.tiers:
            return None
        return self._add(m.Order(
            number=next(self._numbers), namespace="", tiers=list(self.contents.tiers), least=0,
            keys=b"".join(except_for),
        ))

    def _add(self, order: m.Order, *, has_cleared: bool = False) -> _Pending:
        pending = self._pending[order.number] = _Pending(order, has_cleared=has_cleared)
        return pending

    def _send(self, pending: _Pending) -> None:
        self._unsent.append(pending.order.number)
        self.wake()

    async def _save(self) -> None:
        """Saves the pending orders for the next server, in case this one ends before tiers have carried them out."""
        if not self.contents.tiers and not self._pending:
            return
        async with self._writing:
            orders = [
                msgspec.structs.replace(pending.order, tiers=list(pending.order.tiers))
                for pending in self._pending.values()
            ]
            try:
                await asyncio.to_thread(self._file.write, orders)
            except OSError as error:
                log.error("pending orders to tiers are not kept for the next server: %s", error)

    async def _tiers_answer(self, pending: Sequence[_Pending | None]) -> TierAnswers:
        """Waits until all tiers have carried the orders out, but at most ANSWER_S."""
        sent = [one for one in pending if one is not None]
        if sent:
            waits = asyncio.gather(*(one.done.wait() for one in sent))
            with suppress(TimeoutError):
                await asyncio.wait_for(waits, ANSWER_S)
        tiers = sorted({tier for one in sent for tier in one.order.tiers})
        if tiers:
            self._bus.publish(e.TiersPending(tiers=tiers))
        return TierAnswers(tiers, sum(one.chunks for one in sent), any(one.has_cleared for one in sent))
