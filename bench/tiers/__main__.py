"""How fast lower tiers store and load, the one on disk compared with fio, and what a busy tier does to lookups.

    python -m bench.tiers --json --path FOLDER                 disk, lookups, and the stores that can be started here
    python -m bench.tiers --json --path FOLDER --only disk     one of them
    python -m bench.tiers --json --path FOLDER --url URL       an existing store; chunks that it stores are deleted

disk_store_gb_s, disk_load_gb_s, fio_write_gb_s, fio_read_gb_s, disk_store_share, disk_load_share: the tier and fio
(O_DIRECT, psync, eight jobs, preallocated files) take turns in going first; a share of 1.0 means as fast as fio.
fio_huge_write_gb_s, fio_huge_read_gb_s, disk_store_share_of_huge, disk_load_share_of_huge: fio with huge pages, as the
pool's memory has them where the kernel gives them. plain_write_gb_s, disk_store_share_of_plain: plain writes of the
memory that the tier stores (bench/tiers/disk.py).
disk_store_spread and others that end so: the quickest of the rounds, divided by the slowest. What fio's and those of
plain writes are above 1 is the machine's, not the tier's.
redis_, objects_ (files in a folder), objects_s3_ (an S3 server in Python) and mooncake_: store_gb_s and load_gb_s. A
server on the same machine takes cores away from the tier. Stores that cannot be started are omitted, with a line on
stderr. lookup_ratio_under_load: what lookups of 512 keys take while the disk tier writes and loads all the time, as a
share of what they take while it is idle; lookup_ratio_beside_other_work: the same at another server, which has no tier.
What both have is the machine's, not the tier's. policy_share_of_lru: the hits of the tier on disk as a share of LRU's
in the same space, the least of several traces (bench/tiers/policy.py), which each have their own, with what is written
for each miss. known_bytes_per_chunk: what the server takes to know what tiers have, when known_chunks have filled it.
warm_found_share, cold_wait_round_trips, idle_bytes_per_min and others: what an object store at some distance costs
requests (bench/tiers/far.py). warm_load_share_of_gets: how fast a prefix comes from there, beside plain GETs of the
same objects (bench/tiers/far_loads.py). hot_kept_share_disk, burst_served_share, open_1tb_first_hit_s and others: what
tiers keep, take and cost in weeks of service (bench/tiers/weeks.py), and how long lookups wait while a disk is opened
(bench/tiers/starts.py). Without --json, what is wanted stands beside a figure.

Each figure is the median of its rounds, a share or ratio the median of the paired ones. Parts lie in POSIX shared
memory, are 2 to 32 MiB large, and are compared with what was stored. On disk none goes through the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.tiers import disk, far, far_loads, lookups, policy, stores, weeks
from bench.tiers.batch import Batch
from kvdock.tiers.disk.io import THREADS
from kvdock.tiers.tier import Deadline, TierError

WANTED = {
    "hot_kept_share_disk": ">= 0.95", "hot_kept_share_redis": ">= 0.95", "cold_wait_round_trips": "<= 2",
    "warm_found_share": ">= 0.98", "warm_load_share_of_gets": ">= 0.8", "idle_bytes_per_min": "0",
    "known_bytes_per_chunk": "<= 4", "open_1tb_first_hit_s": "<= 1", "open_1tb_bytes_per_record": "<= 120",
    "longest_lookup_ms_beside_start": "<= 2", "policy_share_of_lru": ">= 1", "burst_served_share": ">= 0.95",
    "disk_store_share": ">= 0.9", "disk_load_share": ">= 0.9", "cpu_s_per_gb_64k": "<= 0.3",
}  # fmt: skip
KINDS = ("disk", "lookups", "policy", "far", "weeks", *stores.STARTS)


def of_store(name: str, chosen: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Figures of one store. `name`: a store, or its URL. Raises CannotStart, TierError."""
    with ExitStack() as stack:
        url = name if ":" in name else stores.start(name, folder, chosen.store_mib, stack)
        tier = stores.opened(url)
        stack.callback(tier.close, Deadline(stores.OPEN_S))
        batch = Batch(chosen.store_mib, seed=7)
        batch.round(tier, 0)  # makes connections, and the server allocates its memory
        rates = [batch.round(tier, 1 + number) for number in range(chosen.rounds)]
    name = tier.name if ":" in name else name
    return {f"{name}_store_gb_s": [store for store, _ in rates], f"{name}_load_gb_s": [load for _, load in rates]}


def of_kind(name: str, chosen: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    if name == "disk":
        return disk.measure(folder, chosen.mib, chosen.rounds, chosen.threads)
    if name == "lookups":
        return lookups.measure(folder, chosen.rounds, chosen.calls, chosen.part_kib << 10)
    if name == "far":
        return far.measure(chosen.rounds) | far_loads.measure(chosen.rounds)
    if name == "weeks":
        return weeks.measure(folder)
    if name == "policy":
        return policy.measure(folder, chosen.policy_lookups)
    return of_store(name, chosen, folder)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, required=True, help="a folder on the file system that is to be measured")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--url", action="append", help="of a store, instead of what can be started here")
    parser.add_argument("--mib", type=int, default=1024, help="MiB that the disk has in a round (default 1024)")
    parser.add_argument("--store-mib", type=int, default=256, help="MiB that a store has in a round (default 256)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds for each figure (default 7)")
    parser.add_argument("--calls", type=int, default=400, help="lookups of a round (default 400)")
    parser.add_argument("--part-kib", type=int, default=2048, help="of the chunks that load the tier (default 2048)")
    parser.add_argument("--policy-lookups", type=int, default=200_000, help="of each trace (default 200,000)")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"of the disk tier (default {THREADS})")
    chosen = parser.parse_args(arguments)
    chosen.path.mkdir(parents=True, exist_ok=True)
    path = chosen.path.resolve()  # URLs need absolute paths
    figures: dict[str, float] = {}
    for name in chosen.url or chosen.only:
        with tempfile.TemporaryDirectory(prefix="kvdock-bench-", dir=path) as folder:
            try:
                found = of_kind(name, chosen, Path(folder))
            except (stores.CannotStart, TierError) as error:
                print(f"bench.tiers: {name} is left out: {error}", file=sys.stderr)
                continue
        figures |= {key: round(statistics.median(values), 3) for key, values in found.items()}
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, figure in figures.items():
            print(f"{name:36} {figure:<12} {WANTED.get(name, '')}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
