"""A chunk table without memory: it hands out slots of one size, which are never read or written."""

from __future__ import annotations

import os

from kvdock._core import Mapping, Table


def bare_table(room: int, slot_bytes: int, *, grants: int, session_cap: float, total_cap: float) -> Table:
    """A table with memory for `room` slots. The caps are Table's."""
    records = 2 * room + 4096
    size = Table.region_bytes(records, grants)
    fd = os.memfd_create("bench-table")
    try:
        os.ftruncate(fd, size)
        region = Mapping(fd, size)
    finally:
        os.close(fd)
    table = Table(
        region, pool_id=1, incarnation=1, limit_bytes=room * slot_bytes, max_records=records, max_grants=grants,
        session_cap=session_cap, total_cap=total_cap,
    )
    table.add_segment(0, slot_bytes, room * slot_bytes)
    return table
