"""Where the tokens of prompts came from, as far as the server knows: what it offered, and what became of the rest.

Lookups leave an Answered here; the outcome of their request takes it and divides the prompt (kvdock/protocol/hits.py).
All of it is bounded: the outcome of a request whose answer was forgotten counts its loaded tokens as from memory, and
those that it computed as not asked for.

Used from the event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec

from kvdock._core import Lookup as Found, Table
from kvdock.api.clock import boot_s
from kvdock.api.pool.registry import Hits, NamespaceRecord, Recent, SessionRecord
from kvdock.api.record.requests import Detail
from kvdock.api.turns import sliced
from kvdock.protocol.hits import COMPUTED, MEMORY, WAITED, ComputedWhy, PromptRun
from kvdock.protocol.mover_schemas import split_keys
from kvdock.protocol.outcomes import Outcome, OutcomeView
from kvdock.protocol.reports import DayOfHits
from kvdock.protocol.wire_types import KEY_BYTES, OWN_TENANT

MOST_ANSWERS = 16_384
"""Requests whose outcome has not come yet: those of some minutes of busy engines."""
MOST_EPOCHS = 16
"""Epochs of one request, the last ones: an engine begins one each time that it preempts the request."""
MOST_ARRIVING = 4096
"""Reservations of the mover that are open."""
MOST_BROUGHT = 65_536
"""Chunks that tiers brought last: as many as requests wait for at once, and more."""

MOST_JUDGED, MOST_RUNS = 4096, 512
"""Chunks behind a hit that are looked into, and runs of chunks with one fate, so that no turn of the event loop is
long. What is behind them has the reason of the last one."""

STAYS_THE_REASON = frozenset({"ready", "being_stored", "unknown", "cleared", "deleted", "mismatched"})
"""What became of a chunk before its namespace was cleared. All others, such as evictions, would not matter: the clear
would have removed it."""

NOWHERE: Final = frozenset[bytes]()
Absent = Callable[[NamespaceRecord, bytes], bytes]
"""Those of the keys, in a row, that no lower tier is known to have."""


class Missing(msgspec.Struct, gc=False):
    """A run of chunks that a lookup did not find. `end`: where it ends, in chunks from the prompt's first. `at_ms`,
    `used_ms`: when its first chunk left the pool and when a request had last named it, on the server clock; 0: not
    known, or it was never there."""

    end: int
    why: ComputedWhy
    at_ms: int = 0
    used_ms: int = 0


class Answered(msgspec.Struct, gc=False):
    """The answers to one request's lookups in one epoch. Ends are in chunks from the prompt's first."""

    chunk_tokens: int
    asked: int
    """How many chunks were asked for."""
    began_ns: int
    found: tuple[tuple[int, str], ...] = ()
    """The end of each run of chunks that were found, with its source."""
    missing: tuple[Missing, ...] = ()
    """What follows them, up to `asked`."""
    detail: Detail | None = None
    """That of the first of these lookups, for explanations; its trace context is the last one's. None: not counted."""
    seen: tuple[int, int, str, int] = (-1, 0, "", 0)
    """What the last answer that was looked into had: hit tokens, tokens being stored, its limit, and the namespace's
    generation."""

    @property
    def is_drained(self) -> bool:
        """A server that drained gave nothing, whatever it had: the next answer is the first one that says."""
        return any(one.why == "draining" for one in self.missing)

    @property
    def hit(self) -> int:
        return self.found[-1][0] if self.found else 0

    def grow(self, end: int, source: str) -> None:
        """Everything up to `end` was found: what is new came from `source`."""
        if end < self.hit:
            kept = [(upto, known) for upto, known in self.found if upto < end]
            self.found = (*kept, (end, self.found[len(kept)][1])) if end else ()
        if end == self.hit:
            return
        before = self.found[:-1] if self.found and self.found[-1][1] == source else self.found
        self.found = (*before, (end, source))


class Answers:
    """The answers of lookups whose requests have not ended."""

    def __init__(self, table: Table, absent: Absent) -> None:
        self._table, self._absent = table, absent
        self._open: Recent[tuple[int, bytes], dict[int, Answered]] = Recent(MOST_ANSWERS)
        """By session and request, then by epoch."""
        self._arriving: OrderedDict[int, tuple[NamespaceRecord, Sequence[bytes], str]] = OrderedDict()
        """By reservation of the mover, the chunks that it loads, and from which tier."""
        self._brought: Recent[tuple[int, bytes], tuple[str, int]] = Recent(MOST_BROUGHT)
        """By namespace and key, the tier that brought a chunk into the pool, and when."""

    def tier_reserved(self, space: NamespaceRecord, grant: int, keys: Sequence[bytes], tier: str) -> None:
        """The mover has slots for chunks that it loads from `tier`."""
        self._arriving[grant] = space, keys, tier
        if len(self._arriving) > MOST_ARRIVING:
            self._arriving.popitem(last=False)

    def tier_committed(self, grant: int, now_ns: int, *, is_whole: bool) -> None:
        """The mover has published chunks of that reservation. `is_whole`: it publishes no more."""
        space, keys, tier = self._arriving.get(grant, (None, (), ""))
        if space is None:
            return
        if is_whole:
            del self._arriving[grant]
        for key in keys:
            self._brought.put((space.table_id, key), (tier, now_ns))

    def answered(
        self, session: SessionRecord, request: bytes, epoch: int, keys: bytes, found: Found, now_ns: int,
    ) -> Answered:
        """A lookup for `keys` was answered with `found`. To be called before another call changes the table."""
        space = session.namespace
        of_request = self._answers_of(session, request)
        answer, asked = of_request.get(epoch), len(keys) // KEY_BYTES
        hit = found.hit_tokens // space.manifest.chunk_tokens
        if answer is None or answer.is_drained:
            answer = Answered(space.manifest.chunk_tokens, asked, now_ns)
            _put(of_request, epoch, answer)
            answer.grow(hit, MEMORY)
        else:
            answer.asked = asked
            self._grow(answer, space, keys, hit)
        generation = self._table.generation(space.table_id)  # of chunks that are waited for, a clear changes no more
        if (seen := (found.hit_tokens, found.being_stored, found.limited, generation)) != answer.seen:
            answer.seen = seen
            answer.missing = tuple(self._missing(space, keys, found, hit))
        return answer

    def drained(self, session: SessionRecord, request: bytes, epoch: int, keys: bytes, now_ns: int) -> None:
        """A lookup for `keys` got nothing, because the server drains."""
        asked = len(keys) // KEY_BYTES
        answer = Answered(session.namespace.manifest.chunk_tokens, asked, now_ns)
        answer.missing = (Missing(asked, "draining"),)
        _put(self._answers_of(session, request), epoch, answer)

    def _answers_of(self, session: SessionRecord, request: bytes) -> dict[int, Answered]:
        """The request's, by epoch. Forgets an old request if there are too many."""
        name = session.table_id, request
        of_request = self._open.get(name)
        if of_request is None:
            of_request = {}
        self._open.put(name, of_request)
        return of_request

    def _grow(self, answer: Answered, space: NamespaceRecord, keys: bytes, hit: int) -> None:
        """What is found beyond the last answer came from a tier, or another engine has stored it meanwhile."""
        for at in range(answer.hit, hit):
            brought = self._brought.get((space.table_id, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]))
            tier, came_ns = brought or ("", 0)
            answer.grow(at + 1, tier if tier and came_ns >= answer.began_ns else WAITED)
        answer.grow(hit, WAITED)

    def _missing(self, space: NamespaceRecord, keys: bytes, found: Found, hit: int) -> list[Missing]:
        """Why the chunks behind the first `hit` ones were not given. A chunk that is there behind a missing one shares
        its reason: it would have been found with it."""
        end, behind = hit, keys[hit * KEY_BYTES : (hit + MOST_JUDGED) * KEY_BYTES]
        why: ComputedWhy = "partial"
        if found.limited == "held_bytes" or found.limited == "pinning":
            why = found.limited
        runs: list[Missing] = []
        absent = self._absent(space, behind)
        elsewhere = set(split_keys(behind)).difference(split_keys(absent)) if absent != behind else NOWHERE
        being_stored = found.being_stored // space.manifest.chunk_tokens
        fates = self._table.fates(space.table_id, behind) if behind else ()
        for chunks, fate, at_ms, used_ms in islice(fates, MOST_RUNS):
            if 0 < at_ms <= space.use.cleared_ms and fate not in STAYS_THE_REASON:
                fate, at_ms = "cleared", space.use.cleared_ms
            some = keys[end * KEY_BYTES : (end + chunks) * KEY_BYTES]
            for count, reason in _reasons(some, fate, max(0, being_stored - end), elsewhere):
                end += count
                if reason is not None:
                    why = reason
                if runs and runs[-1].why == why:
                    runs[-1].end = end
                else:
                    runs.append(Missing(end, why, at_ms, used_ms))
        if runs:
            runs[-1].end = len(keys) // KEY_BYTES
        return runs

    def take(self, session: SessionRecord, request: bytes, epoch: int) -> Answered | None:
        """The answers to the request's lookups in that epoch, or in its last one. The request has ended."""
        of_request = self._open.pop((session.table_id, request))
        if of_request is None:
            return None
        return of_request.get(epoch) or of_request[max(of_request)]


def _put(of_request: dict[int, Answered], epoch: int, answer: Answered) -> None:
    of_request.pop(epoch, None)
    of_request[epoch] = answer
    if len(of_request) > MOST_EPOCHS:
        del of_request[next(iter(of_request))]


# --------------------------------------------------------------------------------
# The division of a prompt.

def _reasons(
    keys: bytes, fate: str, promised: int, elsewhere: Set[bytes]
) -> Iterator[tuple[int, ComputedWhy | None]]:
    """(chunks, why they are missing) of a run of chunks with one fate, in their order; None: they are there.
    `promised`: how many of the first ones another engine computes and stores. `elsewhere`: those that a tier may have.
    """
    chunks = len(keys) // KEY_BYTES
    if fate == "ready":
        yield chunks, None
        return
    why: ComputedWhy = "never_stored" if fate == "unknown" else _known(fate) or "other"
    first = min(chunks, promised) if fate == "unknown" else 0
    if first:
        yield first, "being_stored"
    if not elsewhere or fate in ("cleared", "deleted", "mismatched", "being_stored"):  # tiers have no such chunk
        if chunks > first:
            yield chunks - first, why
        return
    for at in range(first * KEY_BYTES, len(keys), KEY_BYTES):
        yield 1, "tier_slow" if keys[at : at + KEY_BYTES] in elsewhere else why


class _Runs:
    def __init__(self, prompt_tokens: int) -> None:
        self.runs: list[PromptRun] = []
        self._end, self._prompt_tokens = 0, prompt_tokens

    def upto(self, end: int, run: PromptRun) -> None:
        """The tokens from the last run's end up to `end` are of the kind of `run`."""
        tokens = min(end, self._prompt_tokens) - self._end
        if tokens <= 0:
            return
        self._end += tokens
        last = self.runs[-1] if self.runs else None
        if last is not None and (last.origin, last.source, last.why) == (run.origin, run.source, run.why):
            last.tokens += tokens
        else:
            run.tokens = tokens
            self.runs.append(run)


def _local() -> PromptRun:
    return PromptRun(tokens=0, origin="local")


def _loaded(source: str) -> PromptRun:
    return PromptRun(tokens=0, origin="loaded", source=source)


def _computed(why: ComputedWhy) -> PromptRun:
    return PromptRun(tokens=0, origin="computed", why=why)


def divided(outcome: Outcome, chunk_tokens: int, answer: Answered | None) -> list[PromptRun]:
    """The prompt of a request that has ended, from its first token to its last. `answer`: None: it was not looked up,
    or its lookups were forgotten. The last token of a prompt is always computed, so a chunk that ends with it counts as
    one that could be loaded only if the engine has looked it up."""
    runs, prompt = _Runs(outcome.prompt_tokens), outcome.prompt_tokens
    end, start = outcome.local_tokens + outcome.loaded_tokens, outcome.asked_from
    runs.upto(outcome.local_tokens, _local())
    found = answer.found if answer is not None else ()
    for chunk, source in found:
        runs.upto(min(start + chunk * chunk_tokens, end), _loaded(source))
    runs.upto(end, _loaded(MEMORY))
    why: ComputedWhy | None = _known(outcome.why)
    whole = max(0, prompt - 1) // chunk_tokens * chunk_tokens
    if answer is not None:
        whole = max(whole, min(start + answer.asked * chunk_tokens, prompt))
        for chunk, source in found:
            tokens = start + chunk * chunk_tokens
            runs.upto(min(tokens, outcome.found_tokens), _computed(why or "not_loaded"))
            runs.upto(tokens, _computed(_came_late(source, why)))
        for missing in answer.missing:
            runs.upto(start + missing.end * chunk_tokens, _computed(missing.why))
    runs.upto(whole, _computed(why or "not_asked"))
    runs.upto(prompt, _computed("tail" if whole else "short"))
    return runs.runs


def _came_late(source: str, why: ComputedWhy | None) -> ComputedWhy:
    """Why tokens were computed that an answer found which the engine has not used."""
    if source == WAITED:
        return "being_stored"
    return why or "not_loaded" if source == MEMORY else "tier_slow"


def _known(why: str) -> ComputedWhy | None:
    """An engine's own reason; None: it has none."""
    if not why:
        return None
    return next((one for one in COMPUTED if one == why), "other")


# --------------------------------------------------------------------------- sums by tenant and day

# Where prompts' tokens came from, summed by tenant and model: since the server's start, and by day. The days are kept
# with the pool, so the next server of the pool goes on with them.
#
# Used from the event loop only.

MOST_DAYS = 400
MOST_MODELS = 64
"""Pairs of tenant and model that are counted apart, since the start and on each day; the others together are OTHERS."""
OTHERS = ("", "(others)")
SHARE_OF_TENANT = 0.5
"""How much of what is counted apart one tenant may be, unless it is the server's own user: engines name their models
and themselves. The others of that tenant are counted together, as its own."""

Key = tuple[str, str]
"""(tenant, model)"""
K = TypeVar("K", bound=tuple[str, ...])


LATELY_S, SPANS_LATELY = 3600.0, 12
MOST_ENGINES = 256
"""Engines that are counted apart in each span of the last hour; the others are together."""


class Whose(NamedTuple):
    """Whose requests have ended. `name`: its label or session."""

    tenant: str
    model: str
    name: str


OTHER_ENGINES = Whose(*OTHERS, OTHERS[1])


class Lately:
    """The last hour by engine, in spans of five minutes: what is right or wrong now, whatever was before."""

    def __init__(self, boot_s: Callable[[], float]) -> None:
        self._boot_s = boot_s
        self._spans: deque[tuple[float, dict[Whose, Hits]]] = deque(maxlen=SPANS_LATELY)
        """Each with its beginning, by `boot_s`."""

    def ended(self, engine: Whose, outcome: OutcomeView) -> None:
        now_s = self._boot_s()
        if not self._spans or now_s - self._spans[-1][0] >= LATELY_S / SPANS_LATELY:
            self._spans.append((now_s, {}))
        _, span = self._spans[-1]
        its_others = Whose(engine.tenant, *OTHER_ENGINES[1:])
        span.setdefault(_apart(span, engine, its_others, MOST_ENGINES) or OTHER_ENGINES, Hits()).ended(outcome)

    async def sums(self, sees: Callable[[str], bool]) -> dict[Whose, Hits]:
        """What engines did whose tenants the caller sees. In slices."""
        now_s, found = self._boot_s(), dict[Whose, Hits]()
        for began_s, span in tuple(self._spans):
            if now_s - began_s <= LATELY_S:
                async for engine, hits in sliced(tuple(span.items())):
                    if sees(engine.tenant):
                        found.setdefault(engine, Hits()).add(hits.view())
        return found


class HitRecord:
    """`wall_s`: Unix seconds; days are those of the server's time zone. `boot_s`: the time since this machine was
    started."""

    def __init__(self, wall_s: Callable[[], float] = time.time, boot_s: Callable[[], float] = boot_s) -> None:
        self.total = Hits()
        self.by_model: dict[Key, Hits] = {}
        self.lately = Lately(boot_s)
        self._wall_s = wall_s
        self._days: OrderedDict[str, dict[Key, Hits]] = OrderedDict()
        """By date, as 2026-11-25; the oldest first."""
        self._encoded: dict[str, bytes] = {}
        """Days that are over, as they are kept: to encode all of them each minute would take too long."""

    def ended(self, engine: Whose, outcome: OutcomeView) -> None:
        tenant, model, _ = engine
        self.total.ended(outcome)
        self.lately.ended(engine, outcome)
        _of(self.by_model, (tenant, model)).ended(outcome)
        today = self.today
        if today not in self._days:
            self._add_day(today)
        _of(self._days[today], (tenant, model)).ended(outcome)

    @property
    def today(self) -> str:
        """As dates of days are written."""
        return date_of(self._wall_s())

    def _add_day(self, date: str) -> None:
        self._days[date] = {}
        if len(self._days) > MOST_DAYS:
            oldest, _ = self._days.popitem(last=False)
            self._encoded.pop(oldest, None)

    async def days(self, sees: Callable[[str], bool], most: int = MOST_DAYS) -> list[DayOfHits]:
        """The last `most` days, oldest first, of the tenants that the caller sees. In slices: a day takes some tenths
        of a ms."""
        return [day async for date in sliced(reversed(self.dates()[:most])) for day in self.on(date, sees)]

    def dates(self) -> list[str]:
        """Newest first."""
        return list(reversed(self._days))

    def on(self, date: str, sees: Callable[[str], bool] = lambda tenant: True) -> list[DayOfHits]:
        """The tenants' that the caller sees; empty: nothing is known of that day."""
        return [
            DayOfHits(date=date, tenant=tenant, model=model, hits=hits.view())
            for (tenant, model), hits in self._days.get(date, {}).items() if sees(tenant)
        ]

    # ---------------------------------------------------------------- kept with the pool

    @property
    def has_changed(self) -> bool:
        """It is kept with each value of the series."""
        return False

    def kept(self) -> Iterator[bytes]:
        before, newest = b"[", next(reversed(self._days), "")
        for date in list(self._days):
            if date not in self._encoded or date == newest:
                self._encoded[date] = msgspec.json.encode(self.on(date))
            yield before
            yield self._encoded[date]
            before = b","
        yield b"]" if newest else b"[]"

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with the days of an earlier server. Raises msgspec.MsgspecError."""
        for of_day in msgspec.json.decode(kept, type=list[list[DayOfHits]]):
            for day in of_day:
                if day.date not in self._days:
                    self._add_day(day.date)
                _of(self._days[day.date], (day.tenant, day.model)).add(day.hits)


def date_of(wall_s: float) -> str:
    """As 2026-11-25, in the server's time zone."""
    return time.strftime("%Y-%m-%d", time.localtime(wall_s))


def _of(by_model: dict[Key, Hits], key: Key) -> Hits:
    return by_model.setdefault(_apart(by_model, key, (key[0], OTHERS[1]), MOST_MODELS) or OTHERS, Hits())


def _apart(counted: Collection[K], key: K, others: K, most: int) -> K | None:
    """What `key` is counted as, where at most `most` are counted apart: itself, or the others of its tenant, the first
    word of each; None: there is no room for these either."""
    if key in counted:
        return key
    has_room = len(counted) < most
    if has_room and (key[0] == OWN_TENANT or sum(one[0] == key[0] for one in counted) < SHARE_OF_TENANT * most):
        return key
    return others if has_room or others in counted else None
