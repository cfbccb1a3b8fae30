"""Keeps a server's tier busy in both directions, in a process of its own, so that the process that measures lookups
does not do this work.

    python -m bench.tiers.load ADDRESS PART_BYTES

It stores new chunks somewhat faster than the tier writes them, and looks up old chunks that the pool has evicted, two
prompts at a time. All chunks are zeros, so nothing needs to be written into the pool. A line on stdin starts the load,
another one stops it; a line on stdout reports that the tier is busy, or idle again.
"""

from __future__ import annotations

import random
import select
import sys
import time
from collections import deque

from bench.serving import Engine, chain
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.reports import TierView
from kvdock.shm.checksum import checksum

CHUNKS = 16
"""Chunks of each prompt."""
POOL_PROMPTS = 24
"""The number of prompts that fit into the pool."""
AGE = range(2 * POOL_PROMPTS, 4 * POOL_PROMPTS)
"""How many prompts ago a prompt that is looked up was stored: the pool has evicted it, and the tier has it."""
FETCHES = 2
OVERDRIVE = 1.25
TURN_S = 0.05
"""How often a request asks whether its chunks have come: about as often as an engine does."""
WAIT_S = 30.0
QUIET_S = 2.0
"""A tier that has done nothing for this long is idle: its mover learns of new chunks and reports more often."""


class Load:
    def __init__(self, client: Client, part_bytes: int) -> None:
        self._client, self._engine = client, Engine(client, "load", part_bytes)
        self._sum = checksum(bytes(part_bytes))
        self._part_bytes = part_bytes
        self._stored: deque[bytes] = deque(maxlen=AGE.stop)
        self._fetches: dict[str, bytes] = {}
        self._numbers = 0
        self._draw = random.Random(1)
        self._beaten_s = 0.0
        self._every_s = 0.0

    @property
    def _tier(self) -> TierView:
        return self._client.status().tiers[0]

    def prepare(self) -> None:
        """Fills the tier, and measures how fast it writes."""
        began_s = time.monotonic()
        for number in range(AGE.stop):
            self._store()
            wanted = (number + 1 - POOL_PROMPTS // 2) * CHUNKS * self._part_bytes
            while self._done_bytes() < wanted:  # chunks that wait to be written are not evicted
                self._rest()
        self._every_s = (time.monotonic() - began_s) / AGE.stop / OVERDRIVE

    def _done_bytes(self) -> int:
        """Bytes that the tier has written or left out."""
        counters = self._tier.counters
        left_out = sum(count for name, count in counters.items() if name.startswith("left_out_"))
        return counters.get("stored_bytes", 0) + left_out * self._part_bytes

    def run(self) -> int:
        """Keeps the tier busy until a line comes; returns how many prompts were loaded."""
        due_s, came, is_told = time.monotonic(), 0, False
        while not select.select([sys.stdin], [], [], TURN_S)[0]:
            while due_s < time.monotonic():
                self._store()
                due_s += self._every_s
            came += self._look()
            if came >= FETCHES and not is_told:
                is_told = True
                print("busy", flush=True)
        return came

    def quiet(self) -> None:
        """Returns once the tier has become idle."""
        for request, keys in self._fetches.items():
            while (found := self._lookup(request, keys)).pending is not None:
                self._rest()
            self._release(found)
        self._fetches.clear()
        before, now = None, self._tier
        while now.queued_bytes or now.counters != before:
            before = now.counters
            self._rest(QUIET_S)
            now = self._tier

    def _look(self) -> int:
        """Repeats the lookup of each request; returns how many requests have ended with all their chunks."""
        came = 0
        for request, keys in list(self._fetches.items()):
            found = self._lookup(request, keys)
            if found.pending is None:
                del self._fetches[request]
                came += len(found.chunks) == CHUNKS
                self._release(found)
        while len(self._fetches) < FETCHES:
            self._numbers += 1
            keys = self._stored[-self._draw.choice(AGE)]
            self._fetches[f"fetch-{self._numbers}"] = keys
        self._beat()
        return came

    def _lookup(self, request: str, keys: bytes) -> s.LookupAnswer:
        return self._client.lookup(s.Lookup(
            session=self._engine.session, member=self._engine.member, request=request, keys=keys, wait_s=WAIT_S
        ))

    def _release(self, found: s.LookupAnswer) -> None:
        if found.lease is not None:
            self._client.release(found.lease, s.ReleaseLease(session=self._engine.session, ranks=[0]))

    def _store(self) -> None:
        self._numbers += 1
        keys = chain(CHUNKS, f"load/{self._numbers}")
        self._engine.store(keys, self._sum)
        self._stored.append(keys)

    def _rest(self, seconds: float = TURN_S) -> None:
        time.sleep(seconds)  # between two queries
        self._beat()

    def _beat(self) -> None:
        if time.monotonic() - self._beaten_s > 1.0:
            self._beaten_s = time.monotonic()
            self._engine.beat()


def main(address: str, part_bytes: str) -> None:
    with Client(address) as client:
        load = Load(client, int(part_bytes))
        load.prepare()
        load.quiet()
        print("idle", flush=True)
        while sys.stdin.readline():
            load.run()
            sys.stdin.readline()
            load.quiet()
            print("idle", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
