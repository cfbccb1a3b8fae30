"""Writes chunks of the pool to one tier, after they were published, so that no store of an engine waits for it, and
keeps there what prompts go on asking for.

A chunk that prompts find in the pool is not loaded from the tier, which would take it for unused. So after some time
(Tier.recheck_s) the tier is asked whether it still has the chunk. That question is a use of the tier's copy, and finds
out whether it is gone, whoever evicted it; then it is written again.

The queue has a limit in bytes: beyond it, the chunks that have waited longest are left out and counted. While a batch
is written, its chunks are leased, so they are not evicted. Chunks that the pool evicts while they wait are counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Hold, Part
from kvdock.protocol.wire_types import MAX_STORE_KEYS
from kvdock.shm.errors import ShmError
from kvdock.tiers.mover.agreement import NOTE_S, AgreedNote, Agreement
from kvdock.tiers.mover.namespaces import NamespaceSession, NamespaceSessions
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.record import Record
from kvdock.tiers.tier import Deadline, Outcome, SharesPool, TierError, ToStore

# --------------------------------------------------------------------------- admission

# Decides which chunks are written to lower tiers: those that prompts ask for again, within a budget of writes.
#
# How often each chunk was asked for is counted in two tables. When the newer one is full, the older one is forgotten
# (as in Einziger et al., TinyLFU, 2017, whose counts age by halving). So a chunk that was asked for once, long ago,
# counts as new.

MOST_COUNTED = 1 << 18
"""The most keys in one table."""
MOST_EVICTED = 1 << 16
DAY_S = 86400.0
LEAST_SHARE = 0.25
"""As long as at least this share of the chunks that were evicted after one lookup is asked for again, all chunks are
written: computing one chunk costs an engine about as much as storing four costs a disk."""
JUDGED, MOST_JUDGED = 64, 2048
"""The share is computed from at least JUDGED chunks; beyond twice MOST_JUDGED, older chunks count half."""


class AskCounts:
    """Thread-safe. `wanted`: how often a chunk must have been asked for; 0: once or twice, whichever pays."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._returns = Returns()

    def asked(self, keys: Sequence[bytes]) -> None:
        """A lookup has asked for these chunks."""
        if self._wanted == 1:
            return
        with self._lock:
            for key in keys:
                self._new[key] = self._new.get(key, 0) + 1
            if len(self._new) >= MOST_COUNTED:
                self._old, self._new = self._new, {}
            self._returns.asked(keys)

    def evicted(self, keys: Iterable[bytes], capacity: int) -> None:
        """The pool has evicted these chunks. `capacity`: how many chunks fit into the tiers."""
        if self._wanted == 0:
            with self._lock:
                self._returns.evicted((key for key in keys if self._count(key) <= 1), capacity)

    def worth(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The chunks of `keys` that have been asked for often enough."""
        wanted = self._wanted or (1 if self._returns.pay else 2)
        return keys if wanted == 1 else [key for key in keys if self._count(key) >= wanted]

    def _count(self, key: bytes) -> int:
        return self._new.get(key, 0) + self._old.get(key, 0)


class WriteBudget:
    """How much may be written to a storage that wears out: `day_bytes` in a day, which come evenly, and add up to a
    day's if they are not spent. A new mover begins with an hour's. `day_bytes` 0: there is no limit. `written_bytes`:
    returns what was written so far. `now_s`: a monotonic clock, in seconds."""

    def __init__(self, day_bytes: int, written_bytes: Callable[[], int], now_s: Callable[[], float]) -> None:
        self.day_bytes = day_bytes
        self._written_bytes, self._now_s, self._lock = written_bytes, now_s, threading.Lock()
        self._left, self._counted, self._at_s = day_bytes / 24, written_bytes(), now_s()

    @property
    def left_bytes(self) -> int:
        """Below 0 if more was written than allowed; then nothing is written until it is made up for."""
        with self._lock:
            now_s, written = self._now_s(), self._written_bytes()
            earned = self.day_bytes * (now_s - self._at_s) / DAY_S
            self._left = min(self.day_bytes, self._left + earned - (written - self._counted))
            self._at_s, self._counted = now_s, written
            return int(self._left)

    @property
    def is_spent(self) -> bool:
        return self.day_bytes > 0 and self.left_bytes <= 0


class Returns:
    """Whether chunks that the pool evicts after one lookup are asked for again while a tier would still have them. The
    answer is yes until enough chunks have been seen. Not thread-safe."""

    def __init__(self) -> None:
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._returned, self._stayed_away = 0, 0
        self.pay = True

    def asked(self, keys: Sequence[bytes]) -> None:
        returned = [key for key in keys if key in self._evicted]
        for key in returned:
            del self._evicted[key]
        self._judge(len(returned), 0)

    def evicted(self, keys: Iterable[bytes], capacity: int) -> None:
        self._evicted.update(dict.fromkeys(keys))
        late = max(0, len(self._evicted) - min(capacity, MOST_EVICTED))
        for _ in range(late):
            self._evicted.popitem(last=False)
        self._judge(0, late)

    def _judge(self, returned: int, stayed_away: int) -> None:
        self._returned += returned
        self._stayed_away += stayed_away
        if (total := self._returned + self._stayed_away) >= JUDGED:
            self.pay = self._returned >= LEAST_SHARE * total
        if total > 2 * MOST_JUDGED:
            self._returned, self._stayed_away = self._returned // 2, self._stayed_away // 2


# --------------------------------------------------------------------------- writing

log = logging.getLogger("kvdock.tiers")

BATCH_S = 30.0
"""How long writing a batch may take."""
RECHECK_S = 3.0
"""How long asking a tier what it has of a batch may take."""
RETRY_S = 0.2
"""The pause between two tries while the tier or the server does not answer."""
MOST_KNOWN_STORED = 1 << 18
_LOOKED_AT = MAX_STORE_KEYS
"""How many entries of the queue are looked at for a batch."""

ChunkName = tuple[bytes, bytes]
"""Namespace and key."""


class KnownStored:
    """The last MOST_KNOWN_STORED chunks that a tier is known to have, so that it is not asked about them each time.
    Keys alone do not name them: engines that run other weights have equal keys in other namespaces. `recheck_s`: as in
    Tier. Not thread-safe."""

    def __init__(self, recheck_s: float, clock: Callable[[], float]) -> None:
        self._recheck_s, self._clock = recheck_s, clock
        self._names: OrderedDict[ChunkName, float] = OrderedDict()
        """When the tier last had each, in seconds."""
        self._refused: OrderedDict[ChunkName, None] = OrderedDict()

    def unknown(self, names: Iterable[ChunkName]) -> list[ChunkName]:
        """The chunks of `names` that the tier is not known to have, or to refuse."""
        return [name for name in names if name not in self._names and name not in self._refused]

    def due(self, names: Iterable[ChunkName]) -> list[ChunkName]:
        """The chunks of `names` about which the tier has to be asked again. Each is returned once."""
        now_s = self._clock()
        due = [name for name in names if now_s - self._names.get(name, now_s) >= self._recheck_s]
        self._names.update(dict.fromkeys(due, now_s))
        return due

    def add(self, name: ChunkName) -> None:
        self._names[name] = self._clock()
        self._names.move_to_end(name)
        if len(self._names) > MOST_KNOWN_STORED:
            self._names.popitem(last=False)

    def refuse(self, name: ChunkName) -> None:
        """The tier does not take all parts of the chunk. The last MOST_KNOWN_STORED of these are known, too."""
        self._refused[name] = None
        if len(self._refused) > MOST_KNOWN_STORED:
            self._refused.popitem(last=False)

    def discard(self, name: ChunkName) -> bool:
        """Whether it was known."""
        return self._names.pop(name, None) is not None

    def discard_all(self, digest: bytes) -> None:
        """Those of one namespace."""
        for name in [name for name in self._names if name[0] == digest]:
            del self._names[name]

    def clear(self) -> None:
        self._names.clear()


class WriteQueue:
    """Chunks that wait to be written, with their sizes. `most_bytes`: the limit for chunks that wait in their order.
    `batch_bytes`: the most bytes of a batch. Not thread-safe."""

    def __init__(self, most_bytes: int, batch_bytes: int, budget: WriteBudget) -> None:
        self._most_bytes, self._batch_bytes, self.budget = most_bytes, batch_bytes, budget
        self._waiting: OrderedDict[ChunkName, int] = OrderedDict()
        self._evicting_soon: OrderedDict[ChunkName, int] = OrderedDict()
        """Chunks that the pool evicts next: they are written first."""
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def names(self) -> Iterable[ChunkName]:
        """The chunks to be written next, in their order: those that the pool evicts soon, or, if there are none, the
        others.
        """
        return self._evicting_soon or self._waiting

    def add(self, name: ChunkName, size: int) -> int:
        """Queues a chunk. Returns how many other chunks are left out because of it."""
        left_out = 0
        if name not in self._waiting:
            self._waiting[name] = size
            self.waiting_bytes += size
            while self.waiting_bytes > self._most_bytes:
                self.waiting_bytes -= self._waiting.popitem(last=False)[1]
                left_out += 1
        return left_out

    def prioritise(self, chunks: Iterable[tuple[ChunkName, int]]) -> None:
        """From now on these chunks, and no others, are written first. `chunks`: each with its size in bytes."""
        self._evicting_soon = OrderedDict(chunks)

    def take(self, digest: bytes) -> list[bytes]:
        """The keys of a batch of one namespace."""
        queue = self._evicting_soon or self._waiting
        keys: list[bytes] = []
        size = 0
        for name in list(itertools.islice(queue, _LOOKED_AT)):
            if name[0] != digest:
                continue
            if keys and size + queue[name] > self._batch_bytes:
                break
            keys.append(name[1])
            size += queue[name]
            self.remove(name)
        return keys

    def remove(self, name: ChunkName) -> None:
        self._evicting_soon.pop(name, None)
        self.waiting_bytes -= self._waiting.pop(name, 0)

    def of(self, digest: bytes) -> list[ChunkName]:
        """The chunks of one namespace."""
        return [name for name in (*self._waiting, *self._evicting_soon) if name[0] == digest]


class Batch(NamedTuple):
    """Chunks of one namespace to write, or to ask the tier about. `agreed`: older than any lease of the chunks."""

    space: NamespaceSession
    agreed: AgreedNote
    keys: list[bytes]
    is_recheck: bool = False


class WriteObserver(NamedTuple):
    """Called with a namespace and chunks: `stored`, if the tier has them from now on; `gone`, if it has them no
    more."""

    stored: Callable[[bytes, Sequence[bytes]], None]
    gone: Callable[[bytes, Sequence[bytes]], None]


class WriteBehind:
    """A thread of its own writes."""

    def __init__(
        self, handle: TierHandle, sessions: NamespaceSessions, agreement: Agreement, client: Client, queue: WriteQueue,
        *, observer: WriteObserver, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle, self._sessions, self._agreement, self._client = handle, sessions, agreement, client
        self._queue, self._observer, self._clock = queue, observer, clock
        self._may_store = not isinstance(handle.tier, SharesPool) and not handle.is_only_read
        self._known_stored = KnownStored(handle.tier.recheck_s, clock)
        self._rechecks: OrderedDict[ChunkName, None] = OrderedDict()
        """Chunks about which the tier is asked again."""
        self._writing: NamespaceSession | None = None
        self._changed = threading.Condition()
        """Guards the queue, what is known to be stored, `_writing` and `_until_s`."""
        self._until_s: float | None = None
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name=f"kvdock-{handle.name}-down", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._queue.waiting_bytes

    @property
    def budget(self) -> WriteBudget:
        return self._queue.budget

    def offer(self, space: NamespaceSession, keys: Sequence[bytes]) -> None:
        """Queues chunks that the pool has and that are worth writing, unless the tier is known to have them."""
        if not self._may_store:
            return
        with self._changed:
            if self._until_s is None:
                names = [(space.digest, key) for key in keys]
                unknown = self._known_stored.unknown(names)
                if unknown and self.budget.is_spent:
                    self._handle.counters["left_out_day_spent"] += len(unknown)
                    unknown = []
                for name in unknown:
                    self._handle.counters["left_out_full_queue"] += self._queue.add(name, space.chunk_bytes)
                self._rechecks.update(dict.fromkeys(self._known_stored.due(names)))
            self._changed.notify()

    def prioritise(self, evicting_soon: Iterable[tuple[NamespaceSession, Sequence[bytes]]]) -> None:
        """The pool evicts these chunks next: they are written first, in place of the chunks of the last call."""
        if not self._may_store:
            return
        with self._changed:
            self._queue.prioritise(
                (name, space.chunk_bytes) for space, keys in evicting_soon
                for name in self._known_stored.unknown((space.digest, key) for key in keys) if self._until_s is None
            )
            self._changed.notify()

    def is_busy(self, space: NamespaceSession) -> bool:
        with self._changed:
            return self._writing is space or bool(self._queue.of(space.digest))

    def has(self, space: NamespaceSession, agreed: AgreedNote, keys: Sequence[bytes]) -> bool:
        """Records that the tier has these chunks. False: they were cleared meanwhile, so lookups do not find them. An
        order changes what is agreed before drop() is called; both take the same lock, so no chunk is added after its
        drop()."""
        with self._changed:
            if self._agreement.of(self._handle, space.digest) != agreed:
                return False
            for key in keys:
                self._known_stored.add((space.digest, key))
            return True

    def forget(self, digest: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """The tier does not have these chunks of a namespace any more, or has damaged ones: they are written when they
        are offered again. Returns those that it was known to have."""
        with self._changed:
            return [key for key in keys if self._known_stored.discard((digest, key))]

    def forget_all(self) -> None:
        """It is not known any more what the tier has."""
        with self._changed:
            self._known_stored.clear()

    def drop(self, digest: bytes, keys: Sequence[bytes] | None = None) -> None:
        """Chunks were cleared or deleted, so they are not written. `keys` None: all chunks of the namespace."""
        with self._changed:
            if keys is None:
                names = self._queue.of(digest)
                self._known_stored.discard_all(digest)
            else:
                names = [(digest, key) for key in keys]
            for name in names:
                self._queue.remove(name)
                self._known_stored.discard(name)

    @property
    def is_drained(self) -> bool:
        """Whether the server drains, and nothing more is written."""
        return not self._thread.is_alive()

    def drain(self, seconds: float) -> None:
        """The server is about to end: waiting chunks are written for at most `seconds` and as long as the tier takes
        them, and new ones are not accepted."""
        with self._changed:
            if self._until_s is None:
                self._until_s = self._clock() + seconds
            self._changed.notify()

    def close(self) -> None:
        """The server has ended. Returns when nothing reads the pool any more."""
        self.drain(0.0)
        with self._changed:
            self._until_s = self._clock()
            self._changed.notify()
        self._thread.join()
        if self._queue:
            log.warning("%s: %d chunks that waited were not written", self._handle.name, len(self._queue))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                is_answered = (self._recheck if batch.is_recheck else self._write)(batch)
            except Exception:  # without this thread nothing would be written any more
                log.exception("chunks could not be written to %s", self._handle.name)
                is_answered = False
            with self._changed:
                self._writing = None
            if not is_answered:
                time.sleep(RETRY_S)  # so that a tier or server that does not answer is not called all the time

    def _next_batch(self) -> Batch | None:
        """Some chunks of one namespace: those about which the tier is asked again, else those that the pool evicts
        soon, else those that have waited longest. None: the queue is closed or drained."""
        with self._changed:
            while True:
                first = next(iter(self._queue.names), None)
                if self._until_s is not None and (
                    first is None or self._clock() > self._until_s or not self._may_write()
                ):
                    return None
                if self._rechecks and not self._handle.breaker.is_open and (batch := self._next_recheck()):
                    return batch
                if first is not None and self._may_write():
                    digest = first[0]
                    if self._sessions.of(digest) is not None and self._agreement.of(self._handle, digest) is None:
                        others = (one for one, _ in self._queue.names if self._agreement.of(self._handle, one))
                        digest = next(others, b"")
                    space, agreed = self._sessions.of(digest), self._agreement.of(self._handle, digest)
                    if space is None and digest:
                        self._handle.counters["left_out_namespace_gone"] += len(self._queue.take(digest))
                        continue
                    if space is not None and agreed is not None:
                        self._writing = space
                        return Batch(space, agreed, self._queue.take(digest))
                self._changed.wait(RETRY_S)

    def _may_write(self) -> bool:
        return not self._handle.breaker.is_open and self._handle.stores.are_due and not self.budget.is_spent

    def _next_recheck(self) -> Batch | None:
        """None: the tier is not used for the namespace now. Its chunks are due again later. The caller holds
        `_changed`."""
        digest = next(iter(self._rechecks))[0]
        names = [name for name in itertools.islice(self._rechecks, _LOOKED_AT) if name[0] == digest]
        for name in names:
            del self._rechecks[name]
        space, agreed = self._sessions.of(digest), self._agreement.of(self._handle, digest)
        if space is None or agreed is None:
            return None
        return Batch(space, agreed, [key for _, key in names], is_recheck=True)

    def _recheck(self, batch: Batch) -> bool:
        """Asks for all parts of the chunks, so that all count as used. Chunks that the tier does not have whole are
        queued to be written. Returns False if the tier did not answer."""
        space, deadline = batch.space, Deadline(RECHECK_S)
        names = [name for key in batch.keys for name in space.names(batch.agreed.note, key)]
        try:
            has = self._handle.exists(names, deadline)
        except TierError:
            return False
        if deadline.is_over:  # what was not asked in time counts as missing
            return False
        wanted = {at for at, group in enumerate(space.manifest.groups) if group.kind != "window"}
        lacks = {name.key for name, is_there in zip(names, has, strict=True) if name.group in wanted and not is_there}
        self.has(space, batch.agreed, [key for key in batch.keys if key not in lacks])
        if lacks:
            gone = list(lacks)
            left = [name for name, is_there in zip(names, has, strict=True) if is_there and name.key in lacks]
            if left:  # _missing() would find the chunk by one of them
                self._handle.delete_damaged(left)
            self.forget(space.digest, gone)
            self._observer.gone(space.digest, gone)
            self.offer(space, gone)
        return True

    def _write(self, batch: Batch) -> bool:
        """Returns False if the tier or the server did not answer. If chunks are cleared meanwhile, they are stored
        under names that no lookup asks for."""
        space, agreed = batch.space, batch.agreed
        if not self._agreement.still_holds(self._handle, space.digest, agreed, Deadline(NOTE_S)):
            self.offer(space, batch.keys)  # the store has lost its note, or others have cleared the namespace
            return False
        keys = self._missing(space, agreed, batch.keys)
        attachment = space.session.attachment
        if not keys:
            return True
        if attachment is None or not attachment.acquire():
            self._handle.counters["left_out_no_server"] += len(keys)
            return False
        try:
            return self._write_leased(space, agreed, attachment, keys)
        finally:
            attachment.release()

    def _missing(self, space: NamespaceSession, agreed: AgreedNote, keys: list[bytes]) -> list[bytes]:
        """The chunks of `keys` whose part of group 0 and writer 0 the tier does not have; all if the tier does not
        answer. That part is stored last (_store)."""
        names = [space.names(agreed.note, key, [0])[0] for key in keys]
        try:
            has = self._handle.exists(names, Deadline(RECHECK_S))
        except TierError:
            return keys
        self.has(space, agreed, [key for key, is_there in zip(keys, has, strict=True) if is_there])
        return [key for key, is_there in zip(keys, has, strict=True) if not is_there]

    def _write_leased(
        self, space: NamespaceSession, agreed: AgreedNote, attachment: Attachment, keys: list[bytes]
    ) -> bool:
        body = Hold(
            session=attachment.session, member=attachment.member, keys=b"".join(keys),
            request=f"{self._handle.name}-{next(self._numbers)}",
        )
        try:
            held = self._client.hold(body)
        except (ServerUnavailable, ApiError) as error:
            space.session.lost(attachment, error)
            self._handle.counters["left_out_no_server"] += len(keys)
            return False
        self._handle.counters["left_out_evicted"] += sum(not parts for parts in held.chunks)
        if held.lease is None:
            return True
        is_held = attachment.grants.start(held.lease)
        try:
            return not is_held or self._store(space, agreed, attachment, keys, held.chunks)
        finally:
            self._client.release_later(held.lease, attachment.session, [0])
            if is_held:
                attachment.grants.stop(held.lease)
            try:
                self._client.flush(attachment.session)
            except (ServerUnavailable, ApiError) as error:
                space.session.lost(attachment, error)

    def _store(
        self, space: NamespaceSession, agreed: AgreedNote, attachment: Attachment, keys: list[bytes],
        chunks: Sequence[Sequence[Part]],
    ) -> bool:
        """In each chunk the part of group 0 and writer 0 comes last, because _missing() asks for that part alone. Tiers
        that store several parts at once may end them in another order."""
        stores: list[ToStore] = []
        of_key: list[bytes] = []
        try:
            for key, parts in zip(keys, chunks, strict=True):
                for part in sorted(parts, key=lambda part: (part.group, part.writer), reverse=True):
                    name = agreed.note.name(space.digest, key, part.group, part.writer)
                    pages = space.pages(attachment, part.segment, part.offset, part.length)
                    stores.append(ToStore(Record(name, part.length, part.checksum_value), pages))
                    of_key.append(key)
        except (ServerUnavailable, ApiError, ShmError) as error:
            log.warning("chunks could not be read for %s: %s", self._handle.name, error)
            return False
        try:
            outcomes = self._handle.store(stores, Deadline(BATCH_S))
        except TierError:
            self._handle.counters["left_out_failed"] += len(keys)
            return False
        bad = {key for key, outcome in zip(of_key, outcomes, strict=True) if outcome is not Outcome.DONE}
        large = {key for key, outcome in zip(of_key, outcomes, strict=True) if outcome is Outcome.TOO_LARGE}
        self._handle.counters["left_out_failed"] += len(bad - large)
        self._handle.counters["left_out_too_large"] += len(large)
        with self._changed:
            for key in large:
                self._known_stored.refuse((space.digest, key))
        good = [key for key in keys if key in of_key and key not in bad]
        with self._changed:  # so that no chunk is reported after drop() has dropped it
            if self.has(space, agreed, good):
                self._observer.stored(space.digest, good)
        return True
