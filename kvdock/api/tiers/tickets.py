"""Requests that wait for lower tiers: a ticket for each.

When the mover has loaded chunks of a ticket, the ticket's lookup is made again, which leases them to the request.
Nothing can be evicted between the chunks' publication and that lease, because no other call comes between them.

A chunk that the mover loads for a request is temporary: the pool drops it with its last reader. Those that no request
has read when their reservation ends are dropped here, unless a request that waits will read them once the chunks before
them are there.

Used from the event loop alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvdock._core import Lookup as Found, Table, TableError
from kvdock.api.pool.registry import NamespaceRecord, SessionRecord
from kvdock.protocol import mover_schemas as m
from kvdock.protocol.reports import WAIT_BOUNDS_S
from kvdock.protocol.schemas import PendingTokens
from kvdock.protocol.wire_types import KEY_BYTES

ASKING_S = 0.05
"""How soon tiers are expected to answer what they have."""
GRACE_S = 5.0
"""How long after its wait a request may still ask for what has come: an engine asks in its own time."""
MOST_TICKETS = 4096
"""The most requests that wait at once; others compute."""
WaitOutcome = Literal["fulfilled", "shortened", "expired", "withdrawn"]
"""MoverView.waits explains them."""


@dataclass(frozen=True)
class LookupCall:
    """All values that are needed to make a lookup again. `keys`: 32 bytes each."""

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
    engine_lease: int
    """The lease that the engine knows of; 0: none."""
    lease: int
    promise: m.Promise | None = None
    promised_at_s: float = 0.0
    unread: list[bytes] = field(default_factory=list)
    """Keys of temporary chunks that were published for it. Those that it has not read when it ends are dropped."""
    is_done: bool = False
    """Nothing more comes."""


class WaitTotals:
    """How many waits ended in which way, and how long they took."""

    def __init__(self) -> None:
        outcomes = get_args(WaitOutcome)
        self.waits: dict[str, int] = dict.fromkeys(outcomes, 0)
        self.seconds: dict[str, float] = dict.fromkeys(outcomes, 0.0)
        self.histogram = {outcome: [0] * (len(WAIT_BOUNDS_S) + 1) for outcome in outcomes}

    def add(self, outcome: WaitOutcome, waited_s: float) -> None:
        self.waits[outcome] += 1
        self.seconds[outcome] += waited_s
        self.histogram[outcome][bisect_left(WAIT_BOUNDS_S, waited_s)] += 1


class Tickets:
    """`now_s`: a monotonic clock, in seconds. `wake`: called when tickets have ended that the mover does not know to
    have ended."""

    def __init__(
        self, table: Table, now_ms: Callable[[], int], now_s: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        self._table, self._now_ms, self._now_s, self._wake = table, now_ms, now_s, wake
        self.totals = WaitTotals()
        self._numbers = itertools.count(1)
        self._open: dict[int, _Ticket] = {}
        self._by_request: dict[tuple[int, bytes], int] = {}
        """By the session's id in the table and the request."""
        self._ended: list[int] = []
        """Tickets that have ended without the mover's knowledge."""
        self._temporary: dict[int, tuple[NamespaceRecord, bytes]] = {}
        """Namespace and keys of the mover's open reservations for temporary chunks, by grant."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MOST_TICKETS

    # ---------------------------------------------------------------- lookups of engines

    def open(self, call: LookupCall, found: Found, wait_s: float) -> int:
        """Returns the new ticket's number."""
        number, now_s = next(self._numbers), self._now_s()
        self._open[number] = _Ticket(call, now_s, now_s + wait_s, found.hit_tokens, found.lease, found.lease)
        self._by_request[call.session.table_id, call.request] = number
        return number

    def of(self, call: LookupCall) -> int | None:
        """The number of the ticket that an earlier lookup of the same request has opened."""
        return self._by_request.get((call.session.table_id, call.request))

    def keys_of(self, number: int) -> bytes:
        return self._open[number].call.keys

    def asked_again(self, number: int, found: Found) -> PendingTokens | None:
        """The request has looked up the same keys again, and has been answered with `found`. Returns what may still
        come; None: nothing, and the ticket has ended."""
        ticket = self._open[number]
        ticket.lease = ticket.engine_lease = found.lease
        ticket.hit_tokens = found.hit_tokens
        left_s = ticket.until_s - self._now_s()
        chunk_tokens = ticket.call.session.namespace.manifest.chunk_tokens
        chunks = ticket.promise.chunks if ticket.promise is not None else len(ticket.call.keys) // KEY_BYTES
        tokens = chunks * chunk_tokens
        is_whole = found.hit_tokens >= tokens
        if is_whole or left_s <= 0 or found.limited or ticket.is_done:
            is_late = left_s <= 0 and not ticket.is_done
            outcome: WaitOutcome = "fulfilled" if is_whole else "expired" if is_late else "shortened"
            self.end(number, outcome, mover_knows=ticket.is_done)
            return None
        if ticket.promise is None:
            return PendingTokens(tokens, "", min(ASKING_S, left_s))
        by_s = max(0.0, ticket.promise.by_s - (self._now_s() - ticket.promised_at_s))
        return PendingTokens(tokens, ticket.promise.tier, min(by_s, left_s))

    def superseded(self, number: int) -> None:
        """The request has looked up other keys. Its lease with what has come so far stays."""
        ticket = self._open[number]
        ticket.engine_lease = ticket.lease
        self.end(number, "withdrawn")

    def withdrawn(self, session: SessionRecord, request: bytes) -> None:
        """The request no longer waits."""
        if (number := self._by_request.get((session.table_id, request))) is not None:
            self.end(number, "withdrawn")

    def end_of_session(self, session: SessionRecord) -> None:
        for number in [number for number, ticket in self._open.items() if ticket.call.session is session]:
            self.end(number, "withdrawn")

    # ---------------------------------------------------------------- calls and reports of the mover

    def extend(self, space: NamespaceRecord) -> None:
        """The mover has published chunks of the namespace: leases them to the requests that wait for them."""
        for number, ticket in list(self._open.items()):
            if ticket.call.session.namespace is space:
                self._extend(number, ticket)

    def _extend(self, number: int, ticket: _Ticket) -> None:
        call = ticket.call
        try:
            found = self._table.lookup(
                call.session.table_id, call.member, call.request, call.epoch, call.keys, readers=call.readers,
                skip_tokens=call.skip_tokens, now_ms=self._now_ms(), is_apart=call.session.is_bench,
            )
        except TableError:  # the engine has begun to load what it had, or has ended: the request does not wait
            self.end(number, "withdrawn")
            return
        call.session.grants += found.lease not in (0, ticket.lease)
        ticket.lease, ticket.hit_tokens = found.lease, found.hit_tokens

    def promised(self, promise: m.Promise) -> None:
        if (ticket := self._open.get(promise.ticket)) is not None:
            ticket.promise, ticket.promised_at_s = promise, self._now_s()

    def mover_ended(self, number: int) -> None:
        """The mover loads nothing more for it. What came is leased to the request, which has not asked again yet."""
        if (ticket := self._open.get(number)) is not None:
            ticket.is_done = True

    def cleared(self, space: NamespaceRecord, keys: bytes | None) -> None:
        """These chunks were cleared or deleted, so they do not come. None: all of the namespace."""
        if keys is None:
            space.use.cleared_ms = self._now_ms()
        for ticket in self._open.values():
            if ticket.call.session.namespace is not space:
                continue
            if keys is None or any(key in ticket.call.keys for key in m.split_keys(keys)):
                ticket.is_done = True

    def reserved(self, session: SessionRecord, grant: int, keys: bytes) -> None:
        """The mover has reserved slots for temporary chunks of a request."""
        self._temporary[grant] = (session.namespace, keys)
        if len(self._temporary) > MOST_TICKETS:
            del self._temporary[next(iter(self._temporary))]

    def reservation_ended(self, grant: int) -> None:
        """A reservation of the mover has ended, and what came is leased to the requests that wait for it."""
        if grant in self._temporary:
            self._drop_unread(*self._temporary.pop(grant))

    def _drop_unread(self, space: NamespaceRecord, keys: bytes) -> None:
        """Drops those of the temporary chunks that no request reads, except those that a waiting request will read once
        the chunks before them are there."""
        count, reader = 0, None
        for ticket in self._open.values():
            if ticket.call.session.namespace is space and (shared := _shared(ticket.call.keys, keys)) > count:
                count, reader = shared, ticket
        if reader is not None:
            reader.unread.append(keys[: count * KEY_BYTES])
        if len(keys) > count * KEY_BYTES:
            with suppress(TableError):  # the namespace does not exist any more
                self._table.drop_unread(space.table_id, keys[count * KEY_BYTES :])

    # ---------------------------------------------------------------- the end of tickets

    def end_late(self) -> None:
        """Ends those whose requests have not asked within GRACE_S after their wait."""
        now_s = self._now_s()
        for number in [number for number, ticket in self._open.items() if ticket.until_s + GRACE_S < now_s]:
            self.end(number, "expired")

    def mover_restarted(self) -> None:
        """The mover that loaded chunks for them has ended."""
        for number in list(self._open):
            self.end(number, "shortened", mover_knows=True)
        for grant in list(self._temporary):
            self.reservation_ended(grant)
        self._ended.clear()

    def end(self, number: int, outcome: WaitOutcome, *, mover_knows: bool = False) -> None:
        """`mover_knows`: the mover need not be informed."""
        ticket = self._open.pop(number, None)
        if ticket is None:
            return
        self.totals.add(outcome, self._now_s() - ticket.began_s)
        call = ticket.call
        self._by_request.pop((call.session.table_id, call.request), None)
        if not mover_knows:
            self._ended.append(number)
            self._wake()
        if ticket.lease and ticket.lease != ticket.engine_lease:
            with suppress(TableError):  # the lease has ended in another way; the engine does not know of it
                self._table.cancel(call.session.table_id, call.member, ticket.lease)
        for keys in ticket.unread:
            self._drop_unread(call.session.namespace, keys)

    def take_ended(self) -> list[int]:
        """Numbers of the tickets that have ended since the last call, except those whose end the mover knows."""
        ended, self._ended = self._ended, []
        return ended


def _shared(chain: bytes, keys: bytes) -> int:
    """How many of the first `keys` are in `chain`. `keys` are consecutive keys of some chain. A key stands for all keys
    before it, so the ones that two chains share come first."""
    return bisect_left(
        range(len(keys) // KEY_BYTES), True,
        key=lambda at: keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] not in chain,
    )
