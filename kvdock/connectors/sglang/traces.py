"""The trace context of SGLang's own span of a request, which kvdock's spans have as their parent.

With --enable-trace SGLang begins this span when the request comes, as a child of the client's span, and passes its
context on to its schedulers. Without the option SGLang reads no trace headers, and kvdock's spans begin traces of their
own.
"""

from __future__ import annotations

from typing import Any

from kvdock.protocol.wire_types import traceparent_or_none


def traceparent_of(req: Any) -> str:
    """The context of the span of SGLang's Req, as a `traceparent`. Empty: SGLang does not trace it, or `req` is
    None."""
    traced: Any = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    if traced is None or traced.tracing_enable is not True:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, traced.root_span_context)
    return traceparent_or_none(headers.get("traceparent"))
