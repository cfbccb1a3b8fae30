"""Spans of lookups, loads and stores, sent by the OpenTelemetry SDK over OTLP/HTTP to a collector.

A span's parent is the trace context that the engine sent with the request (kvdock/protocol/wire_types.py). A span is
made from an event, once the lookup, load or store has ended. The event loop does one append for each event; a thread of
its own makes spans, and the SDK's thread sends them. Whatever a collector does, at most QUEUE_EVENTS and QUEUE_SPANS
wait; the rest is dropped and counted.

Needs the extra `traces`; kvdock/api/feeds/feeds.py alone imports this module.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from kvdock.api.background import Background
from kvdock.protocol import events as e
from kvdock.protocol.wire_types import trace_context

QUEUE_EVENTS = 8192
QUEUE_SPANS = 4096
GATHER_S = 0.1
"""How long the thread waits for more events before it makes spans of them."""
SEND_S = 1.0
END_S = 2.0
"""How long the server waits at its end until all is sent."""
SENT, FAILED, DROPPED = "sent", "failed", "dropped"
MODEL = "gen_ai.request.model"
"""As in OpenTelemetry's conventions for generative AI."""


class _Counted(SpanExporter):
    """Counts spans by outcome. Called from the SDK's thread alone."""

    def __init__(self, exporter: SpanExporter, spans: dict[str, int]) -> None:
        self._exporter, self._spans = exporter, spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        found = SpanExportResult.FAILURE
        try:
            found = self._exporter.export(spans)
        finally:
            self._spans[SENT if found is SpanExportResult.SUCCESS else FAILED] += len(spans)
        return found

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Traces:
    """Sends to the collector at `endpoint`, as `http://host:4318`. Makes no span before `start`. `instance`: which
    server this is."""

    name = "traces"
    kinds: Collection[type[e.Event]] = frozenset({
        e.LookedUp, e.Loaded, e.Committed, e.Aborted, e.Cancelled, e.RequestEnded
    })

    def __init__(self, endpoint: str, *, version: str, instance: str) -> None:
        self.spans = {SENT: 0, FAILED: 0, DROPPED: 0}
        self._events: deque[e.Event] = deque()
        exporter = _Counted(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"), self.spans)
        resource = Resource.create({
            "service.name": "kvdock", "service.version": version, "host.name": socket.gethostname(),
            "service.instance.id": f"{socket.gethostname()}:{instance}",
        })
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(
            exporter, max_queue_size=QUEUE_SPANS, schedule_delay_millis=SEND_S * 1000,
        ))
        self._tracer = self._provider.get_tracer("kvdock", version)
        self._made = 0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- the event loop

    def take(self, event: e.Event) -> None:
        """Queues the event for the thread. `spans` is raised in two threads, so a count may be too low for a moment."""
        if isinstance(event, e.Aborted) and not event.is_over:
            return
        if len(self._events) >= QUEUE_EVENTS:
            self.spans[DROPPED] += 1
            return
        self._events.append(event)

    def start(self, background: Background) -> None:
        self._thread = background.thread("making traces", self._run, self._ending)
        self._thread.start()

    def close(self) -> None:
        """Sends the spans that are left, for END_S at most."""
        if self._thread is None:
            return
        self._ending.set()
        ends = threading.Thread(target=self._end, args=(self._thread,), name="kvdock-traces-end", daemon=True)
        ends.start()
        ends.join(END_S)

    def _end(self, thread: threading.Thread) -> None:
        thread.join()
        self._provider.shutdown()

    # ---------------------------------------------------------------- its own thread

    def _run(self) -> None:
        is_ending = False
        while not is_ending:
            is_ending = self._ending.wait(GATHER_S)
            while self._events:
                self._make(self._events.popleft())

    def _make(self, event: e.Event) -> None:
        if self._made - self.spans[SENT] - self.spans[FAILED] >= QUEUE_SPANS:
            self.spans[DROPPED] += 1
            return
        name, attributes = described(event)
        ended_ns, took_us = round(event.at * 1e9), getattr(event, "took_us", 0)
        span = self._tracer.start_span(
            name, _parent(getattr(event, "traceparent", "")),
            kind=SpanKind.SERVER if isinstance(event, e.LookedUp) else SpanKind.INTERNAL,
            attributes=attributes, start_time=ended_ns - took_us * 1000,
        )
        if not span.is_recording():
            return  # not sampled
        if isinstance(event, e.Aborted | e.Cancelled):
            span.set_status(Status(StatusCode.ERROR, "given up by the engine"))
        self._made += 1
        span.end(ended_ns)


def described(event: e.Event) -> tuple[str, dict[str, Any]]:
    """A span's name and attributes. docs/operate/events.md lists them."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    names = {"tenant": "kvdock.tenant", "session": "kvdock.session", "label": "kvdock.label", "model": MODEL}
    about = {name: fields[field] for field, name in names.items() if fields[field] is not None}
    match event:
        case e.LookedUp():
            missed = event.tokens - event.hit_tokens
            return "kvdock.lookup", {**about, "kvdock.request": event.request, "kvdock.tokens": event.tokens,
                                     "kvdock.hit_tokens": event.hit_tokens, "kvdock.missed_tokens": missed,
                                     "kvdock.why": event.why}
        case e.RequestEnded():
            return "kvdock.request", {
                **about, "kvdock.request": event.request, "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": event.local_tokens + sum(event.loaded.values()),
                "kvdock.local_tokens": event.local_tokens, "kvdock.reloaded_tokens": event.reloaded_tokens,
                **{f"kvdock.loaded.{source}": tokens for source, tokens in event.loaded.items()},
                **{f"kvdock.computed.{why}": tokens for why, tokens in event.computed.items()},
            }
        case e.Loaded():
            return "kvdock.load", {**about, "kvdock.request": event.request, "kvdock.lease": event.lease,
                                   "kvdock.chunks": event.chunks, "kvdock.bytes": event.bytes}
        case e.Committed():
            return "kvdock.store", {**about, "kvdock.store": event.store, "kvdock.reservation": event.reservation,
                                    "kvdock.chunks": event.chunks, "kvdock.bytes": event.bytes}
        case e.Aborted():
            return "kvdock.store", {**about, "kvdock.store": event.store, "kvdock.reservation": event.reservation,
                                    "kvdock.chunks": event.chunks}
        case e.Cancelled():
            held = ("kvdock.store", "kvdock.reservation") if event.is_store else ("kvdock.request", "kvdock.lease")
            return ("kvdock.store" if event.is_store else "kvdock.load"), {
                **about, held[0]: event.name, held[1]: event.grant,
            }
    raise AssertionError(f"no span describes {type(event).__name__}")


def _parent(traceparent: str) -> Context | None:
    """The context of the span's parent; None: the span begins a trace of its own."""
    found = trace_context(traceparent)
    if found is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if found.is_sampled else TraceFlags.DEFAULT)
    parent = SpanContext(found.trace_id, found.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(parent), Context())
