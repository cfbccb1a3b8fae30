"""Tracks which generation of a namespace each tier has, whether the server's pool has the same one, and which orders
tiers have to carry out.

A tier is used for a namespace while its note (kvdock/tiers/notes.py) and the pool agree: both have the same generation,
the pool has followed every deletion that the note names, and the tier has carried out all orders (of a deletion that
waits for some nodes that share their pools, the keys alone are not read). The names of parts are made from the tier's
note. So chunks that were cleared are not found, whichever server cleared them. Chunks that
were leased or reserved before a clear are stored under names that no lookup asks for any more, or are not published.

Threads: one for each tier carries out orders and reads notes. `_changed` guards everything here.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvdock.protocol.mover_schemas import Generation, NoteChange, Order, OrderDone, split_keys
from kvdock.tiers.mover.note_reads import NoteReads
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.notes import LEASE, Note, begins, deletes, raises
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Deadline, NotAll, NotEverywhere, ReadOnly, Sweeps, TierError

log = logging.getLogger("kvdock.tiers")

NOTE_S = 2.0
"""How long a tier may take to read or change a note."""
REMOVE_S = 1.5
"""How long parts of deleted chunks are removed before the order counts as done. Parts that stay cannot be found
either."""
SWEEP_S = 0.2
"""How long parts of former generations are removed at a time; then nothing is removed for SWEEP_PAUSE_S."""
SWEEP_PAUSE_S = 1.0
AGREE_S = 2.0
"""The longest that a request waits until pool and tier agree."""
RETRY_S, LONGEST_RETRY_S = 0.2, 5.0
"""The pause before orders that could not be carried out are tried again: at first, and at most. It doubles with each
try."""
SHORTEST_PAUSE_S = 0.01


@dataclass(frozen=True)
class AgreedNote:
    """A note on which pool and tier agree, and from which names of parts are made. `edition`: the edition of the
    namespace at the server, which reservations name."""

    note: Note
    edition: int


@dataclass
class _Retry:
    """When a tier's orders are tried again, and why the first of them was not carried out. `partly`: numbers of orders
    that hold, though not everywhere yet: the tier is used."""

    why: str = ""
    until_s: float = -math.inf
    rest_s: float = RETRY_S
    partly: set[int] = field(default_factory=set)

    def at_once(self) -> None:
        self.why, self.until_s, self.rest_s = "", -math.inf, RETRY_S

    def failed(self, why: str, now_s: float) -> None:
        self.why, self.until_s = why, now_s + self.rest_s
        self.rest_s = min(2 * self.rest_s, LONGEST_RETRY_S)


class AgreementObserver(NamedTuple):
    """`note_changed`, `order_done`: report to the server. `renewed`: called with a tier that has lost the note of a
    namespace, so that nothing of what was stored before is found."""

    note_changed: Callable[[NoteChange], None]
    order_done: Callable[[OrderDone], None]
    renewed: Callable[[str], None]


class Agreement:
    """`served`: the namespaces whose notes are read."""

    def __init__(
        self, served: Callable[[], Iterable[bytes]], observer: AgreementObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served, self._observer, self._clock = served, observer, clock
        self._changed = threading.Condition()
        self._reads: dict[str, NoteReads] = {}
        """By tier, those of still_holds()."""
        self._pool: dict[bytes, tuple[int, int]] = {}
        """Generation and edition by namespace."""
        self._followed: dict[tuple[str, bytes], Note] = {}
        """The notes that the server has followed, by tier and namespace."""
        self._read_last: dict[tuple[str, bytes], Note] = {}
        """The notes that were read last, by tier and namespace; a note that differs from the one in `_followed` was
        reported to the server."""
        self._numbers = itertools.count(1)
        self._reported: dict[int, tuple[str, bytes, Note]] = {}
        """Note changes that the server has not followed yet: tier, namespace and note by number."""
        self._orders: dict[str, list[Order]] = {}
        """By tier, the orders that are not carried out yet, in the order in which they came."""
        self._retries: defaultdict[str, _Retry] = defaultdict(_Retry)
        """By tier."""
        self._sweeping: dict[str, dict[bytes, Note]] = {}
        """By tier, the namespaces that may still have parts of former generations, with their notes."""
        self._woken: set[str] = set()
        self._is_closed = False

    # ------------------------------------------------------------------ for the main thread

    def use(self, handle: TierHandle) -> None:
        """Starts to use a tier, in a thread of its own."""
        with self._changed:
            self._reads[handle.name] = NoteReads(handle)
            self._woken.add(handle.name)
        threading.Thread(target=self._run, args=(handle,), name=f"kvdock-{handle.name}-notes", daemon=True).start()

    def follow(self, pool: Sequence[Generation]) -> list[bytes]:
        """The pool's generations have changed. Returns the namespaces whose generation is another: loads and stores in
        progress there are of no use."""
        with self._changed:
            before = self._pool
            self._pool = {bytes.fromhex(one.namespace): (one.generation, one.edition) for one in pool}
            raised = [
                digest for digest, (generation, _) in self._pool.items()
                if digest in before and before[digest][0] != generation
            ]
            self._wake(self._reads)
        return raised

    def wake(self) -> None:
        """The namespaces served have changed."""
        with self._changed:
            self._wake(self._reads)

    def why_pending(self, tier: str) -> str:
        """Why the tier has not carried out the first of its orders; "": it has, or has not tried."""
        with self._changed:
            return self._retries[tier].why if self._orders.get(tier) else ""

    def order(self, order: Order) -> None:
        with self._changed:
            for tier in order.tiers:
                self._orders.setdefault(tier, []).append(order)
                self._retries[tier].at_once()
            self._wake(order.tiers)

    def server_followed(self, numbers: Sequence[int]) -> None:
        """The server has followed these note changes."""
        with self._changed:
            for number in numbers:
                if (reported := self._reported.pop(number, None)) is not None:
                    tier, digest, note = reported
                    if self._read_last.get((tier, digest)) == note:
                        self._followed[tier, digest] = note
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ for other threads

    def of(self, handle: TierHandle, digest: bytes) -> AgreedNote | None:
        """The note on which pool and tier agree. None: the tier is not used for the namespace now."""
        with self._changed:
            return self._of(handle.name, digest)

    def generation(self, digest: bytes) -> int | None:
        """The pool's generation of a namespace, as the server has told it last."""
        with self._changed:
            return self._pool.get(digest, (None, 0))[0]

    def wait_for(self, handle: TierHandle, digest: bytes, deadline: Deadline) -> AgreedNote | None:
        """Like of(), but waits up to AGREE_S until pool and tier agree."""
        until = Deadline(min(AGREE_S, deadline.left_s))
        with self._changed:
            while (agreed := self._of(handle.name, digest)) is None:
                if until.is_over or deadline.is_over or handle.breaker.is_open or self._is_closed:
                    return None
                self._changed.wait(min(RETRY_S, until.left_s))
            return agreed

    def still_holds(self, handle: TierHandle, digest: bytes, agreed: AgreedNote, deadline: Deadline) -> bool:
        """Whether `agreed` still holds, at the server and in the tier. A store that other servers use, too, is asked
        again."""
        if handle.tier.poll_s:
            try:
                note = self._reads[handle.name].read(digest, deadline)
            except TierError:
                return False
            if note != agreed.note:
                with self._changed:
                    self._wake([handle.name])
                return False
        return self.of(handle, digest) == agreed

    def _of(self, tier: str, digest: bytes) -> AgreedNote | None:
        at = tier, digest
        note, pool = self._followed.get(at), self._pool.get(digest)
        if note is None or pool is None or note.generation != pool[0] or self._read_last.get(at) != note:
            return None
        if any(
            order.namespace in ("", digest.hex()) and order.number not in self._retries[tier].partly
            for order in self._orders.get(tier, ())
        ):
            return None
        return AgreedNote(note, pool[1])

    def _wake(self, tiers: Iterable[str]) -> None:
        """Wakes the threads of these tiers. The caller holds `_changed`."""
        self._woken.update(tiers)
        self._changed.notify_all()

    # ------------------------------------------------------------------ a tier's thread

    def _run(self, handle: TierHandle) -> None:
        pause_s = 0.0
        while self._wait(handle, pause_s):
            pause_s = RETRY_S
            if handle.breaker.is_open:
                continue
            try:
                steps = [self._carry_out_orders, self._read_notes]
                if self._retries[handle.name].partly:  # these may wait for nodes that do not answer
                    steps.reverse()
                for step in steps:
                    step(handle)
                is_swept = self._sweep(handle)
            except TierError as error:
                log.debug("%s: its notes cannot be read, trying again: %s", handle.name, error)
                if isinstance(error, (ReadOnly, NotAll)):  # it is asked no more often than for what others have changed
                    pause_s = max(RETRY_S, handle.tier.poll_s)
                continue
            except Exception:  # without this thread the tier would not be used any more
                log.exception("the notes of %s could not be read", handle.name)
                continue
            pause_s = self._pause_s(handle, handle.tier.poll_s if is_swept else SWEEP_PAUSE_S)

    def _pause_s(self, handle: TierHandle, pause_s: float) -> float:
        """The time until notes are read again, as in _wait(), or until orders are tried again if that is sooner."""
        with self._changed:
            until_s = self._retries[handle.name].until_s if self._orders.get(handle.name) else math.inf
        left_s = min(pause_s or math.inf, until_s - self._clock())
        return max(SHORTEST_PAUSE_S, left_s) if left_s < math.inf else 0.0

    def _wait(self, handle: TierHandle, pause_s: float) -> bool:
        """Waits until `pause_s` has passed or something has changed. `pause_s` 0: waits without a limit. False: the
        Agreement is closed."""
        until_s = self._clock() + pause_s if pause_s else None
        with self._changed:
            while not self._is_closed and handle.name not in self._woken:
                left_s = None if until_s is None else until_s - self._clock()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._woken.discard(handle.name)
            return not self._is_closed

    def _carry_out_orders(self, handle: TierHandle) -> None:
        """Carries out the orders for the tier. Of a namespace with an order that fails, later ones wait for it; all
        that are left are tried again after a pause, which grows."""
        with self._changed:
            retry = self._retries[handle.name]
            orders = list(self._orders.get(handle.name, ()))
        if not orders or self._clock() < retry.until_s:
            return
        whys, failed = list[str](), set[str]()
        for order in orders:
            if not failed.isdisjoint(("", order.namespace)) or (failed and not order.namespace):
                continue
            try:
                done = self._clear_all(handle, order) if not order.namespace else self._clear_or_delete(handle, order)
            except TierError as error:
                whys.append(error.why)
                if isinstance(error, NotEverywhere):
                    with self._changed:
                        retry.partly.add(order.number)
                        self._changed.notify_all()
                else:
                    failed.add(order.namespace)
                continue
            self._observer.order_done(done)  # first, so that the server believes what is stored from now on
            with self._changed:
                self._orders[handle.name].remove(order)
                retry.partly.discard(order.number)
                self._changed.notify_all()
        with self._changed:
            if whys:
                retry.failed(whys[0], self._clock())
            if not whys or any(order not in orders for order in self._orders[handle.name]):  # or one has come meanwhile
                retry.at_once()

    def _clear_all(self, handle: TierHandle, order: Order) -> OrderDone:
        """Clears all namespaces that the tier can list, except those that `order.keys` names."""
        others = set(split_keys(order.keys))
        for digest in handle.namespaces(Deadline(NOTE_S)):
            if digest not in others and digest != LEASE:
                self._raised(handle, digest, handle.change(digest, raises(0), Deadline(NOTE_S)))
        return OrderDone(order.number, handle.name, 0, 0)

    def _clear_or_delete(self, handle: TierHandle, order: Order) -> OrderDone:
        digest, keys = bytes.fromhex(order.namespace), split_keys(order.keys)
        if not keys:
            note = handle.change(digest, raises(order.least), Deadline(NOTE_S))
            self._raised(handle, digest, note)
            return OrderDone(order.number, handle.name, note.generation, 0)
        (before,) = handle.notes([digest], Deadline(NOTE_S))
        chunks = 0
        if before is not None:
            chunks = sum(handle.exists([before.name(digest, key, 0, 0) for key in keys], Deadline(NOTE_S)))
        note = handle.change(digest, deletes(keys, order.least), Deadline(NOTE_S))
        if before is not None:
            parts = itertools.product(keys, range(order.groups), range(order.writers))
            self._remove(handle, [before.name(digest, *part) for part in parts])
            if before.generation != note.generation:
                self._raised(handle, digest, note)
            else:
                self._follow_own_deletion(handle, digest, before, note)
        return OrderDone(order.number, handle.name, note.generation, chunks)

    def _follow_own_deletion(self, handle: TierHandle, digest: bytes, before: Note, note: Note) -> None:
        """The pool has made this deletion already. So it has followed the new note, if it had followed the one before
        and no other server has deleted anything between the two."""
        at = handle.name, digest
        with self._changed:
            if self._followed.get(at) == before and note.deletions == before.deletions + 1:
                self._followed[at] = self._read_last[at] = note

    def _remove(self, handle: TierHandle, names: list[PartName]) -> None:
        """Removes the parts of deleted chunks. Parts that cannot be removed now are not found by lookups either."""
        try:
            handle.remove(names, Deadline(REMOVE_S))
        except TierError as error:
            log.warning("%s: deleted parts are not found any more, but still take space: %s", handle.name, error)

    def _raised(self, handle: TierHandle, digest: bytes, note: Note) -> None:
        """The generation was raised: parts of former generations are removed little by little."""
        if isinstance(handle.tier, Sweeps):
            with self._changed:
                self._sweeping.setdefault(handle.name, {})[digest] = note

    def _sweep(self, handle: TierHandle) -> bool:
        """Removes some parts of former generations. Returns whether none is left."""
        with self._changed:
            wanted = dict(self._sweeping.get(handle.name, {}))
        for digest, note in wanted.items():
            try:
                if handle.sweep(digest, note, Deadline(SWEEP_S)):
                    return False
            except TierError as error:
                log.info("%s: parts of former generations are not removed: %s", handle.name, error)
            with self._changed:
                if self._sweeping[handle.name].get(digest) == note:
                    del self._sweeping[handle.name][digest]
        return True

    def _read_notes(self, handle: TierHandle) -> None:
        """Reads the notes of the namespaces served, and brings pool and tier to agree. Raises TierError."""
        served = list(self._served())
        with self._changed:
            pool = dict(self._pool)
            wanted = [
                digest for digest in served
                if digest in pool and (handle.tier.poll_s or self._of(handle.name, digest) is None)
            ]
        if not wanted:
            return
        failed: TierError | None = None
        try:
            notes = dict(zip(wanted, handle.notes(wanted, Deadline(NOTE_S)), strict=True))
        except NotAll as error:
            notes, failed = dict(error.known), error
        for digest, note in notes.items():
            generation, _ = pool[digest]
            is_lost = note is None and (handle.name, digest) in self._followed
            if note is None or note.generation < generation:
                try:
                    note = handle.change(digest, begins(generation), Deadline(NOTE_S))
                except TierError as error:  # others may have a note that can be used as it is
                    failed = error
                    continue
            if is_lost:
                self._raised(handle, digest, note)
            self._compare(handle, digest, note)
        if failed is not None:
            raise failed

    def _compare(self, handle: TierHandle, digest: bytes, note: Note) -> None:
        """Reports the note to the server, unless the pool has followed it already."""
        at = handle.name, digest
        is_shared = handle.tier.poll_s > 0
        with self._changed:
            if digest not in self._pool:
                return
            generation, _ = self._pool[digest]
            if note.generation < generation:  # the server has raised it meanwhile
                self._wake([handle.name])
                return
            known = self._followed.get(at)
            is_renewed = known is not None and known.birth != note.birth
            is_known = known is not None and (known.birth, known.generation) == (note.birth, note.generation)
            keys = note.deleted_since(known) if known is not None and is_known else list(note.deleted)
            if generation == note.generation and not (keys and is_shared):
                self._followed[at] = self._read_last[at] = note
                self._changed.notify_all()
                if is_renewed:
                    self._observer.renewed(handle.name)
                return
            if self._read_last.get(at) == note and any(one == (*at, note) for one in self._reported.values()):
                return  # it was reported already
            self._read_last[at] = note
            number = next(self._numbers)
            self._reported = {other: one for other, one in self._reported.items() if one[:2] != at}
            self._reported[number] = (*at, note)
        self._observer.note_changed(NoteChange(
            number, handle.name, digest.hex(), note.generation, b"".join(keys) if is_shared else b"", is_shared
        ))
