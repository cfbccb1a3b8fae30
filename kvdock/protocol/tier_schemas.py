"""The bodies of calls about lower tiers, and their answers."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvdock.protocol.schemas import Part
from kvdock.protocol.wire_types import Answer, Body, Carried, Carrier, Hex64, Keys, Name, StoreKeys

MOVER_LABEL: Final = "lower tiers"
"""The label of the mover's own sessions, for people alone: an engine may have the same."""
MAX_AFTER_S = 3600.0
MAX_PREFETCH_S = 600.0


class Hold(Carrier, kw_only=True):
    """Leases the chunks of `keys` that are stored, wherever they stand in their chains, with all their groups, to rank
    0. It is no use of them: what is evicted first does not change."""

    session: Name
    member: Name
    request: Name
    """An id of its own for each call."""
    keys: StoreKeys


class HoldHead(Carried, kw_only=True):
    """A hold's answer without `chunks`, as LookupHead."""

    lease: Hex64 | None
    is_limited: bool
    """Some are stored and not leased, because as much is held as may be."""


class HoldAnswer(HoldHead, kw_only=True):
    chunks: list[list[Part]]
    """For each key; empty: it is not leased."""


class Prefetch(Body, kw_only=True):
    """Chunks that will be asked for soon: lower tiers load what the pool lacks of them, ahead of requests."""

    session: Name
    member: Name
    keys: Keys
    """A prompt's, from its first on."""
    after_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_AFTER_S)] = 0.0
    """When loading begins, from now on: a conversation that comes back later may lose chunks until then."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_PREFETCH_S)] = 30.0
    """How long it may take; what has not come by then is left."""


Why = Literal["", "stored", "later", "limited", "absent", "tiers_off", "not_served", "no_tiers", "draining"]


class PrefetchAnswer(Answer, kw_only=True):
    """At once: no tier has been asked yet."""

    stored_tokens: int
    """The pool has so many from the first on."""
    coming_tokens: int
    """So many behind them may be loaded now, as far as a tier has them."""
    why: Why
    """Why no more: '': all may come; 'stored': all is there; 'later': `after_s` is not over; 'limited': as much is
    loaded ahead as may be; 'absent': no tier has the next chunk; 'tiers_off': no tier works; 'not_served': tiers do
    not serve the tenant; 'no_tiers': the server has none; 'draining': the server ends."""
