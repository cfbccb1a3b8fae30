"""The objects that routes call, and how a route gets them."""

from __future__ import annotations

from typing import NamedTuple

from fastapi import Request

from kvdock.api.access.peer import Peer
from kvdock.api.admin import Admin
from kvdock.api.feeds.kv import KvStream
from kvdock.api.feeds.sse import EventStream, IsAdmitted
from kvdock.api.http.limits import BodyCapacity
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.explain import Explainer
from kvdock.api.reports.lists import Lists
from kvdock.api.reports.metrics import Metrics
from kvdock.api.reports.status import Overview, Probes
from kvdock.api.reports.verdict import Judge
from kvdock.api.service import CacheService


class Handlers(NamedTuple):
    service: CacheService
    admin: Admin
    overview: Overview
    judge: Judge
    lists: Lists
    contents: Contents
    explainer: Explainer
    probes: Probes
    metrics: Metrics
    events: EventStream | None
    """None: it is switched off, as `kv_stream` may be."""
    kv_stream: KvStream | None
    body_limit_bytes: int
    body_capacity: BodyCapacity


def peer_of_call(request: Request) -> Peer:
    """The caller, as the guard has determined."""
    peer: Peer = request.scope["state"]["peer"]
    return peer


def is_admitted_of(request: Request) -> IsAdmitted:
    """Tells during a long answer whether the caller could still call, as the guard would find now."""
    is_admitted: IsAdmitted = request.scope["state"]["is_admitted"]
    return is_admitted


def handlers_of(request: Request) -> Handlers:
    handlers: Handlers = request.app.state.handlers
    return handlers
