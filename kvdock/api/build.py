"""Everything that one server is made of, put together over its pool, and the ASGI application that serves it. Nothing
else in kvdock/api/ builds these parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvdock import __version__
from kvdock._core import TableError
from kvdock.api.access.access_file import AccessFile
from kvdock.api.admin import Admin
from kvdock.api.background import Background
from kvdock.api.clock import Clocks, ServerClock
from kvdock.api.feeds.feeds import Extras, Feeds
from kvdock.api.http import first_calls, routes_people, wire
from kvdock.api.http.dispatch import Dispatch
from kvdock.api.http.engine_calls import ENGINE_CALLS, methods_at
from kvdock.api.http.guard import Checks, Guard
from kvdock.api.http.handlers import Handlers
from kvdock.api.http.limits import BodyCapacity
from kvdock.api.http.openapi import TAGS, openapi_schema
from kvdock.api.keeper import Keeper
from kvdock.api.pool.damage import DamageReports
from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.quotas import Quotas, default_quota
from kvdock.api.pool.registry import KeptNamespaces, Names, Registry
from kvdock.api.pool.sessions import Drain, Sessions
from kvdock.api.record.beginnings import Beginnings
from kvdock.api.record.curve import Curves
from kvdock.api.record.history import SERIES, TIER_SERIES, History, Sampler
from kvdock.api.record.hits import Answers
from kvdock.api.record.journal import Journal
from kvdock.api.record.labels import Labels
from kvdock.api.record.tally import Learned, Tally
from kvdock.api.record.timings import Meter, Pulse, Timings
from kvdock.api.record.troubles import Troubles
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.explain import Explainer, Sources
from kvdock.api.reports.lists import Lists
from kvdock.api.reports.metrics import Metrics, ServerMetrics
from kvdock.api.reports.status import LowerTiers, Overview, Probes
from kvdock.api.reports.verdict import Judge
from kvdock.api.service import CacheService
from kvdock.api.settings import Settings
from kvdock.api.tiers.clears import Clears, OrderFile
from kvdock.api.tiers.mover_client import MoverClient
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import OWN_TENANT
from kvdock.shm.objects import Kept, kept_path

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

DESCRIPTION = (
    "The KV-cache server that every LLM inference engine on a machine shares. HTTP carries decisions; "
    "shared memory carries bytes. A HEAD is answered like its GET, without the body. In JSON, integers are written "
    "without fraction and exponent: `88`, not `88.0`."
)
NO_EXTRAS = Extras()


class Parts(NamedTuple):
    access: AccessFile
    handlers: Handlers
    meter: Meter
    keeper: Keeper
    sampler: Sampler
    drain: Drain
    mover_client: MoverClient
    feeds: Feeds
    background: Background


def build(
    settings: Settings, pool: Pool, access: AccessFile, clocks: Clocks, *, journal: Journal | None = None,
    extras: Extras = NO_EXTRAS,
) -> Parts:
    """`journal`: one that has the pool's events already."""
    journal = journal or Journal(clocks.wall_s)
    sessions, drain = _sessions(settings, pool, clocks)
    registry, clock = sessions.registry, sessions.clock
    kept = _kept(pool, "curve", "the curve of hit shares")
    curves = Curves(pool, clocks.now_s, clocks.boot_s, kept) if "curve" in settings.observers else None
    beginnings = Beginnings(registry, pool.table)
    answers = Answers(pool.table, lambda space, keys: mover_client.absent(space, keys))
    troubles, labels = Troubles(clocks.wall_s, clocks.boot_s), Labels(registry, pool.table)
    background = Background(lambda what: troubles.add_once("failed", OWN_TENANT, what))
    if pool.left_out:
        troubles.add("left_out", OWN_TENANT, pool.left_out)
    tally = Tally(settings, pool.table, journal, Learned(curves, beginnings, answers, troubles, labels), clocks, clock)
    orders = OrderFile(Path(f"{settings.socket_path}.orders"))
    clears = Clears(pool.table, registry, journal, orders, settings.tier_names, background)
    mover_client = MoverClient(
        pool, registry, tally.counters, clears, drain=drain, now_ms=clock.now_ms, now_s=clocks.now_s,
    )
    damage = DamageReports(pool, clocks.now_s, clears.damaged)
    feeds = Feeds(settings, pool.table, journal, clocks.wall_s, extras)
    mover_client.has_routers(feeds.kv)
    history = History(
        settings.history_values, settings.history_interval_s, SERIES + TIER_SERIES * settings.has_tiers,
        kept=_kept(pool, "history", "quotas, and the history of hours and days"), boot_s=clocks.boot_s,
        beside={
            "hits": tally.hits, "namespaces": KeptNamespaces(registry, pool.table), "labels": labels,
            "quotas": sessions.quotas,
            "troubles": troubles,
        },
    )
    _mark_changes(history, journal, sessions.quotas, access)
    sampler = Sampler(history, pool, tally, lambda: mover_client.tiers, clock, curves)
    sessions.quotas.keep = sampler.keep_quotas
    meter = Meter(tally.counters, Timings(clocks.wall_s), clocks.perf_ns, {}, journal.publish)
    probes = Probes(settings, sessions, pulse := Pulse(clocks.perf_ns), history, clocks.wall_s)
    tiers = LowerTiers(lambda: mover_client.tiers, mover_client.view, mover_client.session_count)
    overview = Overview(probes, sessions, tally, history, curves, tiers, clocks.wall_s)
    contents = Contents(pool.table, registry, labels, clock, clocks.now_s)
    lists = Lists(sessions, tally.recent, tally.hits, contents, mover_client.is_mover)
    judge = Judge(probes, tally, troubles, curves, sessions, tiers)
    server_metrics = ServerMetrics(pool, overview, probes, meter, feeds, curves)
    handlers = Handlers(
        service=CacheService(
            sessions, tally, mover_client, clears, feeds.kv, settings.heartbeat_s, damage
        ),
        admin=Admin(settings, sessions, journal, clears, troubles, labels, contents.forget),
        overview=overview, judge=judge,
        lists=lists, contents=contents,
        explainer=Explainer(Sources(tally.recent, beginnings, contents, tiers.tiers), registry, pool.table, clock),
        probes=probes,
        metrics=Metrics(server_metrics, lists, sessions.quotas, judge, tally, clocks.now_s),
        events=feeds.events, kv_stream=feeds.kv_stream,
        body_limit_bytes=settings.body_limit_bytes, body_capacity=BodyCapacity.for_bodies_of(settings.body_limit_bytes),
    )
    keeper = Keeper(settings, access, sessions, tally, sampler, pulse, background)
    return Parts(access, handlers, meter, keeper, sampler, drain, mover_client, feeds, background)


def _kept(pool: Pool, what: Kept, in_words: str) -> KeptObject:
    return KeptObject(kept_path(pool.pool_id, what, pool.secret), in_words)


def _mark_changes(history: History, journal: Journal, quotas: Quotas, access: AccessFile) -> None:
    """From now on, the history marks changes of limits. The quotas that the access file has already are none."""
    quotas.follow(access.caps)
    quotas.on_changed = history.marks.quotas_changed
    journal.subscribe(history.marks)


def _sessions(settings: Settings, pool: Pool, clocks: Clocks) -> tuple[Sessions, Drain]:
    drain = Drain(settings, pool, clocks.now_s)
    registry, names = Registry(pool.table.first_incarnation, pool.secret), Names(keep=4 * settings.table_grants)
    clock = ServerClock(start_ms=pool.clock_ms)
    return Sessions(pool, registry, names, Quotas(pool.table, default_quota(settings)), drain, clock), drain


def create_app(settings: Settings, parts: Parts, lifespan: Lifespan | None = None) -> Dispatch:
    """`lifespan` runs the background work (kvdock/api/server.py); tests of routes alone leave it out."""
    app = _routed_app(lifespan)
    app.state.handlers = parts.handlers
    routes, checks = routes_people.router.routes, Checks(settings, parts.access)
    app.add_middleware(Guard, checks=checks, meter=parts.meter, routes=routes, methods_at=methods_at)
    return Dispatch(app, checks, parts.handlers, parts.meter)


def api_document() -> dict[str, Any]:
    """The OpenAPI document that every server of this version serves."""
    return openapi_schema(_routed_app(), ENGINE_CALLS)


def _routed_app(lifespan: Lifespan | None = None) -> FastAPI:
    """All routes but those of engine calls, without what answers them."""
    app = FastAPI(
        title="kvdock",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        servers=[{"url": "/", "description": "The server that this document comes from"}],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        exception_handlers={
            ApiError: wire.on_refusal,
            TableError: wire.on_refusal,
            HTTPException: wire.on_http_exception,
            RequestValidationError: wire.on_bad_parameters,
            ClientDisconnect: wire.on_disconnect,
            Exception: wire.on_failure,
        },
    )
    # As they are: an app that includes a router makes its routes anew, for a third of the time that a start takes.
    app.router.routes += routes_people.router.routes
    routes_people.add_static(app)
    first_calls.prepare(app.routes)
    return app
