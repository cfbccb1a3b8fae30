"""The chunk table alone, without a server.

    python -m bench.table

`reserve_1024_ms_*`: CPU time of one reservation of 1,024 chunks of 1 MiB in a full pool. All of its slots are of that
size (`one_size`), or a tenth of it has slots of 1.25 MiB that are not used any more (`two_sizes_cold`) or are stored
again all the time (`two_sizes_hot`). Median of 21, and the longest. bench.control shows lookups.

Segments here are numbers only: the table allocates slots and never touches their bytes.
"""

from __future__ import annotations

import argparse
import json
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
    """Stores sequences of KEYS chunks, all of which become READY."""
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


def _new_table(segments: int, records: int) -> Table:
    size = Table.region_bytes(records, 1 << 13)
    fd = os.memfd_create("bench-table")
    os.ftruncate(fd, size)
    region = Mapping(fd, size)
    os.close(fd)
    table = Table(region, pool_id=1, incarnation=1, limit_bytes=segments * GIB, max_records=records,
                  max_grants=1 << 13, session_cap=1.0, total_cap=1.0)
    for segment in range(segments):
        table.add_segment(segment, 4096, GIB - 4096)
    return table


def measure(chunks: int, seed: int = 1) -> tuple[float, float]:
    """(median µs of lookup + release of 512 keys, resident bytes a chunk) with that many chunks in the table."""
    source = random.Random(seed)
    before = resident_bytes()
    table = _new_table(-(-chunks * PART_BYTES // (GIB // 2)), chunks + KEYS)
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


class _Storer:
    """An engine whose chunks have one part each, and that stores new ones."""

    def __init__(self, table: Table, name: bytes, part_bytes: int) -> None:
        self._table, self._stores, self._name = table, 0, name
        space = table.add_namespace(name * 32, chunk_tokens=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS, writers=1,
                                    groups=[("full", 0, part_bytes)])
        self._session = table.open_session(name * 16, space, 1)
        self._member = table.add_member(self._session, name * 16, [0], True, 1)

    def store(self, count: int) -> float:
        """Stores `count` chunks; returns the CPU seconds of the reservation."""
        self._stores += 1
        keys, store = os.urandom(32 * count), self._stores.to_bytes(15) + self._name
        began = time.thread_time()
        granted = self._table.reserve(
            self._session, self._member, store, b"", keys, groups=0, temporary=False, deadline_ms=1000, now_ms=1
        )
        took = time.thread_time() - began
        assert len(granted.chunks) == count
        self._table.commit(self._session, granted.grant, 0, [(at, 0, 1) for at in range(count)], 1)
        return took


def measure_reserve(pool_gib: int, *, other_share: float, others_are_hot: bool) -> tuple[float, float]:
    """(median, longest) CPU ms of a reservation of 1,024 chunks in a full pool of which `other_share` has slots of
    another size. `others_are_hot`: they are stored anew as often as they would be evicted."""
    table = _new_table(pool_gib, pool_gib * 1024 + 4096)
    storer, other = _Storer(table, b"a", 1 << 20), _Storer(table, b"b", 1280 << 10)
    while table.free_bytes() > pool_gib * GIB * other_share and not table.stats()["evicted_chunks"]:
        storer.store(512)
    while other_share and not table.stats()["evicted_chunks"]:
        other.store(64)
    took = []
    for _ in range(21):
        took.append(storer.store(1024) * 1e3)
        if others_are_hot:
            other.store(64)
    return statistics.median(took), max(took)


def main() -> None:
    argparse.ArgumentParser("python -m bench.table", description=__doc__).parse_known_args()
    figures: dict[str, float] = {}
    for pool_gib in (64, 256):
        for name, share, are_hot in (
            ("one_size", 0.0, False), ("two_sizes_cold", 0.1, False), ("two_sizes_hot", 0.1, True),
        ):
            middle, longest = measure_reserve(pool_gib, other_share=share, others_are_hot=are_hot)
            figures[f"reserve_1024_ms_{name}_{pool_gib}_gib"] = round(middle, 3)
            figures[f"reserve_1024_ms_{name}_{pool_gib}_gib_longest"] = round(longest, 3)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
