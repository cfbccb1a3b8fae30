"""The bodies of calls about lower tiers, and their answers."""

from __future__ import annotations

from kvdock.protocol.schemas import Part
from kvdock.protocol.wire_types import Carried, Carrier, Hex64, Name, StoreKeys


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
