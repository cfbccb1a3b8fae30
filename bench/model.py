"""A model of bench.service: a trace's sessions through engines whose steps take a fixed time for each token.

    python -m bench.model --json --trace FILE [--modes one two_random two_affinity]

It runs vLLM's rules for admission, chunked prefill and its own prefix cache (free blocks, the least recently used
first), and the real chunk table, without a GPU and in seconds. So it estimates a policy before it is measured on a
machine; it does not model copies, other processes and CPU time. Kinds: native (vLLM's own offload, LRU of
single blocks; two engines have half each) and kvdock. Figures, for each mode and kind: cached_share, took_s,
ttft_mean_ms, ttft_p50_ms, ttft_p99_ms. On seeds 1 and 2 the cached share of native is that of an H200 within .005
(bench/LOG.md).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import statistics
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench import trace
from bench.bare_table import bare_table
from kvdock.protocol.wire_types import MAX_STORE_KEYS

BLOCK = 16
STEP_TOKENS = 8192
GIB_TOKENS = 8192
"""Tokens for each GiB, in a model with 128 KiB of KV for each token."""
PREFILL_PER_S, STEP_S, ATTENTION_S, LOAD_PER_S = 26_000.0, 0.012, 1.3e-9, 400_000.0
"""Tokens of prefill a second, the fixed time of a step, the time for each pair of tokens, and tokens loaded a second:
about those of an H200."""
KINDS, MODES = ("native", "kvdock"), ("one", "two_random", "two_affinity")


@dataclass(eq=False)
class Request:
    """`names`: one for each whole block of prompt and output, which stands for its content and everything before it."""

    tokens: int
    new_tokens: int
    names: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    made: int = 0
    stored: int = 0
    is_loaded: bool = False
    local: int = 0
    cached: int | None = None
    arrived_s: float = 0.0
    first_s: float = 0.0
    lease: int = 0


def request_of(number: int, one: trace.Request, most_new: int) -> Request:
    names, name, new_tokens = [], 0, max(4, min(one.new_tokens, most_new))
    for at in range((one.tokens + new_tokens) // BLOCK):
        is_own = (at + 1) * BLOCK > one.tokens - trace.OWN_TOKENS
        block = one.blocks[min(at * BLOCK // trace.BLOCK_TOKENS, len(one.blocks) - 1)]
        place = at % (trace.BLOCK_TOKENS // BLOCK)
        name = hash((name, -1 - number, at)) if is_own else hash((name, block, place))
        names.append(name)
    return Request(one.tokens, new_tokens, names)


class PrefixCache:
    """As vLLM's: free blocks keep their content until they are given out, the least recently used first."""

    def __init__(self, blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(blocks))
        self._users: Counter[int] = Counter()
        self._name_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    def found(self, names: Sequence[int]) -> list[int]:
        return [self._block_of[name] for name in itertools.takewhile(self._block_of.__contains__, names)]

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._block_of[name]
            self._users[block] = 1
        return taken

    def know(self, request: Request, begin: int, end: int) -> None:
        """Makes the blocks of tokens [begin, end), which are computed now, available to other requests."""
        for at in range(begin // BLOCK, min(end // BLOCK, len(request.names))):
            if request.names[at] not in self._block_of:
                self._block_of[request.names[at]] = request.blocks[at]
                self._name_of[request.blocks[at]] = request.names[at]

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self.free[block] = None


class NativePool:
    """A pool of single blocks, from which the least recently used is evicted."""

    def __init__(self, tokens: int) -> None:
        self._room, self._blocks = tokens // BLOCK, OrderedDict[int, None]()

    def ask(self, request: Request, tokens: int, _now_s: float) -> int:
        names = list(itertools.takewhile(self._blocks.__contains__, request.names[: tokens // BLOCK]))
        for name in reversed(names):
            self._blocks.move_to_end(name)
        return len(names) * BLOCK

    def store(self, request: Request, tokens: int, _now_s: float) -> None:
        names = request.names[request.stored // BLOCK : tokens // BLOCK]
        for name in reversed([name for name in names if name in self._blocks]):
            self._blocks.move_to_end(name)
        for name in names:
            if name not in self._blocks and len(self._blocks) >= self._room:
                self._blocks.popitem(last=False)
            self._blocks[name] = None
        request.stored = max(request.stored, tokens // BLOCK * BLOCK)

    def loaded(self, request: Request) -> None:
        pass


@cache
def key_of(name: int) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


class TablePool:
    """The real table. Its segment exists only as a number, without memory."""

    def __init__(self, tokens: int, chunk_tokens: int) -> None:
        self._chunk, page = chunk_tokens, 4096
        self._table = bare_table(tokens // chunk_tokens, page, grants=256, session_cap=0.5, total_cap=0.75)
        space = self._table.add_namespace(
            bytes(32), chunk_tokens=chunk_tokens, block_tokens=BLOCK, writers=1, groups=[("full", 0, page)]
        )
        self._session = self._table.open_session(bytes(16), space, 1)
        self._member, self._calls = self._table.add_member(self._session, bytes(16), [0], True, 1), 0

    def _now_ms(self, now_s: float) -> int:
        now_ms = round(1000 * now_s) + 2
        self._table.tick(now_ms)
        self._table.heartbeat(self._member, now_ms)
        self._calls += 1
        return now_ms

    def _keys(self, request: Request, begin: int, end: int) -> bytes:
        per_chunk = self._chunk // BLOCK
        return b"".join(map(key_of, request.names[per_chunk - 1 :: per_chunk][begin:end]))

    def ask(self, request: Request, tokens: int, now_s: float) -> int:
        self.loaded(request)
        count = min(tokens, len(request.names) * BLOCK) // self._chunk
        if not count:
            return 0
        now_ms = self._now_ms(now_s)
        found = self._table.lookup(
            self._session, self._member, self._calls.to_bytes(16), 1, self._keys(request, 0, count), readers=1,
            skip_tokens=0, now_ms=now_ms,
        )
        request.lease = found.lease
        return int(found.hit_tokens)

    def loaded(self, request: Request) -> None:
        if request.lease:
            self._table.release(self._session, request.lease, [0])
        request.lease = 0

    def store(self, request: Request, tokens: int, now_s: float) -> None:
        end = tokens // self._chunk
        for first in range(request.stored // self._chunk, end, MAX_STORE_KEYS):
            now_ms, above = self._now_ms(now_s), self._keys(request, first - 1, first) if first else b""
            keys = self._keys(request, first, min(end, first + MAX_STORE_KEYS))
            granted = self._table.reserve(
                self._session, self._member, self._calls.to_bytes(16), above, keys, groups=0, temporary=False,
                deadline_ms=1000, now_ms=now_ms,
            )
            if granted.grant:
                self._table.commit(self._session, granted.grant, 0, [(at, 0, 0) for at, _ in granted.chunks], now_ms)
        request.stored = max(request.stored, end * self._chunk)


class Engine:
    """A closed loop of `concurrency` requests."""

    def __init__(self, requests: Sequence[Request], pool: Any, concurrency: int, gpu_tokens: int) -> None:
        self.requests, self._queue, self._pool, self._concurrency = requests, deque(requests), pool, concurrency
        self._gpu = PrefixCache(gpu_tokens // BLOCK)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: list[tuple[float, Request]] = []
        self.now_s, self._left = 0.0, len(requests)

    @property
    def is_over(self) -> bool:
        return not self._left

    def step(self) -> None:
        while self._queue and len(self._running) + len(self._waiting) + len(self._loading) < self._concurrency:
            self._queue[0].arrived_s = self.now_s
            self._waiting.append(self._queue.popleft())
        for done_s, request in list(self._loading):
            if done_s <= self.now_s:
                self._loading.remove((done_s, request))
                self._pool.loaded(request)
                self._gpu.know(request, request.local, request.computed)
                self._waiting.appendleft(request)
        work = self._go_on()
        self._admit(work)
        if work:
            self._compute(work)
        else:
            self.now_s = max(self.now_s + 0.001, min((done_s for done_s, _ in self._loading), default=0.0))

    def _go_on(self) -> dict[Request, int]:
        """The running requests' tokens in the next step, by request. Preempts the last requests if there are too few
        blocks."""
        work: dict[Request, int] = {}
        for request in list(self._running):
            if request not in self._running:
                continue
            count = min(request.tokens + request.made - request.computed, STEP_TOKENS - sum(work.values()))
            lacks = -(-(request.computed + count) // BLOCK) - len(request.blocks)
            while lacks > len(self._gpu.free) and self._running[-1] is not request:
                last = self._running.pop()
                work.pop(last, None)
                self._gpu.give_back(last.blocks)
                last.blocks, last.computed, last.is_loaded = [], 0, False
                self._waiting.appendleft(last)
            if count > 0 and lacks <= len(self._gpu.free):
                request.blocks += self._gpu.take(max(0, lacks))
                work[request] = count
        return work

    def _admit(self, work: dict[Request, int]) -> None:
        while self._waiting and (budget := STEP_TOKENS - sum(work.values())) > 0:
            request = self._waiting[0]
            if not request.is_loaded and not self._finds(request):
                return
            if (count := min(request.tokens - request.computed, budget)) <= 0 or request not in self._waiting:
                continue
            lacks = -(-(request.computed + count) // BLOCK) - len(request.blocks)
            if lacks > len(self._gpu.free):
                return
            request.blocks += self._gpu.take(max(0, lacks))
            self._waiting.remove(request)
            self._running.append(request)
            work[request] = count

    def _finds(self, request: Request) -> bool:
        """False: the request does not fit. Else it has its cached blocks, and waits for a load if there is something to
        load."""
        local = self._gpu.found(request.names[: (request.tokens - 1) // BLOCK])
        request.local = request.computed = len(local) * BLOCK
        found = max(request.local, self._pool.ask(request, request.tokens - 1, self.now_s))
        free = len(self._gpu.free) - sum(block in self._gpu.free for block in local)
        if -(-request.tokens // BLOCK) - len(local) > free:
            return False
        self._gpu.share(local)
        request.blocks, request.is_loaded = local, True
        request.cached = found if request.cached is None else request.cached
        if found == request.local:
            self._pool.loaded(request)
            return True
        request.blocks = [*local, *self._gpu.take(-(-found // BLOCK) - len(local))]
        request.computed = found
        self._loading.append((self.now_s + (found - request.local) / LOAD_PER_S, request))
        self._waiting.popleft()
        return True

    def _compute(self, work: dict[Request, int]) -> None:
        self.now_s += STEP_S + sum(work.values()) / PREFILL_PER_S
        self.now_s += ATTENTION_S * sum(count * request.computed for request, count in work.items())
        for request, count in work.items():
            self._gpu.know(request, request.computed, request.computed + count)
            request.computed += count
            if request.computed >= request.tokens + request.made:
                request.first_s = request.first_s or self.now_s
                request.made += 1
            self._pool.store(request, min(request.computed, len(request.names) * BLOCK), self.now_s)
            if request.made >= request.new_tokens:
                self._running.remove(request)
                self._gpu.give_back(request.blocks)
                self._left -= 1


def served(chosen: argparse.Namespace, kind: str, mode: str, sampled: Sequence[trace.Request]) -> dict[str, float]:
    count = 1 if mode == "one" else 2
    parts: list[list[Request]] = [[] for _ in range(count)]
    for number, one in enumerate(sampled):
        routed_by = one.session if mode == "two_affinity" else one.number
        at = random.Random(f"{chosen.seed}/{routed_by}").randrange(2) if count > 1 else 0
        parts[at].append(request_of(number, one, chosen.new))
    host = int(chosen.host_gib * GIB_TOKENS)
    shared = TablePool(host, chosen.chunk_tokens)
    engines = [
        Engine(part, NativePool(host // count) if kind == "native" else shared, chosen.concurrency // count,
               int(chosen.gpu_gib * GIB_TOKENS) // count)
        for part in parts
    ]
    while running := [engine for engine in engines if not engine.is_over]:
        min(running, key=lambda engine: engine.now_s).step()
    done = [request for engine in engines for request in engine.requests]
    ttft_ms = sorted(1e3 * (request.first_s - request.arrived_s) for request in done)
    return {
        "cached_share": sum(request.cached or 0 for request in done) / sum(request.tokens for request in done),
        "took_s": max(engine.now_s for engine in engines),
        "ttft_mean_ms": statistics.mean(ttft_ms),
        "ttft_p50_ms": statistics.median(ttft_ms),
        "ttft_p99_ms": ttft_ms[len(ttft_ms) * 99 // 100],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, as bench/trace.py reads them")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seed", type=int, default=1, help="of sessions and routing")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--most", type=int, default=300, help="requests")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=32, help="the most tokens that a request generates")
    parser.add_argument("--concurrency", type=int, default=6, help="requests at a time, of all engines together")
    parser.add_argument("--gpu-gib", type=float, default=12.0, help="KV memory on the GPU, of all engines together")
    parser.add_argument("--host-gib", type=float, default=28.0, help="KV memory of the host, of all engines together")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    chosen = parser.parse_args(arguments)
    sampled = trace.sampled_sessions(
        trace.read(chosen.trace), count=chosen.sessions, seed=chosen.seed, most=chosen.most,
        longest_tokens=chosen.longest,
    )
    figures: dict[str, float] = {"seed": chosen.seed, "requests": len(sampled)}
    for mode in chosen.modes:
        for kind in chosen.kinds:
            found = served(chosen, kind, mode, sampled)
            figures |= {f"{mode}_{kind}_{name}": float(f"{value:.4g}") for name, value in found.items()}
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
