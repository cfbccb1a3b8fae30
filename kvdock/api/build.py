"""Everything that one server is made of, put together over its pool. Nothing else in kvdock/api/ builds these parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvdock.api.access.access_file import AccessFile
from kvdock.api.admin import Admin
from kvdock.api.clock import ServerClock
from kvdock.api.feeds.feeds import Extras
from kvdock.api.feeds.kv import KvLog
from kvdock.api.feeds.kv_stream import KvStream
from kvdock.api.feeds.log import EventLog
from kvdock.api.feeds.stream import EventStream
from kvdock.api.http.handlers import Handlers
from kvdock.api.http.limits import BodyRoom
from kvdock.api.keeper import Keeper
from kvdock.api.pool.drain import Drain
from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.quotas import Quotas, default_quota
from kvdock.api.pool.registry import Names, Registry
from kvdock.api.record.counters import Counters, RecentRequests
from kvdock.api.record.curve import Curves
from kvdock.api.record.durations import Durations
from kvdock.api.record.history import SERIES, TIER_SERIES, History
from kvdock.api.record.journal import Bus, Subscriber
from kvdock.api.record.pulse import Pulse
from kvdock.api.record.tally import Tally
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.explain import Explainer
from kvdock.api.reports.lists import Reports
from kvdock.api.reports.metrics import Metrics
from kvdock.api.reports.status import Probes
from kvdock.api.service import CacheService
from kvdock.api.settings import Settings
from kvdock.api.tiers.clears import Clears
from kvdock.api.tiers.desk import TierDesk
from kvdock.api.tiers.owed import OwedFile
from kvdock.shm.objects import history_path

NO_EXTRAS = Extras()


class Parts(NamedTuple):
    access: AccessFile
    handlers: Handlers
    meter: Meter
    keeper: Keeper
    drain: Drain
    desk: TierDesk
    bus: Bus
    kv_log: KvLog | None


def _open(bus: Bus, observers: Sequence[Subscriber], wanted: Sequence[str]) -> None:
    for observer in observers:
        if observer.name in wanted:
            bus.subscribe(observer)
    bus.open()


def build(
    settings: Settings, pool: Pool, access: AccessFile, *, perf_ns: Callable[[], int], wall_s: Callable[[], float],
    now_s: Callable[[], float], bus: Bus | None = None, extras: Extras = NO_EXTRAS,
) -> Parts:
    """`perf_ns` times calls, `wall_s` dates what people read, `now_s` times the drain. `bus`: one that has the pool's
    events already."""
    clock = ServerClock(start_ms=pool.clock_ms)
    registry = Registry(pool.table.first_incarnation, pool.secret)
    names = Names(keep=4 * settings.table_grants)
    drain = Drain(settings, pool, now_s)
    quotas = Quotas(pool.table, default_quota(settings))
    counters, pulse = Counters(), Pulse(perf_ns)
    bus = bus or Bus(wall_s)
    clears = Clears(pool.table, registry, bus, OwedFile(Path(f"{settings.socket_path}.owed")), settings.tier_names)
    desk = TierDesk(
        pool.table, registry, counters, clears, has_mover=settings.has_tiers, now_ms=clock.now_ms, now_s=now_s,
        room=lambda: (pool.free_bytes, pool.limit_bytes), is_draining=lambda: drain.begun,
    )
    stream = EventStream(pool.incarnation, bus.flush)
    durations = Durations()
    kv_log = KvLog(pool.table.all_changes, pool.table.ready, wall_s) if "kv_events" in settings.observers else None
    kv_stream = KvStream(kv_log) if kv_log is not None else None
    observers: list[Subscriber] = [EventLog(), stream, durations, *extras.subscribers, *filter(None, [kv_stream])]
    _open(bus, observers, settings.observers)
    meter = Meter(counters, Timings(), perf_ns, {}, bus.publish)
    curves = Curves(pool, now_s) if "curve" in settings.observers else None
    tally = Tally(
        pool.table, counters, RecentRequests(settings.recent_requests), bus, curves,
        keep=4 * settings.table_grants, perf_ns=perf_ns, wall_s=wall_s, server_ms=clock.now_ms,
    )
    contents = Contents(pool.table, registry, clock, now_s)
    probes = Probes(settings, pool=pool, registry=registry, drain=drain, pulse=pulse)
    reports = Reports(
        pool=pool, registry=registry, names=names, clock=clock, probes=probes, tally=tally,
        history=History(
            settings.history_values, settings.history_interval_s, SERIES + TIER_SERIES * settings.has_tiers,
            kept=KeptObject(history_path(pool.pool_id), "the history of hours and days"), wall_s=wall_s,
        ),
        curves=curves, tiers=lambda: desk.reports, mover=desk.view, contents=contents, wall_s=wall_s,
    )
    handlers = Handlers(
        service=CacheService(
            pool=pool, registry=registry, names=names, clock=clock, drain=drain, tally=tally,
            quotas=quotas, desk=desk, clears=clears, bus=bus, kv_log=kv_log, heartbeat_s=settings.heartbeat_s,
        ),
        admin=Admin(
            settings, pool=pool, registry=registry, quotas=quotas, clock=clock, bus=bus, clears=clears,
            forget_count=contents.forget,
        ),
        reports=reports, contents=contents, explainer=Explainer(tally.recent, registry, pool.table), probes=probes,
        metrics=Metrics(pool=pool, quotas=quotas, reports=reports, meter=meter, pulse=pulse, bus=bus,
                        durations=durations, missed=tally.missed, spans=extras.spans, kv_log=kv_log, now_s=now_s),
        stream=stream if stream.name in settings.observers else None, kv_stream=kv_stream,
        body_limit_bytes=settings.body_limit_bytes, body_room=BodyRoom.for_bodies_of(settings.body_limit_bytes),
    )
    keeper = Keeper(
        settings, access=access, quotas=quotas, pool=pool, registry=registry, clock=clock, counters=counters,
        reports=reports, pulse=pulse, bus=bus,
    )
    return Parts(access, handlers, meter, keeper, drain, desk, bus, kv_log)
