"""The server's side of the mover: what the server sends to it, and what it does with the mover's reports.

The server decides who holds which memory. The mover, a process of its own, moves the bytes (kvdock/tiers/mover/).

A lookup that found less than it asked for, and whose request may wait, gets a ticket (kvdock/api/tiers/tickets.py). The
mover gets the lookup, loads what its tiers have, and reports which chunks it expects to load and when the loads have
ended.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

import msgspec

from kvdock._core import Lookup as Found
from kvdock.api.pool.drain import Drain
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.registry import NamespaceRecord, Registry, SessionRecord
from kvdock.api.record.counters import Counters
from kvdock.api.tiers.clears import Clears
from kvdock.api.tiers.prefetches import Prefetches
from kvdock.api.tiers.tickets import ASKING_S, LookupCall, Tickets
from kvdock.api.tiers.tier_state import EvictionForecast, TierState
from kvdock.protocol import mover_schemas as m
from kvdock.protocol.readable import LogLevel
from kvdock.protocol.reports import MoverView, TierView
from kvdock.protocol.schemas import MOVER_NAME, PendingTokens, Why
from kvdock.protocol.wire_types import KEY_BYTES

QUEUE_BYTES = 8 << 20
"""The most bytes of keys that wait to be sent to the mover; lookups beyond it are not sent."""
FRAME_BYTES = 4 << 20
"""About the most bytes of keys in one update."""
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
        self._declined = 0
        self._told: tuple[bool, LogLevel] | None = None
        """What the mover was last told: whether the server drains, and the log's level. None: nothing yet."""
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
            declined=self._declined, waiting=len(self.tickets), waits=dict(totals.waits), wait_s=dict(totals.seconds),
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
            self._declined += 1
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
        self._tiers.follow(report)  # after clears have made it forget chunks, which `known` may name again
        for promise in report.promises:
            self.tickets.promised(promise)
        for result in report.prefetch_results:
            self.prefetches.ended(result)
        for number in report.ended_tickets:
            self.tickets.mover_ended(number)

    def _cleared(self, space: NamespaceRecord, keys: bytes | None) -> None:
        """These chunks were cleared or deleted, here or in a tier. None: all of the namespace."""
        if keys is not None:  # else the mover reports each chunk that is gone
            self._tiers.forget(space, keys)
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
                or update.questions or update.followed
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
            questions=self._clears.contents.take(), is_draining=self._drain.begun, log_level=self.log_level,
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
