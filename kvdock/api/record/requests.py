"""The most recent lookups and stores, and what became of their requests; of those that computed something, a sample of
the last hours by reason. All of it is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from kvdock.api.turns import Slices
from kvdock.protocol.reports import Break, RequestView
from kvdock.protocol.wire_types import trace_context

TRACE_ID_DIGITS = 32
ROWS_OF_STEP = 64
"""After so many rows, a search looks whether its slice of the event loop is over."""
ROWS_OF_PAGE = 1024


class Detail(msgspec.Struct, gc=False):
    """What explanations of a request need beyond its row in lists."""

    namespace: bytes
    broke: Break | None = None
    hit_tokens: int = 0
    """What the last answer in the lookup's epoch had: a request that waited has asked again."""
    chunks: int = 0
    size_bytes: int = 0
    """What all answers in that epoch have leased to it."""
    loaded_us: int | None = None
    """From the answer to the lookup until all ranks had read the chunks that it leased. None: they have not."""
    weights: str | None = ""
    """The weights that its engine ran then."""
    traceparent: str = ""
    """The trace context that came with it."""
    beginnings: str = ""
    """See Beginnings; empty: not known."""
    parted: tuple[bytes, bytes] | None = None
    """The keys of the last chunk that the lookup found and of the next one, if other prompts go on after the former."""


class _Lookups(msgspec.Struct, gc=False):
    """Lookups of one request: a RequestView and its Detail in turns."""

    rows: tuple[Any, ...] = ()


Row = tuple[str, RequestView, Detail]
"""A row with its tenant and its detail."""
NEWEST_MISSES, SAMPLED_MISSES = 16, 64
"""For each reason, this many requests are kept that ended last, and this many more, SAMPLE_S apart."""
SAMPLE_S = 300.0


class _Misses:
    """Requests that computed tokens for one reason, as rows with their details."""

    def __init__(self) -> None:
        self._newest: deque[Row] = deque(maxlen=NEWEST_MISSES)
        self._sampled: deque[Row] = deque(maxlen=SAMPLED_MISSES)

    def add(self, row: Row) -> None:
        if len(self._newest) == NEWEST_MISSES:
            oldest = self._newest[0]
            if not self._sampled or oldest[1].at - self._sampled[-1][1].at >= SAMPLE_S:
                self._sampled.append(oldest)
        self._newest.append(row)

    def rows(self) -> Iterator[Row]:
        """Newest first."""
        yield from reversed(self._newest)
        yield from reversed(self._sampled)


class RecentRequests:
    """The most recent lookups and stores, newest first, and the outcomes that engines have reported. For each reason
    why tokens were computed, some earlier requests are kept, too."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._ring: deque[Row] = deque()
        """Each with its tenant, newest first."""
        self._count = 0
        """How many were added: the newest has this number, and numbers are the cursors of pages."""
        self._without_outcome: dict[str, _Lookups] = {}
        """By name, the lookups of the ring that have no outcome yet, oldest first. No collection of garbage walks this
        dict and the next one, since they have nothing but texts and structs without gc: those of 16,384 requests took
        it 1 to 3 ms, at each look at what is new."""
        self._with_outcome: dict[str, RequestView] = {}
        """By name, the newest row of the ring that has an outcome."""
        self._misses: dict[str, _Misses] = {}
        """By reason."""

    def add(self, tenant: str, request: RequestView, detail: Detail) -> None:
        if len(self._ring) == self._keep:
            oldest = self._ring.pop()
            self._forget(oldest[1])
            if oldest[1].outcome is None and (broke := oldest[2].broke) is not None:
                self._misses.setdefault(broke.why, _Misses()).add(oldest)
        self._count += 1
        self._ring.appendleft((tenant, request, detail))
        if request.outcome is not None:
            self._with_outcome[_name(request)] = request
        elif request.kind == "lookup":
            name = _name(request)
            before = self._without_outcome.get(name, _Lookups())
            self._without_outcome[name] = _Lookups((*before.rows, request, detail))

    def _forget(self, oldest: RequestView) -> None:
        name = _name(oldest)
        if self._with_outcome.get(name) is oldest:
            del self._with_outcome[name]
        if oldest.kind == "lookup" and oldest.outcome is None:
            lookups = self._without_outcome[name] = _Lookups(self._without_outcome[name].rows[2:])
            if not lookups.rows:
                del self._without_outcome[name]

    def ended(self, tenant: str, ended: RequestView, detail: Detail) -> None:
        """`ended` has the outcome of a request: its lookups get it. If there are none, it is a row of its own, unless
        that outcome was reported before."""
        name = _name(ended)
        lookups = self._without_outcome.pop(name, _Lookups()).rows
        for lookup, of_lookup in zip(lookups[::2], lookups[1::2], strict=True):
            lookup.outcome = ended.outcome
            self._with_outcome[name] = lookup
            ended, detail = lookup, of_lookup
        if not lookups:
            if name in self._with_outcome and self._with_outcome[name].outcome == ended.outcome:
                return
            self.add(tenant, ended, detail)
        for why in {run.why for run in ended.outcome.runs} - {"", "tail"} if ended.outcome is not None else ():
            self._misses.setdefault(why, _Misses()).add((tenant, ended, detail))

    async def view(
        self, limit: int, cursor: int, sees: Callable[[str], bool], request: str = ""
    ) -> tuple[list[RequestView], str | None]:
        """From request number `cursor` (0: the newest) backwards, those of tenants that the caller sees whose ids begin
        with `request`; and the cursor of the next page."""
        shown: list[RequestView] = []
        async for number, (tenant, one, _) in self._newest_first(min(cursor or self._count, self._count)):
            if one.request.startswith(request) and sees(tenant):
                if len(shown) == limit:
                    return shown, str(number)
                shown.append(one)
        return shown, None

    async def named(self, name: str, sees: Callable[[str], bool], most: int) -> list[tuple[RequestView, Detail]]:
        """The rows of one request, newest first. `name`: its id; or else how the ids of some begin, or the id of a
        trace, alone or as in a traceparent: then the newest of these requests is meant."""
        found, like, trace = list[Row](), list[Row](), _trace_id(name)
        seen = set[int]()  # the ring may have a miss, too
        async for _, row in self._newest_first(self._count, with_misses=True):
            _, request, detail = row
            is_it = request.request == name
            if not (is_it or _is_meant(request, detail, name, trace)) or id(request) in seen or not sees(row[0]):
                continue
            seen.add(id(request))
            (found if is_it else like).append(row)
        if not found and like:
            meant = _name(like[0][1])
            found = [row for row in like if _name(row[1]) == meant]
        return [(one, detail) for _, one, detail in found[:most]]

    async def _newest_first(self, number: int, *, with_misses: bool = False) -> AsyncIterator[tuple[int, Row]]:
        """From the row with that number on, and then the misses, some of which the ring has; in slices. No more than a
        page is copied: each collection of garbage looks at all of a new list."""
        slices = Slices()
        while page := self._page(number):
            for row in page:
                yield number, row
                number -= 1
                if number % ROWS_OF_STEP == 0:
                    await slices.give_turn()
            await slices.give_turn()
        for misses in list(self._misses.values()) if with_misses else ():
            for row in list(misses.rows()):
                yield 0, row
            await slices.give_turn()

    def _page(self, number: int) -> list[Row]:
        """ROWS_OF_PAGE rows from the one with that number on, as far as they are there."""
        newer = self._count - number
        return list(islice(self._ring, newer, newer + ROWS_OF_PAGE))


def _trace_id(name: str) -> str:
    """The name as the id of a trace; "": it is none."""
    context = trace_context(name)
    shown = name.lower() if context is None else f"{context.trace_id:032x}"
    return shown if len(shown) == TRACE_ID_DIGITS else ""


def _is_meant(request: RequestView, detail: Detail, name: str, trace: str) -> bool:
    is_its_trace = bool(trace) and detail.traceparent[len("00-") : len("00-") + TRACE_ID_DIGITS] == trace
    return is_its_trace or (bool(name) and request.request.startswith(name))


def _name(request: RequestView) -> str:
    """A session and a request in it. Ids of sessions have no space."""
    return f"{request.session} {request.request}"
