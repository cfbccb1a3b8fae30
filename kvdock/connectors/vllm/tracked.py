"""What the scheduler's side knows of a request, from its arrival to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvdock.connectors.vllm.tables import Table
from kvdock.protocol.trace_context import traceparent_or_none


@dataclass
class Tracked:
    """`table`: per group its blocks, None where it has none."""

    request: Any
    local_tokens: int = 0
    is_async: bool = False
    """As LoadOrder has it: of the load that it was last promised."""
    is_new: bool = True
    """It was not in any step since it was given its blocks."""
    table: Table | None = None
    is_old: bool = False
    """The cache was reset since it was looked up: what it computes may rest on what was there before."""
    given: set[int] = field(default_factory=set)
    """Blocks that it was given, until it is in a step."""
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """The newest that it was in since it was given its blocks: their numbers, and the tokens computed before each."""

    @property
    def traceparent(self) -> str:
        """As vLLM got it; empty: none. It keeps these headers only if it sends traces itself."""
        headers = getattr(self.request, "trace_headers", None) or {}
        return traceparent_or_none(headers.get("traceparent"))

    def computed_in(self, tokens: int) -> int | None:
        """The number of a step: once it has ended, the first `tokens` tokens are in their blocks. None: not known."""
        if not self.steps:
            return None
        # What was computed before the oldest of these may have been loaded, which has ended when that one has.
        return next((number for number, before in reversed(self.steps) if before < tokens), self.steps[0][0])
