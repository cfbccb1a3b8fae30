"""What engines use of a server, and what that saves: totals by session and namespace, copy rates, what is cached."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvdock.protocol.wire_types import Answer, Body, Key

Amount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Copied(Body, kw_only=True, omit_defaults=True):
    """What a member's copies moved since its last heartbeat."""

    load_bytes: Amount = 0
    load_us: Amount = 0
    """What the copies took, added up: where some ran at the same time, that time counts for each of them."""
    store_bytes: Amount = 0
    store_us: Amount = 0
    ceiling_bytes_per_s: Rate = 0.0
    """How fast plain copies of that member go, as measured on its machine. 0: that was not measured."""


class CopyRates(Answer, kw_only=True):
    """How fast a session's members copied in the last minutes in which they did; None: they did not."""

    load_bytes_per_s: float | None = None
    """All members together, over the time in which they copied."""
    store_bytes_per_s: float | None = None
    ceiling_bytes_per_s: float | None = None
    """What plain copies reach there, all members together. None: not measured."""


class UseTotals(Answer, kw_only=True):
    """Since the session or namespace was first seen by this server."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0
    """As engines tell of requests that have ended."""
    loaded_bytes: int = 0
    """In leases, counted once per fetch."""
    stored_bytes: int = 0
    saved_s: float | None = None
    """What computing the loaded tokens would have taken, less what loading them took. None: no engine has told both."""


class Purpose(Body, kw_only=True, omit_defaults=True):
    """What an engine attaches for."""

    is_bench: bool = False
    """It measures, or shows something: the server's totals leave out what it does, and when the last such session of
    a namespace that no other has used is gone, what it stored goes."""


class Used(Answer, kw_only=True):
    """What a session has used."""

    is_bench: bool = False
    totals: UseTotals = msgspec.field(default_factory=UseTotals)
    copy: CopyRates = msgspec.field(default_factory=CopyRates)


class Saved(Answer, kw_only=True):
    """By all engines, since the server's start."""

    tokens: int = 0
    """Loaded instead of computed, as engines tell of requests that have ended."""
    seconds: float | None = None
    """The engines' time, as UseTotals has it."""


class PrefixView(Answer, kw_only=True):
    """Chunks that begin with the same first chunk: a prefix and all that goes on from it."""

    namespace: Key
    tenant: str
    model: str
    weights: str | None = ""
    """As in NamespaceView."""
    key: Key
    """The first chunk's."""
    tokens: int
    """Stored under it, each chunk counted once."""
    chunks: int
    bytes: int
    age_s: float | None
    """Since the first chunk was stored; None: before this server's start."""
    unused_s: float | None
    """Since a request last named one of the chunks; None: longer than is known."""
    uses: int
    """Lookups that found the first chunk, since this server's start."""
    last_key: Key
    """The deepest chunk's that at least half of those lookups found as well. A pin of it keeps what precedes it too."""
    last_tokens: int
    """From the first chunk to the end of that one."""


class Prefixes(Answer, kw_only=True):
    """Those that lookups found most often come first. One that has gone since they were counted is left out."""

    prefixes: list[PrefixView]
    prefix_count: int
    """All that there were when they were counted, as many as are listed or more."""
    counted_s: float
    """How long ago the pool was counted."""
