"""A trace's requests through the real chunk table: which share of their tokens each eviction policy finds.

    python -m bench.replay --json --trace FILE

Figures are shares of all prompt tokens. `POLICY_2` is that of the whole trace in a pool that fits 2 % of the trace's
distinct chunks of 512 tokens; `POLICY_5` and `POLICY_10` fit 5 % and 10 %. `sessions60_POLICY` and `sessions100_POLICY`
show what one engine sees: the sessions that bench.service samples with seeds 1 and 2, in a pool that fits 448 chunks.
Each request is looked up, its missing chunks are stored, and its lease is released before the next one comes.

With `--rooms` it is `SESSIONS_ROOM_POLICY` instead, for pools of so many chunks, and the sessions of `--sessions` (0:
all) with prompts of at most `--longest` tokens, whole. With `--gib` it is `found_GIB_POLICY`: each number is the size
of a pool in GiB of an 8B model's KV, which has 16 chunks a GiB.

`default` is the policy of a server without lower tiers (`selective`); with tiers it is `adaptive`.

`hinted` is the default policy, with a hint after the last request of each conversation that it has ended. That is
hindsight: the replay has read the whole trace, and an engine knows the end only from its clients. So it is a bound of
what such hints bring, not a figure to expect. A conversation is what bench/trace.py calls a session; one of a single
request ends at once.

`belady` is no policy but the bound: it knows the future, and lets go of the chunk whose next use is farthest (Belady,
"A study of replacement algorithms for a virtual-storage computer", 1966). A use of a chunk is one of those before it,
so its choice is always the last of a chain.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.bare_table import bare_table
from bench.trace import BLOCK_TOKENS, Request, read, sampled_sessions
from kvdock._core import CONVERSATION_ENDED

SLOT_BYTES = 4096
CHUNKS_A_GIB = 16
STEP_CHUNKS = 16
"""An engine computes 8,192 tokens in a step, and stores them after it."""
PERCENT = (2, 5, 10)
SESSIONS = ((60, 1), (100, 2))
SESSION_ROOM, SESSION_REQUESTS, SESSION_TOKENS = 448, 300, 32768
NEVER = 1 << 60


@dataclass(frozen=True)
class Workload:
    name: str
    requests: Sequence[Request]
    room: int
    """The capacity of the pool, in chunks of 512 tokens."""


def workloads(trace: Sequence[Request]) -> list[Workload]:
    different = len({block for request in trace for block in request.whole_blocks})
    found = [Workload(str(percent), trace, different * percent // 100) for percent in PERCENT]
    for count, seed in SESSIONS:
        sampled = sampled_sessions(
            trace, count=count, seed=seed, most=SESSION_REQUESTS, longest_tokens=SESSION_TOKENS
        )
        found.append(Workload(f"sessions{count}", sampled, SESSION_ROOM))
    return found


def of_rooms(trace: Sequence[Request], rooms: Sequence[int], count: int, seed: int, longest: int) -> list[Workload]:
    """Whole sessions in pools of each size. `count` 0: all sessions."""
    requests = [one for one in trace if one.tokens <= longest]
    if count:
        requests = sampled_sessions(
            trace, count=count, seed=seed, most=len(trace), longest_tokens=longest, lengths=range(3, len(trace) + 1)
        )
    return [Workload(f"sessions{count or '_all'}_{room}", requests, room) for room in rooms]


def hit_share(requests: Sequence[Request], hits: Sequence[int]) -> float:
    """`hits`: how many chunks each request found."""
    return sum(hits) * BLOCK_TOKENS / sum(one.tokens for one in requests)


@cache
def key_of(block: int) -> bytes:
    return hashlib.blake2b(str(block).encode(), digest_size=32).digest()


class Pool:
    """A table whose segment exists only as a number: it hands out slots, and nobody reads or writes them."""

    def __init__(self, room: int, policy: str) -> None:
        self._table = bare_table(room, SLOT_BYTES, grants=16, session_cap=1.0, total_cap=1.0)
        self._table.set_eviction({"default": "selective", "hinted": "selective"}.get(policy, policy))
        self._space = self._table.add_namespace(
            bytes(32), chunk_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, writers=1, groups=[("full", 0, SLOT_BYTES)]
        )
        self._session = self._table.open_session(bytes(16), self._space, 1)
        self._member = self._table.add_member(self._session, bytes(16), [0], True, 1)
        self._stores = 0

    def serve(self, number: int, blocks: Sequence[int], now_ms: int) -> int:
        """How many chunks the request finds. Afterwards the pool has as much of it as fits."""
        table, session, member = self._table, self._session, self._member
        table.tick(now_ms)
        table.heartbeat(member, now_ms)
        keys = b"".join(map(key_of, blocks))
        found = table.lookup(
            session, member, number.to_bytes(16), 1, keys, readers=1, skip_tokens=0, now_ms=now_ms
        )
        hit = found.hit_tokens // BLOCK_TOKENS
        for first in range(hit, len(blocks), STEP_CHUNKS):
            self._stores += 1
            granted = table.reserve(
                session, member, self._stores.to_bytes(16), key_of(blocks[first - 1]) if first else b"",
                keys[32 * first : 32 * (first + STEP_CHUNKS)], groups=0, temporary=False, deadline_ms=1000,
                now_ms=now_ms,
            )
            if granted.grant:
                table.commit(session, granted.grant, 0, [(at, 0, 0) for at, _ in granted.chunks], now_ms)
            if granted.limited:
                break
        if found.lease:
            table.release(session, found.lease, [0])
        return hit

    def end(self, blocks: Sequence[int]) -> None:
        """Reports that the request's conversation has ended."""
        self._table.lower(self._space, b"".join(map(key_of, blocks)), CONVERSATION_ENDED)


def replayed(work: Workload, policy: str) -> float:
    pool, hits = Pool(work.room, policy), []
    last = {one.session: number for number, one in enumerate(work.requests)} if policy == "hinted" else {}
    for number, one in enumerate(work.requests):
        hits.append(pool.serve(number, one.whole_blocks, one.at_ms + 2))
        if last.get(one.session) == number:
            pool.end(one.whole_blocks)
    return hit_share(work.requests, hits)


def belady(work: Workload) -> float:
    uses: dict[int, list[int]] = defaultdict(list)  # by chunk: the numbers of the requests that use it, the last first
    for number in range(len(work.requests) - 1, -1, -1):
        for block in work.requests[number].whole_blocks:
            uses[block].append(number)
    resident: dict[int, int] = {}  # by chunk: the request that uses it next
    farthest: list[tuple[int, int, int]] = []
    hits = []
    for one in work.requests:
        hit, blocks = 0, one.whole_blocks
        while hit < len(blocks) and blocks[hit] in resident:
            hit += 1
        hits.append(hit)
        for depth, block in enumerate(blocks):
            uses[block].pop()
            following = uses[block][-1] if uses[block] else NEVER
            resident[block] = following
            heapq.heappush(farthest, (-following, -depth, block))
        while len(resident) > work.room:
            negative, _, block = heapq.heappop(farthest)
            if resident.get(block) == -negative:
                del resident[block]
    return hit_share(work.requests, hits)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, as bench/trace.py reads them")
    parser.add_argument("--policies", nargs="+", default=["lru", "default", "hinted", "belady"])
    parser.add_argument("--rooms", type=int, nargs="+", metavar="CHUNKS", help="sizes of pools, of 512 tokens each")
    parser.add_argument("--gib", type=int, nargs="+", metavar="GIB", help="sizes of pools, of 16 chunks a GiB")
    parser.add_argument("--sessions", type=int, default=0, help="with --rooms: how many (default all)")
    parser.add_argument("--seed", type=int, default=1, help="with --rooms: of the sessions that are chosen")
    parser.add_argument("--longest", type=int, default=1 << 20, help="with --rooms: tokens of the longest prompt")
    chosen = parser.parse_args(arguments)
    figures: dict[str, float] = {}
    trace = read(chosen.trace)
    rooms = chosen.rooms or [CHUNKS_A_GIB * gib for gib in chosen.gib or ()]
    works = of_rooms(trace, rooms, chosen.sessions, chosen.seed, chosen.longest) if rooms else workloads(trace)
    if chosen.gib:
        works = [replace(work, name=f"found_{gib}") for work, gib in zip(works, chosen.gib, strict=True)]
    for work in works:
        for policy in chosen.policies:
            share = belady(work) if policy == "belady" else replayed(work, policy)
            name = f"{policy}_{work.name}" if work.name.isdigit() else f"{work.name}_{policy}"
            figures[name] = round(share, 4)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
