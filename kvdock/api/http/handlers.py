"""What the routes call, and where a route finds it."""

from __future__ import annotations

from typing import NamedTuple

from fastapi import Request

from kvdock.api.access.peer import Peer
from kvdock.api.admin import Admin
from kvdock.api.feeds.kv_stream import KvStream
from kvdock.api.feeds.stream import EventStream
from kvdock.api.http.limits import BodyRoom
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.explain import Explainer
from kvdock.api.reports.lists import Reports
from kvdock.api.reports.metrics import Metrics
from kvdock.api.reports.status import Probes
from kvdock.api.service import CacheService


class Handlers(NamedTuple):
    service: CacheService
    admin: Admin
    reports: Reports
    contents: Contents
    explainer: Explainer
    probes: Probes
    metrics: Metrics
    stream: EventStream | None
    kv_stream: KvStream | None
    """None: it is switched off, as `stream` may be."""
    body_limit_bytes: int
    body_room: BodyRoom


def peer_of_call(request: Request) -> Peer:
    """Who makes the call: the guard has found it out."""
    peer: Peer = request.scope["state"]["peer"]
    return peer


def handlers_of(request: Request) -> Handlers:
    handlers: Handlers = request.app.state.handlers
    return handlers
