"""How long the next server needs to adopt a large pool.

    python -m bench.restart --json

A pool of `--chunks` chunks is left behind and adopted in this process, with the server's code
(kvdock/api/pool/adopt.py): the pool is checked and rebuilt, without a new Python process. A test shows that
engines have hits again within 2 s of the new server, with the same tokens (tests/api/test_adoption.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import secrets
import statistics
import sys
import tempfile
import time

from kvdock._core import Table
from kvdock.api.pool.adopt import Means, adopt_pool
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import SegmentPool
from kvdock.api.settings import Settings
from kvdock.shm import objects as shm

PART_BYTES = 4096
CHAIN_KEYS = 512


def digest(*what: object) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=32).digest()


def leave_pool(settings: Settings, pool_id: int, chunks: int) -> None:
    """Leaves a pool of READY chunks of one part each, with a lease on the last, as a killed server would leave it."""
    lock = PoolLock.create(pool_id, address=settings.socket_path)
    size = Table.region_bytes(settings.table_records, settings.table_grants)
    region = shm.create_region(shm.region_name(pool_id), size)
    segments = SegmentPool(pool_id, limit_bytes=settings.pool_bytes, segment_bytes=settings.segment_bytes)
    table = Table(
        region, pool_id=pool_id, lock_inode=lock.inode, incarnation=1, limit_bytes=settings.pool_bytes,
        max_records=settings.table_records, max_grants=settings.table_grants, session_cap=1.0, total_cap=1.0,
    )
    while segments.can_grow():
        info = segments.grow()
        table.add_segment(info.id, info.data_offset, info.data_bytes)
    space = table.add_namespace(digest("ns"), chunk_tokens=16, block_tokens=4, writers=1,
                                groups=[("full", 0, PART_BYTES)])
    session = table.open_session(digest("session")[:16], space, 0)
    member = table.add_member(session, digest("member")[:16], [0], True, 1)
    keys: list[bytes] = []
    for chain in range(-(-chunks // CHAIN_KEYS)):
        keys = [digest(chain, index) for index in range(min(CHAIN_KEYS, chunks - chain * CHAIN_KEYS))]
        got = table.reserve(session, member, digest("store", chain)[:16], b"", b"".join(keys), groups=0,
                            temporary=False, deadline_ms=60_000, now_ms=0)
        if len(got.chunks) != len(keys):
            raise RuntimeError(f"chain {chain}: {len(got.chunks)} of {len(keys)} chunks were granted")
        table.commit(session, got.grant, 0, [(index, 0, 7) for index in range(len(keys))], 0)
    segments.close(unlink=False)
    lock.close(unlink=False)


def adopt(chunks: int, times: int) -> dict[str, object]:
    """Seconds of adopting that pool, several times in a row; no adoption changes what the next one finds."""
    with tempfile.TemporaryDirectory(prefix="kvdock-restart-") as folder:
        settings = Settings.load({
            "socket_path": f"{folder}/s.sock", "pool_bytes": chunks * PART_BYTES + (64 << 20),
            "table_records": 2 * chunks,
        })
        pool_id = random.getrandbits(64)
        took_s: list[float] = []
        found: dict[str, int] = {}
        try:
            leave_pool(settings, pool_id, chunks)
            for _ in range(times):
                began = time.perf_counter()
                adopted = adopt_pool(settings, pool_id, Means(secrets.randbits))
                took_s.append(time.perf_counter() - began)
                found = adopted.found
                adopted.objects.leave()
        finally:
            for name in shm.pool_objects().get(pool_id, []):
                (shm.SHM_DIR / name).unlink()
    return {
        "chunks": found["chunks"], "dropped": found["dropped"], "adopt_s_median": round(statistics.median(took_s), 3),
        "adopt_s_worst": round(max(took_s), 3),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    chosen = parser.parse_args(arguments)
    found = adopt(chosen.chunks, chosen.times)
    print(json.dumps(found) if chosen.json else "\n".join(f"{key:32} {value}" for key, value in found.items()))
    return 1 if found["chunks"] != chosen.chunks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
