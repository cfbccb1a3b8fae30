"""The mover: turns with the server, and what follows from its news.

Threads: the main one makes turns; each fetch and each tier's writing have their own; sessions' heartbeats tell what the
pool stores.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Changes
from kvdock.protocol.tier_schemas import Asked, MoverConfig, MoverNews, MoverTurn, Promised, TierReport
from kvdock.protocol.wire_types import MAX_ENTRIES
from kvdock.tiers.mover.admission import AskCounts, cut
from kvdock.tiers.mover.fetches import Fetch, Fetches
from kvdock.tiers.mover.lanes import Lane
from kvdock.tiers.mover.opened import OpeningTiers
from kvdock.tiers.mover.places import Place, Places
from kvdock.tiers.mover.write_behind import WriteBehind
from kvdock.tiers.tier import Deadline, StillRunning

log = logging.getLogger("kvdock.tiers")

TURN_S = 0.2
"""The longest that a turn waits, and so how late uses and reports may be told."""
RETRY_S = 0.2
REPORT_S = 0.5
CLOSE_S = 2.0
LOST_STATUS = 70
"""Of a process that ends because only its end keeps a call from writing to the pool."""


class Mover:
    """`ended`: set when the server has ended, or is about to."""

    def __init__(
        self, config: MoverConfig, ended: threading.Event, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._ended, self._clock = config, ended, clock
        self._turns, self._client = Client(config.address), Client(config.address)
        self._places = Places(self._client, config.instance_prefix + secrets.token_hex(4), self._changed)
        self._asks = AskCounts(config.asks)
        self._opening = OpeningTiers(config, clock)
        self._lanes: list[Lane] = []
        self._writers: dict[str, WriteBehind] = {}
        self._fetches = Fetches(
            self._lanes, self._client, promise=self._promise, ended=self._fetch_ended, bad=self._bad
        )
        self._lock = threading.Lock()
        self._promised: list[Promised] = []
        self._fetched: list[int] = []
        self._said = threading.Event()
        self._reported_s = -REPORT_S

    def run(self) -> None:
        """Until the server has ended."""
        while not self._ended.is_set():
            for tier in self._opening.opened():
                lane = Lane(tier, clock=self._clock, lost=_end_process)
                writer = self._writers[lane.name] = WriteBehind(
                    lane, self._places, self._client, self._config.queue_bytes
                )
                self._lanes.append(lane)
                writer.start()
                log.info("the tier %s is used", lane.name)
            for lane in self._lanes:
                lane.probe()
            try:
                news = self._turns.mover_turn(self._turn())
            except (ServerUnavailable, ApiError) as error:
                log.info("no news from the server: %s", error)
                self._ended.wait(RETRY_S)
                continue
            self._follow(news)
        self._close()

    # ------------------------------------------------------------------ turns

    def _turn(self) -> MoverTurn:
        with self._lock:
            promised, self._promised = self._promised[:MAX_ENTRIES], self._promised[MAX_ENTRIES:]
            fetched, self._fetched = self._fetched[:MAX_ENTRIES], self._fetched[MAX_ENTRIES:]
        now_s, reports = self._clock(), None
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s, reports = now_s, self._reports()
        has_words = bool(promised or fetched)
        return MoverTurn(
            secret=self._config.secret, wait_s=0.0 if has_words else TURN_S, promised=promised, ended=fetched,
            tiers=reports,
        )

    def _reports(self) -> list[TierReport]:
        reports = [TierReport(name=name, state="off", why=why) for name, why in self._opening.failures.items()]
        for lane in self._lanes:
            usage, breaker = lane.tier.usage(), lane.breaker
            reports.append(TierReport(
                name=lane.name, state="off" if breaker.is_open else "open", why=breaker.why if breaker.is_open else "",
                objects=usage.objects, bytes_used=usage.bytes_used, bytes_limit=usage.bytes_limit,
                wear_bytes=usage.wear_bytes, queued_bytes=self._writers[lane.name].waiting_bytes,
                counters=dict(lane.counters),
            ))
        return reports

    def _follow(self, news: MoverNews) -> None:
        if news.namespaces is not None:
            for place in self._places.follow(news.namespaces):
                place.session.close()
        for ticket in news.ended:
            self._fetches.cancel(ticket)
        for asked in news.asked:
            self._asked(asked)

    def _asked(self, asked: Asked) -> None:
        place = self._places.of(bytes.fromhex(asked.namespace))
        keys = list(cut(asked.keys))
        self._asks.asked(keys)
        if place is None:
            if asked.ticket:
                self._fetch_ended(asked.ticket)
            return
        if asked.ticket:
            self._fetches.begin(Fetch(
                place, keys, asked.hit_chunks, asked.ticket, asked.wait_s, asked.tokens_per_s
            ))
        self._offer(place, keys[: asked.hit_chunks])

    # ------------------------------------------------------------------ other threads

    def _changed(self, place: Place, changes: Changes) -> None:
        self._offer(place, [bytes.fromhex(change.key) for change in changes.changes if change.is_there])

    def _offer(self, place: Place, keys: list[bytes]) -> None:
        worth = [key for key in keys if self._asks.is_worth(key)]
        for writer in list(self._writers.values()):
            for key in worth:
                writer.offer(place, key)

    def _promise(self, promised: Promised) -> None:
        with self._lock:
            self._promised.append(promised)

    def _fetch_ended(self, ticket: int) -> None:
        with self._lock:
            self._fetched.append(ticket)

    def _bad(self, lane: Lane, key: bytes) -> None:
        self._writers[lane.name].forget(key)

    # ------------------------------------------------------------------ the end

    def _close(self) -> None:
        self._fetches.close()
        until_s = self._clock() + self._config.drain_s
        for writer in self._writers.values():
            writer.finish(max(0.0, until_s - self._clock()))
        for place in self._places.follow([]):
            place.session.close()
        for lane in self._lanes:
            lane.close(Deadline(CLOSE_S))
        self._turns.close()
        self._client.close()


def _end_process(error: StillRunning) -> None:
    log.error("the mover ends, so that nothing writes to the pool any more: %s", error)
    os._exit(LOST_STATUS)
