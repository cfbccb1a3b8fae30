"""What connectors of all engines count. Each engine exports it under its own name: vllm:kvdock_…, sglang:kvdock_…"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """`seconds`: durations, one observation each."""

    kind: Literal["counter", "gauge", "seconds"]
    help: str


SHARED: Mapping[str, Metric] = {
    "load_tokens": Metric("counter", "Tokens loaded from the kvdock server instead of being computed."),
    "lookup_seconds": Metric("seconds", "Time from a lookup's question to its answer."),
    "lookups_late": Metric("counter", "Lookups taken for a miss because the server's answer was late."),
    "declined_short": Metric("counter", "Requests whose hit was shorter than min_load_tokens, and was computed."),
    "declined_dear": Metric("counter", "Requests whose hit was computed because to load it would have taken longer."),
    "tier_wait_seconds": Metric("seconds", "Time that a request waited for what a lower tier was loading."),
    "tier_waits_fulfilled": Metric("counter", "Requests that waited for a lower tier until all of it was there."),
    "tier_waits_shortened": Metric("counter", "Requests that waited for a lower tier until no more of it came."),
    "tier_waits_expired": Metric("counter", "Requests that waited for a lower tier for as long as they may."),
    "attached": Metric("gauge", "Whether the kvdock server is there: 1, or 0 when every lookup is a miss."),
}
"""By name without prefix: `load_tokens` is vllm:kvdock_load_tokens_total."""
