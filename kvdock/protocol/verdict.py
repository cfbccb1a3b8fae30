"""What an operator should know first: whether the server helps, by how much, and what to do about what goes wrong.

The page, `kvdock status`, `kvdock doctor` and, by `kvdock_finding` of the metrics, the alerts read this.
docs/operate/runbook.md explains each finding.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvdock.protocol.wire_types import Answer

Effect = Literal["helping", "costing", "not_helping", "idle", "not_reported", "not_ready"]
"""helping: engines load tokens, and as far as is known that saved time. costing: loads took longer than computing would
have. not_helping: requests have ended, and none has loaded anything. idle: no engine has asked for anything.
not_reported: engines look up, and none has reported the end of a request. not_ready: no slot can be given out."""

FindingCode = Literal[
    "not_ready", "loads_cost_time", "tier_off", "engine_died", "engine_silent", "chunks_damaged", "engine_misreads",
    "pool_left_out", "server_failed", "thrashing", "shares_nothing", "share_fell", "tier_too_slow",
    "full_of_one_tenant", "grants_old", "mover_silent",
]

TroubleKind = Literal["died", "damaged", "misread", "left_out", "failed"]
"""What findings about the past are made of: an engine that died, damaged chunks, an engine that reported whole chunks
as damaged, a pool that was left out at the start, and background work of the server that failed."""

REMEDIES: Final[dict[FindingCode, str]] = {
    "not_ready": "kvdock status",
    "loads_cost_time": "kvdock top",
    "tier_off": "kvdock doctor",
    "engine_died": "kvdock events --kinds dead,suspect",
    "engine_silent": "kvdock sessions",
    "chunks_damaged": "kvdock events --kinds mismatched",
    "engine_misreads": "kvdock events --kinds mismatch_refuted",
    "pool_left_out": "kvdock acknowledge",
    "server_failed": "kvdock acknowledge",
    "thrashing": "kvdock size",
    "shares_nothing": "kvdock cached",
    "share_fell": "kvdock saved",
    "tier_too_slow": "kvdock status",
    "full_of_one_tenant": "kvdock quota",
    "grants_old": "kvdock leases",
    "mover_silent": "kvdock doctor",
}
"""The command that shows more, or that mends it."""


class Finding(Answer, kw_only=True):
    code: FindingCode
    severity: Literal["bad", "warn"]
    text: str
    remedy: str
    """A command."""
    cost_share: float = 0.0
    """The share of all prompt tokens that this is estimated to have cost: computed in place of loaded. 0: not known."""
    at: float | None = None
    """Unix seconds, for display only: when it last happened. None: it lasts."""


class Verdict(Answer, kw_only=True):
    """`findings`: the worst first, then those that cost most."""

    effect: Effect
    headline: str
    """One sentence: up or not, helping or not, and by how much."""
    findings: list[Finding] = msgspec.field(default_factory=list)
