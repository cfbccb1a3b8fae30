"""Writes chunks of the pool to one tier, after they were published and never in a store's way.

What waits is bounded in bytes: beyond that, what has waited longest is left out and counted. While a batch is written
its chunks are leased, so they are not evicted; what was evicted while it waited is counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Part
from kvdock.protocol.tier_schemas import Hold
from kvdock.shm.errors import ShmError
from kvdock.tiers.mover.admission import Settled
from kvdock.tiers.mover.agreed import Agreed, Agreement
from kvdock.tiers.mover.lanes import Lane
from kvdock.tiers.mover.places import Place, Places
from kvdock.tiers.record import Record
from kvdock.tiers.tier import Deadline, Outcome, TierError, ToStore

log = logging.getLogger("kvdock.tiers")

BATCH_S = 30.0
"""How long a batch may take."""
REST_S = 0.2
"""Between two tries while the tier, or the server, does not answer."""


class WriteBehind:
    """`most_bytes`: of what waits. `stored`: called with the namespace and the chunks that the tier has from now on.
    One thread writes."""

    def __init__(
        self, lane: Lane, places: Places, agreement: Agreement, client: Client, most_bytes: int, *, batch_bytes: int,
        stored: Callable[[bytes, Sequence[bytes]], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stored, self._batch_bytes, self._agreement = stored, batch_bytes, agreement
        self._lane, self._places, self._client, self._most_bytes, self._clock = lane, places, client, most_bytes, clock
        self._waiting: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        self._leaving: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        """What the pool evicts next: it goes before what waits."""
        self._settled = Settled()
        self._writing: Place | None = None
        self.waiting_bytes = 0
        self._wake = threading.Condition()
        self._until_s: float | None = None
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name=f"kvdock-{lane.name}-down", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, place: Place, keys: Sequence[bytes]) -> None:
        """The pool has the chunks, and they are worth being written."""
        with self._wake:
            for key in self._settled.lacking(keys):
                self._add((place.digest, key), place.chunk_bytes)
            self._wake.notify()

    def hurry(self, leaving: Iterable[tuple[Place, Sequence[bytes]]]) -> None:
        """The pool evicts these chunks next. What it said before counts no more."""
        with self._wake:
            self._leaving = OrderedDict(
                ((place.digest, key), place.chunk_bytes)
                for place, keys in leaving for key in self._settled.lacking(keys) if self._until_s is None
            )
            self._wake.notify()

    def _add(self, name: tuple[bytes, bytes], size: int) -> None:
        if name not in self._waiting and self._until_s is None:
            self._waiting[name] = size
            self.waiting_bytes += size
            while self.waiting_bytes > self._most_bytes:
                self.waiting_bytes -= self._waiting.popitem(last=False)[1]
                self._lane.counters["left_out_full_queue"] += 1

    def is_busy(self, place: Place) -> bool:
        with self._wake:
            names = (*self._waiting, *self._leaving)
            return self._writing is place or any(digest == place.digest for digest, _ in names)

    def forget(self, keys: Sequence[bytes]) -> None:
        """The tier has lost them, or what it had was bad: they are written when they are offered again."""
        with self._wake:
            for key in keys:
                self._settled.discard(key)

    def drop(self, digest: bytes, keys: Sequence[bytes] | None = None) -> None:
        """What waits of these chunks was cleared. None: all of the namespace."""
        with self._wake:
            if keys is None:
                names = [name for name in (*self._waiting, *self._leaving) if name[0] == digest]
                self._settled.clear()
            else:
                names = [(digest, key) for key in keys]
            for name in names:
                self._leaving.pop(name, None)
                self.waiting_bytes -= self._waiting.pop(name, 0)
                self._settled.discard(name[1])

    def drain(self, seconds: float) -> None:
        """The server is about to end: what waits is written, for so long at most, and nothing more is taken."""
        with self._wake:
            if self._until_s is None:
                self._until_s = self._clock() + seconds
            self._wake.notify()

    def close(self) -> None:
        """The server has ended. Returns when nothing is read from the pool any more."""
        self.drain(0.0)
        with self._wake:
            self._until_s = self._clock()
            self._wake.notify()
        self._thread.join()
        if self._waiting:
            log.warning("%s: %d chunks were not written any more", self._lane.name, len(self._waiting))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            place, agreed, keys = batch
            try:
                rests = not self._write(place, agreed, keys)
            except Exception:  # without this thread nothing would be written any more
                log.exception("chunks could not be written to %s", self._lane.name)
                rests = True
            with self._wake:
                self._writing = None
            if rests:
                time.sleep(REST_S)  # whoever does not answer is not asked all the time

    def _next(self) -> tuple[Place, Agreed, list[bytes]] | None:
        """Some chunks of one place: what leaves the pool first, then what has waited longest. None: it is over."""
        with self._wake:
            while True:
                queue = self._leaving or self._waiting
                is_over = self._until_s is not None and (not queue or self._clock() > self._until_s)
                if is_over:
                    return None
                if queue and not self._lane.breaker.is_open:
                    digest = next(iter(queue))[0]
                    if self._places.of(digest) is not None and self._agreement.of(self._lane, digest) is None:
                        digest = next((one for one, _ in queue if self._agreement.of(self._lane, one)), b"")
                    place, agreed = self._places.of(digest), self._agreement.of(self._lane, digest)
                    if place is None and digest:
                        self._lane.counters["left_out_namespace_gone"] += len(self._taken(queue, digest))
                        continue
                    if place is not None and agreed is not None:
                        self._writing = place
                        return place, agreed, self._taken(queue, digest)
                self._wake.wait(REST_S)

    def _taken(self, queue: OrderedDict[tuple[bytes, bytes], int], digest: bytes) -> list[bytes]:
        keys: list[bytes] = []
        size = 0
        for name in list(itertools.islice(queue, 1024)):
            if name[0] != digest:
                continue
            if keys and size + queue[name] > self._batch_bytes:
                break
            keys.append(name[1])
            size += queue[name]
            self._leaving.pop(name, None)
            self.waiting_bytes -= self._waiting.pop(name, 0)
        return keys

    def _write(self, place: Place, agreed: Agreed, keys: list[bytes]) -> bool:
        """False: somebody did not answer, and a pause is due. `agreed` is older than any lease of the chunks, so
        what is cleared after that has a name that nobody asks for any more."""
        keys = self._lacked(place, agreed, keys)
        attachment = place.session.attachment
        if not keys:
            return True
        if attachment is None or not attachment.acquire():
            self._lane.counters["left_out_no_server"] += len(keys)
            return False
        try:
            return self._write_leased(place, agreed, attachment, keys)
        finally:
            attachment.release()

    def _lacked(self, place: Place, agreed: Agreed, keys: list[bytes]) -> list[bytes]:
        """Those that the tier does not have."""
        names = [place.names(agreed.note, key, [0])[0] for key in keys]
        try:
            has = self._lane.exists(names, Deadline(BATCH_S / 10))
        except TierError:
            return keys
        self._settle(place, agreed, [key for key, is_there in zip(keys, has, strict=True) if is_there])
        return [key for key, is_there in zip(keys, has, strict=True) if not is_there]

    def _write_leased(self, place: Place, agreed: Agreed, attachment: Attachment, keys: list[bytes]) -> bool:
        body = Hold(
            session=attachment.session, member=attachment.member, keys=b"".join(keys),
            request=f"{self._lane.name}-{next(self._numbers)}",
        )
        try:
            held = self._client.hold(body)
        except (ServerUnavailable, ApiError) as error:
            place.session.lost(attachment, error)
            self._lane.counters["left_out_no_server"] += len(keys)
            return False
        self._lane.counters["left_out_evicted"] += sum(not parts for parts in held.chunks)
        if held.lease is None:
            return True
        is_held = attachment.grants.begin(held.lease)
        try:
            return not is_held or self._store(place, agreed, attachment, keys, held.chunks)
        finally:
            self._client.release_later(held.lease, attachment.session, [0])
            if is_held:
                attachment.grants.end(held.lease)
            try:
                self._client.flush(attachment.session)
            except (ServerUnavailable, ApiError) as error:
                place.session.lost(attachment, error)

    def _store(
        self, place: Place, agreed: Agreed, attachment: Attachment, keys: list[bytes], chunks: list[list[Part]]
    ) -> bool:
        """A chunk's part of group 0, which exists() asks about, comes last."""
        stores: list[ToStore] = []
        of_key: list[bytes] = []
        try:
            for key, parts in zip(keys, chunks, strict=True):
                for part in sorted(parts, key=lambda part: (part.group, part.writer), reverse=True):
                    name = agreed.note.name(place.digest, key, part.group, part.writer)
                    pages = place.pages(attachment, part.segment, part.offset, part.length)
                    stores.append(ToStore(Record(name, part.length, part.checksum_value), pages))
                    of_key.append(key)
        except (ServerUnavailable, ApiError, ShmError) as error:
            log.warning("chunks could not be read for %s: %s", self._lane.name, error)
            return False
        try:
            outcomes = self._lane.store(stores, Deadline(BATCH_S))
        except TierError:
            self._lane.counters["left_out_failed"] += len(keys)
            return False
        bad = {key for key, outcome in zip(of_key, outcomes, strict=True) if outcome is not Outcome.DONE}
        self._lane.counters["left_out_failed"] += len(bad)
        good = [key for key in keys if key in of_key and key not in bad]
        if self._settle(place, agreed, good):
            self._stored(place.digest, good)
        return True

    def _settle(self, place: Place, agreed: Agreed, keys: Sequence[bytes]) -> bool:
        """The tier has them, and need not be offered them again. False: they were cleared meanwhile, and nobody finds
        them. An order changes what is agreed before drop() is called: under one lock, neither is missed."""
        with self._wake:
            if self._agreement.of(self._lane, place.digest) != agreed:
                return False
            for key in keys:
                self._settled.add(key)
            return True
