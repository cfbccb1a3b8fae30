"""The time of lookups while a tier is busy, divided by their time while it is idle.

Lookups of 512 resident keys, as in bench.control, at two servers in turns: one with a tier on disk, and one without.
Another process (bench/tiers/load.py) makes the tier busy with writing and loading, and idle again, in turns. So the
second server shows the effect of other work on the machine on lookups, and the first the effect of the tier.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.control import BEAT_S, Timed, lookups
from bench.serving import Engine, ServerProcess, chain
from bench.tiers.load import AGE, CHUNKS, POOL_PROMPTS
from kvdock.client.client import Client

KEYS = 512
WARM_UP = 100
PLACES = ("with", "without")


class Engines:
    """One engine at each server, which has all of its keys; `time` measures their lookups in turns."""

    def __init__(self, servers: list[ServerProcess], stack: ExitStack) -> None:
        keys = chain(KEYS, "resident")
        self._engines: list[Engine] = []
        self._calls: dict[str, Timed] = {}
        self._beaten_s = 0.0
        for place, server in zip(PLACES, servers, strict=True):
            client = stack.enter_context(Client(server.unix))
            engine = Engine(client, place)
            stack.callback(engine.close)
            engine.store(keys)
            self._engines.append(engine)
            self._calls[place] = lookups(engine, client, keys, KEYS)
            self._calls[place]()  # from now on a lease keeps the chunks

    def time(self, calls: int) -> dict[str, float]:
        """The median time in ms of `calls` lookups at each server."""
        took_ns: dict[str, list[int]] = {place: [] for place in PLACES}
        for number in range(calls):
            if time.monotonic() - self._beaten_s > BEAT_S:
                self._beaten_s = time.monotonic()
                for engine in self._engines:
                    engine.beat()
            for place in PLACES if number % 2 else reversed(PLACES):
                took_ns[place].append(self._calls[place]())
        return {place: statistics.median(took) / 1e6 for place, took in took_ns.items()}

    def while_it_is(self, word: str, load: subprocess.Popen[str], calls: int) -> dict[str, float]:
        """As `time`, once the load has reported that the tier is "busy" or "idle"; then switches the load to the other
        state."""
        assert load.stdin is not None and load.stdout is not None
        if (said := load.stdout.readline().strip()) != word:
            raise RuntimeError(f"the load said {said!r}, wanted {word!r}")
        self.time(WARM_UP)
        found = self.time(calls)
        load.stdin.write("\n")
        load.stdin.flush()
        return found


def measure(folder: Path, rounds: int, calls: int, part_bytes: int) -> dict[str, list[float]]:
    """The figures of each round, by name. `folder`: an empty one for the tier; `part_bytes`: the size of the parts that
    it writes and loads."""
    pool = {
        "pool_bytes": (POOL_PROMPTS + 1) * CHUNKS * part_bytes, "session_cap": 1.0, "total_cap": 1.0,
        "heartbeat_s": 0.2, "missed_heartbeats": 1000,  # the mover learns of new chunks with its heartbeats
    }
    tier = {
        "disk_path": str(folder), "disk_bytes": 4 * AGE.stop * CHUNKS * part_bytes, "tier_asks": 1,
        "tier_queue_bytes": max(1 << 20, POOL_PROMPTS // 2 * CHUNKS * part_bytes),
    }
    figures: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess("serve", **settings)) for settings in (pool | tier, pool)]
        engines, load = Engines(servers, stack), stack.enter_context(loaded(servers[0], part_bytes))
        for _ in range(rounds):
            idle, busy = (engines.while_it_is(word, load, calls) for word in ("idle", "busy"))
            for name, figure in {
                "lookup_512_idle_tier_ms": idle["with"], "lookup_512_no_tier_ms": idle["without"],
                "lookup_ratio_under_load": busy["with"] / idle["with"],
                "lookup_ratio_beside_other_work": busy["without"] / idle["without"],
            }.items():
                figures.setdefault(name, []).append(figure)
    return figures


@contextmanager
def loaded(server: ServerProcess, part_bytes: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.tiers.load", server.unix, str(part_bytes)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()

