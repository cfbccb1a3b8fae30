"""Lookups beside all observers and beside none: the part of bench.observe that runs servers.

Two servers, one whose `observe` names all there is, and one whose `observe` is empty. Lookups of 512 resident keys over
the Unix socket; each carries the release of the lease before it, so each causes three events. Rounds of both in turns:
of each the median, and the quickest round counts, because other programs only add.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from bench.control import lookups
from bench.serving import Engine, ServerProcess, chain
from kvdock.client.client import Client

KEYS, CALLS, ROUNDS, WARM_UP, RATIO_LIMIT = 512, 300, 10, 300, 1.05
POOL_BYTES = 64 << 20
PATIENT = 100_000
"""Heartbeats that engines of a bench may miss."""


def lookup_figures() -> dict[str, float]:
    """ms, and the ratio of both."""
    with ExitStack() as stack:
        calls = {}
        for name, settings in {"off": {"observe": ""}, "on": {}}.items():
            server = stack.enter_context(ServerProcess(
                "serve", pool_bytes=POOL_BYTES, log_level="warning", missed_heartbeats=PATIENT, **settings
            ))
            client = stack.enter_context(Client(server.unix))
            engine = Engine(client, name)
            stack.callback(engine.close)
            keys = chain(KEYS, "resident")
            engine.store(keys)
            calls[name] = lookups(engine, client, keys, KEYS)
            for _ in range(WARM_UP):
                calls[name]()
        medians: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                medians[name].append(statistics.median(call() for _ in range(CALLS)) / 1e6)
    off, on = (min(medians[name]) for name in ("off", "on"))
    return {
        "lookup_512_off_p50_ms": round(off, 4), "lookup_512_on_p50_ms": round(on, 4),
        "lookup_512_on_ratio": round(on / off, 3), "lookup_512_on_ratio_limit": RATIO_LIMIT,
    }
