"""What tiers keep, take and cost in weeks of service, on little data.

- hot_kept_share_disk, hot_kept_share_redis: of a prefix that prompts go on hitting in the pool while many other chunks
  go through the tier, how much is there for the next server. The disk has room for a fraction of the others; in Redis
  everything expires that was not used for TTL_S.
- burst_served_share: BURST prompts that the disk has come at once to a server whose pool is empty, and has room for
  four of them: how much of them is loaded.
- cpu_s_per_gb_64k: processor time of the tier on disk for a GB stored and loaded in parts of 64 KiB, the dearer of the
  two; cpu_store_s_per_gb_64k, cpu_load_s_per_gb_64k.
- open_1tb_first_hit_s, open_1tb_bytes_per_record: until the tier on a disk with 1 TiB of parts of 2 MiB (sparse files)
  finds the newest part, and the memory that each part takes.
- longest_lookup_ms_beside_start and others: how long lookups wait while the mover opens it (bench/tiers/starts.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from bench.serving import Engine, ServerProcess, chain
from bench.tiers import starts, stores
from bench.tiers.far import awaited, wait_until_used
from kvdock.client.client import Client
from kvdock.shm.checksum import checksum
from kvdock.tiers.disk.index import Index, Row
from kvdock.tiers.disk.log import SegmentBlock, key_of, record_bytes
from kvdock.tiers.disk.tier import DiskTier, Sizes
from kvdock.tiers.mover.tier_handle import own_pages
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Outcome, ToLoad, ToStore

MIB = 1 << 20
PART = 64 << 10
HOT, OTHERS, RUN = 16, 60, 16
"""Chunks of the hot prefix; prompts that go by, and the chunks of each."""
BEAT_S, TTL_S = 0.25, 8
BURST, BURST_WAIT_S, HELD_S = 24, 20.0, 0.05
CPU_PARTS, CPU_BATCH = 4096, 128
TIB = 1 << 40


def hot_kept(tier: dict[str, object], *, is_shared: bool) -> float:
    """`is_shared`: another server that shares the tier is asked, at once; otherwise the next one, with an empty
    pool."""
    settings = {"pool_bytes": 2 * HOT * PART + 16 * MIB, "session_cap": 1.0, "total_cap": 1.0, "tier_asks": 1,
                "heartbeat_s": 0.2, "missed_heartbeats": 1000} | tier  # fmt: skip
    digest, hot = checksum(bytes(PART)), chain(HOT, "hot")
    with ExitStack() as other:
        if is_shared:
            ask = other.enter_context(asker(settings))
        with ServerProcess("serve", **settings) as server, Client(server.unix) as client:
            wait_until_used(client)
            with closing(Engine(client, "weeks", PART)) as engine:
                engine.store(hot, digest)
                for number in range(OTHERS):
                    engine.store(chain(RUN, f"other/{number}"), digest)
                    engine.look_up(hot)
                    engine.beat()
                    time.sleep(BEAT_S)
            if is_shared:
                return ask(hot)
        return other.enter_context(asker(settings))(hot)


@contextmanager
def asker(settings: dict[str, object]) -> Iterator[Callable[[bytes], float]]:
    """A server whose pool is empty, and what returns how much of the prompt it can load."""
    with ServerProcess("serve", **settings) as server, Client(server.unix) as client:
        wait_until_used(client)
        with closing(Engine(client, "asker", PART)) as engine:
            yield lambda keys: awaited(engine, client, keys, 10.0)[0] / HOT


def burst_served(folder: Path) -> float:
    chunk = {"session_cap": 1.0, "total_cap": 1.0, "tier_asks": 1, "heartbeat_s": 0.2, "missed_heartbeats": 1000}
    tier = {"disk_path": str(folder), "disk_bytes": 8 * BURST * RUN * PART + 16 * MIB}
    prompts, digest = [chain(RUN, f"burst/{number}") for number in range(BURST)], checksum(bytes(PART))
    with ServerProcess("serve", pool_bytes=64 * MIB, **chunk, **tier) as server, Client(server.unix) as client:
        wait_until_used(client)
        with closing(Engine(client, "burst", PART)) as engine:
            for prompt in prompts:
                engine.store(prompt, digest)
                engine.beat()
            until_s = time.monotonic() + 60
            while client.status().tiers[0].objects < BURST * RUN and time.monotonic() < until_s:
                time.sleep(0.2)
                engine.beat()
    small = 4 * RUN * PART + 2 * MIB
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess("serve", pool_bytes=small, segment_bytes=small, **chunk, **tier))
        client = stack.enter_context(Client(server.unix))
        wait_until_used(client)
        engine = stack.enter_context(closing(Engine(client, "burst", PART)))

        def one(prompt: bytes) -> int:
            with Client(server.unix) as own:
                return awaited(engine, own, prompt, BURST_WAIT_S, held_s=HELD_S)[0]

        with ThreadPoolExecutor(BURST) as threads:
            return sum(threads.map(one, prompts)) / (BURST * RUN)


def cpu_64k(folder: Path) -> dict[str, float]:
    """The second round counts: in the first, files are allocated."""
    source, target, digest = own_pages(PART), own_pages(CPU_BATCH * PART), checksum(bytes(PART))
    gb = CPU_PARTS * PART / 1e9
    tier, costs = DiskTier.open(folder, 4 * CPU_PARTS * PART), (0.0, 0.0)
    for number in range(2):
        names = [PartName(bytes([number]) * 32, at.to_bytes(32, "big"), 0, 0) for at in range(CPU_PARTS)]
        batches = [names[at : at + CPU_BATCH] for at in range(0, CPU_PARTS, CPU_BATCH)]
        stores = [[ToStore(Record(name, PART, digest), source) for name in batch] for batch in batches]
        loads = [
            [ToLoad(name, PART, target[at * PART : (at + 1) * PART]) for at, name in enumerate(batch)]
            for batch in batches
        ]
        began_s = time.process_time()
        stored = {outcome for batch in stores for outcome in tier.store(batch, Deadline(60))}
        between_s = time.process_time()
        loaded = {one.outcome for batch in loads for one in tier.load(batch, Deadline(60))}
        costs = (between_s - began_s) / gb, (time.process_time() - between_s) / gb
        if stored | loaded != {Outcome.DONE}:
            raise RuntimeError(f"not all of it was moved: {stored | loaded}")
    tier.close(Deadline(60))
    return {"cpu_store_s_per_gb_64k": costs[0], "cpu_load_s_per_gb_64k": costs[1], "cpu_s_per_gb_64k": max(costs)}


def make_1tb(folder: Path) -> PartName:
    """Makes an index and sparse segments of a disk that is full. Returns the newest part."""
    part, sizes = 2 * MIB, Sizes.of(TIB)
    each = record_bytes(part)
    records = min(sizes.most_records, (sizes.segment_bytes - PAGE_BYTES) // each)
    index, _ = Index.open(folder / "index.db", sizes.wal_bytes)
    name = PartName(bytes(32), bytes(32), 0, 0)
    for sequence in range(1, sizes.segments_bytes // sizes.segment_bytes + 1):
        with (folder / f"segment-{sequence:06}.log").open("wb") as file:
            file.truncate(sizes.segment_bytes)
            file.write(SegmentBlock.new(sequence, sizes.segment_bytes).block())
        rows = []
        for at in range(records):
            name = PartName(bytes(32), os.urandom(32), 0, 0)
            rows.append(Row(sequence, PAGE_BYTES + at * each, key_of(name), part, 1, 0))
        index.add(rows)
    index.finish()
    index.close()
    os.sync()  # else each direct read writes its file first
    return name


def open_1tb(folder: Path, newest: PartName) -> dict[str, float]:
    """In a process of its own, whose memory is this alone."""
    program = (
        "import sys, time, resource; from pathlib import Path\n"
        "from kvdock.tiers.disk.tier import DiskTier; from kvdock.tiers.record import PartName\n"
        "from kvdock.tiers.tier import Deadline\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before, began_s = rss(), time.monotonic()\n"
        f"tier = DiskTier.open(Path(sys.argv[1]), {TIB})\n"
        "assert tier.exists([PartName(bytes(32), bytes.fromhex(sys.argv[2]), 0, 0)], Deadline(60)) == [True]\n"
        "print(time.monotonic() - began_s, flush=True)\n"
        "tier.holdings(Deadline(600))\n"
        "print((rss() - before) / tier.usage().objects)\n"
        "tier.close(Deadline(60))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), newest.key.hex()], capture_output=True, text=True, check=True
    )
    seconds, each = map(float, done.stdout.split())
    return {"open_1tb_first_hit_s": seconds, "open_1tb_bytes_per_record": each}


def measure(folder: Path) -> dict[str, list[float]]:
    figures: dict[str, float] = {}
    room = {"disk_path": str(folder / "hot"), "disk_bytes": 20 * MIB}
    figures["hot_kept_share_disk"] = hot_kept(room, is_shared=False)
    with ExitStack() as stack:
        (folder / "redis").mkdir()
        try:
            url = stores.start("redis", folder / "redis", 64, stack)
            figures["hot_kept_share_redis"] = hot_kept({"redis_url": f"{url}?ttl_s={TTL_S}"}, is_shared=True)
        except stores.CannotStart as error:
            print(f"bench.tiers: hot_kept_share_redis is left out: {error}", file=sys.stderr)
    figures["burst_served_share"] = burst_served(folder / "burst")
    figures |= cpu_64k(folder / "cpu")
    (folder / "large").mkdir()
    newest = make_1tb(folder / "large")
    figures |= open_1tb(folder / "large", newest)
    figures |= starts.measure(folder / "large")
    return {name: [figure] for name, figure in figures.items()}
