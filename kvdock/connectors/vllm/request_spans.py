"""Makes vLLM's own span of a request the parent of kvdock's spans.

vLLM makes this span, `llm_request`, when the request has ended, with ids that OpenTelemetry draws then. kvdock's spans
have named their parent long before. So the ids are drawn when the request comes, and vLLM makes its span with them:

    vLLM's API    OutputProcessor.add_request ──► ids are drawn, and travel with the request as one more trace header
    vLLM's core   Tracked.traceparent ──► the header is what kvdock's spans name as their parent
    vLLM's API    OutputProcessor.do_tracing ──► the id generator of vLLM's spans gives the ids of the header

Everything else about the span stays vLLM's: its parent, its times, what it says, whether it is sampled. vLLM calls no
connector at these points, so `name_request_spans` wraps both methods. Where they are not as wanted, there is no such
header, and kvdock's spans are children of the client's span, beside vLLM's.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from kvdock.protocol.wire_types import TraceContext, trace_context

log = logging.getLogger("kvdock.vllm")

HEADER = "kvdock-request-span"
"""The header: the trace context of vLLM's span, as a traceparent. vLLM takes no header of this name from clients."""
PROCESSOR = "vllm.v1.engine.output_processor.OutputProcessor"
HOOKS = {"add_request": "request", "do_tracing": "engine_core_output"}
"""The methods of PROCESSOR that are wrapped, each with the name of its first parameter."""
SPAN = "llm_request"
BESIDE = "kvdock's spans of a request stand beside vLLM's own, not under it: %s"
_wanted: ContextVar[TraceContext | None] = ContextVar("_wanted", default=None)
"""The ids of the span that is being made; None: any."""


class _Ids:
    """OpenTelemetry's id generator, except while a span is made whose ids are known."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def generate_trace_id(self) -> int:
        wanted = _wanted.get()
        return int(self._real.generate_trace_id() if wanted is None else wanted.trace_id)

    def generate_span_id(self) -> int:
        wanted = _wanted.get()
        return int(self._real.generate_span_id() if wanted is None else wanted.span_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def name_request_spans(vllm_config: Any) -> None:
    """Called in each process that makes vLLM's spans. Wraps nothing if vLLM sends none."""
    if getattr(vllm_config.observability_config, "otlp_traces_endpoint", None) is None:
        return
    try:
        from opentelemetry import trace
        from vllm.v1.engine.output_processor import OutputProcessor
    except ImportError as missing:
        log.warning(BESIDE, missing)
        return
    provider = trace.get_tracer_provider()
    if isinstance(getattr(provider, "id_generator", None), _Ids):
        return  # it is done
    for name, wanted in HOOKS.items():
        found = list(inspect.signature(getattr(OutputProcessor, name, lambda: None)).parameters)[1:2]
        if found != [wanted]:
            log.warning(BESIDE, f"{PROCESSOR}.{name}({wanted}, …) was wanted, found {found or 'none'}")
            return
    if not (hasattr(provider, "id_generator") and hasattr(provider, "sampler")):
        log.warning(BESIDE, f"a tracer provider of OpenTelemetry's SDK was wanted, found {type(provider).__name__}")
        return
    provider.id_generator = _Ids(provider.id_generator)
    _wrap(OutputProcessor, provider)


def _wrap(processor: Any, provider: Any) -> None:
    add, trace = processor.add_request, processor.do_tracing

    @wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **more: Any) -> Any:
        if self.tracing_enabled:
            try:
                drawn = _drawn(provider, request.trace_headers)
                request.trace_headers = {**(request.trace_headers or {}), **drawn}
            except Exception:  # vLLM serves the request all the same, whatever a sampler of the operator's does
                processor.add_request = add  # one traceback, not one for each request
                log.exception(BESIDE, "no ids could be drawn")
        return add(self, request, *args, **more)

    @wraps(trace)
    def do_tracing(self: Any, engine_core_output: Any, *args: Any, **more: Any) -> Any:
        token = _wanted.set(trace_context((engine_core_output.trace_headers or {}).get(HEADER, "")))
        try:
            return trace(self, engine_core_output, *args, **more)
        finally:
            _wanted.reset(token)

    processor.add_request, processor.do_tracing = add_request, do_tracing


def _drawn(provider: Any, headers: Mapping[str, str] | None) -> dict[str, str]:
    """HEADER for a request with these trace headers. Empty where its span may not begin a trace, although the client
    has named none: where vLLM's environment names one, and in a program, which may have a span around its calls."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, get_current_span
    from vllm.tracing import extract_trace_context

    if not headers and ({"traceparent", "TRACEPARENT"} & os.environ.keys() or not _is_server()):
        return {}
    context = extract_trace_context(headers) or Context()
    parent, ids = get_current_span(context).get_span_context(), provider.id_generator
    trace_id = parent.trace_id if parent.is_valid else ids.generate_trace_id()
    is_sampled = provider.sampler.should_sample(context, trace_id, SPAN, SpanKind.SERVER).decision.is_sampled()
    return {HEADER: f"00-{trace_id:032x}-{ids.generate_span_id():016x}-{is_sampled:02x}"}


def _is_server() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
