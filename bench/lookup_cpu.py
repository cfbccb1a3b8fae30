"""The CPU time of a lookup in the server and in the client, which varies less than its latency on a shared machine.

    python -m bench.lookup_cpu --json

Lookup-and-lock of 2, 32 and 512 resident keys over the Unix socket, one client; each call also releases the lease of
the call before. Time on a core is the scheduler's own count (/proc/PID/task/TID/schedstat), all threads added up. A
round is thousands of calls of one kind; of several rounds the cheapest counts, because other programs only add time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from bench.control import lookups
from bench.serving import Engine, ServerProcess, chain
from kvdock.client.client import Client

CALLS = {2: 2500, 32: 2500, 512: 800}
WARM_UP = 300
POOL_BYTES = 1 << 30


def on_core_ns(pid: int) -> int:
    """Time that the threads of a process have spent on a core."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def measure(rounds: int) -> dict[str, float]:
    """Microseconds a call: of the server's CPU, of the client's CPU, and from the call to its answer (the round's
    median)."""
    best: dict[str, float] = {}
    quiet = {"watch_s": 1.0, "history_interval_s": 60.0, "heartbeat_s": 60.0}
    with ServerProcess("serve", pool_bytes=POOL_BYTES, **quiet) as server, Client(server.unix) as client:
        keys = chain(max(CALLS), "resident")
        engines = {count: Engine(client, f"keys-{count}") for count in CALLS}
        engines[2].store(keys)
        calls = {count: lookups(engine, client, keys[: count * 32], count) for count, engine in engines.items()}
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        for _ in range(rounds):
            for count, number in CALLS.items():
                before = on_core_ns(server.pid), time.thread_time_ns()
                took_ns = [calls[count]() for _ in range(number)]
                after = on_core_ns(server.pid), time.thread_time_ns()
                found = {
                    f"server_cpu_{count}_us": (after[0] - before[0]) / number / 1e3,
                    f"client_cpu_{count}_us": (after[1] - before[1]) / number / 1e3,
                    f"lookup_{count}_us": statistics.median(took_ns) / 1e3,
                }
                best |= {name: round(min(value, best.get(name, value)), 1) for name, value in found.items()}
        for engine in engines.values():
            engine.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    print(json.dumps(found) if arguments.json else "\n".join(f"{name:>20} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
