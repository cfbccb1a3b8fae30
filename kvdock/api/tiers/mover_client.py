"""The server's side of the mover: what the server sends to it, and what it does with the mover's reports.

The server decides who holds which memory. The mover, a process of its own, moves the bytes (kvdock/tiers/mover/).

A lookup that found less than it asked for, and whose request may wait, gets a ticket (kvdock/api/tiers/tickets.py). The
mover gets the lookup, loads what its tiers have, and reports which chunks it expects to load and when the loads have
ended.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvdock._core import KeyFilter, Lookup as Found, TableError
from kvdock.api.feeds.kv import KvLog
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord, Registry, SessionRecord
from kvdock.api.pool.sessions import Drain
from kvdock.api.record.counters import Counters
from kvdock.api.tiers.clears import Clears
from kvdock.api.tiers.peers import Peers
from kvdock.api.tiers.tickets import ASKING_S, LookupCall, Tickets
from kvdock.protocol import mover_schemas as m
from kvdock.protocol.mover_schemas import worth_chunks
from kvdock.protocol.readable import LogLevel
from kvdock.protocol.reports import MoverView, TierView
from kvdock.protocol.schemas import MOVER_NAME, PendingTokens, PrefetchAnswer, Why
from kvdock.protocol.wire_types import KEY_BYTES, OWN_TENANT

QUEUE_BYTES = 8 << 20
"""The most bytes of keys that wait to be sent to the mover; lookups beyond it are not sent."""
FRAME_BYTES = 64 << 10
"""About the most bytes of keys in one update: it is encoded and sent in one turn of the event loop."""
UPDATE_S = 0.1
"""The latest that an update is sent for which no request waits."""


class MoverClient:
    """`clears`: knows the tiers. `now_s`: a monotonic clock, in seconds."""

    def __init__(
        self, pool: Pool, registry: Registry, counters: Counters, clears: Clears, *, drain: Drain,
        now_ms: Callable[[], int], now_s: Callable[[], float],
    ) -> None:
        self.instance_prefix = f"{MOVER_NAME}-{secrets.token_hex(4)}-"
        """The instance names under which movers of this server attach begin with it."""
        self.restarts = 0
        self._pool, self._registry = pool, registry
        self._clears, self._drain = clears, drain
        self._wake = asyncio.Event()
        self._tiers = TierState(now_s)
        self.prefetches = Prefetches(pool, counters, self._why_unavailable, now_s)
        self.tickets = Tickets(pool.table, now_ms, now_s, self._wake.set)
        self._forecast = EvictionForecast(pool, registry, now_s)
        self._namespaces = _ServedNamespaces(registry, self.is_mover)
        self._lookups = _LookupQueue()
        self._told: tuple[bool, LogLevel] | None = None
        """What the mover was last told: whether the server drains, and the log's level. None: nothing yet."""
        self.peers = Peers(clears, self._wake.set)
        clears.wake, clears.on_cleared = self._wake.set, self._cleared

    @property
    def has_mover(self) -> bool:
        return self._clears.has_tiers

    @property
    def log_level(self) -> LogLevel:
        """In effect now: calls and SIGHUP change it."""
        return self._pool.limits.log_level

    @property
    def tiers(self) -> list[TierView]:
        """As the mover last reported them."""
        return [
            msgspec.structs.replace(report, pending_orders=self._clears.pending_orders(report.name))
            for report in self._tiers.reports
        ]

    @property
    def is_drained(self) -> bool:
        """Whether the mover has said that no chunk waits to be written any more."""
        return self._tiers.is_drained

    def absent(self, space: NamespaceRecord, keys: bytes) -> bytes:
        """Those of `keys` that no lower tier is known to have."""
        return self._tiers.absent(space, keys)

    def is_mover(self, session: SessionRecord) -> bool:
        """Whether the session is one of the mover's."""
        return self.has_mover and session.instance.startswith(self.instance_prefix)

    def session_count(self) -> int:
        """How many open sessions of the table are the mover's."""
        if not self.has_mover:
            return 0
        return len(self._pool.table.sessions([one.table_id for one in self._registry.sessions() if self.is_mover(one)]))

    def view(self) -> MoverView | None:
        """For status and metrics. The mover is not asked."""
        if not self.has_mover:
            return None
        totals = self.tickets.totals
        return MoverView(
            silent_s=self._tiers.silent_s, restarts=self.restarts, lost_lookups=self._lookups.lost,
            declined=self._tiers.declined, waiting=len(self.tickets), waits=dict(totals.waits),
            wait_s=dict(totals.seconds),
            wait_counts={outcome: list(counts) for outcome, counts in totals.histogram.items()},
        )

    # ---------------------------------------------------------------- calls of engines

    def attached(self, session: SessionRecord) -> None:
        """The mover is sent the session's namespace at once, even if the engine leaves at once."""
        if self.has_mover and not self.is_mover(session) and not session.tenant:
            self._namespaces.attached(session.namespace)
            self._wake.set()

    def moved(self, session: SessionRecord, before: NamespaceRecord) -> None:
        """The session's engine runs other weights now. The chunks that its requests waited for are of no use to it."""
        if self.has_mover:
            self._namespaces.left(before)
            self.tickets.end_of_session(session)

    def looked_up(self, call: LookupCall, found: Found, wait_s: float, tokens_per_s: float) -> PendingTokens | None:
        """A lookup was answered with `found`. Returns what may come for it; None: nothing. Called only where there is a
        mover."""
        session, space = call.session, call.session.namespace
        if self.is_mover(session) or not call.keys:
            return None
        self.prefetches.looked_up(call.keys)
        earlier = self.tickets.of(call)
        if earlier is not None:
            if self.tickets.keys_of(earlier) == call.keys:
                return self.tickets.asked_again(earlier, found)
            self.tickets.superseded(earlier)
        chunk_tokens, asked = space.manifest.chunk_tokens, len(call.keys) // KEY_BYTES
        stored = max(found.hit_tokens, found.committed) // chunk_tokens
        ticket = 0
        is_short = wait_s > 0 and stored < asked and not found.limited
        if is_short and self._may_wait(space, call.keys, stored, wait_s, tokens_per_s):
            ticket = self.tickets.open(call, found, wait_s)
        self._send(m.LookupNotice(
            namespace=space.digest.hex(), keys=call.keys, hit_chunks=stored, ticket=ticket, wait_s=wait_s,
            tokens_per_s=tokens_per_s,
        ))
        return PendingTokens(asked * chunk_tokens, "", min(ASKING_S, wait_s)) if ticket else None

    def _may_wait(
        self, space: NamespaceRecord, keys: bytes, stored: int, wait_s: float, tokens_per_s: float
    ) -> bool:
        if self._why_unavailable(space, keys, stored):
            return False
        if not self._tiers.may_be_worth(space, len(keys) // KEY_BYTES - stored, wait_s, tokens_per_s):
            self._tiers.declined += 1
            return False
        return not self.tickets.is_full

    def _why_unavailable(self, space: NamespaceRecord, keys: bytes, stored: int) -> Why:
        """Why no tier can load the chunk after the first `stored` ones; "": a tier may have it."""
        if not self.has_mover:
            return "no_tiers"
        if space.tenant:
            return "not_served"
        if self._drain.refuses_new:
            return "draining"
        if not self._tiers.is_any_open:
            return "tiers_off"
        at = stored * KEY_BYTES
        return "" if self._tiers.may_have(space, keys[at : at + KEY_BYTES]) else "absent"

    def _send(self, notice: m.LookupNotice) -> None:
        if self._lookups.add(notice):
            if notice.ticket:  # no request waits for the others: they go with the next update
                self._wake.set()
        elif notice.ticket:
            self.tickets.end(notice.ticket, "shortened", mover_knows=True)

    # ---------------------------------------------------------------- reports of the mover, and updates for it

    def follow(self, report: m.MoverReport) -> None:
        for change in report.note_changes:
            self._clears.note_changed(change)
        for done in report.orders_done:
            self._clears.order_done(done)
        for answer in report.contents:
            self._clears.contents.answered(answer)
        for found in report.peers:
            self.peers.answered(found)
        report.known = self._clears.still_known(report.known, self.known_bytes)
        self._tiers.follow(report)  # after clears have made it forget chunks, which `known` may name again
        for promise in report.promises:
            self.tickets.promised(promise)
        for result in report.prefetch_results:
            self.prefetches.ended(result)
        for number in report.ended_tickets:
            self.tickets.mover_ended(number)

    async def tell_routers(self, known: list[m.KnownKeys]) -> None:
        """Announces what a report says that tiers have. The next report is read once that is done."""
        if (log := self._tiers.kv_log) is None:
            return
        for one in known:
            if one.keys or one.is_there:
                await log.tier_has(bytes.fromhex(one.namespace), one.tier, one.keys, is_there=one.is_there)
            else:
                log.cleared(bytes.fromhex(one.namespace), None, one.tier)

    async def routers_know_no_tier(self) -> None:
        """A mover has ended: what tiers have is not known until the next one tells it."""
        if self._tiers.kv_log is not None:
            await self._tiers.kv_log.tiers_unknown()

    @property
    def known_bytes(self) -> int:
        """As in MoverConfig."""
        return self._tiers.known_bytes

    def has_routers(self, kv_log: KvLog | None) -> None:
        """Called once, before a mover runs. None: there are none."""
        self._tiers.kv_log = kv_log

    def _cleared(self, space: NamespaceRecord, keys: bytes | None) -> None:
        """These chunks were cleared or deleted, here or in a tier. None: all of the namespace."""
        self._tiers.cleared(space, keys)
        self.tickets.cleared(space, keys)

    def mover_restarted(self) -> None:
        """A new mover process starts, or the last one has ended: nothing that was sent or reported before holds."""
        self._told = None
        self._namespaces.mover_restarted()
        self._tiers.mover_restarted()
        self._clears.mover_restarted()
        self.prefetches.mover_restarted()
        self.tickets.mover_restarted()

    async def next_update(self) -> m.ServerUpdate:
        """Returns at once where a request waits for the update, else within about UPDATE_S after something has
        changed."""
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), UPDATE_S)
            except TimeoutError:
                self.tickets.end_late()
            self._wake.clear()
            update = self._update()
            has_more = (
                update.lookups or update.prefetches or update.ended_tickets or update.evicting_soon or update.orders
                or update.questions or update.followed or update.peers
                or update.namespaces is not None or update.generations is not None
            )
            told = update.is_draining, self.log_level
            if has_more or told != self._told:
                self._told = told
                return update

    def _update(self) -> m.ServerUpdate:
        lookups, left_bytes = self._lookups.take(lambda notice: not notice.ticket or notice.ticket in self.tickets)
        ended = self.tickets.take_ended()
        if self._lookups:
            self._wake.set()
        orders, generations, followed = self._clears.update()
        namespaces, abandoned = self._namespaces.update()
        return m.ServerUpdate(
            namespaces=namespaces, abandoned=[digest.hex() for digest in abandoned],
            generations=generations, orders=orders, followed=followed,
            lookups=lookups, prefetches=self.prefetches.due(left_bytes), ended_tickets=ended,
            evicting_soon=self._forecast.evicting_soon(self._tiers.absent) if self._tiers.is_any_open else [],
            questions=self._clears.contents.take(), peers=self.peers.take(),
            is_draining=self._drain.begun, log_level=self.log_level,
        )


class _LookupQueue:
    """Lookups that wait to be sent to the mover."""

    def __init__(self) -> None:
        self._waiting: deque[m.LookupNotice] = deque()
        self._keys_bytes = 0
        self.lost = 0
        """How many lookups were not sent, because too many waited."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, notice: m.LookupNotice) -> bool:
        """False: too many wait, so it is not sent."""
        if self._keys_bytes + len(notice.keys) > QUEUE_BYTES:
            self.lost += 1
            return False
        self._waiting.append(notice)
        self._keys_bytes += len(notice.keys)
        return True

    def take(self, is_wanted: Callable[[m.LookupNotice], bool]) -> tuple[list[m.LookupNotice], int]:
        """Those that wait longest, without those that are not wanted any more, and how many of FRAME_BYTES are left."""
        taken: list[m.LookupNotice] = []
        left_bytes = FRAME_BYTES
        while self._waiting and left_bytes > 0:
            notice = self._waiting.popleft()
            self._keys_bytes -= len(notice.keys)
            left_bytes -= len(notice.keys)
            if is_wanted(notice):
                taken.append(notice)
        return taken, left_bytes


class _ServedNamespaces:
    """Which namespaces the mover serves: those of the server's own user in which an engine has a session."""

    def __init__(self, registry: Registry, is_mover: Callable[[SessionRecord], bool]) -> None:
        self._registry, self._is_mover = registry, is_mover
        self._sent: list[bytes] | None = None
        """What the mover serves; None: it has not been sent anything."""
        self._attached: dict[bytes, NamespaceRecord] = {}
        """Those in which an engine has attached since the last update."""
        self._left: set[bytes] = set()
        """Those that engines have left for other weights. Each is removed once it is no longer served."""
        self._of_later_weights: set[bytes] = set()
        """Those served that are not of the weights with which engines start."""

    def attached(self, space: NamespaceRecord) -> None:
        self._attached[space.digest] = space

    def left(self, space: NamespaceRecord) -> None:
        """An engine runs other weights now."""
        self._left.add(space.digest)

    def mover_restarted(self) -> None:
        self._sent = None

    def update(self) -> tuple[list[m.ServedNamespace] | None, list[bytes]]:
        """(all namespaces that are served now, or None where they are the same as before; those whose weights no engine
        runs any more)."""
        records = {
            session.namespace.digest: session.namespace for session in self._registry.sessions()
            if not self._is_mover(session) and not session.tenant and session.namespace.use.weights is not None
        }
        records |= {
            digest: record for digest, record in self._attached.items() if record.use.weights is not None
        }
        self._attached = {}
        served = sorted(records)
        if served == self._sent:
            return None, []
        ended = set(self._sent or ()) - records.keys()
        abandoned = [digest for digest in ended if digest in self._left or digest in self._of_later_weights]
        self._left.difference_update(ended)
        self._of_later_weights = {digest for digest in served if digest != records[digest].base}
        self._sent = served
        return [
            m.ServedNamespace(
                namespace=digest.hex(), manifest=records[digest].manifest, weights=records[digest].use.weights or ""
            ) for digest in served
        ], abandoned


# --------------------------------------------------------------------------- the state of the tiers

# What the server knows of its tiers: their state as the mover last reported it, the chunks that they have, and which
# chunks the pool evicts soon and no tier has.
#
# Most chunks are written to a tier soon after they are published. Some are not: the tier was off or too slow then, or
# no mover ran. Those are named to the mover while there is still time to write them.
#
# Used from the event loop alone.

MOST_KNOWN = 1 << 22
"""About the most chunks known to be in tiers, over all namespaces. Beyond it, tiers are asked."""
MOVER_STARTS = "the mover is being started"
FORECAST_INTERVAL_S = 0.5
NEAR_SHARE = 0.125
"""While more of the pool than this share is free, nothing is evicted soon."""
SOON_SHARE = 0.0625
"""How much of the pool counts as evicted soon, and is written to tiers before the rest."""
MOST_SOON = 4096
"""Chunks that count as such, at most."""


class TierState:
    """`now_s`: a monotonic clock, in seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.kv_log: KvLog | None = None
        """Tells routers what tiers have."""
        self._now_s = now_s
        self._reported_s = now_s()
        self.reports: list[TierView] = []
        """As the mover last reported them."""
        self.declined = 0
        """How many requests did not wait, because no tier was worth it."""
        self._known = KeyFilter(salt=secrets.randbits(64), most_keys=MOST_KNOWN)
        """What tiers have, by the first KNOWN_BYTES of namespaces and keys."""
        self._is_full = False
        self._lists_all = self.is_drained = False

    def follow(self, report: m.MoverReport) -> None:
        if report.tiers is not None:
            self.reports, self._reported_s = report.tiers, self._now_s()
        for known in report.known:
            namespace = bytes.fromhex(known.namespace)
            if not known.is_there:
                self._known.remove(namespace, known.keys, self.known_bytes)
            elif not self._known.add(namespace, known.keys, self.known_bytes):
                self._is_full = True
        self._lists_all, self.is_drained = report.lists_all, report.is_drained

    @property
    def known_bytes(self) -> int:
        """As in MoverConfig."""
        return m.KNOWN_BYTES if self.kv_log is None else KEY_BYTES

    def mover_restarted(self) -> None:
        """A new mover process reports everything anew."""
        self.reports = [TierView(name=report.name, state="off", why=MOVER_STARTS) for report in self.reports]
        self._known = KeyFilter(salt=secrets.randbits(64), most_keys=MOST_KNOWN)
        self._is_full = self._lists_all = self.is_drained = False

    def forget(self, space: NamespaceRecord, keys: bytes) -> None:
        """These chunks were deleted, so no tier has them."""
        self._known.remove(space.digest, keys, KEY_BYTES)

    def cleared(self, space: NamespaceRecord, keys: bytes | None) -> None:
        """These chunks were cleared or deleted; None: all of the namespace."""
        if keys is not None:  # else the mover reports each chunk that is gone
            self.forget(space, keys)
        if self.kv_log is not None:
            self.kv_log.cleared(space.digest, keys)

    def absent(self, space: NamespaceRecord, keys: bytes) -> bytes:
        """Those of `keys` that no tier is known to have. About one in a thousand others is left out, too."""
        return self._known.missing(space.digest, keys, KEY_BYTES)

    @property
    def silent_s(self) -> float:
        """Seconds since the mover last reported the state of its tiers."""
        return self._now_s() - self._reported_s

    @property
    def is_any_open(self) -> bool:
        return any(report.state != "off" for report in self.reports)

    def may_have(self, space: NamespaceRecord, key: bytes) -> bool:
        """False: certainly no tier has the chunk."""
        return not self._lists_all or self._is_full or not self.absent(space, key)

    def may_be_worth(self, space: NamespaceRecord, chunks: int, wait_s: float, tokens_per_s: float) -> bool:
        """False: certainly no tier loads any of `chunks` chunks sooner than an engine computes them, at the speeds that
        the mover reported last. Where one may, the mover decides (kvdock/protocol/mover_schemas.py says why)."""
        return any(
            worth_chunks(
                chunks, chunk_bytes=space.chunk_bytes, chunk_tokens=space.manifest.chunk_tokens,
                latency_s=report.load_latency_s, bytes_per_s=report.load_bytes_per_s, wait_s=wait_s,
                tokens_per_s=tokens_per_s,
            )
            for report in self.reports if report.state != "off"
        )


class EvictionForecast:
    """`now_s`: a monotonic clock, in seconds."""

    def __init__(self, pool: Pool, registry: Registry, now_s: Callable[[], float]) -> None:
        self._pool, self._registry, self._now_s = pool, registry, now_s
        self._next_s = now_s()

    def evicting_soon(self, absent: Callable[[NamespaceRecord, bytes], bytes]) -> list[m.EvictingSoon]:
        """The chunks that the pool evicts next and no tier is known to have; empty while enough of the pool is free,
        and when the last forecast is more recent than FORECAST_INTERVAL_S. `absent`: as in TierState."""
        if (now_s := self._now_s()) < self._next_s:
            return []
        self._next_s = now_s + FORECAST_INTERVAL_S
        pool_bytes = self._pool.limit_bytes
        if self._pool.free_bytes > NEAR_SHARE * pool_bytes:
            return []
        spaces = {space.table_id: space for space in self._registry.namespaces() if not space.tenant}
        found = []
        for table_id, keys in self._pool.table.next_out(int(SOON_SHARE * pool_bytes), MOST_SOON).items():
            if (space := spaces.get(table_id)) is None:
                continue
            if missing := absent(space, keys):
                found.append(m.EvictingSoon(space.digest.hex(), missing))
        return found


# --------------------------------------------------------------------------- prefetches

# Prefetches: which chunks lower tiers load ahead of requests, when, and how many at a time.
#
# Whether a prefetch will be of use is not known. So all prefetches together may evict at most SHARE of the pool. A
# prefetched chunk that fits into free memory counts only until it has come. Any other counts until a lookup asks for
# it, or for REST_S after it has come. Hints may retain the same share at most: three quarters of the pool stay with the
# chunks that requests have really asked for.
#
# Used from the event loop alone.

SHARE = 0.25
REST_S = 60.0
"""After this long, a prefetched chunk that no lookup has asked for is a chunk like any other."""
MOST = 256
"""The most prefetches that wait, run or still count at once."""
MOST_KEYS_BYTES = 8 << 20
"""The most bytes of keys that wait for their start or for the mover."""
GRACE_S = 5.0
"""A prefetch is lost if the mover has not reported on it this long after its deadline."""


@dataclass
class _Prefetch:
    space: NamespaceRecord
    keys: bytes
    start_s: float
    until_s: float
    """When the prefetch is dropped or, if it has ended, forgotten."""
    stored: int = 0
    """How many of its first chunks the pool has."""
    bytes_: int = 0
    evicts: int = 0
    """How many of `bytes_` do not fit into free memory."""
    is_sent: bool = False
    """To the mover."""
    has_ended: bool = False


class Prefetches:
    """`why_unavailable`: returns why no tier can load the chunk at an index of a namespace's chain; "": a tier may have
    it. `now_s`: a monotonic clock, in seconds."""

    def __init__(
        self, pool: Pool, counters: Counters, why_unavailable: Callable[[NamespaceRecord, bytes, int], Why],
        now_s: Callable[[], float],
    ) -> None:
        self._pool, self._counters, self._why_unavailable, self._now_s = pool, counters, why_unavailable, now_s
        self._numbers = itertools.count(1)
        self._all: dict[int, _Prefetch] = {}

    def start(self, space: NamespaceRecord, keys: bytes, after_s: float, deadline_s: float) -> PrefetchAnswer:
        """Returns at once what the pool has and what may come. `keys`: 32 bytes each."""
        self._counters.prefetches += 1
        start_s = self._now_s() + after_s
        one = _Prefetch(space, keys, start_s, start_s + deadline_s)
        chunks, why = self._loadable(one)
        if after_s > 0 and why in ("", "stored", "limited"):
            chunks, why = 0, "later"
        if (chunks or why == "later") and not self._has_room(space, len(keys)):
            chunks, why = 0, "limited"
        self._counters.prefetches_refused += why == "limited"
        if chunks or why == "later":
            if chunks:
                self._take(one, chunks)
            self._all[next(self._numbers)] = one
        tokens = space.manifest.chunk_tokens
        return PrefetchAnswer(stored_tokens=one.stored * tokens, coming_tokens=chunks * tokens, why=why)

    def _has_room(self, space: NamespaceRecord, more_bytes: int) -> bool:
        """Whether one more is taken. A tenant has half of the room at most, unless it is the server's own user."""
        everyones = list(self._all.values())
        its = [] if space.tenant == OWN_TENANT else [one for one in everyones if one.space.tenant == space.tenant]
        return all(
            len(some) < MOST // parts
            and sum(len(one.keys) for one in some if not one.is_sent) + more_bytes <= MOST_KEYS_BYTES // parts
            for some, parts in ((everyones, 1), (its, 2))
        )

    def _loadable(self, one: _Prefetch) -> tuple[int, Why]:
        """How many chunks after the stored ones may be loaded now, and why not all."""
        space = one.space
        one.stored = self._pool.table.peek(space.table_id, one.keys) // space.manifest.chunk_tokens
        missing = len(one.keys) // KEY_BYTES - one.stored
        if missing <= 0:
            return 0, "stored"
        if why := self._why_unavailable(space, one.keys, one.stored):
            return 0, why
        allowed = sum(self._left_bytes()) // space.chunk_bytes
        return (missing, "") if missing <= allowed else (allowed, "limited")

    def _left_bytes(self) -> tuple[int, int]:
        """Free bytes that no prefetch will fill, and bytes that prefetches may still evict."""
        coming = sum(one.bytes_ - one.evicts for one in self._all.values() if not one.has_ended)
        evicted = sum(one.evicts for one in self._all.values())
        return max(0, self._pool.free_bytes - coming), max(0, int(SHARE * self._pool.limit_bytes) - evicted)

    def _take(self, one: _Prefetch, chunks: int) -> None:
        one.bytes_ = chunks * one.space.chunk_bytes
        one.evicts = max(0, one.bytes_ - self._left_bytes()[0])
        one.keys = one.keys[: (one.stored + chunks) * KEY_BYTES]

    # ---------------------------------------------------------------- later

    def looked_up(self, keys: bytes) -> None:
        """A lookup has asked for `keys`: what was prefetched of them is of use, and does not count any more."""
        for number, one in list(self._all.items()):
            at = one.stored * KEY_BYTES
            if one.evicts and keys[at : at + KEY_BYTES] == one.keys[at : at + KEY_BYTES]:
                one.evicts = 0
                if one.has_ended:
                    del self._all[number]

    def due(self, most_bytes: int) -> list[m.PrefetchRequest]:
        """The prefetches that start now, for the mover, with about `most_bytes` of keys."""
        now_s = self._now_s()
        self._expire(now_s)
        found: list[m.PrefetchRequest] = []
        for number, one in list(self._all.items()):
            if one.is_sent or one.start_s > now_s:
                continue
            if most_bytes <= 0 or self._why_unavailable(one.space, one.keys, 0) in ("tiers_off", "draining"):
                break  # it is tried again until its deadline
            if not one.bytes_ and not self._is_still_loadable(number, one):
                continue
            one.is_sent = True
            most_bytes -= len(one.keys)
            found.append(m.PrefetchRequest(
                number=number, namespace=one.space.digest.hex(), keys=one.keys, hit_chunks=one.stored,
                wait_s=one.until_s - now_s,
            ))
        return found

    def _is_still_loadable(self, number: int, one: _Prefetch) -> bool:
        """The pool and the tiers may have changed since the call. False: the prefetch is dropped."""
        try:
            chunks, why = self._loadable(one)
        except TableError:  # the namespace does not exist any more
            chunks, why = 0, "not_served"
        self._counters.prefetches_refused += why == "limited"
        if chunks:
            self._take(one, chunks)
            return True
        self._counters.prefetches_dropped += why not in ("stored", "limited")
        del self._all[number]
        return False

    def _expire(self, now_s: float) -> None:
        for number, one in list(self._all.items()):
            if one.until_s + GRACE_S * one.is_sent < now_s:
                del self._all[number]
                self._counters.prefetches_dropped += not one.has_ended

    def ended(self, result: m.PrefetchResult) -> None:
        """The mover has finished a prefetch: it loads nothing more for it."""
        if (one := self._all.get(result.number)) is None:
            return
        self._counters.prefetched_chunks += result.chunks
        self._counters.prefetches_dropped += result.was_dropped
        one.has_ended, one.until_s = True, self._now_s() + REST_S
        one.evicts = min(one.evicts, result.chunks * one.space.chunk_bytes)
        if not one.evicts:
            del self._all[result.number]

    def mover_restarted(self) -> None:
        """Those that were sent to the mover that has ended are lost. The others wait for the new one."""
        for number, one in list(self._all.items()):
            if one.is_sent and not one.has_ended:
                del self._all[number]
                self._counters.prefetches_dropped += 1
