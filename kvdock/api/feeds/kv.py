"""KV cache events for routers: which chunks lookups find, in vLLM's form, with numbers that count for each tenant
alone.

`KvLog` follows the table's log of changes (csrc/table/change_log.h), which it reads every EVERY_S, and what the mover
reports of tiers. A chunk may be in the pool and on several tiers: each is a copy with events of its own. The names that
engines give a chunk wait here until the chunk is published. A reader that knows a number gets what came after it; one
that was away for too long, comes late, or knows another server's numbers gets a snapshot: AllBlocksCleared, and then
all that is there. Numbers begin with the time, so that those of the next server are higher and leave a gap. `KvStream`
sends the log as server-sent events; kvdock/api/feeds/kv_zmq.py publishes it over ZeroMQ.

Invariants: stored and removed events alternate for each copy. Memory is bounded: for a chunk that does not fit,
routers get a removal, so that they may miss chunks that are there, but do not expect chunks that are not. The event
loop writes; one lock lets other threads read.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import msgspec

from kvdock.api.feeds.sse import RETRY, IsAdmitted, Stream, number_in, piece_of
from kvdock.api.turns import next_slice
from kvdock.protocol.events import Draining, Event
from kvdock.protocol.forms import JSON
from kvdock.protocol.kv_events import (
    TOKEN_BYTES,
    AllBlocksCleared,
    BlockNames,
    BlockRemoved,
    BlockStored,
    KvEvent,
    block_hash,
    in_hex,
    on_tier,
)
from kvdock.protocol.wire_types import KEY_BYTES, OWN_TENANT

EVERY_S = 0.05
SLICE = 64
"""Changes of one turn of the event loop."""
BEAT_S = 10.0
"""After this long without events, an empty batch is added. From its number, a reader that has missed events learns
that it has."""
PAGE_CHUNKS, INDEX_PARTS = 256, 61
COPIED_BATCHES = 8
"""How many batches a reader has at once."""
BATCH_CHUNKS, BATCH_TOKENS = 128, 2048
"""The most of a batch: to make one takes a millisecond."""
MOST_BYTES = 128 << 20
"""About how much the log may remember of all chunks that lookups find."""
MOST_TIER_BYTES = 64 << 20
"""The same for copies on tiers."""
MOST_EARLY = 1 << 17
"""The most chunks on tiers that are remembered until an engine attaches to their namespace."""
KEPT_BYTES = 32 << 20
"""How much is kept, for all tenants together, for readers that were away."""
NAMES_BYTES = 32 << 20
"""How much is kept of the names of chunks that are not there, or not yet: the oldest are forgotten first."""
CHUNK_BYTES, HASH_BYTES = 400, 64
"""How much memory a chunk and each of its hashes take, beside its tokens."""

Change = tuple[int, bytes, bool, bytes]
Changes = Callable[[int, int], tuple[list[Change], int, bool]]
"""Table.all_changes."""
Ready = Callable[[int, int], tuple[list[Change], int]]
"""Table.ready."""


class Source(msgspec.Struct, frozen=True, gc=False):
    """A namespace, as routers know it."""

    digest: bytes
    tenant: str
    model: str
    chunk_tokens: int


class Announced(msgspec.Struct, frozen=True, gc=False):
    """A chunk that is there, as it was announced to routers."""

    source: Source
    hashes: tuple[int, ...]
    parent: int | None
    name: BlockNames | None
    """As its engine named it; None: only its key is known."""
    above: bytes
    """The key of the chunk before it; empty: not known."""
    tier: str = ""
    """The tier that has this copy; "": the pool."""

    @property
    def tokens(self) -> bytes:
        return b"" if self.name is None else self.name.tokens

    @property
    def size_bytes(self) -> int:
        return CHUNK_BYTES if self.name is None else _size_bytes(self.name)

    def stored(self) -> BlockStored:
        tokens = list(struct.unpack(f"<{len(self.tokens) // TOKEN_BYTES}I", self.tokens))
        made = BlockStored(list(self.hashes), self.parent, tokens, self.source.chunk_tokens // len(self.hashes))
        return on_tier(made, self.tier) if self.tier else made

    def removed(self) -> BlockRemoved:
        made = BlockRemoved(self.hashes)
        return on_tier(made, self.tier) if self.tier else made


def _announced(source: Source, place: Place, name: BlockNames | None, above: bytes, tier: str = "") -> Announced:
    """`place`: in the pool."""
    if name is not None and name.hashes:
        return Announced(source, name.hashes, name.parent, name, above, tier)
    return Announced(source, (block_hash(place),), block_hash(above) if any(above) else None, name, above, tier)


def _size_bytes(name: BlockNames) -> int:
    return CHUNK_BYTES + len(name.tokens) + HASH_BYTES * len(name.hashes)


Item = Announced | BlockRemoved | AllBlocksCleared
"""An event as it is kept: tokens as bytes take a tenth of the memory of a list."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    seq: int
    at: float
    model: str
    items: tuple[Item, ...]

    @property
    def size_bytes(self) -> int:
        return CHUNK_BYTES + sum(item.size_bytes if isinstance(item, Announced) else CHUNK_BYTES for item in self.items)

    def events(self) -> list[KvEvent]:
        return [item.stored() if isinstance(item, Announced) else item for item in self.items]


V = TypeVar("V")
Place = bytes
"""Names a copy: the number of its source in the log, in NUMBER_BYTES bytes, then the chunk's key, then the tier's name.
Bytes and not a tuple, because the garbage collector would walk every dict whose keys are tuples."""
NUMBER_BYTES = 8
CHUNK_PLACE = NUMBER_BYTES + KEY_BYTES


def _place(number: int, key: bytes) -> Place:
    return number.to_bytes(NUMBER_BYTES, "big") + key


def _number_in(place: Place) -> int:
    return int.from_bytes(place[:NUMBER_BYTES], "big")


class Chunks(Generic[V]):
    """A value for each of many chunks, in the order in which the chunks were added, in pages of PAGE_CHUNKS. A snapshot
    shares the pages that there are: a page that is in a snapshot is copied before it changes. There is no single large
    dict, because Python rebuilds a growing dict as a whole now and then, which takes some ms."""

    def __init__(self) -> None:
        self._pages: dict[int, dict[Place, V]] = {}
        self._page_of: list[dict[Place, int]] = [{} for _ in range(INDEX_PARTS)]
        self._own: set[int] = set()
        """The pages that no snapshot has."""
        self._newest = self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, place: Place) -> bool:
        return place in self._index(place)

    def get(self, place: Place) -> V | None:
        number = self._index(place).get(place)
        return None if number is None else self._pages[number][place]

    def add(self, place: Place, value: V) -> None:
        """The chunk is not there yet."""
        if len(self._pages.get(self._newest, ())) >= PAGE_CHUNKS:
            self._newest += 1
        self._changing(self._newest)[place] = value
        self._index(place)[place] = self._newest
        self._count += 1

    def take(self, place: Place) -> V | None:
        number = self._index(place).pop(place, None)
        if number is None:
            return None
        self._count -= 1
        page = self._changing(number)
        value = page.pop(place)
        if not page:
            del self._pages[number]
            self._own.discard(number)
        return value

    def oldest(self) -> Place:
        return next(iter(next(iter(self._pages.values()))))

    def pages(self) -> Sequence[Mapping[Place, V]]:
        """All of now."""
        self._own.clear()
        return tuple(self._pages.values())

    def _index(self, place: Place) -> dict[Place, int]:
        return self._page_of[hash(place) % INDEX_PARTS]

    def _changing(self, number: int) -> dict[Place, V]:
        if number not in self._own:
            self._own.add(number)
            self._pages[number] = dict(self._pages.get(number, ()))
        return self._pages[number]


class TenantLog:
    """The events of one tenant, and those of its chunks that were announced as stored and not as removed: in the pool
    (`there`) and on tiers (`on_tiers`)."""

    def __init__(self, first: int, at: float) -> None:
        self.last, self.at = first - 1, at
        self.there, self.on_tiers = Chunks[Announced](), Chunks[Announced]()
        self.there_bytes = self.kept_bytes = 0
        """How much is remembered of chunks in the pool, and kept of batches."""
        self.again = list[Chunks[Announced]]()
        """Copies on tiers that were declared void, and are announced again soon."""
        self._kept: deque[Batch] = deque()
        self._begins = True

    def copies(self, place: Place) -> Chunks[Announced]:
        """Where this copy is, if it was announced."""
        return self.on_tiers if len(place) > CHUNK_PLACE else self.there

    def begin_anew(self) -> Chunks[Announced]:
        """Declares all that was announced void: the next batch begins with AllBlocksCleared. Returns what was there in
        the pool."""
        gone, self.there, self.there_bytes, self._begins = self.there, Chunks(), 0, True
        self.again.append(self.on_tiers)
        self.on_tiers = Chunks()
        return gone

    def add(self, at: float, model: str, items: list[Item]) -> int:
        """Keeps a batch. Returns its size in bytes."""
        if self._begins:
            items, self._begins = [AllBlocksCleared(), *items], False
        self.last, self.at = self.last + 1, at
        self._kept.append(Batch(self.last, at, model, tuple(items)))
        self.kept_bytes += self._kept[-1].size_bytes
        return self._kept[-1].size_bytes

    def drop_oldest(self) -> int:
        """Forgets the oldest batch; there is one. Returns its size in bytes."""
        size_bytes = self._kept.popleft().size_bytes
        self.kept_bytes -= size_bytes
        return size_bytes

    def since(self, seq: int, most: int) -> list[Batch] | None:
        """The batches from number `seq` on, `most` of them; None: some are not kept."""
        if seq == self.last + 1:
            return []
        if not self._kept or not self._kept[0].seq <= seq <= self.last:
            return None
        following = self.last + 1 - seq
        return [self._kept[-back] for back in range(following, max(0, following - most), -1)]

    def snapshot(self, at: float) -> Iterator[Batch]:
        """All chunks that are announced now, as batches that are made when they are asked for. All have the number of
        the newest event of now."""
        pages = (*self.there.pages(), *self.on_tiers.pages())
        return _batches_of(itertools.chain.from_iterable(page.values() for page in pages), self.last, at)


def _batches_of(chunks: Iterable[Announced], seq: int, at: float) -> Iterator[Batch]:
    """A batch has chunks of one model, and about BATCH_TOKENS at most. After as many chunks, those of all models that
    have come are handed out, so that none waits for the last."""
    waiting: dict[str, list[Item]] = {}
    count = tokens = 0
    cleared: list[Item] = [AllBlocksCleared()]
    for chunk in itertools.chain(chunks, [None]):
        if chunk is not None:
            waiting.setdefault(chunk.source.model, []).append(chunk)
            count, tokens = count + 1, tokens + chunk.source.chunk_tokens
        if tokens >= BATCH_TOKENS or count == BATCH_CHUNKS or chunk is None:
            for model, items in waiting.items():
                yield Batch(seq, at, model, (*cleared, *items))
                cleared = []
            waiting, count, tokens = {}, 0, 0
    if cleared:
        yield Batch(seq, at, "", tuple(cleared))


class TenantLogs:
    """The logs of all tenants. Together they keep KEPT_BYTES of batches: the tenant that has most loses its oldest."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s, self._first = wall_s, round(wall_s() * 1000)
        self._kept_bytes = 0
        self._by_tenant: dict[str, TenantLog] = {}

    def __iter__(self) -> Iterator[TenantLog]:
        return iter(self._by_tenant.values())

    def of(self, tenant: str) -> TenantLog:
        found = self._by_tenant.get(tenant)
        if found is None:
            found = self._by_tenant[tenant] = TenantLog(self._first, self._wall_s())
        return found

    def add(self, log: TenantLog, at: float, model: str, items: list[Item]) -> None:
        self._kept_bytes += log.add(at, model, items)
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= max(self, key=lambda one: one.kept_bytes).drop_oldest()

    def add_all(self, log: TenantLog, items: Sequence[tuple[Source, Item]]) -> None:
        """Adds the items in batches, in their order; each batch has items of one model."""
        now, batch = self._wall_s(), list[Item]()
        for number, (source, item) in enumerate(items):
            batch.append(item)
            following = items[number + 1][0].model if number + 1 < len(items) else None
            if following != source.model or len(batch) >= BATCH_CHUNKS:
                self.add(log, now, source.model, batch)
                batch = []

    def snapshot(self, tenant: str) -> tuple[Iterator[Batch], int]:
        """All chunks that are announced now, and the number that all of its batches have."""
        log = self.of(tenant)
        return log.snapshot(self._wall_s()), log.last

    def beat(self) -> bool:
        """Adds an empty batch to each log that was silent for BEAT_S. Returns whether there was such a log."""
        now = self._wall_s()
        silent = [log for log in self if abs(now - log.at) >= BEAT_S]
        for log in silent:
            self.add(log, now, "", [])
        return bool(silent)


class Names:
    """The names of chunks that are not there, or not yet: as many as fit. Where they do not, those that were named
    first are forgotten: of the tenant that adds one, if it has its share or more, else of the one that has most."""

    def __init__(self) -> None:
        self._names: dict[str, Chunks[BlockNames]] = {}
        """By tenant."""
        self._bytes = Counter[str]()
        self._all_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))

    def get(self, tenant: str, place: Place) -> BlockNames | None:
        found = self._names.get(tenant)
        return None if found is None else found.get(place)

    def put(self, tenant: str, place: Place, name: BlockNames) -> None:
        self.take(tenant, place)
        self._names.setdefault(tenant, Chunks()).add(place, name)
        self._count(tenant, _size_bytes(name))
        if self._all_bytes > NAMES_BYTES:
            self._make_room(tenant)

    def take(self, tenant: str, place: Place) -> BlockNames | None:
        of_tenant = self._names.get(tenant)
        name = None if of_tenant is None else of_tenant.take(place)
        if name is not None:
            self._count(tenant, -_size_bytes(name))
            if not self._names[tenant]:
                del self._names[tenant], self._bytes[tenant]
        return name

    def _make_room(self, tenant: str) -> None:
        """The tenant that has most names loses many of them at once, because it takes a while to find that tenant."""
        loses, wanted_bytes = tenant, NAMES_BYTES
        if self._bytes[tenant] < NAMES_BYTES // len(self._names):
            loses, wanted_bytes = max(self._bytes, key=lambda one: self._bytes[one]), NAMES_BYTES - NAMES_BYTES // 256
        while self._all_bytes > wanted_bytes and loses in self._names:
            self.take(loses, self._names[loses].oldest())

    def _count(self, tenant: str, more: int) -> None:
        self._bytes[tenant] += more
        self._all_bytes += more


class Room:
    """How much is remembered, of how much at most."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used_bytes = most_bytes, 0

    @property
    def is_over(self) -> bool:
        return self.used_bytes > self.most_bytes


class Lower:
    """What is known of tiers beside the copies that were announced."""

    def __init__(self) -> None:
        self.room, self.names = Room(MOST_TIER_BYTES), set[bytes]()
        """The names of tiers that have had chunks."""
        self.early = Chunks[None]()
        """Copies in namespaces to which no engine has attached: the namespace's digest, the key, the tier's name."""
        self.met, self.cleared = deque[bytes](), deque[tuple[bytes, bytes | None, list[bytes]]]()
        """Namespaces to which an engine has attached since, and chunks that were cleared, on which tiers."""

    def remember(self, place: bytes) -> None:
        if place not in self.early:
            self.early.add(place, None)
        while len(self.early) > MOST_EARLY:
            self.early.take(self.early.oldest())


class KvLog:
    """`changes`, `ready`: the table's methods. `run` follows the table until cancelled. `wall_s`: Unix seconds."""

    def __init__(
        self, changes: Changes, ready: Ready, wall_s: Callable[[], float], *, most_bytes: int = MOST_BYTES
    ) -> None:
        self.snapshots = 0
        """How many snapshots were made for readers."""
        self.listeners: list[Callable[[], None]] = []
        """Called when there is something new."""
        self._changes, self._ready = changes, ready
        self._room, self._lower = Room(most_bytes), Lower()
        self._since = 0
        self._numbers = itertools.count()
        self._sources: dict[int, tuple[int, Source]] = {}
        """By the number of the namespace in the table: what it is now, with a number that is never used again."""
        self._gone: deque[tuple[int, Source]] = deque()
        """What numbers were before; its chunks that are there are yet to be removed."""
        self._names = Names()
        self._count: Counter[int] = Counter()
        """How many chunks of each source are there."""
        self._logs = TenantLogs(wall_s)
        self._is_walked = False
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- from engines

    def met(self, space: int, source: Source) -> None:
        """An engine has attached to a namespace. The number may have been another namespace's: the table reuses
        numbers."""
        known = self._sources.get(space)
        if known is not None and known[1] == source:
            return
        with self._lock:
            if known is not None and self._count.pop(known[0], 0):
                self._gone.append(known)
            self._sources[space] = next(self._numbers), source
            if self._lower.early and source.tenant == OWN_TENANT:
                self._lower.met.append(source.digest)
        self._is_walked = False  # its chunks are of an earlier server, or were never announced

    def named(self, space: int, keys: bytes, names: Sequence[BlockNames]) -> None:
        """An engine names these chunks, which are there already, or may be soon, as routers know them."""
        if space not in self._sources:
            return
        number, source = self._sources[space]
        with self._lock:
            log, again = self._logs.of(source.tenant), list[tuple[Source, Item]]()
            for at, name in enumerate(names):
                place = _place(number, keys[KEY_BYTES * at : KEY_BYTES * (at + 1)])
                chunk = log.there.get(place)
                if chunk is None or chunk.name is None:
                    self._names.put(source.tenant, place, name)
                if chunk is not None and chunk.name is None:
                    again += [(source, self._removed(log, place)), *self._stored(log, source, place, chunk.above)]
                for tier in self._lower.names:
                    copy = log.on_tiers.get(place + tier)
                    if copy is not None and copy.name is None:
                        again += [(source, self._removed(log, place + tier)), *self._copied(log, source, place + tier)]
            self._publish(log, again)
            self._make_room()

    # ---------------------------------------------------------------- from the table

    async def run(self) -> None:
        """Until cancelled. After a failure it begins anew: changes that were read and not announced are lost."""
        if self._since:
            await self._begin_anew()
            self._is_walked = False
        while True:
            await self._remove_gone()
            await self._follow_tiers()
            if not self._is_walked:
                await self._walk()
            await self._follow()
            self._beat()
            await asyncio.sleep(EVERY_S)

    def _beat(self) -> None:
        with self._lock:
            has_beaten = self._logs.beat()
        if has_beaten:
            self._notify()

    async def _remove_gone(self) -> None:
        """What is there of namespaces whose numbers others have now."""
        while self._gone:
            number, source = self._gone[0]
            log = self._logs.of(source.tenant)
            for page in (*log.there.pages(), *log.on_tiers.pages()):
                with self._lock:
                    gone = [place for place in page if _number_in(place) == number and place in log.copies(place)]
                    self._publish(log, [(source, self._removed(log, place)) for place in gone])
                    for place in gone:
                        if log.copies(place) is log.on_tiers:  # the tier has it still
                            self._lower.remember(source.digest + place[NUMBER_BYTES:])
                await next_slice()
            self._gone.popleft()
            del self._count[number]

    async def _walk(self) -> None:
        """Announces all chunks that are there. Changes meanwhile are followed afterwards."""
        self._is_walked = True
        if self._since == 0:
            self._since = self._changes(0, 0)[1]
        place = 0
        while place >= 0:
            found, place = self._ready(place, SLICE)
            self._take(found)
            await next_slice()

    async def _follow(self) -> None:
        is_more = True
        while is_more:
            changes, following, is_complete = self._changes(self._since, SLICE)
            self._since = following
            if not is_complete:  # more has changed than the table remembers
                await self._begin_anew()
                await self._walk()
                continue
            self._take(changes)
            is_more = len(changes) == SLICE
            await next_slice()

    async def _begin_anew(self) -> None:
        """Declares all that was announced void, and forgets it in slices: to free many chunks at once takes as long as
        to announce them."""
        with self._lock:
            gone = [log.begin_anew() for log in self._logs]
            self._room.used_bytes = 0
        for there in gone:
            while there:
                for _ in range(min(len(there), SLICE)):
                    place = there.oldest()
                    there.take(place)
                    self._count[_number_in(place)] -= 1
                await next_slice()
        for log in self._logs:
            while log.again:
                with self._lock:
                    self._announce_again(log)
                await next_slice()

    def _announce_again(self, log: TenantLog) -> None:
        first, items = log.again[0], list[tuple[Source, Item]]()
        for _ in range(min(len(first), SLICE)):
            place = first.oldest()
            chunk = first.take(place)
            assert chunk is not None, "it is there"
            log.on_tiers.add(place, chunk)
            items.append((chunk.source, chunk))
        self._publish(log, items)
        if not first:
            log.again.pop(0)

    def _take(self, changes: Sequence[Change]) -> None:
        with self._lock:
            of_log: dict[str, list[tuple[Source, Item]]] = {}
            for space, key, is_there, parent in changes:
                if space not in self._sources:
                    continue  # announced once an engine attaches to the namespace
                number, source = self._sources[space]
                log, place = self._logs.of(source.tenant), _place(number, key)
                if is_there == (place in log.there):
                    continue
                items = of_log.setdefault(source.tenant, [])
                items += self._stored(log, source, place, parent) if is_there else [(source, self._removed(log, place))]
            for tenant, items in of_log.items():
                self._publish(self._logs.of(tenant), items)
            self._make_room()

    def _stored(
        self, log: TenantLog, source: Source, place: Place, parent: bytes
    ) -> list[tuple[Source, Item]]:
        """The chunk's event."""
        name = self._names.take(source.tenant, place)
        if name is None:
            copies = [log.on_tiers.get(place + tier) for tier in self._lower.names]
            name = next((copy.name for copy in copies if copy is not None and copy.name is not None), None)
        return self._added(log, place, _announced(source, place, name, parent))

    def _added(self, log: TenantLog, place: Place, chunk: Announced) -> list[tuple[Source, Item]]:
        """The event of a chunk, or of a copy on a tier, and removals of older copies for which there is no room."""
        log.copies(place).add(place, chunk)
        self._count[_number_in(place)] += 1
        items: list[tuple[Source, Item]] = [(chunk.source, chunk)]
        if not chunk.tier:
            log.there_bytes += chunk.size_bytes
            self._room.used_bytes += chunk.size_bytes
            return items
        self._lower.room.used_bytes += chunk.size_bytes
        while self._lower.room.is_over and log.on_tiers:
            items.append(self._oldest_removed(log, log.on_tiers))
        return items

    def _make_room(self) -> None:
        """Forgets chunks of the pool until the rest fits into the memory for KV events. The tenant that has most of
        this memory gives up its oldest chunks. Its readers are told that these chunks are gone."""
        while self._room.is_over:
            log, items = max(self._logs, key=lambda one: one.there_bytes), list[tuple[Source, Item]]()
            next_bytes = max((one.there_bytes for one in self._logs if one is not log), default=0)
            while self._room.is_over and log.there and log.there_bytes >= next_bytes:
                items.append(self._oldest_removed(log, log.there))
            self._publish(log, items)

    def _oldest_removed(self, log: TenantLog, copies: Chunks[Announced]) -> tuple[Source, Item]:
        place = copies.oldest()
        known = copies.get(place)
        assert known is not None, "it is there"
        return known.source, self._removed(log, place)

    def _removed(self, log: TenantLog, place: Place) -> BlockRemoved:
        chunk = log.copies(place).take(place)
        assert chunk is not None, "it is there"
        self._count[_number_in(place)] -= 1
        (self._lower.room if chunk.tier else self._room).used_bytes -= chunk.size_bytes
        log.there_bytes -= 0 if chunk.tier else chunk.size_bytes
        if chunk.name is not None and not chunk.tier:
            self._names.put(chunk.source.tenant, place, chunk.name)  # it may come back without one
        return chunk.removed()

    def _publish(self, log: TenantLog, items: Sequence[tuple[Source, Item]]) -> None:
        if items:
            self._logs.add_all(log, items)
            self._notify()

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()

    # ---------------------------------------------------------------- from the mover

    async def tier_has(self, namespace: bytes, tier: str, keys: bytes, *, is_there: bool) -> None:
        """Announces that the tier has these chunks, or has them no more. Returns once that is done, a slice in each
        turn of the event loop, so that the mover tells no more than can be followed."""
        name = tier.encode()
        self._lower.names.add(name)
        for begin in range(0, len(keys), SLICE * KEY_BYTES):
            some = keys[begin : begin + SLICE * KEY_BYTES]
            self._take_copies(namespace, [some[at : at + KEY_BYTES] + name for at in range(0, len(some), KEY_BYTES)],
                              is_there=is_there)
            await next_slice()

    def cleared(self, namespace: bytes, keys: bytes | None, tier: str = "") -> None:
        """The tier does not have these chunks any more. `keys` None: all of the namespace. `tier` "": no tier has."""
        tiers = [tier.encode()] if tier else list(self._lower.names)
        if tiers:
            self._lower.cleared.append((namespace, keys, tiers))

    async def tiers_unknown(self) -> None:
        """It is not known any more what tiers have: they tell it anew."""
        self._lower.early = Chunks()
        await self._remove_copies(lambda _: True)

    async def _follow_tiers(self) -> None:
        while self._lower.met:
            namespace = self._lower.met.popleft()
            for page in self._lower.early.pages():
                copies = [place[KEY_BYTES:] for place in page if place.startswith(namespace)]
                self._take_copies(namespace, copies, is_there=True)
                for copy in copies:
                    self._lower.early.take(namespace + copy)
                await next_slice()
        while self._lower.cleared:
            await self._clear_copies(*self._lower.cleared.popleft())

    async def _clear_copies(self, namespace: bytes, keys: bytes | None, tiers: list[bytes]) -> None:
        if keys is not None:
            for tier in tiers:
                await self.tier_has(namespace, tier.decode(), keys, is_there=False)
            return
        for early in self._lower.early.pages():
            for place in early:
                if place.startswith(namespace) and place[2 * KEY_BYTES :] in tiers:
                    self._lower.early.take(place)
            await next_slice()
        if (known := self._source_of(namespace)) is not None:
            number = known[0]
            await self._remove_copies(lambda place: _number_in(place) == number and place[CHUNK_PLACE:] in tiers)

    async def _remove_copies(self, is_gone: Callable[[Place], bool]) -> None:
        log = self._logs.of(OWN_TENANT)
        for page in itertools.chain(log.on_tiers.pages(), *(again.pages() for again in log.again)):
            with self._lock:
                places = [place for place in page if is_gone(place)]
                self._publish(log, [item for place in places for item in self._gone_from_tier(log, place)])
            await next_slice()

    def _source_of(self, namespace: bytes) -> tuple[int, Source] | None:
        """Tiers have chunks of the server's own user alone."""
        return next((
            known for known in self._sources.values() if (known[1].digest, known[1].tenant) == (namespace, OWN_TENANT)
        ), None)

    def _take_copies(self, namespace: bytes, copies: Sequence[bytes], *, is_there: bool) -> None:
        """`copies`: a key with a tier's name each."""
        known = self._source_of(namespace)
        with self._lock:
            if known is None:
                for copy in copies:
                    if is_there:
                        self._lower.remember(namespace + copy)
                    else:
                        self._lower.early.take(namespace + copy)
                return
            log, items = self._logs.of(OWN_TENANT), list[tuple[Source, Item]]()
            for copy in copies:
                place = _place(known[0], copy)
                items += self._copied(log, known[1], place) if is_there else self._gone_from_tier(log, place)
            self._publish(log, items)

    def _copied(self, log: TenantLog, source: Source, place: Place) -> list[tuple[Source, Item]]:
        """A copy's event; none if it was announced, or if it has no name and there is no room for it."""
        if place in log.on_tiers or any(place in again for again in log.again):
            return []
        chunk_place, tier = place[:CHUNK_PLACE], place[CHUNK_PLACE:].decode()
        pooled = log.there.get(chunk_place)
        name = pooled.name if pooled is not None else self._names.get(OWN_TENANT, chunk_place)
        if name is None and self._lower.room.used_bytes + CHUNK_BYTES > self._lower.room.most_bytes:
            return []
        above = b"" if pooled is None else pooled.above
        return self._added(log, place, _announced(source, chunk_place, name, above, tier))

    def _gone_from_tier(self, log: TenantLog, place: Place) -> list[tuple[Source, Item]]:
        for again in log.again:
            if (void := again.take(place)) is not None:  # readers were told so already
                self._count[_number_in(place)] -= 1
                self._lower.room.used_bytes -= void.size_bytes
        chunk = log.on_tiers.get(place)
        return [] if chunk is None else [(chunk.source, self._removed(log, place))]

    # ---------------------------------------------------------------- readers, in any thread

    def since(self, tenant: str, seq: int) -> tuple[Iterable[Batch], bool]:
        """(batches from number `seq` on, False); (a snapshot, True) where some of them are not known."""
        found = self.kept(tenant, seq)
        return (self.snapshot(tenant)[0], True) if found is None else (found, False)

    def kept(self, tenant: str, seq: int, most: int = sys.maxsize) -> list[Batch] | None:
        """The batches from number `seq` on, `most` of them; None: some of them are not known."""
        with self._lock:
            return self._logs.of(tenant).since(seq, most)

    def snapshot(self, tenant: str) -> tuple[Iterator[Batch], int]:
        """All chunks that are announced now, and the number that all of its batches have."""
        with self._lock:
            self.snapshots += 1
            return self._logs.snapshot(tenant)

    def next_of(self, tenant: str) -> int:
        """The number of the next batch."""
        with self._lock:
            return self._logs.of(tenant).last + 1

    @property
    def chunks(self) -> int:
        """How many chunks routers believe to be in the pool."""
        return sum(len(log.there) for log in self._logs)

    @property
    def tier_chunks(self) -> int:
        """How many copies on tiers they believe to be there."""
        return sum(len(log.on_tiers) for log in self._logs)


class KvStream(Stream):
    """KV cache events as server-sent events: `GET /v1/kv-events`. A reader sees those of its own tenant.

    Each event of the stream is one batch: `{"ts", "model", "events"}`, and its id is the batch's number. A reader that
    comes back with `Last-Event-ID` gets what came since, or a snapshot. Only the snapshot's last batch has an id.
    """

    name = "kv_events"
    kinds: Collection[type[Event]] = frozenset({Draining})

    def __init__(self, log: KvLog) -> None:
        super().__init__()
        self._log = log
        self._snapshots: WeakValueDictionary[str, Snapshot] = WeakValueDictionary()
        """By tenant, those that somebody reads."""
        log.listeners.append(self._wake)

    def take(self, event: Event) -> None:
        self._is_ending = True
        self._wake()

    def read(self, tenant: str, last_id: str, is_admitted: IsAdmitted, *, follows: bool) -> AsyncIterator[bytes]:
        """The batches after `last_id`, or a snapshot; if `follows`, then new ones too, until the server drains."""
        return self._sent(self._pieces(tenant, last_id, follows=follows), tenant, is_admitted)

    def _pieces(self, tenant: str, last_id: str, *, follows: bool) -> Iterator[bytes | None]:
        number = number_in(last_id)
        following, end = 0 if number is None else number + 1, self._log.next_of(tenant)
        yield RETRY
        while True:
            batches = self._log.kept(tenant, following, COPIED_BATCHES)
            if batches is None:
                snapshot = self._snapshot(tenant)
                yield from snapshot.pieces()
                following = snapshot.seq + 1
                continue
            for batch in batches:
                yield _piece(batch, has_id=True)
                following = batch.seq + 1
            if not follows and following >= end:
                return
            if not batches:
                yield None

    def _snapshot(self, tenant: str) -> Snapshot:
        """The one that others read, if what came since is still known."""
        found = self._snapshots.get(tenant)
        if found is None or self._log.kept(tenant, found.seq + 1, most=0) is None:
            found = self._snapshots[tenant] = Snapshot(*self._log.snapshot(tenant))
        return found


class Snapshot:
    """A snapshot as pieces of a body. Each is made once, for all readers, when the first of them gets there."""

    def __init__(self, batches: Iterator[Batch], seq: int) -> None:
        self.seq = seq
        self._made: list[bytes] = []
        self._rest = self._make(batches)

    def pieces(self) -> Iterator[bytes]:
        for at in itertools.count():
            if at == len(self._made):
                piece = next(self._rest, None)
                if piece is None:
                    return
                self._made.append(piece)
            yield self._made[at]

    def _make(self, batches: Iterator[Batch]) -> Iterator[bytes]:
        last: Batch | None = None
        for batch in batches:
            if last is not None:
                yield _piece(last, has_id=False)
            last = batch
        if last is not None:
            yield _piece(last, has_id=True)


def _piece(batch: Batch, *, has_id: bool) -> bytes:
    body = {"ts": batch.at, "model": batch.model, "events": [in_hex(event) for event in batch.events()]}
    return piece_of("kv", JSON.encode(body), str(batch.seq) if has_id else "")
