"""The mover: the server's news, and what follows from them.

Threads: the main one has the line to the server; each fetch and each tier's writing have their own; sessions'
heartbeats tell what the pool stores.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from kvdock.client.client import Client
from kvdock.protocol.mover_schemas import (
    KNOWN_BYTES,
    Asked,
    KnownKeys,
    Learned,
    Leaving,
    MoverConfig,
    MoverNews,
    MoverWords,
    Prefetched,
    Promised,
    Told,
    Wanted,
)
from kvdock.protocol.reports import TierView
from kvdock.protocol.schemas import Changes
from kvdock.tiers.mover.admission import MOST_GONE, AskCounts, cut
from kvdock.tiers.mover.agreed import Agreement
from kvdock.tiers.mover.fetches import Fetch, Fetches
from kvdock.tiers.mover.lanes import Lane
from kvdock.tiers.mover.line import Line
from kvdock.tiers.mover.opened import OpeningTiers
from kvdock.tiers.mover.places import Place, Places
from kvdock.tiers.mover.write_behind import WriteBehind
from kvdock.tiers.tier import Deadline, Lists, StillRunning, Tier

log = logging.getLogger("kvdock.tiers")

TURN_S = 0.2
"""How late what is no answer to a request may be told."""
REPORT_S = 0.5
CLOSE_S = 2.0
FAILING = "its calls fail or are late"
LOST_STATUS = 70
"""The status of a process that ends because only its end keeps a call from writing to the pool."""


class Mover:
    def __init__(self, config: MoverConfig, line: Line, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._line, self._clock = config, line, clock
        self._client = Client(config.address)
        self._places = Places(self._client, config.instance_prefix + secrets.token_hex(4), self._changed, clock)
        self._asks = AskCounts(config.asks)
        self._agreement = Agreement(
            lambda: [place.digest for place in self._places.all()], self._learned, self._told, clock
        )
        self._opening = OpeningTiers(config)
        self._lanes: list[Lane] = []
        self._writers: dict[str, WriteBehind] = {}
        self._fetches = Fetches(
            self._lanes, self._client, self._agreement, promise=self._promise, ended=self._fetch_ended,
            lacked=self._lacked, batch_bytes=config.batch_bytes,
        )
        self._lock = threading.Lock()
        self._words = MoverWords()
        self._reported_s = -REPORT_S

    def run(self) -> None:
        """Until the server has ended."""
        while (news := self._line.news(TURN_S)) is not None:
            for tier in self._opening.opened():
                self._use(tier)
            for lane in self._lanes:
                lane.probe()
            self._places.leave(self._is_busy)
            for one in news:
                self._follow(one)
            self._say()
        self._close()

    def _is_busy(self, place: Place) -> bool:
        return self._fetches.is_busy(place) or any(one.is_busy(place) for one in self._writers.values())

    def _use(self, tier: Tier) -> None:
        lane = Lane(tier, clock=self._clock, lost=_end_process)
        writer = WriteBehind(
            lane, self._places, self._agreement, self._client, self._config.queue_bytes,
            batch_bytes=4 * self._config.batch_bytes, stored=self._stored,
        )
        if isinstance(tier, Lists):
            known: dict[bytes, list[bytes]] = {}
            for name in tier.listed():
                if name.group == name.writer == 0:
                    known.setdefault(name.namespace, []).append(name.key)
            for namespace, keys in known.items():
                self._stored(namespace, keys)
        self._writers[lane.name] = writer
        self._lanes.append(lane)
        self._lanes.sort(key=lambda one: self._opening.order.index(one.name))
        self._agreement.use(lane)
        writer.start()
        self._places.hear_all()
        log.info("the tier %s is used", lane.name)

    # ------------------------------------------------------------------ words

    def _say(self) -> None:
        with self._lock:
            words, self._words = self._words, MoverWords()
        if (now_s := self._clock()) - self._reported_s >= REPORT_S:
            self._reported_s, words.tiers = now_s, self._reports()
        words.lists_all = all(isinstance(lane.tier, Lists) for lane in self._lanes)
        says = words.promised or words.ended or words.prefetched or words.known or words.learned or words.told
        if words.tiers is not None or says:
            self._line.say(words)

    def _reports(self) -> list[TierView]:
        reports = [
            TierView(name=name, state="off", why=why, error=error)
            for name, (why, error) in self._opening.closed.items()
        ]
        for lane in self._lanes:
            usage, is_off = lane.tier.usage(), lane.breaker.is_open
            reports.append(TierView(
                name=lane.name, state="off" if is_off else "open", why=FAILING if is_off else "",
                error=lane.breaker.why if is_off else "", objects=usage.objects, bytes_used=usage.bytes_used,
                bytes_limit=usage.bytes_limit, wear_bytes=usage.wear_bytes,
                queued_bytes=self._writers[lane.name].waiting_bytes, load_bytes_per_s=lane.speed.rate,
                load_latency_s=lane.speed.latency_s, fetches=lane.fetches, fetch_s=lane.fetch_s,
                counters=dict(lane.counters),
            ))
        return sorted(reports, key=lambda report: self._opening.order.index(report.name))

    def _follow(self, news: MoverNews) -> None:
        for order in news.orders:
            self._agreement.order(order)
            if order.namespace:
                self._drop(bytes.fromhex(order.namespace), list(cut(order.keys)) or None)
        if news.generations is not None:
            for digest in self._agreement.follow(news.generations):
                self._drop(digest)
        self._agreement.heard(news.heard)
        if news.namespaces is not None:
            self._places.follow(news.namespaces)
            self._agreement.wake()
        if news.left:
            left = [bytes.fromhex(one) for one in news.left]
            self._places.left(left)
            for digest in left:
                self._drop(digest)
        for ticket in news.ended:
            self._fetches.cancel(ticket)
        if news.leaving:
            self._hurry(news.leaving)
        for asked in news.asked:
            self._asked(asked)
        for wanted in news.wanted:
            self._wanted(wanted)
        if news.is_draining:
            for writer in self._writers.values():
                writer.drain(self._config.drain_s)

    def _drop(self, digest: bytes, keys: list[bytes] | None = None) -> None:
        """These chunks were cleared: what is under way of them, in either direction, is of no use. None: all."""
        self._fetches.drop(digest, keys)
        for writer in self._writers.values():
            writer.drop(digest, keys)

    def _asked(self, asked: Asked) -> None:
        place = self._places.of(bytes.fromhex(asked.namespace))
        keys = list(cut(asked.keys))
        self._asks.asked(keys)
        if place is None:
            if asked.ticket:
                with self._lock:
                    self._words.ended.append(asked.ticket)
            return
        if asked.ticket:
            self._fetches.begin(Fetch(
                place, keys, asked.hit_chunks, asked.ticket, asked.wait_s, asked.tokens_per_s
            ))
        self._offer(place, keys[: asked.hit_chunks])

    def _wanted(self, wanted: Wanted) -> None:
        place = self._places.of(bytes.fromhex(wanted.namespace))
        if place is None:
            with self._lock:
                self._words.prefetched.append(Prefetched(wanted.number, 0, True))
            return
        self._fetches.begin(Fetch(
            place, list(cut(wanted.keys)), wanted.hit_chunks, 0, wanted.wait_s, prefetch=wanted.number
        ))

    def _hurry(self, leaving: Sequence[Leaving]) -> None:
        places = [(self._places.of(bytes.fromhex(one.namespace)), list(cut(one.keys))) for one in leaving]
        worth = [
            (place, self._asks.worth(keys)) for place, keys in places
            if place is not None and not self._places.is_left(place)
        ]
        for writer in self._writers.values():
            writer.hurry(worth)

    # ------------------------------------------------------------------ other threads

    def _changed(self, place: Place, changes: Changes) -> None:
        gone = [bytes.fromhex(change.key) for change in changes.changes if not change.is_there]
        room_bytes = [lane.tier.usage().bytes_limit for lane in self._lanes]
        room = sum(room_bytes) // place.chunk_bytes if all(room_bytes) else MOST_GONE
        self._asks.evicted(gone, room)
        self._offer(place, [bytes.fromhex(change.key) for change in changes.changes if change.is_there])

    def _offer(self, place: Place, keys: list[bytes]) -> None:
        if self._places.is_left(place):
            return
        worth = self._asks.worth(keys)
        for writer in list(self._writers.values()):
            writer.offer(place, worth)

    def _promise(self, promised: Promised) -> None:
        with self._lock:
            self._words.promised.append(promised)
        self._line.wake()

    def _fetch_ended(self, fetch: Fetch) -> None:
        with self._lock:
            if fetch.ticket:
                self._words.ended.append(fetch.ticket)
            else:
                was_dropped = fetch.deadline.is_over or all(lane.breaker.is_open for lane in self._lanes)
                self._words.prefetched.append(Prefetched(fetch.prefetch, fetch.loaded, was_dropped))
        self._line.wake()

    def _learned(self, learned: Learned) -> None:
        if learned.keys:
            self._drop(bytes.fromhex(learned.namespace), list(cut(learned.keys)))
        with self._lock:
            self._words.learned.append(learned)
        self._line.wake()

    def _told(self, told: Told) -> None:
        with self._lock:
            self._words.told.append(told)
        self._line.wake()

    def _stored(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Tiers have these chunks."""
        with self._lock:
            self._words.known.append(KnownKeys(namespace.hex(), b"".join(key[:KNOWN_BYTES] for key in keys)))

    def _lacked(self, lane: Lane, keys: Sequence[bytes]) -> None:
        self._writers[lane.name].forget(keys)

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        self._opening.close()
        self._agreement.close()
        self._fetches.close()
        for writer in self._writers.values():
            writer.close()
        self._places.close()
        for lane in self._lanes:
            lane.close(Deadline(CLOSE_S))
        self._client.close()


def _end_process(error: StillRunning) -> None:
    log.error("the mover ends, so that nothing writes to the pool any more: %s", error)
    os._exit(LOST_STATUS)
