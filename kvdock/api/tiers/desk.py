"""What the server tells its mover, and what it does with the mover's words. It decides who holds what; the mover, a
process of its own, moves the bytes (kvdock/tiers/mover/).

A lookup that found less than it asked for, and whose request may wait, becomes a ticket. When the mover has loaded some
of it, the ticket's lookup is made again, which leases what came to the same request: nothing can be evicted between its
publication and that lease, because no other call comes between them.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from kvdock._core import Lookup as Found, Table, TableError
from kvdock.api.pool.registry import NamespaceRecord, Registry, SessionRecord
from kvdock.api.record.counters import Counters
from kvdock.api.tiers.ahead import Ahead
from kvdock.api.tiers.clears import Clears
from kvdock.api.tiers.leaving import Leaving
from kvdock.protocol import mover_schemas as t
from kvdock.protocol.awaited import PendingTokens, worth_chunks
from kvdock.protocol.reports import WAIT_BOUNDS_S, MoverView, TierView
from kvdock.protocol.tier_schemas import Why
from kvdock.protocol.wire_types import KEY_BYTES

ASKING_S = 0.05
"""How soon tiers are expected to say what they have."""
NEWS_BYTES = 8 << 20
"""This much of keys may wait for the mover; lookups beyond that it is not told of."""
FRAME_BYTES = 4 << 20
"""So much of keys goes in one frame."""
NEWS_S = 0.1
"""How late news may be for which nobody waits."""
GRACE_S = 5.0
"""So long after its wait a request may ask for what has come: an engine asks in its own time."""
MOST_TICKETS = 4096
"""So many requests may wait at once; others compute."""
MOST_KNOWN = 1 << 21
"""So many chunks are known to be in tiers, over all namespaces; beyond it tiers are asked."""
MOST_KNOWN_NAMESPACES = 4096
"""Each set of weights has one of its own; beyond it tiers are asked about those that were told of longest ago."""
MOVER_STARTS = "the mover is being started"
WaitOutcome = Literal["fulfilled", "shortened", "expired", "withdrawn"]
"""MoverView.waits says what they mean."""


@dataclass(frozen=True)
class LookupCall:
    """What makes the same lookup again. `keys`: 32 bytes each."""

    session: SessionRecord
    member: int
    request: bytes
    epoch: int
    keys: bytes
    readers: int
    skip_tokens: int


@dataclass
class _Ticket:
    call: LookupCall
    began_s: float
    until_s: float
    hit_tokens: int
    lease_told: int
    """The lease that the engine knows; 0: none."""
    lease: int
    promised: t.Promised | None = None
    promised_at_s: float = 0.0
    unread: list[bytes] = field(default_factory=list)
    """Keys of its temporary chunks that were published: what it has not read of them when it ends came for nobody."""
    is_done: bool = False
    """Nothing more comes."""


class TierDesk:
    """`movers`: whether a mover was started for this server. `now_s`: a clock that never goes back."""

    def __init__(
        self, table: Table, registry: Registry, counters: Counters, clears: Clears, *, has_mover: bool,
        room: Callable[[], tuple[int, int]], is_draining: Callable[[], bool], now_ms: Callable[[], int],
        now_s: Callable[[], float],
    ) -> None:
        self.instance_prefix = f"mover-{secrets.token_hex(4)}-"
        """With it begin the instances as which movers of this server attach."""
        self._reports: list[TierView] = []
        """The mover's last."""
        self.mover_restarts = 0
        self._lost_lookups = self._declined = 0
        self._waits: dict[str, int] = dict.fromkeys(get_args(WaitOutcome), 0)
        self._wait_s: dict[str, float] = dict.fromkeys(get_args(WaitOutcome), 0.0)
        self._wait_counts = {how: [0] * (len(WAIT_BOUNDS_S) + 1) for how in get_args(WaitOutcome)}
        self._table, self._registry, self.has_mover = table, registry, has_mover
        self._now_ms, self._now_s, self._is_draining = now_ms, now_s, is_draining
        self._heard_s = now_s()
        self._numbers = itertools.count(1)
        self.ahead = Ahead(table, counters, room, self._why_not, now_s)
        self._leaving = Leaving(table, registry, room, now_s)
        self._tickets: dict[int, _Ticket] = {}
        self._of_request: dict[tuple[int, bytes], int] = {}
        """Tickets by the session's id at the table and the request."""
        self._asked: deque[t.Asked] = deque()
        self._asked_bytes = 0
        self._ended: list[int] = []
        self._temporary: dict[int, tuple[NamespaceRecord, bytes]] = {}
        """The keys of open reservations of the mover's for temporary chunks, by grant."""
        self._served: list[bytes] | None = None
        self._fresh: dict[bytes, NamespaceRecord] = {}
        """Namespaces in which an engine has attached since the last news."""
        self._moved_from: set[bytes] = set()
        """Namespaces that engines have moved out of since the last news of namespaces."""
        self._left: list[bytes] = []
        """What the next news tells: nobody runs these weights any more."""
        self._of_weights: set[bytes] = set()
        """Those of the namespaces served that are not of the weights that engines start with."""
        self._said_draining = False
        self._known: OrderedDict[bytes, set[bytes]] = OrderedDict()
        """The beginnings of the keys that tiers have, by namespace; the one that was told of longest ago first."""
        self._has_forgotten = False
        self._lists_all = False
        self._news = asyncio.Event()
        self._clears = clears
        clears.wake, clears.on_cleared = self._news.set, self._cleared

    @property
    def reports(self) -> list[TierView]:
        return [
            msgspec.structs.replace(report, untold=self._clears.untold(report.name)) for report in self._reports
        ]

    def is_movers(self, session: SessionRecord) -> bool:
        return self.has_mover and session.instance.startswith(self.instance_prefix)

    # ---------------------------------------------------------------- for engines' calls

    def attached(self, session: SessionRecord) -> None:
        """The mover learns of the namespace at once, also if the engine leaves at once."""
        if self.has_mover and not self.is_movers(session) and not session.tenant:
            self._fresh[session.namespace.digest] = session.namespace
            self._news.set()

    def moved(self, session: SessionRecord, before: NamespaceRecord) -> None:
        """Its engine runs other weights now: what its requests waited for is of no use to it."""
        if self.has_mover:
            self._moved_from.add(before.digest)
            mine = [number for number, ticket in self._tickets.items() if ticket.call.session is session]
            for number in mine:
                self._end(number, "withdrawn")

    def looked_up(self, call: LookupCall, found: Found, wait_s: float, tokens_per_s: float) -> PendingTokens | None:
        """A lookup was answered. Says what may come for it; None: nothing. Only where there is a mover."""
        if self.is_movers(call.session) or not call.keys:
            return None
        self.ahead.asked(call.keys)
        chunk_tokens = call.session.namespace.manifest.chunk_tokens
        asked = len(call.keys) // KEY_BYTES
        at = self._of_request.get((call.session.table_id, call.request))
        if at is not None and self._tickets[at].call.keys == call.keys:
            return self._again(at, found, asked * chunk_tokens)
        if at is not None:  # it asks for more keys: what has come for it stays its own
            self._tickets[at].lease_told = self._tickets[at].lease
            self._end(at, "withdrawn")
        stored = max(found.hit_tokens, found.committed) // chunk_tokens
        waits = wait_s > 0 and stored < asked and not found.limited
        waits = waits and not self._why_not(call.session.namespace, call.keys, stored)
        if waits and not self._is_worth(call.session.namespace, asked - stored, wait_s, tokens_per_s):
            waits, self._declined = False, self._declined + 1
        waits = waits and len(self._tickets) < MOST_TICKETS
        ticket = 0
        if waits:
            ticket = next(self._numbers)
            now_s = self._now_s()
            self._tickets[ticket] = _Ticket(call, now_s, now_s + wait_s, found.hit_tokens, found.lease, found.lease)
            self._of_request[call.session.table_id, call.request] = ticket
        self._tell(t.Asked(
            namespace=call.session.namespace.digest.hex(), keys=call.keys, hit_chunks=stored, ticket=ticket,
            wait_s=wait_s, tokens_per_s=tokens_per_s,
        ))
        return PendingTokens(asked * chunk_tokens, "", min(ASKING_S, wait_s)) if waits else None

    def _why_not(self, space: NamespaceRecord, keys: bytes, stored: int) -> Why:
        """Why no tier has the chunk behind the first `stored`; "": one may."""
        if not self.has_mover:
            return "no_tiers"
        if space.tenant:
            return "not_served"
        if self._is_draining():
            return "draining"
        if not self._is_any_open():
            return "tiers_off"
        if not self._lists_all or sum(map(len, self._known.values())) > MOST_KNOWN:
            return ""
        at = stored * KEY_BYTES
        known = self._known.get(space.digest)
        if known is None and self._has_forgotten:
            return ""
        return "" if known is not None and keys[at : at + t.KNOWN_BYTES] in known else "absent"

    def _is_any_open(self) -> bool:
        return any(report.state == "open" for report in self._reports)

    def _is_worth(self, space: NamespaceRecord, chunks: int, wait_s: float, tokens_per_s: float) -> bool:
        """Whether some tier may bring something sooner than it is computed. The mover decides how much."""
        return any(
            worth_chunks(
                chunks, chunk_bytes=space.chunk_bytes, chunk_tokens=space.manifest.chunk_tokens,
                latency_s=report.load_latency_s, bytes_per_s=report.load_bytes_per_s, wait_s=wait_s,
                tokens_per_s=tokens_per_s,
            )
            for report in self._reports if report.state == "open"
        )

    def _again(self, number: int, found: Found, asked_tokens: int) -> PendingTokens | None:
        """The request has asked once more: what is there by now, it has."""
        ticket = self._tickets[number]
        ticket.lease = ticket.lease_told = found.lease
        ticket.hit_tokens = found.hit_tokens
        left_s = ticket.until_s - self._now_s()
        tokens = asked_tokens
        if ticket.promised is not None:
            tokens = ticket.promised.chunks * ticket.call.session.namespace.manifest.chunk_tokens
        if found.hit_tokens >= tokens or left_s <= 0 or found.limited or ticket.is_done:
            is_whole, is_late = found.hit_tokens >= tokens, left_s <= 0 and not ticket.is_done
            self._end(
                number, "fulfilled" if is_whole else "expired" if is_late else "shortened", is_told=ticket.is_done
            )
            return None
        if ticket.promised is None:
            return PendingTokens(tokens, "", min(ASKING_S, left_s))
        by_s = max(0.0, ticket.promised.by_s - (self._now_s() - ticket.promised_at_s))
        return PendingTokens(tokens, ticket.promised.tier, min(by_s, left_s))

    def withdrawn(self, session: SessionRecord, request: bytes) -> None:
        """Nobody waits any more."""
        if (number := self._of_request.get((session.table_id, request))) is not None:
            self._end(number, "withdrawn")

    def committed(self, session: SessionRecord) -> None:
        """The mover has published chunks of the session's namespace: leases them to those who wait."""
        for number, ticket in list(self._tickets.items()):
            if ticket.call.session.namespace is session.namespace:
                self._extend(number, ticket)

    def reserved(self, session: SessionRecord, grant: int, keys: bytes) -> None:
        """The mover fills temporary chunks for a request."""
        self._temporary[grant] = (session.namespace, keys)
        if len(self._temporary) > MOST_TICKETS:
            del self._temporary[next(iter(self._temporary))]

    def settled(self, grant: int) -> None:
        """A reservation of the mover's has ended, and whoever waits has been leased what came."""
        if grant in self._temporary:
            self._drop_unread(*self._temporary.pop(grant))

    def _drop_unread(self, space: NamespaceRecord, keys: bytes) -> None:
        """What came for nobody goes, but for what a request that waits is to have once the chunks before it are there.
        """
        count, reader = 0, None
        for ticket in self._tickets.values():
            if ticket.call.session.namespace is space and (its := _shared(ticket.call.keys, keys)) > count:
                count, reader = its, ticket
        if reader is not None:
            reader.unread.append(keys[: count * KEY_BYTES])
        if len(keys) > count * KEY_BYTES:
            with suppress(TableError):  # the namespace is gone
                self._table.drop_unread(space.table_id, keys[count * KEY_BYTES :])

    def _extend(self, number: int, ticket: _Ticket) -> None:
        call = ticket.call
        try:
            found = self._table.lookup(
                call.session.table_id, call.member, call.request, call.epoch, call.keys, readers=call.readers,
                skip_tokens=call.skip_tokens, now_ms=self._now_ms(),
            )
        except TableError:  # the engine has begun to load what it had, or is gone: nobody waits
            self._end(number, "withdrawn")
            return
        call.session.grants += found.lease not in (0, ticket.lease)
        ticket.lease, ticket.hit_tokens = found.lease, found.hit_tokens

    def view(self) -> MoverView | None:
        """What people are told. Asks nobody."""
        if not self.has_mover:
            return None
        return MoverView(
            silent_s=self._now_s() - self._heard_s, restarts=self.mover_restarts, lost_lookups=self._lost_lookups,
            declined=self._declined, waiting=len(self._tickets), waits=dict(self._waits), wait_s=dict(self._wait_s),
            wait_counts={how: list(counts) for how, counts in self._wait_counts.items()},
        )

    # ---------------------------------------------------------------- for the mover

    def heard(self, words: t.MoverWords) -> None:
        if words.tiers is not None:
            self._reports, self._heard_s = words.tiers, self._now_s()
        for learned in words.learned:
            self._clears.learned(learned)
        for told in words.told:
            self._clears.told(told)
        for known in words.known:
            namespace = bytes.fromhex(known.namespace)
            self._known.setdefault(namespace, set()).update(
                known.keys[at : at + t.KNOWN_BYTES] for at in range(0, len(known.keys), t.KNOWN_BYTES)
            )
            self._known.move_to_end(namespace)
        while len(self._known) > MOST_KNOWN_NAMESPACES:
            self._known.popitem(last=False)
            self._has_forgotten = True
        self._lists_all = words.lists_all
        for promised in words.promised:
            if (ticket := self._tickets.get(promised.ticket)) is not None:
                ticket.promised, ticket.promised_at_s = promised, self._now_s()
        for prefetched in words.prefetched:
            self.ahead.ended(prefetched)
        for number in words.ended:
            if (ticket := self._tickets.get(number)) is not None:
                ticket.is_done = True  # what came is leased to the request, which has not asked again yet

    def _cleared(self, space: NamespaceRecord, keys: bytes | None) -> None:
        """Chunks were cleared: tiers do not have them any more, and who waits for them waits in vain. None: all."""
        if keys is None:
            self._known.pop(space.digest, None)
        elif (known := self._known.get(space.digest)) is not None:
            known.difference_update(keys[at : at + t.KNOWN_BYTES] for at in range(0, len(keys), KEY_BYTES))
        for ticket in self._tickets.values():
            if ticket.call.session.namespace is not space:
                continue
            asked = ticket.call.keys
            if keys is None or any(keys[at : at + KEY_BYTES] in asked for at in range(0, len(keys), KEY_BYTES)):
                ticket.is_done = True

    async def news(self) -> t.MoverNews:
        """The next, at once where a request waits for it, else soon."""
        while True:
            try:
                await asyncio.wait_for(self._news.wait(), NEWS_S)
            except TimeoutError:
                self._end_late()
            self._news.clear()
            news = self._take_news()
            says = bool(news.asked or news.wanted or news.ended or news.leaving or news.orders or news.heard)
            says = says or news.namespaces is not None or news.generations is not None
            if says or news.is_draining != self._said_draining:
                self._said_draining = news.is_draining
                return news

    def restarted(self) -> None:
        """The mover is a new process: it knows nothing."""
        self._served, self._said_draining, self._lists_all = None, False, False
        self._reports = [TierView(name=report.name, state="off", why=MOVER_STARTS) for report in self._reports]
        self._known.clear()
        self._has_forgotten = False
        self._clears.restarted()
        self.ahead.lost()
        for number in list(self._tickets):
            self._end(number, "shortened", is_told=True)
        for grant in list(self._temporary):
            self.settled(grant)
        self._ended.clear()

    def _tell(self, asked: t.Asked) -> None:
        if self._asked_bytes + len(asked.keys) > NEWS_BYTES:
            self._lost_lookups += 1
            if asked.ticket:
                self._end(asked.ticket, "shortened", is_told=True)
            return
        self._asked.append(asked)
        self._asked_bytes += len(asked.keys)
        if asked.ticket:  # nobody waits for the others: they go with the next news
            self._news.set()

    def _take_news(self) -> t.MoverNews:
        asked: list[t.Asked] = []
        left = FRAME_BYTES
        while self._asked and left > 0:
            one = self._asked.popleft()
            self._asked_bytes -= len(one.keys)
            left -= len(one.keys)
            if not one.ticket or one.ticket in self._tickets:
                asked.append(one)
        ended, self._ended = self._ended, []
        if self._asked:
            self._news.set()
        orders, generations, learned = self._clears.news()
        return t.MoverNews(
            namespaces=self._namespaces(), left=[digest.hex() for digest in self._left],
            generations=generations, orders=orders, heard=learned,
            asked=asked, wanted=self.ahead.news(left), ended=ended,
            leaving=self._leaving.news(self._known) if self._is_any_open() else [], is_draining=self._is_draining(),
        )

    def _namespaces(self) -> list[t.ServedNamespace] | None:
        """Those of the server's own user in which an engine has a session, if they changed."""
        records = {
            session.namespace.digest: session.namespace for session in self._registry.sessions()
            if not self.is_movers(session) and not session.tenant and session.namespace.use.weights is not None
        }
        records |= {
            digest: record for digest, record in self._fresh.items() if record.use.weights is not None
        }
        self._fresh = {}
        served = sorted(records)
        self._left = []
        if served == self._served:
            return None
        gone = set(self._served or ()) - records.keys()
        self._left = [digest for digest in gone if digest in self._moved_from or digest in self._of_weights]
        self._moved_from.difference_update(gone)
        self._of_weights = {digest for digest in served if digest != records[digest].base}
        self._served = served
        return [
            t.ServedNamespace(
                namespace=digest.hex(), manifest=records[digest].manifest, weights=records[digest].use.weights or ""
            ) for digest in served
        ]

    def _end_late(self) -> None:
        now_s = self._now_s()
        for number in [number for number, ticket in self._tickets.items() if ticket.until_s + GRACE_S < now_s]:
            self._end(number, "expired")

    def _end(self, number: int, how: WaitOutcome, *, is_told: bool = False) -> None:
        """`is_told`: the mover knows."""
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return
        self._waits[how] += 1
        waited_s = self._now_s() - ticket.began_s
        self._wait_s[how] += waited_s
        self._wait_counts[how][bisect_left(WAIT_BOUNDS_S, waited_s)] += 1
        call = ticket.call
        self._of_request.pop((call.session.table_id, call.request), None)
        if not is_told:
            self._ended.append(number)
            self._news.set()
        if ticket.lease and ticket.lease != ticket.lease_told:
            with suppress(TableError):  # it has ended otherwise; else the engine never heard of it
                self._table.cancel(call.session.table_id, call.member, ticket.lease)
        for keys in ticket.unread:
            self._drop_unread(call.session.namespace, keys)


def _shared(chain: bytes, keys: bytes) -> int:
    """How many of `keys`, which are some of another chain's in their order, are the chain's as well: a key stands for
    all before it."""
    return bisect_left(
        range(len(keys) // KEY_BYTES), True,
        key=lambda at: keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] not in chain,
    )
