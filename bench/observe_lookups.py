"""Lookups beside all observers and beside none: the part of bench.observe that runs servers.

A pair of servers: the setting `observe` of one names all outputs, including traces to a collector and KV events; that
of the other is empty. Lookups of 512 resident keys over the Unix socket; each carries the release of the lease before
it, so each causes three events. Rounds of both take turns; a round's figure is its median, and the quickest round
counts, because other programs only add time. Of several pairs, each of new servers, the medians count.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import get_args

from bench.control import lookups
from bench.serving import Engine, ServerProcess, chain
from kvdock.api.settings import Observer
from kvdock.client.client import Client

KEYS, CALLS, ROUNDS, WARM_UP, RATIO_LIMIT = 512, 300, 10, 300, 1.05
POOL_BYTES = 64 << 20
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Takes(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *said):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Takes)
print(server.server_port, flush=True)
server.serve_forever()
"""
PATIENT = 100_000
"""How many heartbeats the engines may miss: more than a measurement lasts."""


@contextmanager
def collector() -> Iterator[str]:
    """The address of a process that accepts all traces and keeps none."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def lookup_figures(pairs: int) -> dict[str, float | list[float]]:
    """Medians in ms at the servers without observers and with all, and the ratios of each pair."""
    found = [_of_pair() for _ in range(pairs)]
    ratios = [on / off for off, on in found]
    off, on = (statistics.median(times) for times in zip(*found, strict=True))
    return {
        "lookup_512_off_p50_ms": round(off, 4), "lookup_512_on_p50_ms": round(on, 4),
        "lookup_512_on_ratio": round(statistics.median(ratios), 3), "lookup_512_on_ratio_limit": RATIO_LIMIT,
        "lookup_512_on_ratios": [round(ratio, 3) for ratio in ratios],
    }


def _of_pair() -> tuple[float, float]:
    """ms without observers and with all."""
    with ExitStack() as stack:
        calls = {}
        everything = {"observe": ",".join(get_args(Observer)), "traces_endpoint": stack.enter_context(collector())}
        for name, settings in {"off": {"observe": ""}, "on": everything}.items():
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
    return min(medians["off"]), min(medians["on"])
