"""How many lookups the tier on disk answers, compared with LRU in the same space, and what it writes for that.

The disk's own log, index and policy (kvdock/tiers/disk) run with parts of a page, in 100 segments of 64 parts. A lookup
is a chunk; prompts have RUN of them. A chunk that is missing is stored, one that is there is used.

- zipf: prompts by Zipf's law with exponent 1.0, five times as many as fit.
- hot: nine of ten prompts are of a working set that takes four fifths of the space, the others are asked for once.
- scan: half of the prompts are of a working set that takes three fifths, the others are asked for once.
- sessions: conversations that come back one to eight times.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from kvdock._core import KeyFilter
from kvdock.shm.checksum import checksum
from kvdock.tiers.disk.index import Index
from kvdock.tiers.disk.io import Io, takes_direct
from kvdock.tiers.disk.log import Log, key_of, record_bytes
from kvdock.tiers.disk.space import Space
from kvdock.tiers.disk.tier import StoreBatch
from kvdock.tiers.mover.tier_handle import own_pages
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import PAGE_BYTES, Deadline, ToStore

SEGMENTS, RECORDS, RUN = 100, 64, 16
CAPACITY = SEGMENTS * RECORDS
SEED = 1
Prompts = Iterator[int]


def zipf(draw: random.Random) -> Prompts:
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(5 * CAPACITY // RUN)))
    while True:
        yield bisect.bisect(weights, draw.random() * weights[-1])


def working_set(share: float, of_space: float) -> Callable[[random.Random], Prompts]:
    def prompts(draw: random.Random) -> Prompts:
        once, hot = itertools.count(1 << 20), int(of_space * CAPACITY / RUN)
        while True:
            yield draw.randrange(hot) if draw.random() < share else next(once)

    return prompts


def sessions(draw: random.Random) -> Prompts:
    live: list[list[int]] = []
    names = itertools.count()
    while True:
        if len(live) < 0.7 * CAPACITY / RUN or draw.random() < 0.25:
            live.append([next(names), draw.randint(1, 8)])
        one = draw.choice(live[-int(0.9 * CAPACITY / RUN) :])
        yield one[0]
        one[1] -= 1
        if not one[1]:
            live.remove(one)


TRACES = {"zipf": zipf, "hot": working_set(0.9, 0.8), "scan": working_set(0.5, 0.6), "sessions": sessions}


def lru_hits(prompts: Prompts, count: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in itertools.islice(prompts, count):
        hits += prompt in kept
        kept[prompt] = None
        kept.move_to_end(prompt)
        if len(kept) > CAPACITY // RUN:
            kept.popitem(last=False)
    return hits * RUN


def disk_hits(folder: Path, prompts: Prompts, count: int) -> tuple[int, int]:
    """(hits, records written) of the tier on disk."""
    page = own_pages(PAGE_BYTES)
    digest = checksum(page)
    record = record_bytes(PAGE_BYTES)
    hits = 0
    with ExitStack() as stack:
        io = Io(direct=takes_direct(folder), threads=2)
        stack.callback(io.close)
        segment = RECORDS * record + PAGE_BYTES
        log = Log(folder, io, segment, SEGMENTS * segment, RECORDS)
        stack.callback(log.close)
        index, _ = Index.open(folder / "index.db", 1 << 20)
        stack.callback(index.close)
        space = Space(log, index, io)
        for prompt in itertools.islice(prompts, count):
            names = [PartName(bytes(32), sha256(b"%d.%d" % (prompt, at)).digest(), 0, 0) for at in range(RUN)]
            has = space.use(list(map(key_of, names)))
            hits += sum(has)
            new = [ToStore(Record(name, PAGE_BYTES, digest), page) for name, is_there in zip(names, has, strict=True)
                   if not is_there]
            StoreBatch(space, log, io, new, Deadline()).run()
        return hits, io.wear_bytes // record


def measure(folder: Path, lookups: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    count = lookups // RUN
    for name, trace in TRACES.items():
        of_trace = folder / name
        of_trace.mkdir()
        hits, writes = disk_hits(of_trace, trace(random.Random(SEED)), count)
        lru = lru_hits(trace(random.Random(SEED)), count)
        figures[f"policy_{name}_share_of_lru"] = [hits / lru]
        figures[f"policy_{name}_writes_per_miss"] = [writes / max(1, count * RUN - hits)]
    figures["policy_share_of_lru"] = [min(figures[f"policy_{name}_share_of_lru"][0] for name in TRACES)]
    known = KeyFilter(salt=SEED, most_keys=1 << 22)
    draw = random.Random(SEED)
    while known.add(bytes(32), draw.randbytes(8 << 10), 8):
        pass
    return figures | {"known_chunks": [known.size], "known_bytes_per_chunk": [known.bytes / known.size]}
