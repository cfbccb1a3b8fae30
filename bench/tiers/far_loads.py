"""How fast a request gets a prefix from an object store at some distance, beside plain GETs of the same objects.

An engine's prefix of CHUNKS chunks of CHUNK_BYTES is in the store and no longer in the pool. A request waits for it
until all of it is there: questions, loads, checksums and leases are in that time. It asks as often as engines do.
obstore then gets the same objects in this process, CONNECTIONS at once. They take turns in going first.

- warm_load_gb_s, gets_gb_s: both, with LATENCY_MS for each request to the store.
- warm_load_share_of_gets: the first as a share of the second.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.store import S3Store

from bench.serving import Engine, ServerProcess, chain
from bench.tiers.far import STORED_S, awaited, far_store, wait_until_used
from kvdock.client.client import Client
from kvdock.connectors.waits import ASK_S
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.shm.checksum import checksum

LATENCY_MS = 25.0
CHUNKS, CHUNK_BYTES = 64, 8 << 20
CONNECTIONS = 64
"""As many as the tier has by default."""
WAIT_S = 30.0


def measure(rounds: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"warm_load_gb_s": [], "gets_gb_s": [], "warm_load_share_of_gets": []}
    with ExitStack() as stack:
        store = stack.enter_context(far_store())
        os.environ |= {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        server = stack.enter_context(ServerProcess(
            "serve", pool_bytes=4 << 30, objects_url=store.url, session_cap=1.0, total_cap=1.0,
            heartbeat_s=0.2, missed_heartbeats=1000,
        ))
        client = stack.enter_context(Client(server.unix))
        wait_until_used(client)
        engine = Engine(client, "far", CHUNK_BYTES)
        stack.callback(engine.close)
        keys = chain(CHUNKS, "far loads")
        engine.store(keys, checksum(bytes(CHUNK_BYTES)))
        getter = S3Store.from_url(
            f"s3://{urlsplit(store.url).netloc}", endpoint=parse_qs(urlsplit(store.url).query)["endpoint"][0],
            client_options={"allow_http": True},
        )
        paths = stored(getter, engine)
        store.take(LATENCY_MS)
        ways: list[Callable[[], float]] = [
            lambda: loading_s(client, engine, keys), lambda: asyncio.run(getting_s(getter, paths))
        ]
        for way in ways:
            way()  # makes connections, and reads the namespace's note
        for number in range(rounds):
            at = number % 2
            times = {at: ways[at](), 1 - at: ways[1 - at]()}
            figures["warm_load_gb_s"].append(CHUNKS * CHUNK_BYTES / times[0] / 1e9)
            figures["gets_gb_s"].append(CHUNKS * CHUNK_BYTES / times[1] / 1e9)
            figures["warm_load_share_of_gets"].append(times[1] / times[0])
    return figures


def stored(getter: S3Store, engine: Engine) -> list[str]:
    """Waits until all chunks are in the store. Returns the paths of their objects."""
    until_s = time.monotonic() + STORED_S
    while time.monotonic() < until_s:
        engine.beat()
        paths = [one["path"] for one in obstore.list(getter).collect() if one["size"] >= CHUNK_BYTES]
        if len(paths) == CHUNKS:
            return paths
        time.sleep(0.1)  # the store does not say when it has all
    raise RuntimeError(f"{len(paths)} of {CHUNKS} chunks are in the store")


def loading_s(client: Client, engine: Engine, keys: bytes) -> float:
    """How long a request waits for all of them."""
    client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))
    found, took_s = awaited(engine, client, keys, WAIT_S, turn_s=ASK_S)
    if found != CHUNKS:
        raise RuntimeError(f"{found} of {CHUNKS} chunks came within {WAIT_S:.0f} s")
    return took_s


async def getting_s(getter: S3Store, paths: list[str]) -> float:
    open_ones = asyncio.Semaphore(CONNECTIONS)

    async def get(path: str) -> int:
        async with open_ones:
            return len(await (await obstore.get_async(getter, path)).bytes_async())

    began_s = time.monotonic()
    lengths = await asyncio.gather(*map(get, paths))
    took_s = time.monotonic() - began_s
    if min(lengths) < CHUNK_BYTES:
        raise RuntimeError(f"an object has {min(lengths)} bytes, and a chunk {CHUNK_BYTES}")
    return took_s
