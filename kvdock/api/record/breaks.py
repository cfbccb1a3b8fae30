"""Why a lookup found less than it asked for. It is found out with the lookup, because a moment later the request itself
may store what was missing.
"""

from __future__ import annotations

from kvdock._core import Lookup as Found, Table
from kvdock.api.pool.registry import SessionRecord
from kvdock.protocol.explain import BREAKS, Break
from kvdock.protocol.wire_types import KEY_BYTES


def break_of(table: Table, session: SessionRecord, keys: bytes, found: Found, now_ms: int) -> Break | None:
    """`keys`: 32 bytes each, all that the lookup asked for. None: all was found."""
    space = session.namespace
    chunk_tokens = space.manifest.chunk_tokens
    at = found.hit_tokens // chunk_tokens * KEY_BYTES
    if at >= len(keys):
        return None
    why: str = found.limited or ("being_stored" if found.being_stored > found.hit_tokens else "")
    gone = None if why else table.gone(space.table_id, keys[at : at + KEY_BYTES])
    why = why or ("unknown" if gone is None else gone[0])
    made = Break(at_tokens=found.hit_tokens, why=why, in_words=BREAKS[why])
    if gone is not None:
        _, at_ms, used_ms = gone
        made.gone_s = max(0, now_ms - at_ms) / 1000
        made.unused_s = max(0, at_ms - used_ms) / 1000 if used_ms else None
    return made
