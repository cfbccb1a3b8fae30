"""What the pool holds, by namespace and prefix, from censuses of its chunks (csrc/table/census.h): the event loop makes
them in slices when a call asks for one, and later calls get the same census for a while.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvdock._core import Census, Table
from kvdock.api.access.peer import Peer
from kvdock.api.clock import ServerClock, since_s
from kvdock.api.convert import key_bytes
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.api.record.labels import Chunk
from kvdock.api.reports.recorded import Labels
from kvdock.api.turns import Slices, next_slice
from kvdock.protocol.errors import ApiError
from kvdock.protocol.reports import Prefixes, PrefixView
from kvdock.protocol.wire_types import KEY_BYTES, OWN_TENANT

SLICE_CHUNKS = 4096
"""The chunks of one slice, which take less than a millisecond."""
FRESH_S = 1.0
MOST_SHARE = 0.005
"""The share of the event loop's time that censuses of all prefixes may take: one that took longer counts as fresh for
longer."""
PAUSE = 9.0
"""Censuses that answer one question wait after each slice for that multiple of its time: together they take at most a
tenth of the event loop's time."""
MOST_QUESTIONS = 16
"""Questions whose answers are remembered, and questions that may wait for their census."""
MOST_OF_TENANT = MOST_QUESTIONS // 2
"""Questions of one tenant that may wait, unless it is the server's own user."""
LEAST_DIGITS = 4
"""The fewest hex digits that are searched for among keys: shorter texts begin most keys."""
HEX = frozenset("0123456789abcdef")
MOST_LABELS = 8
"""The most labels of one prefix that are shown."""


class Count(NamedTuple):
    """What a namespace holds. Times are the server clock's in milliseconds; 0: not known."""

    chunks: int
    bytes: int
    oldest_ms: int
    newest_ms: int


NOTHING = Count(0, 0, 0, 0)


class Question(NamedTuple):
    """Which prefixes a call asks for. `below`: what goes on from that chunk of a namespace (its number in the table);
    None: all, from their first chunks on. `search`: part of a label, model or tenant, or the beginning of a key."""

    below: tuple[int, bytes] | None = None
    search: str = ""


ALL = Question()


class _Found(NamedTuple):
    """A prefix as a census has it (csrc/bind/table.cpp)."""

    space: int
    first: bytes
    chunks: int
    held_bytes: int
    born_ms: int
    used_ms: int
    uses: int
    last: bytes
    last_chunks: int
    fork: bytes
    shared_chunks: int
    shared_bytes: int
    branches: int
    is_kept: bool


class _Answer:
    """A census for one question, made again when it is old."""

    def __init__(self, make: Callable[[], Awaitable[tuple[Census, list[Chunk]]]], now_s: Callable[[], float]) -> None:
        """`make`: begins a census, in slices, and returns the labelled chunks that it locates."""
        self._make, self._now_s = make, now_s
        self.census: Census | None = None
        self.labels: dict[tuple[bytes, int], list[str]] = {}
        """By the first key of a prefix and its namespace's number, the nearest to the first chunk first."""
        self.counted_s = self._took_s = 0.0
        self.is_stale = True
        self.making: asyncio.Task[None] | None = None

    @property
    def is_fresh(self) -> bool:
        return not self.is_stale and self._now_s() - self.counted_s < max(FRESH_S, self._took_s / MOST_SHARE)

    async def count(self, pause: float = 0.0) -> None:
        self.is_stale = False
        (census, chunks), worked_s = await self._make(), 0.0
        while True:
            await next_slice()
            began_s = self._now_s()
            is_whole = census.step(SLICE_CHUNKS)
            slice_s = self._now_s() - began_s
            worked_s += slice_s
            if is_whole:
                break
            await asyncio.sleep(pause * slice_s)
        self.labels = {}
        for index, first, _ in sorted(census.named(), key=lambda one: one[2]):
            self.labels.setdefault((first, chunks[index].space), []).extend(chunks[index].labels)
        self.census, self.counted_s, self._took_s = census, self._now_s(), worked_s


class Contents:
    def __init__(
        self, table: Table, registry: Registry, labels: Labels, clock: ServerClock, now_s: Callable[[], float]
    ) -> None:
        self._table, self._registry, self._labels = table, registry, labels
        self._clock, self._now_s = clock, now_s
        self._counts: dict[int, Count] = {}
        self._all = _Answer(lambda: self._begin(ALL), now_s)
        self._answers: OrderedDict[Question, _Answer] = OrderedDict()
        self._waiting = Counter[str | None]()
        """By tenant, how many questions wait to be counted."""
        self._turn = asyncio.Lock()

    async def refresh(self) -> None:
        """Counts, unless that was done a moment ago. Calls that ask meanwhile wait for the same count."""
        if self._all.making is None or self._all.making.done():
            if self._all.is_fresh:
                return
            self._all.making = asyncio.create_task(self._count())
        await self._counted(self._all.making)

    async def _counted(self, making: asyncio.Task[None]) -> None:
        """Waits for a count. Calls that wait for the same one go on one in each turn of the event loop: their answers
        together would take long."""
        await asyncio.shield(making)
        await next_slice()

    def forget(self) -> None:
        """An operator took chunks out of use, or keeps some: the next call gets a new count."""
        for answer in (self._all, *self._answers.values()):
            answer.is_stale = True

    async def _count(self) -> None:
        await self._all.count()
        assert self._all.census is not None, "it was counted"
        self._counts = {space: Count(*counted) for space, *counted in self._all.census.spaces()}

    def of(self, space: int) -> Count:
        """What the namespace held when it was last counted."""
        return self._counts.get(space, NOTHING)

    # ---------------------------------------------------------------- prefixes

    async def prefixes(
        self, peer: Peer, limit: int, cursor: int = 0, *, search: str = "", namespace: str = "", below: str = ""
    ) -> Prefixes:
        """The most used prefixes of the namespaces that the caller sees, from that place on. `namespace` and `below`:
        those that go on from that chunk. Raises ApiError: bad_argument, unknown_namespace, too_busy."""
        question = Question(self._below(peer, namespace, below), search.strip().casefold())
        answer = await self._answer(question, peer.tenant)
        assert answer.census is not None, "it was counted"
        seen = {one.table_id: one for one in self._registry.namespaces() if peer.sees(one.tenant)}
        found, count, following = answer.census.prefixes(list(seen), limit, cursor)
        views, slices = list[PrefixView](), Slices()
        await next_slice()
        for one in map(_Found._make, found):
            views.append(self._view(seen[one.space], one, answer))
            await slices.give_turn()
        return Prefixes(
            prefixes=views,
            prefix_count=count,
            counted_s=max(0.0, self._now_s() - answer.counted_s),
            next=str(following) if following else None,
        )

    def _below(self, peer: Peer, namespace: str, below: str) -> tuple[int, bytes] | None:
        if not namespace and not below:
            return None
        if len(namespace) != 2 * KEY_BYTES or len(below) != 2 * KEY_BYTES or not HEX.issuperset(namespace + below):
            raise ApiError(
                "bad_argument", "namespace and below go together", found=[namespace, below],
                wanted=f"{2 * KEY_BYTES} lower-case hex digits each",
            )
        space = self._registry.namespace(key_bytes([namespace]), sees=peer.sees)
        return space.table_id, key_bytes([below])

    async def _answer(self, question: Question, tenant: str | None) -> _Answer:
        if question == ALL:
            await self.refresh()
            return self._all
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = _Answer(lambda: self._begin(question), self._now_s)
            if len(self._answers) > MOST_QUESTIONS:
                self._answers.popitem(last=False)
        self._answers.move_to_end(question)
        if answer.making is None or answer.making.done():
            if answer.is_fresh:
                return answer
            self._require_room(tenant)
            self._waiting[tenant] += 1
            answer.making = asyncio.create_task(self._count_in_turn(answer, tenant))
        await self._counted(answer.making)
        return answer

    def _require_room(self, tenant: str | None) -> None:
        """For one question more. Raises ApiError: too_busy."""
        its, most_of_it = self._waiting[tenant], MOST_QUESTIONS if tenant == OWN_TENANT else MOST_OF_TENANT
        for waiting, most in ((its, most_of_it), (self._waiting.total(), MOST_QUESTIONS)):
            if waiting >= most:
                raise ApiError("too_busy", "too many searches of prefixes wait", found=waiting, wanted=f"< {most}")

    async def _count_in_turn(self, answer: _Answer, tenant: str | None) -> None:
        try:
            async with self._turn:
                await answer.count(PAUSE)
        finally:
            self._waiting[tenant] -= 1
            self._waiting += Counter()  # drops the tenants that wait for no answer

    async def _begin(self, question: Question) -> tuple[Census, list[Chunk]]:
        """The census looks into all tenants' namespaces: answers list those of the caller's alone."""
        chunks, search = self._labels.chunks(), question.search
        if not search:
            return Census(self._table, below=question.below, named=[chunk[:2] for chunk in chunks]), chunks
        is_sought = [any(search in label.casefold() for label in chunk.labels) for chunk in chunks]
        chunks = [chunk for _, chunk in sorted(zip(is_sought, chunks, strict=True), reverse=True)]  # the sought first
        await next_slice()
        spaces = [
            one.table_id for one in self._registry.namespaces()
            if search in one.model.casefold() or search in one.tenant.casefold()
        ]
        census = Census(
            self._table, below=question.below, named=[chunk[:2] for chunk in chunks], search=spaces,
            sought=sum(is_sought), keys=_keys_with(search),
        )
        return census, chunks

    def _view(self, space: NamespaceRecord, found: _Found, answer: _Answer) -> PrefixView:
        chunk_tokens, now_ms = space.manifest.chunk_tokens, self._clock.now_ms()
        return PrefixView(
            namespace=space.digest.hex(), tenant=space.tenant, model=space.model, weights=space.use.weights,
            key=found.first.hex(), tokens=found.chunks * chunk_tokens, chunks=found.chunks, bytes=found.held_bytes,
            fork_key=found.fork.hex(), shared_tokens=found.shared_chunks * chunk_tokens,
            shared_bytes=found.shared_bytes, branches=found.branches,
            branch_bytes=found.held_bytes - found.shared_bytes,
            labels=answer.labels.get((found.first, found.space), [])[:MOST_LABELS], is_kept=found.is_kept,
            age_s=since_s(found.born_ms, now_ms), unused_s=since_s(found.used_ms, now_ms), uses=found.uses,
            last_key=found.last.hex(), last_tokens=found.last_chunks * chunk_tokens,
        )


def _keys_with(digits: str) -> tuple[bytes, bytes] | None:
    """The least and the greatest key that begin with these hex digits; None: they are no beginning of a key."""
    if not LEAST_DIGITS <= len(digits) <= 2 * KEY_BYTES or not HEX.issuperset(digits):
        return None
    return bytes.fromhex(digits.ljust(2 * KEY_BYTES, "0")), bytes.fromhex(digits.ljust(2 * KEY_BYTES, "f"))
