"""The bodies of calls about lower tiers, and their answers."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvdock.protocol.schemas import Part
from kvdock.protocol.wire_types import Answer, Body, Carried, Carrier, Hex64, Keys, Name, StoreKeys

MOVER_LABEL: Final = "lower tiers"
"""The label of the mover's own sessions. It is only shown to people: an engine may have the same."""
MAX_AFTER_S = 3600.0
MAX_PREFETCH_S = 600.0


class Hold(Carrier, kw_only=True):
    """Leases to rank 0 those chunks of `keys` that are stored, with all their groups, wherever they are in their
    chains. It does not count as a use: the order of eviction stays the same."""

    session: Name
    member: Name
    request: Name
    """A different id for each call."""
    keys: StoreKeys


class HoldHead(Carried, kw_only=True):
    """The answer to a hold without `chunks`, like LookupHead."""

    lease: Hex64 | None
    is_limited: bool
    """Some chunks are stored but not leased, because the session, or all sessions, hold as much as they may."""


class HoldAnswer(HoldHead, kw_only=True):
    chunks: list[list[Part]]
    """The parts of each key's chunk; empty where it is not leased."""


class Prefetch(Body, kw_only=True):
    """Chunks that requests will ask for soon: lower tiers load those that the pool lacks, ahead of the requests."""

    session: Name
    member: Name
    keys: Keys
    """The keys of a prompt's chunks, from the first on."""
    after_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_AFTER_S)] = 0.0
    """Seconds until loading begins. For a conversation that comes back later, whose chunks may be evicted until
    then."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_PREFETCH_S)] = 30.0
    """How long loading may take; chunks that have not come by then are not loaded."""


Why = Literal["", "stored", "later", "limited", "absent", "tiers_off", "not_served", "no_tiers", "draining"]


class PrefetchAnswer(Answer, kw_only=True):
    """The answer comes at once, before any tier is asked."""

    stored_tokens: int
    """How many tokens from the first on the pool has."""
    coming_tokens: int
    """How many of the next tokens may be loaded now, as far as a tier has them."""
    why: Why
    """Why not more tokens come. '': all may come. 'stored': the pool has all of them. 'later': `after_s` has not
    passed. 'limited': as much is loaded ahead of requests as is allowed. 'absent': no tier has the next chunk.
    'tiers_off': no tier works. 'not_served': tiers do not serve the tenant. 'no_tiers': the server has none.
    'draining': the server is about to end."""
