"""The limits an operator may change while the server runs, and the check of those that count grants.

Invariant: a `Limits` is a whole, checked set and never changed: another one takes its place.
"""

from __future__ import annotations

import msgspec

from kvdock._core import Table
from kvdock.api.pool.registry import SessionRecord
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


def check_grants(table: Table, session: SessionRecord, request: bytes, limit: int, *, draining: bool = False) -> None:
    """Refuses one grant too many: ApiError(too_many_grants), and any new one while the server drains:
    ApiError(not_ready). A repeat of a call that has its grant is none.

    `session.grants` is never below the true number (the service counts up, the keeper sets it right), so
    the table is asked only near the limit.
    """
    if session.grants < limit and not draining:
        return
    session.grants, known = table.open_grants(session.table_id, request)
    if known:
        return
    if draining:
        raise ApiError("not_ready", "the server is draining: it gives out nothing new and ends soon")
    if session.grants >= limit:
        raise ApiError(
            "too_many_grants", "release leases and finish reservations first", found=session.grants,
            wanted=f"< {limit}",
        )
