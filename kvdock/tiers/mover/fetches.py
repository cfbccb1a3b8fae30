"""Loads chunks from tiers into the pool for lookups that wait, and ahead of requests.

A fetch finds the longest prefix that one tier has, leaves out what would come later than the engine computes it, says
to the server what it promises, and then goes batch by batch: slots are reserved, filled, hashed and committed, so the
hit grows while later chunks still come. It ends at the first chunk that is missing, bad or late, or when nobody waits
any more.

Ahead of requests one fetch runs at a time, in small batches, and begins none while a request waits: of a tier's threads
it has one at most.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment
from kvdock.datapath.checksum import checksum
from kvdock.protocol.awaited import worth_chunks
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.mover_schemas import BATCH_BYTES, Promised
from kvdock.protocol.schemas import Abort, Commit, GrantedChunk, PartDone, Reserve, ReserveAnswer
from kvdock.protocol.wire_types import MAX_ENTRIES
from kvdock.shm.errors import AttachError, ShmError
from kvdock.tiers.mover.agreed import NOTE_S, Agreed, Agreement
from kvdock.tiers.mover.lanes import Lane
from kvdock.tiers.mover.places import Place
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Deadline, Outcome, TierError, ToLoad

log = logging.getLogger("kvdock.tiers")

EXISTS_S, EXISTS_SHARE = 0.05, 0.25
"""How long a tier may take to say what it has: this long, or this share of the time that the request has left."""
THREADS = 8
DEPTH = 4
"""So many batches of a fetch are under way: one is read, others are hashed or published."""
AHEAD_EXISTS_S, AHEAD_BATCH_BYTES = 1.0, 8 << 20
"""The same for what comes ahead of requests."""
LOOK_S = 0.05
"""How often who waits for others looks at the deadline, which the server may end."""


@dataclass
class Fetch:
    """`keys`: of the chunks from the request's first on; the pool has the first `hit`. `ticket` 0: ahead of
    requests, as the `prefetch` of that number. `wait_s`: no longer than that, from now on."""

    place: Place
    keys: Sequence[bytes]
    hit: int
    ticket: int
    wait_s: float
    tokens_per_s: float = 0.0
    prefetch: int = 0
    deadline: Deadline = field(init=False)
    loaded: int = 0
    """Chunks that it has published."""
    agreed: Agreed | None = None
    """What it names parts by, at the tier that it loads from."""

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.wait_s)


@dataclass
class _Batch:
    """Some of a fetch's chunks, of the same groups, from its `first` on. `names`: those that it fills. `good`: what
    _fill() finds. `is_again`: it asks once more for what others were busy with."""

    first: int
    keys: Sequence[bytes]
    groups: list[int]
    granted: ReserveAnswer
    names: set[tuple[bytes, bytes]] = field(default_factory=set)
    good: Future[dict[tuple[int, int, int], int]] | None = None
    is_again: bool = False


class Fetches:
    """`promise`, `ended`: tell the server. `lacked`: a tier has no such chunks, or damaged ones."""

    def __init__(
        self, lanes: Sequence[Lane], client: Client, agreement: Agreement, *, promise: Callable[[Promised], None],
        ended: Callable[[Fetch], None], lacked: Callable[[Lane, Sequence[bytes]], None],
        batch_bytes: int = BATCH_BYTES, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lanes, self._client, self._batch_bytes, self._agreement = lanes, client, batch_bytes, agreement
        self._promise, self._ended, self._lacked, self._clock = promise, ended, lacked, clock
        self._threads = ThreadPoolExecutor(THREADS, "kvdock-fetch")
        self._ahead = ThreadPoolExecutor(1, "kvdock-ahead")
        self._readers = ThreadPoolExecutor(DEPTH * THREADS, "kvdock-read")
        self._asking = ThreadPoolExecutor(2 * THREADS, "kvdock-agree")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[int, Fetch] = {}
        self._running: list[Fetch] = []
        self._filling: set[tuple[bytes, bytes]] = set()
        """Chunks that a fetch is loading now, by namespace and key."""
        self._filled = threading.Condition(self._lock)

    def begin(self, fetch: Fetch) -> None:
        with self._lock:
            self._running.append(fetch)
            if fetch.ticket:
                self._open[fetch.ticket] = fetch
        (self._threads if fetch.ticket else self._ahead).submit(self._run, fetch)

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            fetch = self._open.pop(ticket, None)
        if fetch is not None:
            fetch.deadline.cancel()

    def drop(self, digest: bytes, keys: Container[bytes] | None = None) -> None:
        """What of these chunks is on its way is of no use any more. None: all of the namespace."""
        with self._lock:
            for fetch in self._running:
                if fetch.place.digest == digest and (keys is None or any(key in keys for key in fetch.keys)):
                    fetch.deadline.cancel()

    def is_busy(self, place: Place) -> bool:
        with self._lock:
            return any(fetch.place is place for fetch in self._running)

    def close(self) -> None:
        with self._lock:
            fetches = list(self._running)
        for fetch in fetches:
            fetch.deadline.cancel()
        for threads in (self._threads, self._ahead, self._readers, self._asking):
            threads.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ a fetch's thread

    def _run(self, fetch: Fetch) -> None:
        try:
            for lane in self._lanes:
                self._give_way(fetch)
                found = self._found(fetch, lane)
                count = self._worth(fetch, lane, len(found))
                if count:
                    self._load_all(fetch, lane, found[:count])
                    return
        except Exception:  # whatever it was, others go on
            log.exception("a fetch has failed")
        finally:
            with self._filled:
                self._running.remove(fetch)
                self._open.pop(fetch.ticket, None)
                self._filled.notify_all()
            self._ended(fetch)

    def _give_way(self, fetch: Fetch) -> None:
        """What comes ahead of requests waits for those that wait, while it holds nothing that they could wait for."""
        with self._filled:
            while not (fetch.ticket or fetch.deadline.is_over) and any(one.ticket for one in self._running):
                self._filled.wait(min(LOOK_S, fetch.deadline.left_s))

    def _found(self, fetch: Fetch, lane: Lane) -> list[list[int]]:
        """For each chunk behind the hit, as far as the tier has them in a row: the groups that it has of it."""
        if lane.breaker.is_open or fetch.deadline.is_over:
            return []
        place, missing = fetch.place, fetch.keys[fetch.hit :]
        agreed = fetch.agreed = self._agreement.awaited(lane, place.digest, fetch.deadline)
        if agreed is None:
            return []
        per_chunk = [place.names(agreed.note, key) for key in missing]
        names = [name for names in per_chunk for name in names]
        left_s = fetch.deadline.left_s
        most_s = max(EXISTS_S, EXISTS_SHARE * left_s) if fetch.ticket else AHEAD_EXISTS_S
        holds = self._asking.submit(self._agreement.holds, lane, place.digest, agreed, Deadline(min(most_s, left_s)))
        try:
            answers = lane.exists(names, Deadline(min(most_s, left_s)))
        except TierError:
            return []
        if not holds.result():
            return []
        self._lacked(lane, [name.key for name, is_there in zip(names, answers, strict=True) if not is_there])
        has, found = iter(answers), []
        for names in per_chunk:
            there = {(name.group, name.writer) for name in names if next(has)}
            groups = [
                group for group in range(len(place.manifest.groups))
                if all((group, writer) in there for writer in place.ranks)
            ]
            if any(one.kind != "window" and at not in groups for at, one in enumerate(place.manifest.groups)):
                break
            found.append(groups)
        return found

    def _worth(self, fetch: Fetch, lane: Lane, count: int) -> int:
        """How many of `count` chunks come before the deadline, and before they would have been computed."""
        if not fetch.ticket:
            return count
        worth = worth_chunks(
            count, chunk_bytes=fetch.place.chunk_bytes, chunk_tokens=fetch.place.manifest.chunk_tokens,
            latency_s=lane.expected_s(0), bytes_per_s=lane.speed.rate, wait_s=fetch.deadline.left_s,
            tokens_per_s=fetch.tokens_per_s,
        )
        lane.counters["declined_as_dear"] += count > 0 and worth == 0
        return worth

    def _load_all(self, fetch: Fetch, lane: Lane, found: list[list[int]]) -> None:
        place = fetch.place
        if fetch.ticket:
            by_s = lane.expected_s(len(found) * place.chunk_bytes)
            self._promise(Promised(fetch.ticket, fetch.hit + len(found), lane.name, by_s))
        attachment = place.session.attachment
        if attachment is None or not attachment.acquire():
            return
        began_s = self._clock()
        try:
            self._stream(fetch, lane, attachment, found)
        finally:
            attachment.release()
            lane.fetched(fetch.loaded * place.chunk_bytes, self._clock() - began_s)

    def _stream(self, fetch: Fetch, lane: Lane, attachment: Attachment, found: list[list[int]]) -> None:
        """Batch by batch: while one is hashed and published, others are being loaded. What comes ahead of requests
        comes one at a time."""
        depth, most_bytes = (DEPTH, self._batch_bytes) if fetch.ticket else (1, AHEAD_BATCH_BYTES)
        under_way: deque[_Batch] = deque()
        is_whole = True
        try:
            for first, count in self._batches(fetch.place, found, most_bytes):
                self._give_way(fetch)
                if fetch.deadline.is_over or not is_whole:
                    break
                batch = self._begin(fetch, lane, attachment, fetch.hit + first, count, found[first])
                if batch is None:
                    break
                lane.counters["fetched_elsewhere"] += len(batch.granted.busy) + len(batch.granted.present)
                under_way.append(batch)
                if batch.granted.limited_by is not None:
                    break
                if len(under_way) == depth:
                    is_whole = self._end(fetch, lane, attachment, under_way.popleft())
        finally:
            for batch in under_way:
                is_whole = self._end(fetch, lane, attachment, batch, is_wanted=is_whole) and is_whole

    def _batches(self, place: Place, found: list[list[int]], most_bytes: int) -> list[tuple[int, int]]:
        """(first, how many): chunks of the same groups."""
        parts = len(place.manifest.groups) * place.manifest.writers
        most = max(1, min(most_bytes // place.chunk_bytes, MAX_ENTRIES // parts))
        batches, at = [], 0
        while at < len(found):
            end = at + 1
            while end < len(found) and end - at < most and found[end] == found[at]:
                end += 1
            batches.append((at, end - at))
            at = end
        return batches

    def _begin(
        self, fetch: Fetch, lane: Lane, attachment: Attachment, first: int, count: int, groups: list[int]
    ) -> _Batch | None:
        """None: the server does not give slots for it."""
        keys = fetch.keys[first : first + count]
        body = Reserve(
            session=attachment.session, member=attachment.member, store=f"fetch-{next(self._numbers)}",
            parent=fetch.keys[first - 1].hex() if first else None, keys=b"".join(keys), groups=groups,
            temporary=bool(fetch.ticket), edition=fetch.agreed.edition if fetch.agreed is not None else None,
        )
        try:
            granted = self._client.reserve(body)
        except (ServerUnavailable, ApiError) as error:
            place_lost(fetch.place, attachment, error)
            return None
        batch = _Batch(first, keys, groups, granted)
        if granted.reservation is None:
            return batch
        if not attachment.grants.begin(granted.reservation):
            return None
        batch.names = {(fetch.place.digest, keys[chunk.index]) for chunk in granted.chunks}
        with self._lock:
            self._filling |= batch.names
        batch.good = self._readers.submit(self._fill, fetch, lane, attachment, keys, granted.chunks)
        return batch

    def _end(
        self, fetch: Fetch, lane: Lane, attachment: Attachment, batch: _Batch, *, is_wanted: bool = True
    ) -> bool:
        """Whether all of the batch is in the pool, or on its way there by somebody else. `is_wanted`: what comes before
        it is there."""
        granted, is_whole = batch.granted, True
        if batch.good is not None and granted.reservation is not None:
            try:
                good = batch.good.result()
                published = self._commit(
                    fetch.place, attachment, granted.reservation, granted.chunks, good if is_wanted else {}
                )
                fetch.loaded += published
                is_whole = published == len(granted.chunks)
            finally:
                attachment.grants.end(granted.reservation)
                with self._filled:
                    self._filling -= batch.names
                    self._filled.notify_all()
        is_whole = is_whole and granted.limited_by is None
        if not (is_wanted and is_whole and granted.busy):
            return is_whole
        has_waited = self._await_others(fetch, [batch.keys[index] for index in granted.busy])
        if fetch.deadline.is_over or (batch.is_again and not has_waited):
            return is_whole
        again = self._begin(fetch, lane, attachment, batch.first, len(batch.keys), batch.groups)
        if again is None:
            return False
        again.is_again = True
        return self._end(fetch, lane, attachment, again)

    def _await_others(self, fetch: Fetch, keys: Sequence[bytes]) -> bool:
        """Other fetches load these chunks, or an engine stores them: who waits for them waits for the former, which may
        end without them, for their own requests have ended. Returns whether there was one to wait for."""
        names = {(fetch.place.digest, key) for key in keys}
        has_waited = False
        with self._filled:
            while not names.isdisjoint(self._filling) and not fetch.deadline.is_over:
                self._filled.wait(min(LOOK_S, fetch.deadline.left_s))
                has_waited = True
        return has_waited

    def _fill(
        self, fetch: Fetch, lane: Lane, attachment: Attachment, keys: Sequence[bytes], chunks: list[GrantedChunk]
    ) -> dict[tuple[int, int, int], int]:
        """Checksums of the parts (index, group, writer) that were loaded and are what they say."""
        place, agreed = fetch.place, fetch.agreed
        assert agreed is not None
        wanted: list[tuple[int, int, int]] = []
        loads: list[ToLoad] = []
        try:
            for chunk in chunks:
                for part in chunk.parts:
                    pages = place.pages(attachment, part.segment, part.offset, part.length)
                    name = agreed.note.name(place.digest, keys[chunk.index], part.group, part.writer)
                    wanted.append((chunk.index, part.group, part.writer))
                    loads.append(ToLoad(name, part.length, pages))
        except (ServerUnavailable, ApiError, AttachError, ShmError) as error:
            log.warning("slots of the pool cannot be mapped: %s", error)
            return {}
        sums, bad = self._read(fetch, lane, loads)
        if bad:  # another server may have replaced it while it was read: then it is whole now, and not to be deleted
            sums_again, still_bad = self._read(fetch, lane, bad)
            sums |= sums_again
            for load in still_bad:
                lane.counters["damaged"] += 1
                log.error("%s: %s is damaged: it is a miss, and deleted", lane.name, load.name.text())
                lane.delete([load.name])
                self._lacked(lane, [load.name.key])
        if not self._agreement.holds(lane, place.digest, agreed, Deadline(min(NOTE_S, fetch.deadline.left_s))):
            log.info("%s: what came was cleared meanwhile, and is dropped", lane.name)
            return {}
        return {at: sums[load.name] for at, load in zip(wanted, loads, strict=True) if load.name in sums}

    def _read(self, fetch: Fetch, lane: Lane, loads: Sequence[ToLoad]) -> tuple[dict[PartName, int], list[ToLoad]]:
        """(checksums of those that came whole, those that are damaged)."""
        try:
            found = lane.load(loads, fetch.deadline).result()
        except TierError:
            return {}, []
        sums: dict[PartName, int] = {}
        bad = []
        for load, loaded in zip(loads, found, strict=True):
            if loaded.outcome is Outcome.DONE and checksum(load.pages[: load.length]) == loaded.checksum:
                sums[load.name] = loaded.checksum
            elif loaded.outcome in (Outcome.DONE, Outcome.DAMAGED):
                bad.append(load)
            elif loaded.outcome is Outcome.MISSING:
                self._lacked(lane, [load.name.key])
        return sums, bad

    def _commit(
        self, place: Place, attachment: Attachment, reservation: str, chunks: list[GrantedChunk],
        good: dict[tuple[int, int, int], int],
    ) -> int:
        """Publishes the chunks before the first that lacks a part, and gives the others back. Returns how many."""
        end = 0
        while end < len(chunks) and all(
            (chunks[end].index, part.group, part.writer) in good for part in chunks[end].parts
        ):
            end += 1
        try:
            for rank in place.ranks:
                done = [
                    PartDone(chunk.index, part.group, good[chunk.index, part.group, part.writer])
                    for chunk in chunks[:end] for part in chunk.parts if part.writer == rank
                ]
                if done:
                    self._client.commit(reservation, Commit(session=attachment.session, rank=rank, parts=done))
            if end < len(chunks):
                self._client.abort(reservation, Abort(session=attachment.session, ranks=list(place.ranks)))
        except (ServerUnavailable, ApiError) as error:
            place_lost(place, attachment, error)
            return 0
        return end


def place_lost(place: Place, attachment: Attachment, error: Exception) -> None:
    log.info("the server does not take it: %s", error)
    place.session.lost(attachment, error)
