"""The mover: follows the server's updates, and reports to it.

Threads: the main one reads and writes the pipe to the server. Fetches share a few threads, each tier has threads for
its calls, for its notes and for writing, and each session has one for heartbeats, through which the mover learns what
the pool stores and evicts.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

import msgspec

from kvdock.client.client import Client
from kvdock.protocol.mover_schemas import (
    FRAME_HEAD,
    ContentsAnswer,
    EvictingSoon,
    KnownKeys,
    LookupNotice,
    MoverConfig,
    MoverReport,
    NoteChange,
    OrderDone,
    PeerAnswer,
    PrefetchRequest,
    PrefetchResult,
    Promise,
    ServerUpdate,
    frame,
    split_keys,
)
from kvdock.protocol.reports import TierContents, TierView
from kvdock.protocol.schemas import Changes
from kvdock.tiers.disk.folder import TIER as DISK
from kvdock.tiers.mover.agreement import Agreement, AgreementObserver
from kvdock.tiers.mover.fetches import Fetch, Fetches, FetchObserver, Wanted
from kvdock.tiers.mover.namespaces import NamespaceSession, NamespaceSessions, PoolMemory
from kvdock.tiers.mover.opening import OpeningTiers, registers_memory
from kvdock.tiers.mover.owner import Owner
from kvdock.tiers.mover.peer_leases import PeerLeases
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.mover.write_behind import MOST_EVICTED, AskCounts, WriteBehind, WriteBudget, WriteObserver, WriteQueue
from kvdock.tiers.tier import CountsRequests, Deadline, Lists, SharesPool, StillRunning, TellsGone, Tier

log = logging.getLogger("kvdock.tiers")

MOST_TOLD = 256
"""The most chunks that one report names as known: the server gives a turn to each report, for which lookups wait."""
LISTED_AT_ONCE = 8
"""How many slices of what a tier has from before are taken in a turn."""
TURN_S = 0.2
"""The longest time until a report is sent if nobody waits for it."""
SHORT_TURN_S = 0.02
"""The same while other nodes wait for chunks that are being loaded, or the server waits for what is being written."""
REPORT_S = 0.5
"""How often the state of the tiers is reported."""
CLOSE_S = 2.0
FAILING = "its calls fail or are late"
TOO_LARGE = "some parts are longer than it takes"
WORDS = {"open": "", "full": "it has no space", "read_only": "it cannot be written"}
LOST_STATUS = 70
"""The exit status of a mover that ends itself, because a call of a tier cannot be stopped and could still write to the
pool."""


@dataclass
class _Reports:
    """What is reported next. `untold`: what tiers have. `has_more`: they have more of that. `tiers_s`: when their
    state was last reported. `is_draining`: the server drains. `has_told_end`: the server was told that
    nothing more is written."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    report: MoverReport = field(default_factory=MoverReport)
    untold: deque[KnownKeys] = field(default_factory=deque)
    has_more: bool = False
    tiers_s: float = -REPORT_S
    is_draining: bool = False
    has_told_end: bool = False


class Mover:
    def __init__(self, config: MoverConfig, pipe: Pipe, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._pipe, self._clock = config, pipe, clock
        self._client = Client(config.address)
        memory = PoolMemory() if registers_memory(config) else None
        self._sessions = NamespaceSessions(
            self._client, config.instance_prefix + secrets.token_hex(4), self._on_changes, clock, memory
        )
        self._asks = AskCounts(config.asks)
        self._agreement = Agreement(
            lambda: [space.digest for space in self._sessions.all()],
            AgreementObserver(self._note_changed, self._order_done, self._renewed), clock,
        )
        self._opening = OpeningTiers(config, memory)
        self._handles: list[TierHandle] = []
        self._writers: dict[str, WriteBehind] = {}
        self._fetches = Fetches(
            self._handles, self._client, self._agreement,
            FetchObserver(
                promised=self._promised, ended=self._fetch_ended, loaded=self._loaded, lacked=self._lacked,
                progressed=lambda: self._peers.progressed(),
            ),
            batch_bytes=config.batch_bytes, pool_bytes=config.pool_bytes,
        )
        self._owners: dict[str, Owner] = {}
        self._peers = PeerLeases(
            self._sessions, self._client, self._agreement, self._fetches.coming, self._answered_peer, pipe.wake, clock
        )
        self._out = _Reports()

    def run(self) -> None:
        """Runs until the server has ended."""
        while (updates := self._pipe.updates(self._turn_s)) is not None:
            self._out.has_more = False
            for tier in self._opening.take_opened():
                self._use(tier)
            is_served = bool(self._sessions.all())
            for handle in self._handles:
                handle.probe(may_measure=is_served)
                self._take_gone(handle)
                self._take_listed(handle)
            self._peers.end_late()
            self._sessions.leave_unserved(self._is_busy)
            for update in updates:
                self._follow(update)
            if self._out.is_draining:
                for writer in self._writers.values():
                    writer.drain(self._config.drain_s)
            self._send_report()
        self._close()

    @property
    def _turn_s(self) -> float:
        """How long the next turn waits for updates."""
        if self._out.untold or self._out.has_more:
            return 0.0
        server_waits = self._out.is_draining and not self._out.has_told_end
        return SHORT_TURN_S if self._peers.has_waiting or server_waits else TURN_S

    def _is_busy(self, space: NamespaceSession) -> bool:
        is_used = self._fetches.is_busy(space) or self._peers.is_busy(space)
        return is_used or any(writer.is_busy(space) for writer in self._writers.values())

    def _use(self, tier: Tier) -> None:
        handle = TierHandle(tier, clock=self._clock, lost=_end_process, writers=self._sessions.writers)
        writer = WriteBehind(
            handle, self._sessions, self._agreement, self._client,
            WriteQueue(self._config.queue_bytes, batch_bytes=4 * self._config.batch_bytes, budget=WriteBudget(
                self._config.disk_day_bytes if tier.name == DISK else 0, lambda: tier.usage().wear_bytes, self._clock
            )),
            observer=WriteObserver(
                stored=partial(self._tell, tier.name, is_there=True),
                gone=partial(self._tell, tier.name, is_there=False),
            ),
        )
        self._writers[handle.name] = writer
        self._owners[handle.name] = Owner(
            handle, self._sessions.all, emptied=partial(self._emptied, tier.name), answered=self._contents_known
        )
        if isinstance(tier, SharesPool):
            self._peers.tier = tier
        self._handles.append(handle)
        self._handles.sort(key=lambda one: self._opening.order.index(one.name))
        self._agreement.use(handle)
        writer.start()
        self._owners[handle.name].start()
        self._sessions.repeat_changes()
        log.info("the tier %s is used", handle.name)

    # ------------------------------------------------------------------ reports

    def _send_report(self) -> None:
        is_listed = all(isinstance(handle.tier, Lists) and handle.tier.is_listed for handle in self._handles)
        with self._out.lock:
            report, self._out.report = self._out.report, MoverReport()
            left = MOST_TOLD
            while self._out.untold and (left := left - len(self._out.untold[0].keys) // self._config.known_bytes) >= 0:
                report.known.append(self._out.untold.popleft())
            is_all_told = not self._out.untold
        if (now_s := self._clock()) - self._out.tiers_s >= REPORT_S:
            self._out.tiers_s, report.tiers = now_s, self._tier_views()
        report.lists_all = is_all_told and is_listed
        report.is_drained = self._out.is_draining and all(writer.is_drained for writer in self._writers.values())
        has_more = (
            report.promises or report.ended_tickets or report.prefetch_results or report.known or report.note_changes
            or report.orders_done or report.contents or report.peers
            or (report.is_drained and not self._out.has_told_end)
        )
        if report.tiers is not None or has_more:
            self._out.has_told_end = report.is_drained
            self._pipe.send(report)

    def _tier_views(self) -> list[TierView]:
        views = [
            TierView(name=name, state="off", why=why, error=error)
            for name, (why, error) in self._opening.unopened.items()
        ]
        for handle in self._handles:
            usage, is_off = handle.tier.usage(), handle.breaker.is_open
            writer, stores = self._writers[handle.name], handle.stores.state
            bills = handle.tier if isinstance(handle.tier, CountsRequests) else None
            requests = {f"request_{verb}": count for verb, count in bills.requests().items()} if bills else {}
            views.append(TierView(
                name=handle.name, state="off" if is_off else stores,
                why=FAILING if is_off else WORDS[stores] or (TOO_LARGE if handle.stores.too_large else ""),
                error=handle.breaker.why if is_off else handle.stores.error,
                objects=usage.objects, bytes_used=usage.bytes_used,
                bytes_limit=usage.bytes_limit, wear_bytes=usage.wear_bytes,
                day_limit_bytes=writer.budget.day_bytes, day_left_bytes=max(0, writer.budget.left_bytes),
                queued_bytes=writer.waiting_bytes, pending_why=self._agreement.why_pending(handle.name),
                load_bytes_per_s=handle.speed.rate,
                load_latency_s=handle.speed.latency_s, fetches=handle.fetches.count, fetch_s=handle.fetches.seconds,
                counters=handle.counters | requests, dollars=bills.dollars if bills else 0.0,
            ))
        return sorted(views, key=lambda view: self._opening.order.index(view.name))

    # ------------------------------------------------------------------ updates

    def _follow(self, update: ServerUpdate) -> None:
        if update.log_level is not None:
            logging.getLogger().setLevel(update.log_level.upper())
        for order in update.orders:
            self._agreement.order(order)
            if order.namespace:
                self._cleared(bytes.fromhex(order.namespace), split_keys(order.keys) or None)
        if update.generations is not None:
            for digest in self._agreement.follow(update.generations):
                self._cleared(digest)
        self._agreement.server_followed(update.followed)
        if update.namespaces is not None:
            self._sessions.follow(update.namespaces)
            self._agreement.wake()
        if update.abandoned:
            abandoned = [bytes.fromhex(one) for one in update.abandoned]
            self._sessions.abandon(abandoned)
            for digest in abandoned:
                self._drop(digest)
        for ticket in update.ended_tickets:
            self._fetches.cancel(ticket)
        if update.evicting_soon:
            self._prioritise(update.evicting_soon)
        for notice in update.lookups:
            self._looked_up(notice)
        for request in update.prefetches:
            self._prefetch(request)
        for question in update.questions:
            if (owner := self._owners.get(question.tier)) is not None:
                owner.ask(question)
            else:
                why = self._opening.unopened.get(question.tier, ("", ""))
                error = ": ".join(filter(None, why)) or "it is not used"
                self._contents_known(ContentsAnswer(question.number, TierContents(tier=question.tier, error=error)))
        for asked in update.peers:
            self._peers.ask(asked)
        self._out.is_draining |= update.is_draining

    def _drop(self, digest: bytes, keys: list[bytes] | None = None) -> None:
        """These chunks are neither loaded nor written. `keys` None: all chunks of the namespace."""
        self._fetches.drop(digest, keys)
        for writer in self._writers.values():
            writer.drop(digest, keys)

    def _cleared(self, digest: bytes, keys: list[bytes] | None = None) -> None:
        """These chunks were cleared or deleted. `keys` None: all chunks of the namespace."""
        self._drop(digest, keys)
        self._tell_no_more(digest, keys)

    def _tell_no_more(self, digest: bytes, keys: list[bytes] | None = None) -> None:
        """Takes back what was not sent yet of reports that a tier has these chunks. `keys` None: all chunks of the
        namespace."""
        namespace, known_bytes = digest.hex(), self._config.known_bytes
        deleted = {key[:known_bytes] for key in keys or ()}
        with self._out.lock:
            for _ in range(len(self._out.untold)):
                one = self._out.untold.popleft()
                if one.is_there and one.namespace == namespace:
                    one = one.without(deleted, known_bytes) if keys else msgspec.structs.replace(one, keys=b"")
                if one.keys or not one.is_there:
                    self._out.untold.append(one)

    def _looked_up(self, notice: LookupNotice) -> None:
        space = self._sessions.of(bytes.fromhex(notice.namespace))
        keys = split_keys(notice.keys)
        self._asks.asked(keys)
        if space is None:
            if notice.ticket:
                with self._out.lock:
                    self._out.report.ended_tickets.append(notice.ticket)
            return
        if notice.ticket:
            wanted = Wanted(space, keys, notice.hit_chunks, notice.ticket, tokens_per_s=notice.tokens_per_s)
            self._fetches.start(Fetch(wanted, notice.wait_s))
        self._offer(space, keys[: notice.hit_chunks])

    def _prefetch(self, request: PrefetchRequest) -> None:
        space = self._sessions.of(bytes.fromhex(request.namespace))
        if space is None:
            with self._out.lock:
                self._out.report.prefetch_results.append(PrefetchResult(request.number, 0, True))
            return
        wanted = Wanted(space, split_keys(request.keys), request.hit_chunks, prefetch=request.number)
        self._fetches.start(Fetch(wanted, request.wait_s))

    def _prioritise(self, evicting_soon: Sequence[EvictingSoon]) -> None:
        chunks = [(self._sessions.of(bytes.fromhex(one.namespace)), split_keys(one.keys)) for one in evicting_soon]
        worth = [
            (space, self._asks.worth(keys)) for space, keys in chunks
            if space is not None and not self._sessions.is_abandoned(space)
        ]
        for writer in self._writers.values():
            writer.prioritise(worth)

    # ------------------------------------------------------------------ called from other threads

    def _on_changes(self, space: NamespaceSession, changes: Changes) -> None:
        """The pool has stored or evicted chunks."""
        evicted = [bytes.fromhex(change.key) for change in changes.changes if not change.is_there]
        limits_bytes = [handle.tier.usage().bytes_limit for handle in self._handles]
        capacity = sum(limits_bytes) // space.chunk_bytes if all(limits_bytes) else MOST_EVICTED
        self._asks.evicted(evicted, capacity)
        self._offer(space, [bytes.fromhex(change.key) for change in changes.changes if change.is_there])

    def _offer(self, space: NamespaceSession, keys: list[bytes]) -> None:
        """Queues the chunks that are worth it to be written."""
        if self._sessions.is_abandoned(space):
            return
        worth = self._asks.worth(keys)
        for writer in list(self._writers.values()):
            writer.offer(space, worth)

    def _promised(self, promise: Promise) -> None:
        with self._out.lock:
            self._out.report.promises.append(promise)
        self._pipe.wake()

    def _fetch_ended(self, fetch: Fetch) -> None:
        with self._out.lock:
            if ticket := fetch.wanted.ticket:
                self._out.report.ended_tickets.append(ticket)
            else:
                was_dropped = fetch.deadline.is_over or all(handle.breaker.is_open for handle in self._handles)
                result = PrefetchResult(fetch.wanted.prefetch, fetch.loaded, was_dropped)
                self._out.report.prefetch_results.append(result)
        self._pipe.wake()

    def _note_changed(self, change: NoteChange) -> None:
        digest = bytes.fromhex(change.namespace)
        if change.keys:
            self._cleared(digest, split_keys(change.keys))
        else:
            self._tell_no_more(digest)
        with self._out.lock:
            self._out.report.note_changes.append(change)
        self._pipe.wake()

    def _renewed(self, tier: str) -> None:
        """What the tier had is lost: what the pool still has is offered again."""
        log.warning("the tier %s has lost what it had: what the pool still has is written again", tier)
        self._writers[tier].forget_all()
        self._sessions.repeat_changes()

    def _order_done(self, done: OrderDone) -> None:
        with self._out.lock:
            self._out.report.orders_done.append(done)
        self._pipe.wake()

    def _contents_known(self, answer: ContentsAnswer) -> None:
        answer.contents.pending_why = self._agreement.why_pending(answer.contents.tier)
        with self._out.lock:
            self._out.report.contents.append(answer)
        self._pipe.wake()

    def _answered_peer(self, answer: PeerAnswer) -> None:
        with self._out.lock:
            self._out.report.peers.append(answer)
        self._pipe.wake()

    def _take_gone(self, handle: TierHandle) -> None:
        """What the tier has no more is written again when prompts ask for it."""
        if not isinstance(handle.tier, TellsGone):
            return
        gone: dict[bytes, set[bytes]] = {}
        for name in handle.tier.gone():
            gone.setdefault(name.namespace, set()).add(name.key)
        for namespace, keys in gone.items():
            self._lacked(handle, namespace, list(keys))
            self._tell(handle.name, namespace, list(keys), is_there=False)

    def _take_listed(self, handle: TierHandle) -> None:
        """What the tier has from before is reported slice by slice."""
        if not isinstance(handle.tier, Lists):
            return
        if self._out.untold:
            self._out.has_more = True  # else the turn that reports the last of them would wait before the next one
            return
        known: dict[bytes, list[bytes]] = {}
        for _ in range(LISTED_AT_ONCE):
            if (some := handle.tier.take_listed()) is None:
                break
            self._out.has_more = True
            for namespace, key in some:
                known.setdefault(namespace, []).append(key)
        for namespace, keys in known.items():
            self._tell(handle.name, namespace, keys, is_there=True)

    def _emptied(self, tier: str, namespace: bytes) -> None:
        """Some of what the tier had of the namespace was removed, or all."""
        self._writers[tier].forget_all()
        with self._out.lock:
            self._out.untold.append(KnownKeys(namespace.hex(), b"", False, tier))

    def _tell(self, tier: str, namespace: bytes, keys: Sequence[bytes], *, is_there: bool) -> None:
        """Reports to the server that the tier has these chunks, or has them no more."""
        with self._out.lock:
            for begin in range(0, len(keys), MOST_TOLD):
                some = b"".join(key[: self._config.known_bytes] for key in keys[begin : begin + MOST_TOLD])
                self._out.untold.append(KnownKeys(namespace.hex(), some, is_there, tier))

    def _loaded(self, handle: TierHandle, fetch: Fetch, keys: Sequence[bytes]) -> None:
        if fetch.agreed is not None:
            self._writers[handle.name].has(fetch.wanted.space, fetch.agreed, keys)

    def _lacked(self, handle: TierHandle, namespace: bytes, keys: Sequence[bytes]) -> None:
        known = self._writers[handle.name].forget(namespace, keys)
        if not isinstance(handle.tier, TellsGone):
            self._tell(handle.name, namespace, known, is_there=False)

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        self._opening.close()
        for owner in self._owners.values():
            owner.close()
        self._agreement.close()
        self._fetches.close()
        self._peers.close()
        for writer in self._writers.values():
            writer.close()
        self._sessions.close()
        for handle in self._handles:
            handle.close(Deadline(CLOSE_S))
        self._client.close()


def _end_process(error: StillRunning) -> None:
    log.error("the mover ends, so that nothing writes to the pool any more: %s", error)
    os._exit(LOST_STATUS)


# --------------------------------------------------------------------------- the pipe

# The mover's pipe to its server: updates come in, reports go out, each as one frame.



class Pipe:
    """Call config() first, once; then updates() and send(), from one thread."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes
        self._updates: queue.SimpleQueue[ServerUpdate | None] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(ServerUpdate)

    def config(self) -> MoverConfig | None:
        """None: the server has ended already."""
        first = self._read_frame()
        if first is None:
            return None
        config = msgspec.msgpack.decode(first, type=MoverConfig)
        threading.Thread(target=self._receive, name="kvdock-updates", daemon=True).start()
        return config

    def updates(self, wait_s: float) -> list[ServerUpdate] | None:
        """All updates that have come. Waits up to `wait_s` for the first. None: the server has ended."""
        found: list[ServerUpdate] = []
        while True:
            try:
                one = self._updates.get_nowait() if found else self._updates.get(timeout=wait_s)
            except queue.Empty:
                return found
            if one is None:
                self._updates.put(None)
                return found or None
            found.append(one)

    def wake(self) -> None:
        """Makes updates() return. From any thread."""
        self._updates.put(ServerUpdate())

    def send(self, report: MoverReport) -> None:
        try:
            self._writes.write(frame(report))
            self._writes.flush()
        except OSError:
            self._updates.put(None)  # the server no longer reads

    def _receive(self) -> None:
        while (read := self._read_frame()) is not None:
            self._updates.put(self._decoder.decode(read))
        self._updates.put(None)

    def _read_frame(self) -> bytes | None:
        head = self._reads.read(FRAME_HEAD.size)
        if len(head) < FRAME_HEAD.size:
            return None
        (length,) = FRAME_HEAD.unpack(head)
        found = self._reads.read(length)
        return found if len(found) == length else None
