"""Why a lookup found less than it asked for, and what became of a request: for people."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.wire_types import Answer, Key

BREAKS: Final = {
    "unknown": "it was never stored, or went so long ago that the server does not remember it",
    "room": "it was evicted to make room for a store",
    "ahead": "it was evicted because the pool had too little free room",
    "quota": "it was evicted because its tenant had reached its quota",
    "shrunk": "it was evicted with a segment that was given back",
    "cleared": "an operator cleared the cache",
    "deleted": "an operator deleted it",
    "mismatched": "a reader found other bytes than were stored, so it was taken out of use",
    "unread": "a lower tier had loaded it for a request that ended first",
    "read": "it came from a lower tier for one request, and went with it",
    "weights": "it was evicted first, because no engine had run its weights for a while",
    "being_stored": "another engine is storing it",
    "held_bytes": "the engine holds as much of the pool as it may",
    "pinning": "not every rank has page-locked the memory that it lies in",
}
"""By `Break.why`."""


class Break(Answer, kw_only=True):
    """Where the prefix that a lookup found ends, and why."""

    at_tokens: int
    """Tokens from the first on that the server gave."""
    why: str
    """A key of BREAKS."""
    in_words: str
    gone_s: float | None = None
    """How long the chunk behind them had been gone. None: it never was there, as far as is known."""
    unused_s: float | None = None
    """How long no request had named it when it went. None: that is not known."""


class OtherNamespace(Answer, kw_only=True):
    """One of the same model that holds chunks, which this request cannot use."""

    namespace: Key
    differs: dict[str, list[Any]]
    """Fields of the manifest, and `weights`: what the request's namespace says, and what this one says. Secrets are
    `hidden`."""


class LookupStory(Answer, kw_only=True):
    """One lookup of the request, as it was answered for the first time in its epoch."""

    at: float
    """Unix seconds, for display only."""
    engine: str
    """Its label, or its session."""
    tokens: int
    hit_tokens: int
    chunks: int
    bytes: int
    took_us: int
    loaded_us: int | None
    """From the answer until all ranks had read what they got; None: they have not, or got nothing."""
    broke: Break | None
    """None: all was found."""


class LoadStory(Answer, kw_only=True):
    """What loading cost, as the engine has measured it: that of the request's last load."""

    tokens: int
    bytes: int
    """Over all ranks."""
    took_ms: float
    """From when the engine began the load until it knew the load's end."""
    queue_ms: float | None
    """The part that was not copying: waiting for copies before it, and for the engine's next step."""
    copy_ms: float | None
    """The copies on the slowest rank; None: that is not known."""
    bytes_per_s: float | None
    """All ranks' bytes over the time of the copies."""


class Explanation(Answer, kw_only=True):
    """What the server knows of a request. `sentences` say it in words; the other fields have the figures."""

    request: str
    namespace: Key
    model: str
    weights: str | None = ""
    """That its engine ran then, as in NamespaceView."""
    sentences: list[str]
    lookups: list[LookupStory] = msgspec.field(default_factory=list)
    """Oldest first."""
    outcome: OutcomeView | None = None
    """What its engine told of it when it had ended."""
    load: LoadStory | None = None
    """None: it loaded nothing, or its engine has not told what that took."""
    saved_s: float | None = None
    """What computing the loaded tokens would have taken at the engine's measured speed, less what loading them took.
    Below 0: the load was dearer. None: that is not known."""
    nearest: OtherNamespace | None = None
    """If nothing was found: the namespace of the same model that differs in the fewest fields."""
