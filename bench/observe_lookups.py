"""Lookups beside all observers and beside none: the part of bench.observe that runs servers.

Two servers, one whose `observe` names all there is, with a reader of its event stream, and one whose `observe` is
empty. Lookups of 512 resident keys over the Unix socket, in turns, so that other work on the machine hits both alike;
each carries the release of the lease before it.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.control import lookups
from bench.serving import Engine, ServerProcess, chain
from kvdock.client.client import Client
from kvdock.client.events import read_events
from kvdock.client.transport import Address
from kvdock.protocol.errors import ServerUnavailable

KEYS, CALLS, WARM_UP, RATIO_LIMIT = 512, 1500, 300, 1.05
POOL_BYTES = 64 << 20


@contextmanager
def followed(server: ServerProcess) -> Iterator[None]:
    """Somebody reads its events."""
    def follow() -> None:
        try:
            for _ in read_events(Address.parse(server.unix), follow=True):
                pass
        except ServerUnavailable:
            pass  # it has ended

    reading = threading.Thread(target=follow, daemon=True)
    reading.start()
    yield


def lookup_figures() -> dict[str, float]:
    """Medians in ms, and their ratio."""
    with ExitStack() as stack:
        calls = {}
        for name, settings in {"off": {"observe": ""}, "on": {}}.items():
            server = stack.enter_context(ServerProcess("serve", pool_bytes=POOL_BYTES, log_level="warning", **settings))
            client = stack.enter_context(Client(server.unix))
            engine = Engine(client, name)
            stack.callback(engine.close)
            keys = chain(KEYS, "resident")
            engine.store(keys)
            calls[name] = lookups(engine, client, keys, KEYS)
            if name == "on":
                stack.enter_context(followed(server))
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        took_ns: dict[str, list[int]] = {name: [] for name in calls}
        for number in range(CALLS):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                took_ns[name].append(calls[name]())
    found = {f"lookup_512_{name}_p50_ms": round(statistics.median(took) / 1e6, 4) for name, took in took_ns.items()}
    ratio = statistics.median(took_ns["on"]) / statistics.median(took_ns["off"])
    return {**found, "lookup_512_on_ratio": round(ratio, 3), "lookup_512_on_ratio_limit": RATIO_LIMIT}
