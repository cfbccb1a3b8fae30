"""What a call of the server costs, compared with a bare ASGI server under the same settings.

    python -m bench.control --json

Lookup-and-lock of resident keys over the Unix socket, seen by the client: from the call to its typed answer, every
part decoded. Each lookup carries the release of the lease before it (release_later), so a figure holds one lock and
one unlock. Calls of all kinds come in random order, each after a call of the floor, so that both servers are equally
warm: the same client, uvicorn with the same settings, an app that reads the body and answers 12 fixed bytes.
`*_per_s_8_clients`: 32-key lookups of eight processes on whatever cores there are. The table alone: lookup and
release of 512 keys from Python. `server_anon_rss_mib`: anonymous memory of the server with 100 000 chunks stored
through the API. A key of 32 bytes names a chunk of one 4 KiB part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Barrier
from typing import TypeAlias

from bench import table
from bench.serving import MIB, PART_BYTES, Engine, ServerProcess, chain
from kvdock.client.client import Client
from kvdock.client.http_client import HttpClient
from kvdock.protocol import schemas as s

CLIENTS = 8
RESIDENT = 100_000
STORE_KEYS = 500
FILL_POOL = RESIDENT * PART_BYTES + 128 * MIB
READY_POOL = 16 << 30
FLOOR_CALL = s.ReleaseLease(session="0" * 16, ranks=[0])
BEAT_S = 2.0

Timed = Callable[[], int]
"""Makes one call, and returns how many nanoseconds it took."""
Counts: TypeAlias = "SynchronizedArray[int]"


def lookups(engine: Engine, client: Client, keys: list[str] | bytes, hit_chunks: int) -> Timed:
    """Calls that lock all of `keys` and release the lease of the call before."""
    number = 0

    def call() -> int:
        nonlocal number
        number += 1
        body = s.Lookup(session=engine.session, member=engine.member, request=f"r{number}", keys=keys)
        began = time.perf_counter_ns()
        found = client.lookup(body)
        took_ns = time.perf_counter_ns() - began
        if found.lease is None or len(found.chunks) != hit_chunks or found.refused_releases:
            raise RuntimeError(f"lookup locked {len(found.chunks)} chunks of {hit_chunks}: {found.limited_by}")
        client.release_later(found.lease, engine.session, [0])
        return took_ns

    return call


def floor_calls(client: Client) -> Timed:
    def call() -> int:
        began = time.perf_counter_ns()
        client.release("0" * 16, FLOOR_CALL)
        return time.perf_counter_ns() - began

    return call


def quantile(took_ns: list[int], share: float) -> float:
    """The quantile in ms."""
    return sorted(took_ns)[min(len(took_ns) - 1, int(len(took_ns) * share))] / 1e6


def latencies(server: ServerProcess, floor: ServerProcess, rounds: int) -> dict[str, float]:
    """Latencies of all kinds of calls, which take turns; each kind has a session of its own, so it carries its own
    releases."""
    keys = chain(512, "resident")
    hex_keys = [keys[at : at + 32].hex() for at in range(0, len(keys), 32)]
    with ExitStack() as stack:
        packed, plain = stack.enter_context(Client(server.unix)), stack.enter_context(Client(server.unix, packed=False))
        bare = stack.enter_context(Client(floor.unix))
        other = stack.enter_context(HttpClient(server.unix))
        engines = [Engine(packed, name) for name in ("two", "thirty-two", "all", "json", "httpx")]
        engines[0].store(keys)
        calls: dict[str, Timed] = {
            "2": lookups(engines[0], packed, keys[: 2 * 32], 2),
            "32": lookups(engines[1], packed, keys[: 32 * 32], 32),
            "512": lookups(engines[2], packed, keys, 512),
            "json": lookups(engines[3], plain, hex_keys, 512),
            "httpx": lookups(engines[4], other, hex_keys[:32], 32),
        }
        floor_call = floor_calls(bare)
        took: dict[str, list[int]] = {name: [] for name in ("floor", *calls)}
        order = random.Random(1)
        beaten_s = 0.0
        for number in range(-20, rounds):
            if time.monotonic() - beaten_s > BEAT_S:
                beaten_s = time.monotonic()
                for engine in engines:
                    engine.beat()
            for name in order.sample(list(calls), len(calls)):  # so that no kind always comes after the slowest
                pair = (("floor", floor_call()), (name, calls[name]()))
                if number >= 0:
                    for kind, took_ns in pair:
                        took[kind].append(took_ns)
        for engine in engines:
            engine.close()
    return {
        "asgi_floor_p50_ms": quantile(took["floor"], 0.5),
        "lookup_2_p50_ms": quantile(took["2"], 0.5),
        "lookup_32_p50_ms": quantile(took["32"], 0.5),
        "lookup_512_p50_ms": quantile(took["512"], 0.5),
        "lookup_512_json_p50_ms": quantile(took["json"], 0.5),
        "lookup_512_p99_ms": quantile(took["512"], 0.99),
        "httpx_lookup_32_p50_ms": quantile(took["httpx"], 0.5),
    }


def client_process(
    address: str, floor_address: str, number: int, rounds: int, round_s: float, start: Barrier, counts: Counts
) -> None:
    """Rounds of calls as fast as possible: floor, lookups, floor, lookups …; all processes start each round
    together."""
    keys = chain(512, "resident")[: 32 * 32]
    with Client(address) as client, Client(floor_address) as bare:
        engine = Engine(client, f"client-{number}")
        calls = (floor_calls(bare), lookups(engine, client, keys, 32))
        for turn in range(2 * rounds):
            engine.beat()
            call, done = calls[turn % 2], 0
            call()
            start.wait()
            until = time.monotonic() + round_s
            while time.monotonic() < until:
                call()
                done += 1
            counts[turn * CLIENTS + number] = done
            start.wait()
        engine.close()


def rates(server: ServerProcess, floor: ServerProcess, rounds: int, round_s: float) -> dict[str, float]:
    """Calls a second of CLIENTS processes together: medians over rounds of lookups and of the floor, which take
    turns."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(CLIENTS)
    counts = context.Array("l", 2 * rounds * CLIENTS)
    processes = [
        context.Process(
            target=client_process, args=(server.unix, floor.unix, number, rounds, round_s, start, counts)
        )
        for number in range(CLIENTS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a client process ended with {process.exitcode}")
    per_turn = [sum(counts[turn * CLIENTS : (turn + 1) * CLIENTS]) / round_s for turn in range(2 * rounds)]
    return {
        "lookups_per_s_8_clients": statistics.median(per_turn[1::2]),
        "asgi_per_s_8_clients": statistics.median(per_turn[::2]),
    }


def fill(server: ServerProcess, chunks: int) -> None:
    with Client(server.unix) as client:
        engine = Engine(client, "filler")
        for number in range(chunks // STORE_KEYS):
            engine.store(chain(STORE_KEYS, f"fill/{number}"))
            if number % 20 == 0:
                engine.beat()
        ready = client.status().chunks.ready
        engine.close()
    if ready < chunks:
        raise RuntimeError(f"{ready} chunks resident, wanted {chunks}")


def ready_seconds() -> tuple[float, int]:
    """(seconds from starting the process to its first answerable call, bytes of the pool)."""
    shm = os.statvfs("/dev/shm")
    pool_bytes = min(READY_POOL, shm.f_bavail * shm.f_frsize * 9 // 10)
    took = []
    for _ in range(3):
        with ServerProcess("serve", pool_bytes=pool_bytes) as server:
            took.append(server.ready_s)
    return statistics.median(took), pool_bytes


def measure(rounds: int, round_s: float) -> tuple[dict[str, float], list[str]]:
    """(the figures, remarks that belong to them)."""
    figures: dict[str, float] = {}
    settings = {"pool_bytes": FILL_POOL, "segment_bytes": FILL_POOL, "session_cap": 1.0, "total_cap": 1.0}
    with ServerProcess("floor") as floor, ServerProcess("serve", **settings, low_water=0, high_water=0) as server:
        figures |= latencies(server, floor, rounds)
        fill(server, RESIDENT)
        figures |= rates(server, floor, 5, round_s)
        anonymous_mib = server.private_mib()
    figures["table_lookup_512_us_10k"], _ = table.measure_apart(10_000)
    figures["table_lookup_512_us_1m"], per_chunk = table.measure_apart(1_000_000)
    figures["ready_s"], pool_bytes = ready_seconds()
    figures["server_anon_rss_mib"], figures["table_bytes_per_chunk"] = anonymous_mib, per_chunk
    notes = [] if pool_bytes == READY_POOL else [f"ready_s: with a pool of {pool_bytes} bytes, as /dev/shm allows"]
    return figures, notes


KEYS = (
    "asgi_floor_p50_ms", "lookup_2_p50_ms", "lookup_32_p50_ms", "lookup_512_p50_ms", "lookup_512_json_p50_ms",
    "lookup_512_p99_ms", "httpx_lookup_32_p50_ms", "table_lookup_512_us_10k", "table_lookup_512_us_1m",
    "lookups_per_s_8_clients", "asgi_per_s_8_clients", "ready_s", "server_anon_rss_mib", "table_bytes_per_chunk",
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.control", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each kind")
    parser.add_argument("--round-s", type=float, default=1.0, help="seconds of each throughput round")
    chosen = parser.parse_args(arguments)
    figures, notes = measure(chosen.rounds, chosen.round_s)
    for note in notes:
        print(note, file=sys.stderr)
    rounded = {key: round(figures[key], 4) for key in KEYS}
    print(json.dumps(rounded) if chosen.json else "\n".join(f"{key:26} {value}" for key, value in rounded.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
