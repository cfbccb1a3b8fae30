"""What an object store at some distance costs requests: two servers share one, as two machines would.

A stores prompts, and B asks for them, and for prompts that nobody has stored. Between two prompts B's pool is emptied.

- warm_found_share: of CHUNKS chunks that A has stored with WRITERS writers, how many a request at B has after WAIT_S at
  most, with LATENCY_MS for each request to the store.
- warm_wait_s: how long it waited.
- cold_wait_round_trips: how long a request at B waits for a prompt that nobody has, in latencies of the store. The
  latency is SLOW_MS for this one, so that the processor time of this machine does not count.
- cold_again_wait_ms: the same prompt once more, with LATENCY_MS.
- idle_bytes_per_min: what an idle server without an engine reads from its store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.serving import Engine, ServerProcess, chain
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.shm.checksum import checksum

LATENCY_MS, SLOW_MS = 25.0, 500.0
CHUNKS, WRITERS, PART_BYTES = 256, 8, 16 << 10
WAIT_S, COLD_WAIT_S = 2.0, 20.0
STORED_S = 60.0
IDLE_S = 30.0
TURN_S = 0.002


class FarStore:
    """The server's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.url = f"s3://bench?endpoint=http://127.0.0.1:{int(self._stdout.readline())}"
        self._latency_ms = 0.0

    def take(self, latency_ms: float) -> None:
        """From now on each request takes that long."""
        self._latency_ms = latency_ms
        self.counts()

    def counts(self) -> dict[str, int]:
        print(self._latency_ms, file=self._stdin, flush=True)
        found: dict[str, int] = json.loads(self._stdout.readline())
        return found


@contextmanager
def far_store() -> Iterator[FarStore]:
    with subprocess.Popen(
        [sys.executable, "-m", "bench.tiers.far_s3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            yield FarStore(process)
        finally:
            process.kill()


def awaited(
    engine: Engine, client: Client, keys: bytes, wait_s: float, *, held_s: float = 0.0, turn_s: float = TURN_S
) -> tuple[int, float]:
    """Asks every `turn_s` until nothing more is pending, and holds for `held_s` what has come. Returns the chunks that
    came, and the seconds."""
    request, began_s, beaten_s = f"{time.monotonic_ns():x}", time.monotonic(), 0.0
    while True:
        found = client.lookup(s.Lookup(
            session=engine.session, member=engine.member, request=request, keys=keys, wait_s=wait_s,
            readers=engine.writers,
        ))
        if found.pending is None:
            break
        if time.monotonic() - beaten_s > 1.0:
            beaten_s = time.monotonic()
            client.heartbeat(engine.session, s.Heartbeat(member=engine.member))
        time.sleep(turn_s)  # as an engine, which asks again once in a step
    took_s = time.monotonic() - began_s
    if found.lease is not None:
        time.sleep(held_s)
        client.release(found.lease, s.ReleaseLease(session=engine.session, ranks=list(range(engine.writers))))
    return len(found.chunks), took_s


def wait_until_used(client: Client) -> None:
    until_s = time.monotonic() + STORED_S
    while [one.state for one in client.status().tiers] != ["open"]:
        if time.monotonic() > until_s:
            raise RuntimeError(f"the tier is not used: {client.status().tiers}")
        time.sleep(0.1)  # between two looks


def measure(rounds: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    with ExitStack() as stack:
        store = stack.enter_context(far_store())
        os.environ |= {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        pool_bytes = 8 * CHUNKS * WRITERS * PART_BYTES
        settings = {
            "pool_bytes": pool_bytes, "objects_url": store.url, "tier_asks": 1, "session_cap": 1.0, "total_cap": 1.0,
            "heartbeat_s": 0.2, "missed_heartbeats": 1000,
        }
        servers = [stack.enter_context(ServerProcess("serve", **settings)) for _ in range(2)]
        clients = [stack.enter_context(Client(one.unix)) for one in servers]
        for client in clients:
            wait_until_used(client)
        before = store.counts().get("bytes", 0)
        time.sleep(IDLE_S)
        figures["idle_bytes_per_min"] = [(store.counts().get("bytes", 0) - before) * 60 / IDLE_S]
        engines = []
        for at, client in enumerate(clients):
            engines.append(Engine(client, f"far-{at}", PART_BYTES, WRITERS))
            stack.callback(engines[-1].close)
        for number in range(rounds):
            for name, figure in of_round(store, clients, engines, number).items():
                figures.setdefault(name, []).append(figure)
    return figures


def of_round(store: FarStore, clients: list[Client], engines: list[Engine], number: int) -> dict[str, float]:
    (a, b), at_b = engines, clients[1]
    store.take(0)
    stored, cold = chain(CHUNKS, f"far/{number}"), chain(CHUNKS, f"cold/{number}")
    before = store.counts()["objects"]
    a.store(stored, checksum(bytes(PART_BYTES)))
    until_s = time.monotonic() + STORED_S
    while store.counts()["objects"] < before + CHUNKS:
        if time.monotonic() > until_s:
            raise RuntimeError("A does not store its chunks")
        time.sleep(0.05)
        a.beat()
        b.beat()
    awaited(b, at_b, chain(8, f"first/{number}"), WAIT_S)  # so that B has read the namespace's note
    store.take(SLOW_MS)
    _, slow_s = awaited(b, at_b, cold, COLD_WAIT_S)
    store.take(LATENCY_MS)
    awaited(b, at_b, chain(CHUNKS, f"colder/{number}"), WAIT_S)
    _, again_s = awaited(b, at_b, chain(CHUNKS, f"colder/{number}"), WAIT_S)
    found, warm_s = awaited(b, at_b, stored, WAIT_S)
    at_b.evict(EvictChunks(free_bytes=at_b.status().pool.limit_bytes))
    return {
        "cold_wait_round_trips": slow_s * 1e3 / SLOW_MS, "cold_again_wait_ms": again_s * 1e3,
        "warm_found_share": found / CHUNKS, "warm_wait_s": warm_s,
    }
