"""The trace that an engine's request belongs to: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/).

Calls carry it as the text that an engine was sent, `traceparent`. As that document says, what is no such text never
makes a call fail: it is ignored, and a span that would have been its child begins a trace of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import msgspec

from kvdock.protocol.wire_types import Carrier

MAX_TRACEPARENT = 256
"""Version 00 has 55 characters; later versions may add to it."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Traced(Carrier, kw_only=True):
    """A call for a request of an engine."""

    traceparent: Annotated[str, msgspec.Meta(max_length=MAX_TRACEPARENT)] | msgspec.UnsetType = msgspec.UNSET
    """The W3C trace context of the request, as the engine got it. What is none is ignored."""


class TraceContext(NamedTuple):
    trace_id: int
    span_id: int
    is_sampled: bool


def trace_context(traceparent: str) -> TraceContext | None:
    """None: this is none."""
    found = _FORM.fullmatch(traceparent) if len(traceparent) <= MAX_TRACEPARENT else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    made = TraceContext(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
    return made if made.trace_id and made.span_id else None


def traceparent_or_none(text: object) -> str:
    """What a call may carry of a text from elsewhere: empty if it is no traceparent."""
    return text if isinstance(text, str) and trace_context(text) is not None else ""
