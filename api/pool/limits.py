"""The limits that an operator may change while the server runs.

Invariant: a `Limits` is a complete, checked set and is never changed: another one takes its place.
"""

from __future__ import annotations

import msgspec

from kvdock.api.settings import Settings
from kvdock.protocol.admin_schemas import Limits
from kvdock.protocol.errors import ApiError


def limits_of(settings: Settings) -> Limits:
    """The limits that a server starts with."""
    return Limits(**{name: getattr(settings, name) for name in Limits.__struct_fields__})


def changed_limits(limits: Limits, changes: dict[str, object], segment_bytes: int) -> Limits:
    """`limits` with some values replaced. ApiError(bad_argument) when they do not fit together."""
    limits = msgspec.structs.replace(limits, **changes)
    if limits.pool_bytes < segment_bytes:
        raise ApiError(
            "bad_argument", "a pool is at least one segment: serve with a smaller segment_bytes",
            found=limits.pool_bytes, wanted=f"pool_bytes >= {segment_bytes}",
        )
    if limits.high_water < limits.low_water:
        raise ApiError(
            "bad_argument", "high_water is at least low_water",
            found=limits.high_water, wanted=f">= {limits.low_water}",
        )
    return limits
