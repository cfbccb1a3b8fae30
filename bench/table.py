"""The chunk table alone, without a server: lookup with leases and release, at several sizes.

Segments here are numbers only: the table hands out slots and never touches what lies in them.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from multiprocessing import get_context
from pathlib import Path

from bench.serving import CHUNK_TOKENS, PART_BYTES
from kvdock._core import Mapping, Table

KEYS = 512
ROUNDS = 1500
GIB = 1 << 30


def resident_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("smaps_rollup without Rss")


def _filled(table: Table, session: int, member: int, chunks: int, source: random.Random) -> list[bytes]:
    """Sequences of KEYS chunks, all READY."""
    sequences = []
    for store in range(chunks // KEYS):
        keys = source.randbytes(32 * KEYS)
        granted = table.reserve(
            session, member, store.to_bytes(16), b"", keys, groups=0, temporary=False, deadline_ms=1000, now_ms=1
        )
        ready, _ = table.commit(session, granted.grant, 0, [(at, 0, at) for at in range(KEYS)], 1)
        assert ready == KEYS
        sequences.append(keys)
    return sequences


def measure(chunks: int, seed: int = 1) -> tuple[float, float]:
    """(median µs of lookup + release of 512 keys, resident bytes a chunk) with that many chunks in the table."""
    source = random.Random(seed)
    before = resident_bytes()
    size = Table.region_bytes(chunks + KEYS, 1 << 13)
    fd = os.memfd_create("bench-table")
    os.ftruncate(fd, size)
    region = Mapping(fd, size)
    os.close(fd)
    segments = -(-chunks * PART_BYTES // (GIB // 2))
    table = Table(region, pool_id=1, incarnation=1, limit_bytes=segments * GIB, max_records=chunks + KEYS,
                  max_grants=1 << 13, session_cap=1.0, total_cap=1.0)
    for segment in range(segments):
        table.add_segment(segment, 4096, GIB - 4096)
    space = table.add_namespace(bytes(32), chunk_tokens=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS, writers=1,
                                groups=[("full", 0, PART_BYTES)])
    session = table.open_session(bytes(16), space, 1)
    member = table.add_member(session, bytes(16), [0], True, 1)
    sequences = _filled(table, session, member, chunks, source)
    per_chunk = (resident_bytes() - before) / (len(sequences) * KEYS)
    took_ns = []
    for number in range(ROUNDS):
        keys, request = source.choice(sequences), (1 << 64 | number).to_bytes(16)
        began = time.perf_counter_ns()
        found = table.lookup(session, member, request, 0, keys, readers=1, skip_tokens=0, now_ms=2)
        table.release(session, found.lease, [0])
        took_ns.append(time.perf_counter_ns() - began)
        assert found.hit_tokens == KEYS * CHUNK_TOKENS
    return statistics.median(took_ns) / 1e3, per_chunk


def measure_apart(chunks: int) -> tuple[float, float]:
    """`measure` in a fresh process, so that resident bytes are the table's."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (chunks,))
