"""Which generation of a namespace each tier has, whether the server's pool has the same, and what tiers must be told.

A tier is used for a namespace while its note (kvdock/tiers/notes.py) and the pool agree: both have the same generation,
the pool has followed every deletion that the note names, and the server has no order for the tier that was not carried
out. Names of parts are made from that note. So nothing that was cleared is found, whoever cleared it; and what was
leased or reserved before a clear is stored under names that nobody asks for any more, or is not published.

Threads: each tier has one, which carries out orders and reads notes; `_changed` guards everything here.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvdock.protocol.mover_schemas import Generation, Learned, Order, Told
from kvdock.tiers.mover.admission import cut
from kvdock.tiers.mover.lanes import Lane
from kvdock.tiers.notes import Note, begins, deletes, raises
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Deadline, Sweeps, TierError

log = logging.getLogger("kvdock.tiers")

NOTE_S = 2.0
"""How long a tier may take to read or change a note."""
REMOVE_S = 1.5
"""How long deleted parts are removed before the answer; the rest nobody can find either."""
SWEEP_S = 0.2
"""So long at a time are parts of former generations removed, and after that for SWEEP_REST_S nothing is."""
SWEEP_REST_S = 1.0
AGREE_S = 2.0
"""How long a request waits until pool and tier agree."""
REST_S = 0.2
"""Between two tries to carry out an order."""


@dataclass(frozen=True)
class Agreed:
    """What names are made from. `edition`: of the namespace at the server; reservations say it."""

    note: Note
    edition: int


class Agreement:
    """`learned`, `told`: tell the server. `served`: the namespaces whose notes are read."""

    def __init__(
        self, served: Callable[[], Iterable[bytes]], learned: Callable[[Learned], None], told: Callable[[Told], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served, self._learned, self._told, self._clock = served, learned, told, clock
        self._changed = threading.Condition()
        self._lanes: dict[str, Lane] = {}
        self._pool: dict[bytes, tuple[int, int]] = {}
        """Generation and edition by namespace."""
        self._notes: dict[tuple[str, bytes], Note] = {}
        """Those that the server has followed, by tier and namespace."""
        self._seen: dict[tuple[str, bytes], Note] = {}
        """Those that were read last, and of which the server was told."""
        self._numbers = itertools.count(1)
        self._said: dict[int, tuple[str, bytes, Note]] = {}
        self._orders: dict[str, list[Order]] = {}
        """Not carried out yet, by tier, in their order."""
        self._sweeping: dict[str, dict[bytes, Note]] = {}
        self._woken: set[str] = set()
        self._is_closed = False

    # ------------------------------------------------------------------ for the main thread

    def use(self, lane: Lane) -> None:
        """From now on."""
        with self._changed:
            self._lanes[lane.name] = lane
            self._woken.add(lane.name)
        threading.Thread(target=self._run, args=(lane,), name=f"kvdock-{lane.name}-notes", daemon=True).start()

    def follow(self, pool: Sequence[Generation]) -> list[bytes]:
        """Returns the namespaces whose generation was raised: nothing of them that is under way is of use."""
        with self._changed:
            before = self._pool
            self._pool = {bytes.fromhex(one.namespace): (one.generation, one.edition) for one in pool}
            raised = [
                digest for digest, (generation, _) in self._pool.items()
                if digest in before and before[digest][0] != generation
            ]
            self._wake(self._lanes)
        return raised

    def wake(self) -> None:
        """Other namespaces are served."""
        with self._changed:
            self._wake(self._lanes)

    def order(self, order: Order) -> None:
        with self._changed:
            for tier in order.tiers:
                self._orders.setdefault(tier, []).append(order)
            self._wake(order.tiers)

    def heard(self, numbers: Sequence[int]) -> None:
        """The server has followed."""
        with self._changed:
            for number in numbers:
                if (said := self._said.pop(number, None)) is not None:
                    tier, digest, note = said
                    if self._seen.get((tier, digest)) == note:
                        self._notes[tier, digest] = note
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ for other threads

    def of(self, lane: Lane, digest: bytes) -> Agreed | None:
        """None: the tier is not used for the namespace now."""
        with self._changed:
            return self._of(lane.name, digest)

    def awaited(self, lane: Lane, digest: bytes, deadline: Deadline) -> Agreed | None:
        """The same for who can wait a moment."""
        until = Deadline(min(AGREE_S, deadline.left_s))
        with self._changed:
            while (agreed := self._of(lane.name, digest)) is None:
                if until.is_over or deadline.is_over or lane.breaker.is_open or self._is_closed:
                    return None
                self._changed.wait(min(REST_S, until.left_s))
            return agreed

    def holds(self, lane: Lane, digest: bytes, agreed: Agreed, deadline: Deadline) -> bool:
        """Whether nothing has changed since, at the server or the tier. A store that others use too is asked now."""
        if lane.tier.poll_s:
            try:
                (note,) = lane.notes([digest], deadline)
            except TierError:
                return False
            if note != agreed.note:
                with self._changed:
                    self._wake([lane.name])
                return False
        return self.of(lane, digest) == agreed

    def _of(self, tier: str, digest: bytes) -> Agreed | None:
        note, pool = self._notes.get((tier, digest)), self._pool.get(digest)
        if note is None or pool is None or note.generation != pool[0] or self._seen.get((tier, digest)) != note:
            return None
        if any(order.namespace in ("", digest.hex()) for order in self._orders.get(tier, ())):
            return None
        return Agreed(note, pool[1])

    def _wake(self, tiers: Iterable[str]) -> None:
        """Under `_changed`."""
        self._woken.update(tiers)
        self._changed.notify_all()

    # ------------------------------------------------------------------ a tier's thread

    def _run(self, lane: Lane) -> None:
        rest_s = 0.0
        while self._waits(lane, rest_s):
            rest_s = REST_S
            if lane.breaker.is_open:
                continue
            try:
                has_done = self._carry_out(lane)
                self._read(lane)
                is_swept = self._sweep(lane)
            except TierError as error:
                log.debug("%s: its notes are tried again: %s", lane.name, error)
                continue
            except Exception:  # without this thread the tier would not be used any more
                log.exception("notes of %s could not be read", lane.name)
                continue
            if has_done and is_swept:
                rest_s = lane.tier.poll_s
            elif has_done:
                rest_s = SWEEP_REST_S

    def _waits(self, lane: Lane, rest_s: float) -> bool:
        """Until it is time, or something has changed. `rest_s` 0: until something has. False: it is over."""
        until_s = self._clock() + rest_s if rest_s else None
        with self._changed:
            while not self._is_closed and lane.name not in self._woken:
                left_s = None if until_s is None else until_s - self._clock()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._woken.discard(lane.name)
            return not self._is_closed

    def _carry_out(self, lane: Lane) -> bool:
        """The orders for the tier. Returns whether none is left."""
        while True:
            with self._changed:
                order = next(iter(self._orders.get(lane.name, ())), None)
            if order is None:
                return True
            told = self._all_raised(lane, order) if not order.namespace else self._one_told(lane, order)
            with self._changed:
                self._orders[lane.name].remove(order)
                self._changed.notify_all()
            self._told(told)

    def _all_raised(self, lane: Lane, order: Order) -> Told:
        others = set(cut(order.keys))
        for digest in lane.namespaces(Deadline(NOTE_S)):
            if digest not in others:
                self._raised(lane, digest, lane.change(digest, raises(0), Deadline(NOTE_S)))
        return Told(order.number, lane.name, 0, 0)

    def _one_told(self, lane: Lane, order: Order) -> Told:
        digest, keys = bytes.fromhex(order.namespace), list(cut(order.keys))
        if not keys:
            note = lane.change(digest, raises(order.least), Deadline(NOTE_S))
            self._raised(lane, digest, note)
            return Told(order.number, lane.name, note.generation, 0)
        (before,) = lane.notes([digest], Deadline(NOTE_S))
        chunks = 0
        if before is not None:
            chunks = sum(lane.exists([before.name(digest, key, 0, 0) for key in keys], Deadline(NOTE_S)))
        note = lane.change(digest, deletes(keys, order.least), Deadline(NOTE_S))
        if before is not None:
            parts = itertools.product(keys, range(order.groups), range(order.writers))
            self._remove(lane, [before.name(digest, *part) for part in parts])
            if before.generation != note.generation:
                self._raised(lane, digest, note)
            else:
                self._follow_own(lane, digest, before, note)
        return Told(order.number, lane.name, note.generation, chunks)

    def _follow_own(self, lane: Lane, digest: bytes, before: Note, note: Note) -> None:
        """The pool has followed before: nobody else has deleted anything between the two notes."""
        at = lane.name, digest
        with self._changed:
            if self._notes.get(at) == before and note.deletions == before.deletions + 1:
                self._notes[at] = self._seen[at] = note

    def _remove(self, lane: Lane, names: list[PartName]) -> None:
        """What is not removed now, nobody can find either."""
        try:
            lane.remove(names, Deadline(REMOVE_S))
        except TierError as error:
            log.warning("%s: deleted parts are not found any more, but take room still: %s", lane.name, error)

    def _raised(self, lane: Lane, digest: bytes, note: Note) -> None:
        """What former generations have left behind is removed little by little."""
        if isinstance(lane.tier, Sweeps):
            with self._changed:
                self._sweeping.setdefault(lane.name, {})[digest] = note

    def _sweep(self, lane: Lane) -> bool:
        """Whether there is nothing to remove any more."""
        with self._changed:
            wanted = dict(self._sweeping.get(lane.name, {}))
        for digest, note in wanted.items():
            try:
                if lane.swept(digest, note, Deadline(SWEEP_S)):
                    return False
            except TierError as error:
                log.info("%s: parts of former generations are not removed: %s", lane.name, error)
            with self._changed:
                if self._sweeping[lane.name].get(digest) == note:
                    del self._sweeping[lane.name][digest]
        return True

    def _read(self, lane: Lane) -> None:
        """Reads the notes of what is served, and sees that pool and tier come to agree."""
        served = list(self._served())
        with self._changed:
            pool = dict(self._pool)
            wanted = [
                digest for digest in served
                if digest in pool and (lane.tier.poll_s or self._of(lane.name, digest) is None)
            ]
        if not wanted:
            return
        for digest, note in zip(wanted, lane.notes(wanted, Deadline(NOTE_S)), strict=True):
            generation, _ = pool[digest]
            is_lost = note is None and (lane.name, digest) in self._notes
            if note is None or note.generation < generation:
                note = lane.change(digest, begins(generation), Deadline(NOTE_S))
            if is_lost:
                self._raised(lane, digest, note)
            self._compare(lane, digest, note)

    def _compare(self, lane: Lane, digest: bytes, note: Note) -> None:
        at = lane.name, digest
        is_shared = lane.tier.poll_s > 0
        with self._changed:
            if digest not in self._pool:
                return
            generation, _ = self._pool[digest]
            if note.generation < generation:  # the server has raised it meanwhile
                self._wake([lane.name])
                return
            known = self._notes.get(at)
            is_known = known is not None and (known.birth, known.generation) == (note.birth, note.generation)
            keys = note.deleted_since(known) if known is not None and is_known else list(note.deleted)
            if generation == note.generation and not (keys and is_shared):
                self._notes[at] = self._seen[at] = note
                self._changed.notify_all()
                return
            if self._seen.get(at) == note and any(said == (*at, note) for said in self._said.values()):
                return  # the server was told
            self._seen[at] = note
            number = next(self._numbers)
            self._said = {one: said for one, said in self._said.items() if said[:2] != at}
            self._said[number] = (*at, note)
        self._learned(Learned(
            number, lane.name, digest.hex(), note.generation, b"".join(keys) if is_shared else b"", is_shared
        ))
