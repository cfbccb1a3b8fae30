"""Loads chunks from tiers into the pool, for requests that wait and ahead of requests.

A fetch finds the longest prefix that one tier has, and leaves out chunks that would arrive later than the engine would
have computed them. It reports the chunks that it promises to the server, and then works batch by batch: slots are
reserved, filled, hashed and committed, so the hit grows while later chunks are still being loaded. A fetch ends at the
first chunk that is missing, damaged or late, or when its request no longer waits.

Only one fetch ahead of requests runs at a time. It loads small batches, and starts no batch while a request's fetch
runs, so it occupies at most one of a tier's threads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from msgspec import UNSET

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.mover_schemas import BATCH_BYTES, Promise, worth_chunks
from kvdock.protocol.schemas import (
    Abort,
    Commit,
    GrantedChunk,
    MakeRaw,
    PartDone,
    RawPart,
    Reserve,
    ReserveAnswer,
)
from kvdock.protocol.wire_types import MAX_ENTRIES, MAX_STORE_KEYS
from kvdock.shm.errors import AttachError, ShmError
from kvdock.tiers.mover.agreement import NOTE_S, AgreedNote, Agreement
from kvdock.tiers.mover.herds import LEAST_BYTES, SLOW_S, SLOWER, Following
from kvdock.tiers.mover.namespaces import NamespaceSession
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import AT_STORE, Deadline, Outcome, Place, SharesPool, TierError, ToLoad, sum_of

log = logging.getLogger("kvdock.tiers")

EXISTS_S, EXISTS_SHARE = 0.05, 0.25
"""How long a tier may take to answer which parts it has: this long, or this share of the time that the request has
left, whichever is longer."""
ASKED_AT_ONCE = 16
"""How many prefixes of a prompt a tier is asked about in one call: two calls find the longest of 256 chunks."""
THREADS = 8
DEPTH = 4
"""How many batches of a fetch are in progress at once: while one is loaded, others are hashed or published."""
FAR_DEPTH = 2 * DEPTH
"""The same for a store that other servers use, too: it is asked for its note after each batch, and meanwhile others are
loaded. One that says how many loads it wants at once (LoadsMany) has as many batches in progress."""
AHEAD_EXISTS_S, AHEAD_BATCH_BYTES = 10.0, 8 << 20
"""For fetches ahead of requests: how long a tier may take to answer, and the size of a batch."""
PASSED_BYTES = 2 << 20
"""The size of a batch that comes from a node that loads it now, and of the first one that comes from a store: others
may wait here for each batch."""
ROOM_S, ROOM_SHARE = 0.01, 0.75
"""How often a fetch that waits for room in the pool tries again, and the share of the pool that all may need."""
ROOM_COMES = ("no_space", "held_bytes")
"""A reservation that was limited by these may get more a moment later."""
LOOK_S = 0.05
"""How often a thread that waits for others looks at its deadline, which the server may cancel."""


class Wanted(NamedTuple):
    """The chunks that a fetch is to load. `keys`: the keys of the prompt's chunks, from the first; the pool has the
    first `hit` of them. `ticket`: the ticket of the request that waits for them; 0: no request waits, and they are for
    the prefetch with the number `prefetch`. `tokens_per_s`: how fast the engine computes; 0: not known."""

    space: NamespaceSession
    keys: Sequence[bytes]
    hit: int
    ticket: int = 0
    prefetch: int = 0
    tokens_per_s: float = 0.0


class Fetch:
    """Loads `wanted`. `wait_s`: how long it may take, from its beginning on."""

    def __init__(self, wanted: Wanted, wait_s: float) -> None:
        self.wanted, self.wait_s, self.deadline = wanted, wait_s, Deadline(wait_s)
        self.loaded = 0
        """How many chunks it has published."""
        self.waited_s = 0.0
        """How long it has waited for room in the pool."""
        self.agreed: AgreedNote | None = None
        """The note from which it makes names of parts, in the tier from which it loads."""
        self.comes: frozenset[bytes] = frozenset()
        """The chunks that it loads, or may still find, as far as other nodes may wait for them."""
        self.depth = 0
        """How many nodes they pass before: those of a greater depth may wait for them."""
        self.is_claimed = False
        """Whether it has asked for its place among the nodes that want them, so that others may wait for them."""
        self.has_room = True
        """Whether the pool has room for them."""
        self.is_promised = False

    @property
    def is_ahead(self) -> bool:
        """Whether no request waits for it."""
        return not self.wanted.ticket

    def promised(self, count: int) -> None:
        """The server expects `count` chunks from now on, and counts the wait as fulfilled when they are there: whatever
        they come from, no others are loaded."""
        self.wanted, self.is_promised = self.wanted._replace(keys=self.wanted.keys[: self.wanted.hit + count]), True


class FetchObserver(NamedTuple):
    """`promised`, `ended`: report to the server. `loaded`: called with a tier, a fetch, and chunks that have come whole
    from the tier; their names are made from the note `agreed` of the fetch. `lacked`: called with chunks of a namespace
    that a tier does not have, or has damaged parts of. `progressed`: called when chunks have been published, or do not
    come any more."""

    promised: Callable[[Promise], None]
    ended: Callable[[Fetch], None]
    loaded: Callable[[TierHandle, Fetch, Sequence[bytes]], None]
    lacked: Callable[[TierHandle, bytes, Sequence[bytes]], None]
    progressed: Callable[[], None]


class _Step(NamedTuple):
    """Consecutive chunks that come from one tier. `found`: for each of them the groups that the tier has."""

    handle: TierHandle
    agreed: AgreedNote | None
    found: list[list[int]]


@dataclass
class _Batch:
    """Some consecutive chunks of a fetch, from its chunk `first` on, all with the same groups. `names`: namespaces and
    keys of the chunks that it loads itself. `good`: the result of _fill(). `is_retry`: the batch was reserved once
    more, because others were storing some of its chunks."""

    first: int
    keys: Sequence[bytes]
    groups: list[int]
    granted: ReserveAnswer
    names: set[tuple[bytes, bytes]] = field(default_factory=set)
    good: Future[dict[tuple[int, int, int], int]] | None = None
    is_retry: bool = False


class _Came(NamedTuple):
    """What loads have brought. `sums`: the checksums of the parts that are complete. `wrong`: parts whose bytes do not
    match their checksum. `unfit`: parts under whose name is something else than a record of that length."""

    sums: dict[PartName, int]
    wrong: list[ToLoad]
    unfit: list[ToLoad]
    missing: list[ToLoad]

    @property
    def bad(self) -> list[ToLoad]:
        return [*self.wrong, *self.unfit]

    def and_then(self, other: _Came, again: Container[PartName]) -> _Came:
        """`other`: what came when the parts `again` were loaded once more."""
        one, two, three = ([load for load in loads if load.name not in again] for loads in self[1:])
        return _Came(self.sums | other.sums, one + other.wrong, two + other.unfit, three + other.missing)


class _Threads:
    def __init__(self) -> None:
        self.fetches = ThreadPoolExecutor(THREADS, "kvdock-fetch")
        self.ahead = ThreadPoolExecutor(1, "kvdock-ahead")
        self.readers = ThreadPoolExecutor(FAR_DEPTH * THREADS, "kvdock-read")
        self.notes = ThreadPoolExecutor(2 * THREADS, "kvdock-agree")

    def shut_down(self) -> None:
        for threads in (self.fetches, self.ahead, self.readers, self.notes):
            threads.shutdown(wait=True, cancel_futures=True)


class Fetches:
    """`handles`: the tiers, in the order in which they are asked."""

    def __init__(
        self, handles: Sequence[TierHandle], client: Client, agreement: Agreement, observer: FetchObserver, *,
        batch_bytes: int = BATCH_BYTES, pool_bytes: int, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handles, self._client, self._agreement = handles, client, agreement
        self._observer, self._batch_bytes, self._clock = observer, batch_bytes, clock
        self._threads = _Threads()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._by_ticket: dict[int, Fetch] = {}
        self._running: list[Fetch] = []
        self._filling: set[tuple[bytes, bytes]] = set()
        """Chunks that a fetch is loading now, by namespace and key."""
        self._filled = threading.Condition(self._lock)
        self._room = _Room(pool_bytes, observer.progressed)
        self._alone_until_s = -inf
        """Until then no fetch follows another node's."""

    def start(self, fetch: Fetch) -> None:
        with self._lock:
            self._running.append(fetch)
            if fetch.wanted.ticket:
                self._by_ticket[fetch.wanted.ticket] = fetch
        (self._threads.ahead if fetch.is_ahead else self._threads.fetches).submit(self._run, fetch)

    def cancel(self, ticket: int) -> None:
        """The ticket's request no longer waits."""
        with self._lock:
            fetch = self._by_ticket.pop(ticket, None)
        if fetch is not None:
            fetch.deadline.cancel()
            self._observer.progressed()

    def drop(self, digest: bytes, keys: Container[bytes] | None = None) -> None:
        """Chunks were cleared or deleted: cancels the fetches that load them. `keys` None: all chunks of the
        namespace."""
        with self._lock:
            for fetch in self._running:
                wanted = fetch.wanted
                if wanted.space.digest == digest and (keys is None or any(key in keys for key in wanted.keys)):
                    fetch.deadline.cancel()
        self._observer.progressed()

    def coming(self, digest: bytes, keys: Sequence[bytes], depth: int) -> int:
        """How many of the first of these chunks a fetch for a request is loading, for which a node of that depth may
        wait."""
        with self._lock:
            comes = [
                fetch.comes for fetch in self._running
                if fetch.has_room and fetch.depth < depth and fetch.wanted.space.digest == digest
                and not fetch.deadline.is_over
            ]
        return max((sum(1 for _ in itertools.takewhile(some.__contains__, keys)) for some in comes), default=0)

    def is_busy(self, space: NamespaceSession) -> bool:
        with self._lock:
            return any(fetch.wanted.space is space for fetch in self._running)

    def close(self) -> None:
        with self._lock:
            fetches = list(self._running)
        for fetch in fetches:
            fetch.deadline.cancel()
        self._threads.shut_down()

    # ------------------------------------------------------------------ a fetch's thread

    def _run(self, fetch: Fetch) -> None:
        try:
            self._expect(fetch, fetch.wanted.keys[fetch.wanted.hit :])
            if not self._load_from(fetch, self._handles) and not fetch.deadline.is_over:
                self._load_from(fetch, [one for one in self._handles if not isinstance(one.tier, SharesPool)])
        except Exception:  # other fetches must go on
            log.exception("a fetch has failed")
        finally:
            with self._filled:
                self._running.remove(fetch)
                self._by_ticket.pop(fetch.wanted.ticket, None)
                self._filled.notify_all()
            self._observer.progressed()
            self._observer.ended(fetch)

    def _expect(self, fetch: Fetch, keys: Iterable[bytes]) -> None:
        """From now on other nodes may wait for these chunks alone."""
        fetch.comes = frozenset() if fetch.is_ahead else frozenset(keys)
        self._observer.progressed()

    def _load_from(self, fetch: Fetch, handles: Sequence[TierHandle]) -> bool:
        """Returns False if another node's pool was to give chunks, and has not: a store may have them."""
        steps, place = self._plan(fetch, handles)
        return not steps or self._load_all(fetch, steps, place) or not isinstance(steps[0].handle.tier, SharesPool)

    def _plan(self, fetch: Fetch, handles: Sequence[TierHandle]) -> tuple[list[_Step], Place]:
        """What is loaded from which tier, and this node's place among those that load it from the last of them. Of many
        nodes one is asked for that place first: where it names a source, the others need not be asked what they have,
        if a store has all."""
        peers = next((handle for handle in handles if isinstance(handle.tier, SharesPool)), None)
        asked = self._claim(fetch, peers) if peers is not None else None
        known: dict[str, _Step] = {}
        if asked is not None and _are_many(peers) and asked.result().source:
            steps = self._steps(fetch, [handle for handle in handles if handle is not peers], known)
            if sum(len(step.found) for step in steps) == len(fetch.wanted.keys) - fetch.wanted.hit:
                return steps, asked.result() if steps[-1].handle.tier.poll_s else AT_STORE
        steps = self._steps(fetch, handles, known)
        is_shared = bool(steps) and steps[-1].handle.tier.poll_s and not isinstance(steps[-1].handle.tier, SharesPool)
        return steps, asked.result() if asked is not None and is_shared else AT_STORE

    def _steps(self, fetch: Fetch, handles: Sequence[TierHandle], known: dict[str, _Step]) -> list[_Step]:
        """The first tier that has something and is not too slow for it decides; what other nodes' pools lack comes from
        the next one. `known`: by tier, what it has after the hit; a tier that is there is not asked again."""
        steps: list[_Step] = []
        hit, end = fetch.wanted.hit, len(fetch.wanted.keys)
        at = hit
        for handle in handles:
            self._yield_to_requests(fetch)
            step = known.get(handle.name)
            if step is None:
                step = _Step(handle, found=self._find(fetch, handle, at), agreed=fetch.agreed)
                if at == hit:
                    known[handle.name] = step
            else:
                step = step._replace(found=step.found[at - hit :])
            count = self._worth(fetch, handle, len(step.found))
            if count:
                steps.append(step._replace(found=step.found[:count]))
                at += count
            if at == end or (count and (count < len(step.found) or not isinstance(handle.tier, SharesPool))):
                break
        return steps

    def _claim(self, fetch: Fetch, peers: TierHandle) -> Future[Place] | None:
        """Asks for this node's place among those that load the chunks from a store. None: nobody need be asked."""
        space, missing = fetch.wanted.space, fetch.wanted.keys[fetch.wanted.hit :]
        stores = any(one.tier.poll_s and not isinstance(one.tier, SharesPool) for one in self._handles)
        is_small = len(missing) * space.chunk_bytes < LEAST_BYTES
        agreed = self._agreement.of(peers, space.digest)
        tier = peers.tier
        if fetch.is_ahead or not stores or is_small or agreed is None or peers.breaker.is_open:
            return None
        assert isinstance(tier, SharesPool)
        name = agreed.note.name(space.digest, missing[0], 0, space.ranks[0])
        most_s, fetch.is_claimed = max(EXISTS_S, EXISTS_SHARE * fetch.deadline.left_s), True
        return self._threads.notes.submit(tier.claim, name, Deadline(most_s))

    def _yield_to_requests(self, fetch: Fetch) -> None:
        """A fetch ahead of requests waits while fetches for requests run. It holds no reservation at this point, so no
        other fetch waits for it."""
        with self._filled:
            while fetch.is_ahead and not fetch.deadline.is_over and not all(one.is_ahead for one in self._running):
                self._filled.wait(min(LOOK_S, fetch.deadline.left_s))

    def _find(self, fetch: Fetch, handle: TierHandle, at: int) -> list[list[int]]:
        """For each chunk from number `at` on that the tier seems to have: the groups that it has of it.

        Few chunks are asked about, and of each one writer's parts. Chunks are stored in their order, and a prompt's
        first ones are asked for most, so tiers seldom lack a chunk and have a later one. The load finds it out.
        """
        if handle.breaker.is_open or fetch.deadline.is_over:
            return []
        space, missing = fetch.wanted.space, fetch.wanted.keys[at:]
        if not fetch.is_ahead:
            missing = handle.absent.cut(space.digest, missing)
        if not missing:
            return []
        agreed = fetch.agreed = self._agreement.wait_for(handle, space.digest, fetch.deadline)
        if agreed is None:
            return []
        left_s = fetch.deadline.left_s
        most_s = min(AHEAD_EXISTS_S if fetch.is_ahead else max(EXISTS_S, EXISTS_SHARE * left_s), left_s)
        holds = self._threads.notes.submit(
            self._agreement.still_holds, handle, space.digest, agreed, Deadline(most_s)
        )
        asked = _Asked(handle, space, agreed, Deadline(most_s))
        try:
            count = asked.prefix(missing)
            found = asked.groups(missing[:count])
        except TierError:
            return []
        if not holds.result():
            return []
        self._observer.lacked(handle, space.digest, missing[count:])  # perhaps not each of them
        return found

    def _worth(self, fetch: Fetch, handle: TierHandle, count: int) -> int:
        """How many of `count` chunks are loaded: those that arrive before the deadline, and sooner than the engine
        would compute them."""
        if fetch.is_ahead:
            return count
        worth_within = partial(
            worth_chunks, count, chunk_bytes=fetch.wanted.space.chunk_bytes,
            chunk_tokens=fetch.wanted.space.manifest.chunk_tokens, latency_s=handle.expected_s(0),
            bytes_per_s=handle.speed.rate, tokens_per_s=fetch.wanted.tokens_per_s,
        )
        worth = worth_within(wait_s=fetch.deadline.left_s)
        if count and not worth and not fetch.deadline.is_cancelled:  # the tier is too slow, or it was asked too late
            is_late = worth_within(wait_s=fetch.wait_s) > 0
            handle.counters["declined_too_late" if is_late else "declined_too_slow"] += 1
        return worth

    def _load_all(self, fetch: Fetch, steps: Sequence[_Step], place: Place) -> bool:
        """`place`: as in _plan(). Returns whether all has come."""
        space, count = fetch.wanted.space, sum(len(step.found) for step in steps)
        if fetch.wanted.ticket and not fetch.is_promised:
            by_s = max(step.handle.expected_s(len(step.found) * space.chunk_bytes) for step in steps)
            name = steps[0].handle.name
            fetch.promised(count)
            self._observer.promised(Promise(fetch.wanted.ticket, fetch.wanted.hit + count, name, by_s))
        attachment = space.session.attachment
        if attachment is None or not attachment.acquire():
            return False
        try:
            with self._room.admitted(fetch, count * space.chunk_bytes) as is_admitted:
                if not is_admitted:
                    return False
                done = self._follow(fetch, attachment, steps, place) if place.source else 0
                fetch.depth = 0
                self._expect(fetch, fetch.wanted.keys[fetch.wanted.hit + done : fetch.wanted.hit + count])
                end = 0
                for step in steps:
                    begin, end = end, end + len(step.found)
                    left = step.found[max(0, done - begin) :]
                    if left and not self._step(fetch, attachment, step, end - len(left), left):
                        return False
                return True
        finally:
            attachment.release()

    def _step(
        self, fetch: Fetch, attachment: Attachment, step: _Step, first: int, found: list[list[int]]
    ) -> bool:
        """Loads chunks from a tier; `first`: the number of the first after the hit. Returns whether all have come."""
        fetch.agreed = step.agreed
        began_s, waited_s, loaded = self._clock(), fetch.waited_s, fetch.loaded
        is_whole = self._stream(fetch, step.handle, attachment, first, found)
        took_s = self._clock() - began_s - (fetch.waited_s - waited_s)
        step.handle.fetched((fetch.loaded - loaded) * fetch.wanted.space.chunk_bytes, took_s)
        return is_whole

    def _follow(self, fetch: Fetch, attachment: Attachment, steps: Sequence[_Step], place: Place) -> int:
        """Loads from the pool of another node what comes there. Returns how many chunks have come."""
        space, store = fetch.wanted.space, steps[-1].handle
        peers = next(handle for handle in self._handles if isinstance(handle.tier, SharesPool))
        found = list(itertools.chain.from_iterable(step.found for step in steps))
        agreed = self._agreement.of(peers, space.digest)
        if agreed is None or self._clock() < self._alone_until_s:
            return 0
        assert isinstance(peers.tier, SharesPool)
        keys = fetch.wanted.keys[fetch.wanted.hit : fetch.wanted.hit + len(found)]
        fetch.depth = place.depth
        self._expect(fetch, keys)
        names = [agreed.note.name(space.digest, key, 0, space.ranks[0]) for key in keys]
        most = min(MAX_STORE_KEYS, max(1, DEPTH * self._batch_bytes // space.chunk_bytes))
        following = Following(peers.tier, place, store, names, chunk_bytes=space.chunk_bytes, clock=self._clock)
        done = 0
        try:
            while done < len(found) and (there := following.there(done, most, fetch.deadline)):
                if not self._step(fetch, attachment, _Step(peers, agreed, found), done, found[done : done + there]):
                    break
                done += there
                following.came()
        finally:
            following.close()
            if following.why == SLOWER:
                self._alone_until_s = self._clock() + SLOW_S
        peers.counters["followed"] += done
        if done < len(found):
            log.info("%d of %d chunks have come from the node %s, and the rest is loaded from the tier %s: %s", done,
                     len(found), place.source, store.name, following.why or "they were not read whole")
        return done

    def _stream(
        self, fetch: Fetch, handle: TierHandle, attachment: Attachment, start: int, found: list[list[int]]
    ) -> bool:
        """Loads batch by batch, from chunk number `start` after the hit on: while one batch is hashed and published,
        others are being loaded. A fetch ahead of requests has one batch at a time. Returns whether all chunks are in
        the pool, or are being loaded or stored by others."""
        depth, most_bytes = FAR_DEPTH if handle.tier.poll_s else DEPTH, self._batch_bytes
        depth = max(depth, handle.loads_at_once)
        if fetch.is_ahead:
            depth, most_bytes = 1, AHEAD_BATCH_BYTES
        if fetch.depth:
            most_bytes = min(most_bytes, PASSED_BYTES)
        in_progress: deque[_Batch] = deque()
        first_bytes = PASSED_BYTES if fetch.is_claimed else most_bytes
        left = deque(self._batches(fetch.wanted.space, found, most_bytes, first_bytes))
        until_s, is_whole = self._clock() + self._compute_s(fetch, len(found)), True
        try:
            while left and is_whole:
                self._yield_to_requests(fetch)
                if fetch.deadline.is_over:
                    break
                first, count = left.popleft()
                at = fetch.wanted.hit + start + first
                batch = self._reserve(fetch, handle, attachment, at, count, found[first])
                if batch is None:
                    left.appendleft((first, count))
                    break
                granted = batch.granted
                handle.counters["fetched_elsewhere"] += len(granted.busy) + len(granted.present)
                came = len(granted.chunks) + len(granted.busy) + len(granted.present)
                self._room.found(fetch, came == count)
                if came:
                    in_progress.append(batch)
                if came < count:  # there is no room now
                    left.appendleft((first + came, count - came))
                    if fetch.is_ahead or granted.limited_by not in ROOM_COMES or self._clock() >= until_s:
                        break
                    fetch.waited_s += (pause_s := min(ROOM_S, fetch.deadline.left_s))
                    time.sleep(pause_s)
                if len(in_progress) == depth or (came < count and in_progress):
                    is_whole = self._finish(fetch, handle, attachment, in_progress.popleft())
        finally:
            for batch in in_progress:
                is_whole = self._finish(fetch, handle, attachment, batch, is_wanted=is_whole) and is_whole
        return is_whole and not left

    def _compute_s(self, fetch: Fetch, chunks: int) -> float:
        """How long the engine would compute so many chunks; without end if that is not known."""
        speed = fetch.wanted.tokens_per_s
        return chunks * fetch.wanted.space.manifest.chunk_tokens / speed if speed else inf

    def _batches(
        self, space: NamespaceSession, found: list[list[int]], most_bytes: int, first_bytes: int
    ) -> list[tuple[int, int]]:
        """(index of the first chunk, number of chunks) of each batch. The chunks of a batch have the same groups. The
        first batch has at most `first_bytes`, and each other one twice as much as the one before."""
        parts = len(space.manifest.groups) * space.manifest.writers
        batches: list[tuple[int, int]] = []
        at = 0
        while at < len(found):
            most = max(1, min(min(most_bytes, first_bytes << len(batches)) // space.chunk_bytes, MAX_ENTRIES // parts))
            end = at + 1
            while end < len(found) and end - at < most and found[end] == found[at]:
                end += 1
            batches.append((at, end - at))
            at = end
        return batches

    def _reserve(
        self, fetch: Fetch, handle: TierHandle, attachment: Attachment, first: int, count: int, groups: list[int]
    ) -> _Batch | None:
        """Reserves slots and starts to fill them. None: the server gives no slots."""
        keys = fetch.wanted.keys[first : first + count]
        body = Reserve(
            session=attachment.session, member=attachment.member, store=f"fetch-{next(self._numbers)}",
            parent=fetch.wanted.keys[first - 1].hex() if first else None, keys=b"".join(keys), groups=groups,
            temporary=not fetch.is_ahead, tier=handle.name,
            edition=fetch.agreed.edition if fetch.agreed is not None else None,
        )
        try:
            granted = self._client.reserve(body)
        except (ServerUnavailable, ApiError) as error:
            _call_failed(fetch.wanted.space, attachment, error)
            return None
        batch = _Batch(first, keys, groups, granted)
        if granted.reservation is None:
            return batch
        if not attachment.grants.start(granted.reservation):
            return None
        batch.names = {(fetch.wanted.space.digest, keys[chunk.index]) for chunk in granted.chunks}
        with self._lock:
            self._filling |= batch.names
        batch.good = self._threads.readers.submit(self._fill, fetch, handle, attachment, keys, granted)
        return batch

    def _finish(
        self, fetch: Fetch, handle: TierHandle, attachment: Attachment, batch: _Batch, *, is_wanted: bool = True
    ) -> bool:
        """Waits until the batch is filled, and publishes it. Returns whether all its chunks are in the pool, or are
        being loaded or stored by others. `is_wanted`: the chunks before it are in the pool."""
        granted, is_whole = batch.granted, True
        if batch.good is not None and granted.reservation is not None:
            try:
                good = batch.good.result()
                came = [chunk for chunk in granted.chunks if all(
                    (chunk.index, part.group, part.writer) in good for part in chunk.parts
                )]
                self._observer.loaded(handle, fetch, [batch.keys[chunk.index] for chunk in came])
                published = self._commit(
                    fetch.wanted.space, attachment, granted.reservation, granted.chunks, good if is_wanted else {}
                )
                fetch.loaded += published
                is_whole = published == len(granted.chunks)
            finally:
                attachment.grants.stop(granted.reservation)
                with self._filled:
                    self._filling -= batch.names
                    self._filled.notify_all()
        self._expect(fetch, fetch.comes.difference(batch.keys))
        is_whole = is_whole and not (batch.is_retry and granted.limited_by)
        if not (is_wanted and is_whole and granted.busy):
            return is_whole
        has_waited = self._await_others(fetch, [batch.keys[index] for index in granted.busy])
        if fetch.deadline.is_over or (batch.is_retry and not has_waited):
            return is_whole
        retry = self._reserve(fetch, handle, attachment, batch.first, len(batch.keys), batch.groups)
        if retry is None:
            return False
        retry.is_retry = True
        return self._finish(fetch, handle, attachment, retry)

    def _await_others(self, fetch: Fetch, keys: Sequence[bytes]) -> bool:
        """Waits while other fetches load these chunks; they may end without having loaded them, when their own requests
        no longer wait. Chunks that an engine stores are not waited for. Returns whether there was a fetch to wait
        for."""
        names = {(fetch.wanted.space.digest, key) for key in keys}
        has_waited = False
        with self._filled:
            while not names.isdisjoint(self._filling) and not fetch.deadline.is_over:
                self._filled.wait(min(LOOK_S, fetch.deadline.left_s))
                has_waited = True
        return has_waited

    def _fill(
        self, fetch: Fetch, handle: TierHandle, attachment: Attachment, keys: Sequence[bytes],
        granted: ReserveAnswer,
    ) -> dict[tuple[int, int, int], int]:
        """Loads the parts into their slots. Returns the checksums of the parts that are complete and match, by (index
        of the chunk, group, writer)."""
        space, agreed = fetch.wanted.space, fetch.agreed
        assert agreed is not None
        wanted: dict[PartName, tuple[int, int, int]] = {}
        loads: list[ToLoad] = []
        try:
            for chunk in granted.chunks:
                for part in chunk.parts:
                    pages = space.pages(attachment, part.segment, part.offset, part.length)
                    name = agreed.note.name(space.digest, keys[chunk.index], part.group, part.writer)
                    wanted[name] = (chunk.index, part.group, part.writer)
                    loads.append(ToLoad(name, part.length, pages))
        except (ServerUnavailable, ApiError, AttachError, ShmError) as error:
            log.warning("slots of the pool cannot be mapped: %s", error)
            return {}
        came = self._read(fetch, handle, loads)
        # Another server may have replaced a part during the load: then it is whole now, and must stay.
        came = came.and_then(self._read(fetch, handle, came.bad), {load.name for load in came.bad})
        packed = [group.packed is not UNSET for group in space.manifest.groups]
        perhaps_raw = {load.name: wanted[load.name] for load in (*came.unfit, *came.missing) if packed[load.name.group]}
        raw = self._raw_loads(space, attachment, granted, perhaps_raw)
        # What there are no slots for is neither damaged nor missing, as far as is known.
        came = came.and_then(self._read(fetch, handle, raw), perhaps_raw)
        sums, bad, missing = came.sums, came.bad, came.missing
        for load in bad:
            handle.counters["damaged"] += 1
            log.error("%s: %s is damaged: it is a miss, and is deleted", handle.name, load.name.text())
        if bad:
            handle.delete_damaged([load.name for load in bad])
        lacks = {load.name.key for load in (*bad, *missing)}
        if lacks:  # the part that stands for the chunk goes too: else the chunk would be asked for, and never written
            first = [agreed.note.name(space.digest, key, 0, space.ranks[0]) for key in lacks]
            handle.delete_damaged([name for name in first if name in sums])
            self._observer.lacked(handle, space.digest, list(lacks))
        deadline = Deadline(min(NOTE_S, fetch.deadline.left_s))
        if not self._agreement.still_holds(handle, space.digest, agreed, deadline):
            log.info("%s: chunks that were loaded were cleared meanwhile, and are dropped", handle.name)
            return {}
        return {at: sums[name] for name, at in wanted.items() if name in sums}

    def _raw_loads(
        self, space: NamespaceSession, attachment: Attachment, granted: ReserveAnswer,
        perhaps_raw: Mapping[PartName, tuple[int, int, int]],
    ) -> list[ToLoad]:
        """Loads of parts into slots for raw bytes, as far as the pool has them: a tier may have parts that could not be
        packed. `perhaps_raw`: (index of the chunk, group, writer) of each."""
        names, loads = {at: name for name, at in perhaps_raw.items()}, []
        try:
            for rank in space.ranks:
                parts = [RawPart(index, group) for index, group, writer in names if writer == rank]
                if not parts or granted.reservation is None:
                    continue
                body = MakeRaw(session=attachment.session, rank=rank, parts=parts)
                for slot in self._client.make_raw(granted.reservation, body).parts:
                    pages = space.pages(attachment, slot.segment, slot.offset, slot.length)
                    loads.append(ToLoad(names[slot.index, slot.group, rank], slot.length, pages))
        except (ServerUnavailable, ApiError, AttachError, ShmError) as error:
            log.warning("parts that may not be packed are not loaded: %s", error)
        return loads

    def _read(self, fetch: Fetch, handle: TierHandle, loads: Sequence[ToLoad]) -> _Came:
        came = _Came({}, [], [], [])
        if not loads:
            return came
        try:
            found = handle.load(loads, fetch.deadline).result()
        except TierError:
            return came
        for load, loaded in zip(loads, found, strict=True):
            is_done = loaded.outcome is Outcome.DONE
            if is_done and sum_of(load, loaded) == loaded.checksum:
                came.sums[load.name] = loaded.checksum
            elif is_done:
                came.wrong.append(load)
            elif loaded.outcome is Outcome.DAMAGED:
                came.unfit.append(load)
            elif loaded.outcome is Outcome.MISSING:
                came.missing.append(load)
        return came

    def _commit(
        self, space: NamespaceSession, attachment: Attachment, reservation: str, chunks: list[GrantedChunk],
        good: dict[tuple[int, int, int], int],
    ) -> int:
        """Publishes the chunks before the first that lacks a part, and gives the other slots back. Returns how many
        chunks were published."""
        end = 0
        while end < len(chunks) and all(
            (chunks[end].index, part.group, part.writer) in good for part in chunks[end].parts
        ):
            end += 1
        try:
            for rank in space.ranks:
                done = [
                    PartDone(chunk.index, part.group, good[chunk.index, part.group, part.writer])
                    for chunk in chunks[:end] for part in chunk.parts if part.writer == rank
                ]
                if done:
                    self._client.commit(reservation, Commit(session=attachment.session, rank=rank, parts=done))
            if end < len(chunks):
                self._client.abort(reservation, Abort(session=attachment.session, ranks=list(space.ranks)))
        except (ServerUnavailable, ApiError) as error:
            _call_failed(space, attachment, error)
            return 0
        return end


class _Room:
    """Admits fetches for requests in their order, as long as all that run need at most ROOM_SHARE of the pool together.
    So those that run can wait for room until other requests give theirs back, and do not wait for each other. After a
    restart, prompts that do not all fit come one after the other."""

    def __init__(self, pool_bytes: int, progressed: Callable[[], None]) -> None:
        """`progressed`: as that of FetchObserver."""
        self._most_bytes, self._changed = int(ROOM_SHARE * pool_bytes), threading.Condition()
        self._progressed = progressed
        self._queue: deque[Fetch] = deque()
        self._running: dict[Fetch, int] = {}
        """What each needs, in bytes."""

    @contextmanager
    def admitted(self, fetch: Fetch, need_bytes: int) -> Iterator[bool]:
        """Waits until the fetch may run, which lasts as long as the context. False: its request no longer waits. One
        that needs more than all may have runs alone; one ahead of requests runs at once."""
        is_admitted = fetch.is_ahead or self._enter(fetch, need_bytes)
        try:
            yield is_admitted
        finally:
            with self._changed:
                self._running.pop(fetch, None)
                self._changed.notify_all()

    def _enter(self, fetch: Fetch, need_bytes: int) -> bool:
        with self._changed:
            self._queue.append(fetch)
            while self._queue[0] is not fetch or not self._fits(need_bytes):
                self.found(fetch, False)
                if fetch.deadline.is_over:
                    self._queue.remove(fetch)
                    self._changed.notify_all()
                    return False
                self._changed.wait(min(LOOK_S, fetch.deadline.left_s))
            self._queue.popleft()
            self._running[fetch], fetch.has_room = need_bytes, True
            self._changed.notify_all()
            return True

    def found(self, fetch: Fetch, has_room: bool) -> None:
        """Whether the pool has room for the fetch now."""
        is_new, fetch.has_room = fetch.has_room and not has_room, has_room
        if is_new:
            self._progressed()

    def _fits(self, need_bytes: int) -> bool:
        return not self._running or sum(self._running.values()) + need_bytes <= self._most_bytes


class _Asked:
    """What a tier answers on a prompt's chunks: of each chunk it is asked for the parts of the first writer."""

    def __init__(self, handle: TierHandle, space: NamespaceSession, agreed: AgreedNote, deadline: Deadline) -> None:
        self._handle, self._space, self._agreed, self._deadline = handle, space, agreed, deadline
        self._full = [at for at, group in enumerate(space.manifest.groups) if group.kind != "window"]

    def _has(self, keys: Sequence[bytes], groups: Sequence[int]) -> list[list[bool]]:
        """For each key whether the tier has the part of each group. Raises TierError."""
        writer = self._space.ranks[0]
        names = [
            self._agreed.note.name(self._space.digest, key, group, writer) for key in keys for group in groups
        ]
        has = self._handle.exists(names, self._deadline)
        return [has[at : at + len(groups)] for at in range(0, len(has), len(groups))]

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first chunks the tier has, by a search that asks about ASKED_AT_ONCE prefixes at a time, and
        the first time about the first chunk, which decides for most prompts. Raises TierError."""
        low, high = 0, len(keys)
        while low < high and not self._deadline.is_over:
            step = -(-(high - low) // ASKED_AT_ONCE)
            lengths = sorted({low + 1, high, *range(low + step, high, step)})
            has = [all(parts) for parts in self._has([keys[length - 1] for length in lengths], self._full)]
            good = has.index(False) if False in has else len(has)
            if good < len(has):
                high = lengths[good] - 1
                if not self._deadline.is_over:  # else it may not have been asked in time
                    self._handle.absent.add(self._space.digest, keys[high])
            low = lengths[good - 1] if good else low
        return low

    def groups(self, keys: Sequence[bytes]) -> list[list[int]]:
        """The groups that the tier has of each of these chunks, whose full groups it has. Raises TierError."""
        windows = [at for at in range(len(self._space.manifest.groups)) if at not in self._full]
        if not windows:
            return [self._full for _ in keys]
        return [
            sorted([*self._full, *itertools.compress(windows, has)]) for has in self._has(keys, windows)
        ]


def _are_many(peers: TierHandle | None) -> bool:
    return peers is not None and isinstance(peers.tier, SharesPool) and peers.tier.are_many


def _call_failed(space: NamespaceSession, attachment: Attachment, error: Exception) -> None:
    log.info("the server refuses a call, or does not answer: %s", error)
    space.session.lost(attachment, error)
